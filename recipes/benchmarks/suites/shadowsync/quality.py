"""Test NE of background against foreground synchronisation: ``recipes/train.py`` over methods, data and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.recipe_runs import Metrics, trained_from_seeds
from benchmarks.harness.report import Columns

BACKGROUND = "S-EASGD"
TOLERANCE = 0.3  # percent of NE, as for layouts that are to train alike

Runs = Mapping[str, Sequence[Metrics]]
"""Method -> metrics of each seed."""


def measure(
    *,
    data: Mapping[str, Sequence[str]],
    methods: Mapping[str, Sequence[str]],
    common: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> Measured:
    """Train what is not in the cache yet.

    Args:
        data: Name -> overrides of ``recipes/train.py``.
        methods: Name -> overrides.
        common: Overrides of all runs.
        seeds: Seeds of start values and the order of rows; a run each.
        cache: Where finished runs are kept.
        root: Folder of the data sets, for ``paths.data``.
    """
    runs = {
        name: {
            method: trained_from_seeds(f"{name}-{method}", [*rows, *common, *how], seeds, cache=cache, root=root)
            for method, how in methods.items()
        }
        for name, rows in data.items()
    }
    return [compared(name, own) for name, own in runs.items()], [bar_of(name, own) for name, own in runs.items()]


def bar_of(data: str, runs: Runs) -> Bar:
    """The background's mean NE against the best foreground's."""
    means = {method: statistics.mean(_values(own, "test/ne")) for method, own in runs.items()}
    foreground = [mean for method, mean in means.items() if method != BACKGROUND]
    value = 100 * (means[BACKGROUND] / min(foreground) - 1) if foreground and BACKGROUND in means else None
    return Bar(f"NE of {BACKGROUND} above the best foreground's, {data}", value, "at most", TOLERANCE, " %")


def compared(data: str, runs: Runs) -> Columns:
    """Sync gap, NE with its spread, and the difference to the background's."""
    base = _values(runs.get(BACKGROUND, ()), "test/ne")
    lines = []
    for method, own in runs.items():
        ne, gaps = _values(own, "test/ne"), _values(own, "sync/gap")
        spread = statistics.stdev(ne) if len(ne) > 1 else 0.0
        difference = f"{statistics.mean(ne) / statistics.mean(base) - 1:+.3%}" if base else ""
        gap = f"{statistics.mean(gaps):.1f}" if gaps else ""
        cells = (f"{statistics.mean(ne):.5f} ± {spread:.5f}", f"{min(ne):.5f} to {max(ne):.5f}", difference)
        lines.append([method, gap, *cells])
    header = ("method", "sync gap", "eval NE", "range", "to S-EASGD")
    return Columns(f"eval NE, {data}", header, lines, {"runs": {method: list(own) for method, own in runs.items()}})


def _values(runs: Sequence[Metrics], metric: str) -> list[float]:
    """Of each seed that logged it."""
    return [metrics[metric] for metrics in runs if metric in metrics]
