"""The table that closes a run."""

from __future__ import annotations

import logging
from typing import Any

from recipe_tools.record import RunRecord
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_recsys.data import TabularDataModule

# Title, metric, format; shown where the run has the metric.
METRICS = (
    ("EPS (examples per second)", "eps", ",.0f"),
    ("Train NE", "train/ne", ".4f"),
    ("Eval NE", "test/ne", ".4f"),
    ("AUC", "test/auc", ".4f"),
    ("Log loss", "test/logloss", ".4f"),
    ("Log loss, calibrated", "test/calibrated_logloss", ".4f"),
    ("Calibration", "test/calibration", ".4f"),
    ("Accuracy", "test/accuracy", ".4f"),
    ("Macro F1", "test/macro_f1", ".4f"),
    ("Recall", "test/recall", ".4f"),
    ("NDCG", "test/ndcg", ".4f"),
    ("Rows found in the cache (rank 0)", "cache/hit_rate", ".1%"),
    ("Rows too old there", "cache/stale_rate", ".1%"),
    ("Rows fetched, bytes", "comm/rows_bytes", ",.0f"),
    ("Updates of rows, bytes", "comm/gradients_bytes", ",.0f"),
)

MOST = 0.5  # share of unknown ids from which on there is a warning

log = logging.getLogger(__name__)


def console() -> Console:
    """A console on standard output; outside a terminal it is wide enough for every table."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def print_results(title: str, record: RunRecord) -> None:
    """Print one run's metrics, the best NE that its data allow (where known), its size, duration, epochs and folder."""
    metrics, details = record.metrics, record.details
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for label, name, form in METRICS:
        if name in metrics:
            table.add_row(label, format(metrics[name], form))
    if (best_ne := details["best_normalized_entropy"]) is not None:
        table.add_row("Best possible NE", format(best_ne, ".4f"))
    parameters = details["parameters"]
    table.add_row("Dense parameters", f"{parameters['dense']:,}")
    table.add_row("Embedding rows", f"{parameters['embedding_rows']:,} ({parameters['embedding']:,} numbers)")
    if "epochs" in details:
        best_epoch = details["best_epoch"]
        table.add_row("Epochs", f"{details['epochs']}" + ("" if best_epoch is None else f", the best: {best_epoch}"))
    table.add_row("Wall time", f"{record.wall_time:.1f} s")
    table.add_row("Outputs", escape(str(record.path.parent)))
    console().print(table)


def unknown_ids(datamodule: Any) -> dict[str, dict[str, float]]:
    """Share of the ids of each column that training has not seen, on validation and test; a line where it is most."""
    if not isinstance(datamodule, TabularDataModule):
        return {}
    found = {split: datamodule.unknown_ids(split) for split in ("validation", "test") if datamodule.has(split)}
    for split, shares in found.items():
        for column, share in shares.items():
            if share > MOST:
                log.warning(
                    "%s: %.0f %% of the %s rows' ids are unknown to training, and share one embedding.",
                    column,
                    100 * share,
                    split,
                )
    return found
