"""AUC and log loss of DES against asynchronous updates of the same rows: ``recipes/train.py`` over models and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.recipe_runs import Metrics, trained
from rich.table import Table

SYNCHRONOUS, ASYNCHRONOUS = "DES", "PS"
TOLERANCE = -1.0  # thousandths of AUC: about the range of the seeds
METRICS = {"AUC": "test/auc", "log loss": "test/logloss"}


@dataclass(frozen=True)
class Quality:
    """Models on the same rows; a result as :func:`benchmarks.harness.report.write` takes it.

    Args:
        data: What they were trained on.
        runs: Model -> method -> metrics of each seed.
    """

    data: str
    runs: Mapping[str, Mapping[str, Sequence[Metrics]]]

    def mean(self, model: str, method: str, metric: str) -> float:
        """Over the seeds."""
        return statistics.mean(metrics[metric] for metrics in self.runs[model][method])

    def bars(self) -> list[Bar]:
        """The synchronous AUC against the asynchronous one's."""
        return [
            Bar(
                f"thousandths of AUC of {SYNCHRONOUS} above {ASYNCHRONOUS}'s, {model}, {self.data}",
                1e3 * (self.mean(model, SYNCHRONOUS, "test/auc") - self.mean(model, ASYNCHRONOUS, "test/auc")),
                "at least",
                TOLERANCE,
            )
            for model in self.runs
        ]

    def table(self) -> Table:
        """As the paper's Table 4, with the range over the seeds."""
        heads = [f"{method} {metric}" for method in (ASYNCHRONOUS, SYNCHRONOUS) for metric in METRICS]
        table = Table("model", *heads, title=f"after one epoch, {self.data}", title_justify="left")
        for model, methods in self.runs.items():
            cells = []
            for method in (ASYNCHRONOUS, SYNCHRONOUS):
                for metric in METRICS.values():
                    values = [metrics[metric] for metrics in methods[method]]
                    cells.append(f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
            table.add_row(model, *cells)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        runs = {model: {name: list(x) for name, x in methods.items()} for model, methods in self.runs.items()}
        return {"quality": self.data, "runs": runs}


def measure(
    *,
    data: Mapping[str, Sequence[str]],
    models: Mapping[str, Sequence[str]],
    methods: Mapping[str, Sequence[str]],
    common: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> tuple[list[Any], list[Bar]]:
    """Train what is not in the cache yet.

    Args:
        data: Name -> overrides of ``recipes/train.py``.
        models: Name -> overrides.
        methods: Name -> overrides.
        common: Overrides of all runs.
        seeds: Seeds of start values and the order of rows; a run each.
        cache: Where finished runs are kept.
        root: ``paths.data``.
    """

    def runs(where: str, model: str, method: str) -> list[Metrics]:
        chosen = [*data[where], *models[model], *common, *methods[method]]
        name = f"{where}-{model}-{method}".replace("&", "n")
        return [trained(f"{name}-seed{seed}", [*chosen, f"seed={seed}"], cache=cache, root=root) for seed in seeds]

    qualities = [
        Quality(where, {model: {method: runs(where, model, method) for method in methods} for model in models})
        for where in data
    ]
    return list(qualities), [bar for quality in qualities for bar in quality.bars()]
