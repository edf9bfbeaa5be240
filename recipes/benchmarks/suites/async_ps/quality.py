"""What 1000 and 3000 simulated workers learn: stale gradients that count in full, by their staleness, or normalised."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar
from recipe_tools.simulated import simulated
from rich.table import Table

FEW, MANY = "1000 workers", "3000 workers"
PLAIN, LINEAR, NORMALISED = "plain", "linear", "normalised"
TOLERANCE = 0.001
"""By how much normalised gradients of many workers may be below plain ones of few, in AUC."""

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Quality:
    """Validation AUC of each setting, one number for each seed; the same seeds for all.

    Args:
        tried: Rate -> AUC with few workers, of which the best was chosen.
        rate: That one, of the dense part.
        examples: That each setting saw.
        auc: Setting -> by seed.
    """

    tried: Mapping[float, float]
    rate: float
    examples: int
    auc: Mapping[str, Sequence[float]]

    def gain(self, one: str, other: str) -> tuple[float, float | None]:
        """By how much one setting's AUC is above another's, over paired seeds, with its standard error."""
        gains = [a - b for a, b in zip(self.auc[one], self.auc[other], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
        return statistics.mean(gains), error

    def bars(self) -> list[Bar]:
        """In thousandths of AUC."""
        found = []
        for other, limit in ((f"{FEW}, {PLAIN}", -TOLERANCE), (f"{MANY}, {PLAIN}", 0.0), (f"{MANY}, {LINEAR}", 0.0)):
            gain, error = self.gain(f"{MANY}, {NORMALISED}", other)
            name = f"AUC of {MANY}, {NORMALISED}, above {other}"
            found.append(
                Bar(name, 1000 * gain, "at least", 1000 * limit, " / 1000", None if error is None else 1000 * error)
            )
        return found

    def table(self) -> Table:
        """One line for each setting."""
        seeds = len(next(iter(self.auc.values())))
        title = f"validation AUC after {self.examples:,} examples, rate {self.rate:g}"
        table = Table("gradients", "mean", *(f"seed {i}" for i in range(seeds)), title=title, title_justify="left")
        for name, values in self.auc.items():
            table.add_row(name, f"{statistics.mean(values):.4f}", *(f"{value:.4f}" for value in values))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {
            "tried_at_few_workers": {f"{rate:g}": auc for rate, auc in self.tried.items()},
            "rate": self.rate,
            "examples": self.examples,
            "auc": {name: list(values) for name, values in self.auc.items()},
        }


def measure(
    *,
    common: Sequence[str],
    settings: Mapping[str, Sequence[str]],
    rates: Sequence[float],
    examples: int,
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> Quality:
    """Choose the rate at few workers with the first seed, then train every setting from every seed.

    Args:
        common: Overrides of ``recipes/simulate.py``.
        settings: Setting -> its own. Those of few workers are ``1000 workers, plain``.
        rates: Of the dense part; rows have ten times as much.
        examples: That each setting sees.
        seeds: Seeds of start values, the order of examples, and times; a run each.
        cache: Where finished runs are kept.
        root: ``paths.data``.
    """
    import simulate

    shared = [*common, f"examples={examples}", f"evaluation.every={examples}"]

    def auc(name: str, rate: float, seed: int) -> float:
        own = [f"seed={seed}", f"optim.dense.lr={rate}", f"optim.rows.lr={10 * rate}"]
        overrides = [*settings[name], *shared, *own, "name=quality"]
        auc = float(simulated(simulate.simulate, name, overrides, cache=cache, root=root)["metrics"]["val/auc"])
        log.info("%s, rate %g, seed %d: AUC %.4f", name, rate, seed, auc)
        return auc

    few = f"{FEW}, {PLAIN}"
    tried = {rate: auc(few, rate, seeds[0]) for rate in rates}
    rate = max(tried, key=lambda rate: tried[rate])
    return Quality(tried, rate, examples, {name: [auc(name, rate, seed) for seed in seeds] for name in settings})
