"""A sweep ends in one table, with the jobs that failed in it."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from recipe_tools.record import FILE_NAME
from recipe_tools.report import METRICS, console

log = logging.getLogger(__name__)


class SweepComparison(Callback):
    """Hydra callback: a failed job does not hide the others, and all of them end up in one comparison.

    Writes ``comparison.csv`` and ``comparison.md`` into the sweep's folder and prints the same table. Where a job
    failed, the program ends with status 1 after that.
    """

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Let Hydra's basic sweeper, which stops at a failed job without an end of its own, go on to the table."""
        grid = config.hydra.sweeper._target_.endswith("BasicSweeper")
        if config.hydra.mode == RunMode.MULTIRUN and grid and job_return.status == JobStatus.FAILED:
            error = job_return._return_value
            log.error("Job %s failed: %s", config.hydra.job.num, error, exc_info=error)
            job_return.return_value = float("nan")
            job_return.status = JobStatus.COMPLETED

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare."""
        folder = Path(config.hydra.sweep.dir)
        records = read_records(folder)
        if not records:
            return
        rows = comparison(records)
        write_csv(folder / "comparison.csv", rows)
        write_markdown(folder / "comparison.md", rows)
        print_comparison(rows, folder)
        if failed := sum(record["status"] != "completed" for record in records):
            raise SystemExit(f"{failed} of {len(records)} jobs failed; see above, or error in comparison.csv")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of all jobs below ``folder``, in the order of the jobs."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*/{FILE_NAME}")]
    return sorted(records, key=lambda record: record["job"])


def comparison(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each job: number, the overrides in which jobs differ, status, metrics, seconds, error."""
    overrides = [
        dict(override.split("=", 1) for override in record["overrides"] if "=" in override) for record in records
    ]
    names = list(dict.fromkeys(name for job in overrides for name in job))
    varied = [name for name in names if len({job.get(name) for job in overrides}) > 1]
    metrics = list(dict.fromkeys(name for record in records for name in record["metrics"]))
    return [
        {
            "job": record["job"],
            **{name: job.get(name) for name in varied},
            "status": record["status"],
            **{name: record["metrics"].get(name) for name in metrics},
            "wall_time_s": record["wall_time_s"],
            "error": record["error"],
        }
        for record, job in zip(records, overrides, strict=True)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """All columns, numbers in full."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_markdown(path: Path, rows: list[dict[str, Any]]) -> None:
    """The columns of the printed table."""
    header, *body = _cells(rows)
    lines = [header, ["---"] * len(header), *body]
    path.write_text("".join(f"| {' | '.join(_escape(cell) for cell in line)} |\n" for line in lines), encoding="utf-8")


def print_comparison(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the table and where it was written."""
    header, *body = _cells(rows)
    table = Table(*map(escape, header), title=f"{len(rows)} jobs", title_justify="left")
    for line in body:
        table.add_row(*map(escape, line))
    output = console()
    output.print(table)
    output.print(
        f"Written to {folder / 'comparison.csv'} and comparison.md", markup=False, highlight=False, soft_wrap=True
    )


def _cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Header and body of the table for people: the metrics that :mod:`recipe_tools.report` knows, rounded."""
    known = {name: (label.split(" (")[0], form) for label, name, form in METRICS}
    known["wall_time_s"] = ("seconds", ".1f")
    columns = list(rows[0])
    metrics = columns[columns.index("status") + 1 : -2]
    hidden = {name for name in metrics if name not in known} | {
        name for name in columns if all(row[name] is None for row in rows)
    }
    names = [name for name in columns if name not in hidden]
    return [
        [known.get(name, (name, ""))[0] for name in names],
        *(
            ["" if row[name] is None else format(row[name], known.get(name, ("", ""))[1]) for name in names]
            for row in rows
        ),
    ]


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
