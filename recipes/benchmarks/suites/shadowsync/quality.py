"""Test NE of background against foreground synchronisation: ``recipes/train.py`` over methods, data and seeds."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.recipe_runs import Metrics, trained
from rich.table import Table

BACKGROUND = "S-EASGD"
TOLERANCE = 0.3  # percent of NE, as for layouts that are to train alike

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Quality:
    """Methods on the same rows; a result as :func:`benchmarks.harness.report.write` takes it.

    Args:
        data: What they were trained on.
        runs: Method -> metrics of each seed.
    """

    data: str
    runs: Mapping[str, Sequence[Metrics]]

    def values(self, method: str, metric: str) -> list[float]:
        """Of each seed that logged it."""
        return [metrics[metric] for metrics in self.runs[method] if metric in metrics]

    def bar(self) -> Bar:
        """The background's mean NE against the best foreground's."""
        means = {method: statistics.mean(self.values(method, "test/ne")) for method in self.runs}
        foreground = [mean for method, mean in means.items() if method != BACKGROUND]
        value = 100 * (means[BACKGROUND] / min(foreground) - 1) if foreground and BACKGROUND in means else None
        return Bar(f"NE of {BACKGROUND} above the best foreground's, {self.data}", value, "at most", TOLERANCE, " %")

    def table(self) -> Table:
        """Sync gap, NE with its spread, and the difference to the background's."""
        table = Table("method", "sync gap", "eval NE", "range", "to S-EASGD", title=f"eval NE, {self.data}")
        table.title_justify = "left"
        base = self.values(BACKGROUND, "test/ne") if BACKGROUND in self.runs else []
        for method in self.runs:
            ne, gaps = self.values(method, "test/ne"), self.values(method, "sync/gap")
            spread = statistics.stdev(ne) if len(ne) > 1 else 0.0
            difference = f"{statistics.mean(ne) / statistics.mean(base) - 1:+.3%}" if base else ""
            gap = f"{statistics.mean(gaps):.1f}" if gaps else ""
            cells = (f"{statistics.mean(ne):.5f} ± {spread:.5f}", f"{min(ne):.5f} to {max(ne):.5f}", difference)
            table.add_row(method, gap, *cells)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {"quality": self.data, "runs": {method: list(runs) for method, runs in self.runs.items()}}


def measure(
    *,
    data: Mapping[str, Sequence[str]],
    methods: Mapping[str, Sequence[str]],
    common: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> list[Quality]:
    """Train what is not in the cache yet.

    Args:
        data: Name -> overrides of ``recipes/train.py``.
        methods: Name -> overrides.
        common: Overrides of all runs.
        seeds: Seeds of start values and the order of rows; a run each.
        cache: Where finished runs are kept.
        root: ``paths.data``.
    """
    return [
        Quality(
            name,
            {
                method: [
                    trained(
                        f"{name}-{method}-seed{seed}", [*rows, *common, *how, f"seed={seed}"], cache=cache, root=root
                    )
                    for seed in seeds
                ]
                for method, how in methods.items()
            },
        )
        for name, rows in data.items()
    ]
