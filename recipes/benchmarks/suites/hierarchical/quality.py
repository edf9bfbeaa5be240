"""Test NE of groups of Hierarchical Training beside one process, each at the rate that validation chose for it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.recipe_runs import run_record
from rich.table import Table

TOLERANCE = 0.3  # percent of NE, as for layouts that are to train alike


@dataclass(frozen=True)
class Side:
    """One layout's runs; of each the epoch with the lowest validation NE counts.

    Args:
        tried: Rate of the dense part -> mean validation NE of the seeds that choose.
        rate: The chosen one, which has the lowest of them.
        validation: NE of each seed, at that rate.
        test: The same on the test rows.
    """

    tried: Mapping[float, float]
    rate: float
    validation: Sequence[float]
    test: Sequence[float]

    @property
    def is_at_edge(self) -> bool:
        """Whether a rate beyond those that were tried may be better."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


@dataclass(frozen=True)
class Quality:
    """Layouts on the same rows; a result as :func:`benchmarks.harness.report.write` takes it.

    Args:
        data: What they were trained on.
        sides: Layout -> its runs, with the same seeds for all. The others are held against the first.
    """

    data: str
    sides: Mapping[str, Side]

    def behind(self, name: str) -> list[float]:
        """By how much a layout's test NE is above the first one's, of each seed, in percent."""
        first = next(iter(self.sides.values()))
        return [100 * (a / b - 1) for a, b in zip(self.sides[name].test, first.test, strict=True)]

    def bars(self) -> list[Bar]:
        """Each of the others against the first."""
        first, *others = self.sides
        bars = []
        for name in others:
            behind = self.behind(name)
            error = statistics.stdev(behind) / len(behind) ** 0.5 if len(behind) > 1 else None
            title = f"test NE of {name} above {first}'s, {self.data}"
            bars.append(Bar(title, statistics.mean(behind), "at most", TOLERANCE, " %", error))
        return bars

    def table(self) -> Table:
        """A line for each layout: the rates that were tried, and what the seeds gave at the chosen one."""
        tests = [f"test NE, seed {i}" for i in range(len(next(iter(self.sides.values())).test))]
        title = f"NE at the epoch of the best validation, {self.data}"
        heads = ["", "validation NE by rate", "chosen", *tests, "mean", "to first"]
        table = Table(*heads, title=title, title_justify="left")
        for name, side in self.sides.items():
            tried = ", ".join(f"{rate:g}: {ne:.5f}" for rate, ne in side.tried.items())
            chosen = f"{side.rate:g}" + (" (edge)" if side.is_at_edge else "")
            mean = f"{statistics.mean(side.test):.5f}"
            to_first = f"{statistics.mean(self.behind(name)):+.2f} %"
            table.add_row(name, tried, chosen, *(f"{ne:.5f}" for ne in side.test), mean, to_first)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        sides = {
            name: {
                "tried": {f"{rate:g}": ne for rate, ne in side.tried.items()},
                "rate": side.rate,
                "validation": list(side.validation),
                "test": list(side.test),
            }
            for name, side in self.sides.items()
        }
        return {"quality": self.data, "sides": sides}


def measure(
    *,
    data: Mapping[str, Sequence[str]],
    layouts: Mapping[str, Sequence[str]],
    common: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    chosen_by: int,
    cache: Path,
    root: str,
) -> Measured:
    """Choose each layout's rate by validation, from the same rates, then train it from every seed.

    Args:
        data: Name -> overrides of ``recipes/train.py``.
        layouts: Name -> overrides.
        common: Overrides of all runs, of which the best checkpoint by ``val/ne`` is tested.
        rates: Of the dense part.
        seeds: Of start values and the order of rows.
        chosen_by: So many of the seeds, from the first, choose the rate.
        cache: Where finished runs are kept.
        root: ``paths.data``.

    Raises:
        ValueError: ``chosen_by`` is not a number of the seeds.
    """
    if not 1 <= chosen_by <= len(seeds):
        raise ValueError(f"suite.quality.chosen_by must be between 1 and {len(seeds)} seeds, got {chosen_by}.")

    def side(where: str, layout: str) -> Side:
        def run(rate: float, seed: int) -> tuple[float, float]:
            overrides = [*data[where], *common, *layouts[layout], f"optim.dense.lr={rate}", f"seed={seed}"]
            name = re.sub(r"[^\w.]+", "-", f"{where}-{layout}-{rate:g}-seed{seed}")
            record = run_record(name, overrides, cache=cache, root=root)
            found = record["best_score"], record["metrics"]["test/ne"]
            return tuple(math.inf if ne is None else ne for ne in found)  # type: ignore[return-value]  # diverged

        tried = {rate: statistics.mean(run(rate, seed)[0] for seed in seeds[:chosen_by]) for rate in rates}
        chosen = min(tried, key=lambda rate: tried[rate])
        validation, test = zip(*(run(chosen, seed) for seed in seeds), strict=True)
        return Side(tried, chosen, validation, test)

    qualities = [Quality(where, {layout: side(where, layout) for layout in layouts}) for where in data]
    return list(qualities), [bar for quality in qualities for bar in quality.bars()]
