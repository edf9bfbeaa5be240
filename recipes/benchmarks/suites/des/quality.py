"""AUC and log loss of DES against asynchronous updates of the same rows: ``recipes/train.py`` over models and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.recipe_runs import Metrics, trained_from_seeds
from benchmarks.harness.report import Columns

SYNCHRONOUS, ASYNCHRONOUS = "DES", "PS"
TOLERANCE = -1.0  # thousandths of AUC: about the range of the seeds
METRICS = {"AUC": "test/auc", "log loss": "test/logloss"}

Runs = Mapping[str, Mapping[str, Sequence[Metrics]]]
"""Model -> method -> metrics of each seed."""


def measure(
    *,
    data: Mapping[str, Sequence[str]],
    models: Mapping[str, Sequence[str]],
    methods: Mapping[str, Sequence[str]],
    common: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> Measured:
    """Train what is not in the cache yet.

    Args:
        data: Name -> overrides of ``recipes/train.py``.
        models: Name -> overrides.
        methods: Name -> overrides.
        common: Overrides of all runs.
        seeds: Seeds of start values and the order of rows; a run each.
        cache: Where finished runs are kept.
        root: Folder of the data sets, for ``paths.data``.
    """

    def runs(where: str, model: str, method: str) -> list[Metrics]:
        chosen = [*data[where], *models[model], *common, *methods[method]]
        name = f"{where}-{model}-{method}".replace("&", "n")
        return trained_from_seeds(name, chosen, seeds, cache=cache, root=root)

    found: dict[str, Runs] = {
        where: {model: {method: runs(where, model, method) for method in methods} for model in models} for where in data
    }
    tables = [compared(where, own) for where, own in found.items()]
    return list(tables), [bar for where, own in found.items() for bar in bars_of(where, own)]


def bars_of(data: str, runs: Runs) -> list[Bar]:
    """The synchronous AUC against the asynchronous one's."""

    def mean(model: str, method: str) -> float:
        return statistics.mean(metrics["test/auc"] for metrics in runs[model][method])

    return [
        Bar(
            f"thousandths of AUC of {SYNCHRONOUS} above {ASYNCHRONOUS}'s, {model}, {data}",
            1e3 * (mean(model, SYNCHRONOUS) - mean(model, ASYNCHRONOUS)),
            "at least",
            TOLERANCE,
        )
        for model in runs
    ]


def compared(data: str, runs: Runs) -> Columns:
    """As the paper's Table 4, with the range over the seeds."""
    columns = {
        f"{method} {name}": (method, metric)
        for method in (ASYNCHRONOUS, SYNCHRONOUS)
        for name, metric in METRICS.items()
    }
    lines = []
    for model, methods in runs.items():
        values = [[metrics[metric] for metrics in methods[method]] for method, metric in columns.values()]
        lines.append([model, *(f"{statistics.mean(x):.4f} ({min(x):.4f} to {max(x):.4f})" for x in values)])
    details = {model: {name: list(x) for name, x in methods.items()} for model, methods in runs.items()}
    return Columns(f"after one epoch, {data}", ("model", *columns), lines, {"runs": details})
