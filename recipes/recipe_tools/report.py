"""The table that closes a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
    ("MRR", "test/mrr", ".4f"),
    ("Rows found in the cache (rank 0)", "cache/hit_rate", ".1%"),
    ("Rows too old there", "cache/stale_rate", ".1%"),
    ("Rows fetched, bytes", "comm/rows_bytes", ",.0f"),
    ("Updates of rows, bytes", "comm/gradients_bytes", ",.0f"),
)

FILES = 8  # that are listed one by one
MOST = 0.5  # share of unknown ids from which on there is a warning

log = logging.getLogger(__name__)


def console() -> Console:
    """A console on standard output; outside a terminal it is wide enough for every table."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def from_here(path: Path) -> str:
    """A path as one would type it: relative to the current folder where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def print_results(title: str, record: RunRecord) -> None:
    """Print one run's metrics, the baseline's, the best NE that its data allow, its size, duration and folder."""
    metrics, details = record.metrics, record.details
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for label, name, form in METRICS:
        if name in metrics:
            table.add_row(label, format(metrics[name], form))
    if (baseline := details.get("baseline")) is not None:
        part = f", fitted to {baseline['share']:.0%} of the rows" if baseline["share"] < 1 else ""
        table.add_row("Logistic regression", f"AUC {baseline['auc']:.4f}, NE {baseline['ne']:.4f}{part}")
    if (best_ne := details["best_normalized_entropy"]) is not None:
        table.add_row("Best possible NE", format(best_ne, ".4f"))
    parameters = details["parameters"]
    table.add_row("Dense parameters", f"{parameters['dense']:,}")
    table.add_row("Embedding rows", f"{parameters['embedding_rows']:,} ({parameters['embedding']:,} numbers)")
    if "epochs" in details:
        best_epoch = details["best_epoch"]
        table.add_row("Epochs", f"{details['epochs']}" + ("" if best_epoch is None else f", the best: {best_epoch}"))
    for about, account in rows_of_files(details.get("rows_read", {})):
        table.add_row(escape(about), account)
    table.add_row("Wall time", f"{record.wall_time:.1f} s")
    table.add_row("Outputs", escape(from_here(record.path.parent)))
    console().print(table)


def rows_of_files(read: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """What became of the rows of each file, for a table; where there are many files, those come first that lost some.

    >>> account = {"rows": 1012, "used": 1000, "skipped": 10, "comments": 2}
    >>> list(rows_of_files({"/data/a.csv": account}))
    [('Rows of a.csv', '1,012 = 1,000 used + 10 skipped + 2 comments')]
    """
    folder = os.path.commonpath([os.path.dirname(path) for path in read]) if read else ""
    told = sorted(read, key=lambda path: read[path]["rows"] == read[path]["used"])  # which keeps their order otherwise
    for path in told[:FILES]:
        yield f"Rows of {os.path.relpath(path, folder)}", _account([read[path]])
    if others := told[FILES:]:
        yield f"Rows of {len(others):,} other file{'s' if len(others) > 1 else ''}", _account([read[x] for x in others])


def _account(files: Sequence[Mapping[str, int]]) -> str:
    rows, used, skipped, comments = (
        sum(file[key] for file in files) for key in ("rows", "used", "skipped", "comments")
    )
    return f"{rows:,} = {used:,} used + {skipped:,} skipped + {comments:,} comments"


def unknown_ids(datamodule: Any, splits: Sequence[str] = ("validation", "test")) -> dict[str, dict[str, float]]:
    """Share of the ids of each column that training has not seen, on some splits; a line where it is most."""
    if not isinstance(datamodule, TabularDataModule):
        return {}
    found = {split: datamodule.unknown_ids(split) for split in splits if datamodule.has(split)}
    for split, shares in found.items():
        for column, share in shares.items():
            if share > MOST:
                log.warning(
                    "%s: %.0f %% of the %s rows' ids are unknown to training, and share one embedding.",
                    column,
                    100 * share,
                    {"predict": "predicted"}.get(split, split),
                )
    return found


def print_predictions(path: str, num_rows: int, datamodule: Any) -> None:
    """Print what was written, what became of the rows of each file, and the share of unknown ids of each column."""
    table = Table(title=f"{num_rows:,} predictions in {escape(path)}", title_justify="left", show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    split = datamodule.predicted_split
    unknown = unknown_ids(datamodule, [split]).get(split, {})  # where a worker has read the rows, this opens them here
    for about, account in rows_of_files(getattr(datamodule, "rows_read", {})):
        table.add_row(escape(about), account)
    for column, share in unknown.items():
        table.add_row(f"Ids of {escape(column)} unknown to training", f"{share:.1%}")
    if table.row_count:
        console().print(table)
