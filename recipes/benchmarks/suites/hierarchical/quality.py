"""Test NE of groups of Hierarchical Training beside one process, each at the rates that validation chose for it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.recipe_runs import run_record
from benchmarks.harness.report import Columns

TOLERANCE = 0.3  # percent of NE, as for layouts that are to train alike


@dataclass(frozen=True)
class Side:
    """One layout's runs; of each the epoch with the lowest validation NE counts.

    Args:
        tried: What validation NE the seeds that choose had on the mean, by rates.
        rates: The chosen ones, which have the lowest of these, by setting.
        at_edge: Those of them beyond which none was tried.
        validation: NE of each seed, at these rates.
        test: The same on the test rows.
    """

    tried: Mapping[str, float]
    rates: Mapping[str, float]
    at_edge: Sequence[str]
    validation: Sequence[float]
    test: Sequence[float]


Sides = Mapping[str, Side]
"""Layout -> its runs, with the same seeds for all. The others are held against the first."""


def behind(sides: Sides, name: str) -> list[float]:
    """By how much a layout's test NE is above the first one's, of each seed, in percent."""
    first = next(iter(sides.values()))
    return [100 * (a / b - 1) for a, b in zip(sides[name].test, first.test, strict=True)]


def bars_of(data: str, sides: Sides) -> list[Bar]:
    """Each of the others against the first."""
    first, *others = sides
    bars = []
    for name in others:
        values = behind(sides, name)
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        title = f"test NE of {name} above {first}'s, {data}"
        bars.append(Bar(title, statistics.mean(values), "at most", TOLERANCE, " %", error))
    return bars


def compared(data: str, sides: Sides) -> Columns:
    """A line for each layout: the rates that were tried, and what the seeds gave at the chosen one."""
    lines = []
    for name, side in sides.items():
        tried = ", ".join(f"{rates}: {ne:.5f}" for rates, ne in side.tried.items())
        chosen = ", ".join(f"{x:g}" + (" (edge)" if key in side.at_edge else "") for key, x in side.rates.items())
        tests = (f"{ne:.5f}" for ne in (*side.test, statistics.mean(side.test)))
        lines.append([name, tried, chosen, *tests, f"{statistics.mean(behind(sides, name)):+.2f} %"])
    tests = [f"test NE, seed {i}" for i in range(len(next(iter(sides.values())).test))]
    header = ["", "validation NE by rates", "chosen", *tests, "mean", "to first"]
    details = {"sides": {name: asdict(side) for name, side in sides.items()}}
    return Columns(f"NE at the epoch of the best validation, {data}", header, lines, details)


def measure(
    *,
    data: Mapping[str, Sequence[str]],
    layouts: Mapping[str, Sequence[str]],
    common: Sequence[str],
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    chosen_by: int,
    cache: Path,
    root: str,
) -> Measured:
    """Choose each layout's rates by validation, from the same grid, then train it from every seed.

    The settings of the grid are tried one after the other, each with the best values of those before.

    Args:
        data: Name -> overrides of ``recipes/train.py``.
        layouts: Name -> overrides.
        common: Overrides of all runs, of which the best checkpoint by ``val/ne`` is tested.
        rates: Setting -> values, the first of each to begin with.
        seeds: Seeds of start values and the order of rows; a run each.
        chosen_by: So many of the seeds, from the first, choose the rates.
        cache: Where finished runs are kept.
        root: Folder of the data sets, for ``paths.data``.

    Raises:
        ValueError: ``chosen_by`` is not a number of the seeds.
    """
    if not 1 <= chosen_by <= len(seeds):
        raise ValueError(f"suite.quality.chosen_by must be between 1 and {len(seeds)} seeds, got {chosen_by}.")

    def side(where: str, layout: str) -> Side:
        def run(chosen: Mapping[str, float], seed: int) -> tuple[float, float]:
            own = [*(f"{name}={value}" for name, value in chosen.items()), f"seed={seed}"]
            name = re.sub(r"[^\w.]+", "-", f"{where}-{layout}-{_shown(chosen)}-seed{seed}")
            record = run_record(name, [*data[where], *common, *layouts[layout], *own], cache=cache, root=root)
            found = record["best_score"], record["metrics"]["test/ne"]
            return tuple(math.inf if ne is None else ne for ne in found)  # type: ignore[return-value]  # diverged

        def validated(chosen: Mapping[str, float]) -> float:
            if (known := tried.get(_shown(chosen))) is None:
                known = tried[_shown(chosen)] = statistics.mean(run(chosen, seed)[0] for seed in seeds[:chosen_by])
            return known

        tried: dict[str, float] = {}
        chosen = {name: values[0] for name, values in rates.items()}
        for name, values in rates.items():
            chosen = min(({**chosen, name: value} for value in values), key=validated)
        edges = [
            name for name, values in rates.items() if len(values) > 1 and chosen[name] in (min(values), max(values))
        ]
        validation, test = zip(*(run(chosen, seed) for seed in seeds), strict=True)
        return Side(tried, chosen, edges, validation, test)

    found = {where: {layout: side(where, layout) for layout in layouts} for where in data}
    tables = [compared(where, sides) for where, sides in found.items()]
    return list(tables), [bar for where, sides in found.items() for bar in bars_of(where, sides)]


def _shown(chosen: Mapping[str, float]) -> str:
    return " ".join(f"{value:g}" for value in chosen.values())
