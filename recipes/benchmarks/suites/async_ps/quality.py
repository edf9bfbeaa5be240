"""What 1000 and 3000 simulated workers learn: stale gradients that count in full, by their staleness, or normalised."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Columns
from recipe_tools.simulated import simulated

FEW, MANY = "1000 workers", "3000 workers"
PLAIN, LINEAR, NORMALISED = "plain", "linear", "normalised"
TOLERANCE = 0.001
"""By how much normalised gradients of many workers may be below plain ones of few, in AUC."""

log = logging.getLogger("benchmark")


def measure(
    *,
    common: Sequence[str],
    settings: Mapping[str, Sequence[str]],
    rates: Sequence[float],
    examples: int,
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> Measured:
    """Choose the rate at few workers with the first seed, then train every setting from every seed.

    Args:
        common: Overrides of ``recipes/simulate.py``.
        settings: Setting -> its own. Those of few workers are ``1000 workers, plain``.
        rates: Of the dense part; rows have ten times as much.
        examples: That each setting sees.
        seeds: Seeds of start values, the order of examples, and times; a run each.
        cache: Where finished runs are kept.
        root: Folder of the data sets, for ``paths.data``.
    """
    from recipe_tools.jobs.simulation import simulate

    shared = [*common, f"examples={examples}", f"evaluation.every={examples}"]

    def auc_of(name: str, rate: float, seed: int) -> float:
        own = [f"seed={seed}", f"optim.dense.lr={rate}", f"optim.rows.lr={10 * rate}"]
        overrides = [*settings[name], *shared, *own, "name=quality"]
        auc = float(simulated(simulate, name, overrides, cache=cache, root=root)["metrics"]["val/auc"])
        log.info("%s, rate %g, seed %d: AUC %.4f", name, rate, seed, auc)
        return auc

    tried = {rate: auc_of(f"{FEW}, {PLAIN}", rate, seeds[0]) for rate in rates}
    rate = max(tried, key=lambda rate: tried[rate])
    auc = {name: [auc_of(name, rate, seed) for seed in seeds] for name in settings}
    lines = [[name, *(f"{value:.4f}" for value in (statistics.mean(own), *own))] for name, own in auc.items()]
    title = f"validation AUC after {examples:,} examples, rate {rate:g}"
    header = ("gradients", "mean", *(f"seed {i}" for i in range(len(seeds))))
    details = {"tried_at_few_workers": tried, "rate": rate, "examples": examples, "auc": auc}
    return [Columns(title, header, lines, details)], bars_of(auc)


def bars_of(auc: Mapping[str, Sequence[float]]) -> list[Bar]:
    """By how much normalised gradients of many workers are above others over paired seeds, in thousandths of AUC.

    Args:
        auc: Setting -> one number for each seed; the same seeds for all.
    """
    bars = []
    for other, limit in ((f"{FEW}, {PLAIN}", -TOLERANCE), (f"{MANY}, {PLAIN}", 0.0), (f"{MANY}, {LINEAR}", 0.0)):
        gains = [1000 * (a - b) for a, b in zip(auc[f"{MANY}, {NORMALISED}"], auc[other], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
        name = f"AUC of {MANY}, {NORMALISED}, above {other}"
        bars.append(Bar(name, statistics.mean(gains), "at least", 1000 * limit, " / 1000", error))
    return bars
