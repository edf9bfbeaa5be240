"""A sweep ends in one table, with the jobs that failed in it."""

from __future__ import annotations

import atexit
import csv
import json
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from recipe_tools.build import plain
from recipe_tools.config_types import check_complete
from recipe_tools.curves import LOG, Curves, draw_curves, read_curves
from recipe_tools.quiet import be_quiet
from recipe_tools.record import FILE_NAME, RunRecord, isolated_job
from recipe_tools.report import METRICS, console
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

_BORDER = 3  # what a column of a printed table takes beside its cells; the table itself takes one more

log = logging.getLogger(__name__)


class SweepComparison(Callback):
    """Hydra callback: a failed job does not hide the others, and all of them end up in one comparison.

    Writes ``comparison.csv`` and ``comparison.md`` into the sweep's folder, draws the curves of all jobs into
    ``comparison.png`` and prints the same table; also where the sweep was interrupted, or a search gave up. Where a job
    of a grid failed, the program ends with status 1 after that. (A search decides itself about failed trials.)

    Args:
        metrics: Metrics that the table shows by their own names, beside the usual ones.
    """

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        self._metrics = tuple(metrics)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Make of a failure what the sweeper can go on with.

        Hydra's basic sweeper stops at a failed job without an end of its own; to a search, a value that is not finite
        is a failure.
        """
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        value = job_return._return_value
        if job_return.status == JobStatus.FAILED:
            log.error("Job %s failed: %s", config.hydra.job.num, value, exc_info=value)
            if _is_grid(config):
                job_return.return_value = float("nan")
                job_return.status = JobStatus.COMPLETED
        elif not _is_grid(config) and (value is None or not math.isfinite(value)):
            job_return.return_value = ValueError(f"optimized_metric: {config.optimized_metric} is {value}")
            job_return.status = JobStatus.FAILED

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare at the end of the program if the end of the sweep is never reached."""
        self._start = time.time() if _is_grid(config) else 0.0  # a search may have begun in the same folder before
        atexit.register(self._compare, config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare."""
        atexit.unregister(self._compare)
        records = self._compare(config)
        failed = sum(record["status"] != "completed" for record in records)
        if failed and _is_grid(config):
            raise SystemExit(f"{failed} of {len(records)} jobs failed; see above, or error in comparison.csv")

    def _compare(self, config: DictConfig) -> list[dict[str, Any]]:
        folder = Path(config.hydra.sweep.dir)
        records = read_records(folder, since=self._start)
        if records:
            rows = comparison(records)
            write_csv(folder / "comparison.csv", rows)
            cells = for_people(rows, optimized_metric=config.optimized_metric, own=self._metrics)
            write_markdown(folder / "comparison.md", cells)
            picture = draw_curves(_curves(records), folder / "comparison.png")
            print_comparison(cells, folder, drawn=picture is not None)
        return records


@contextmanager
def recipe_job(cfg: DictConfig) -> Iterator[RunRecord]:
    """The job that Hydra runs: quiet, recorded with its whole configuration, and gone with its sweep.

    Raises:
        ValueError: the configuration lacks a value.
    """
    be_quiet()
    job = RunRecord.of_job(cfg)
    if job.sweeping:
        end_with_sweep()
    with isolated_job(), job as record:
        check_complete(cfg)
        record.config = plain(cfg)
        yield record


def end_with_sweep() -> None:
    """In a process of joblib: do not outlive the sweep's main process, however it dies.

    joblib's processes would train on, and would wait for five minutes then. What they started ends with them, and their
    resource trackers remove what lies in shared memory.
    """
    name = "end-with-sweep"
    in_joblib = multiprocessing.current_process().name.startswith("LokyProcess")
    if not in_joblib or any(thread.name == name for thread in threading.enumerate()):
        return  # a later job of the same process
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name=name, daemon=True).start()


def refuse_reexecution(trainer: pl.Trainer, *, sweeping: bool) -> None:
    """A launcher that runs ``sys.argv`` again for each worker would run the whole sweep in each of them."""
    if sweeping and trainer.world_size > 1 and isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        raise ValueError(
            f"trainer.strategy: {type(trainer.strategy).__name__} starts its workers by running the command line again."
            " In a sweep (-m) each of them would run the whole sweep, with its own hyperparameters. Use strategy=ddp,"
            " which starts workers from the running job, or run the jobs one by one without -m."
        )


def optimized_value(metrics: dict[str, float], name: str) -> float:
    """The number that a sweep compares."""
    if name not in metrics:
        raise ValueError(f"optimized_metric: this run logged no {name!r}. It logged {', '.join(sorted(metrics))}.")
    return metrics[name]


def _is_grid(config: DictConfig) -> bool:
    """Whether Hydra's own sweeper runs, which takes every combination and does not expect a job to fail."""
    return str(config.hydra.sweeper._target_).endswith("BasicSweeper")


def read_records(folder: Path, *, since: float) -> list[dict[str, Any]]:
    """The records of all jobs below ``folder`` that ran after ``since`` (Unix time), in the order of the jobs.

    The folder of an earlier sweep may be used again, and hold jobs that this one does not have.
    """
    paths = [path for path in folder.rglob(FILE_NAME) if path.stat().st_mtime >= since]
    records = [json.loads(path.read_text(encoding="utf-8")) | {"folder": path.parent} for path in paths]
    return sorted(records, key=lambda record: record["job"])


def varied_overrides(records: list[dict[str, Any]]) -> list[dict[str, str | None]]:
    """The overrides in which runs differ, of each run by name; ``None`` where it has none of that name."""
    overrides = [
        dict(override.split("=", 1) for override in record["overrides"] if "=" in override) for record in records
    ]
    names = list(dict.fromkeys(name for job in overrides for name in job))
    varied = [name for name in names if len({job.get(name) for job in overrides}) > 1]
    return [{name: job.get(name) for name in varied} for job in overrides]


def _curves(records: list[dict[str, Any]]) -> dict[str, Curves]:
    """The curves of each job that has logged some, by its number and the overrides in which jobs differ."""
    curves = {}
    for record, varied in zip(records, varied_overrides(records), strict=True):
        log_file = record["folder"] / LOG
        if log_file.is_file():
            chosen = ", ".join(f"{name}={value}" for name, value in varied.items() if value is not None)
            curves[f"{record['job']}: {chosen}"] = read_curves(log_file)
    return curves


def comparison(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each job: number, the overrides in which jobs differ, status, metrics, seconds, error."""
    metrics = list(dict.fromkeys(name for record in records for name in record["metrics"]))
    return [
        {
            "job": record["job"],
            **varied,
            "status": record["status"],
            **{name: record["metrics"].get(name) for name in metrics},
            "wall_time_s": record["wall_time_s"],
            "error": record["error"],
        }
        for record, varied in zip(records, varied_overrides(records), strict=True)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """All columns, numbers in full."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_markdown(path: Path, cells: list[list[str]]) -> None:
    """The printed table in Markdown."""
    header, *body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in cells]
    lines = [header, ["---"] * len(header), *body]
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")


def print_comparison(cells: list[list[str]], folder: Path, *, drawn: bool) -> None:
    """Print the table, in several pieces below each other where it is too wide, and where it was written and drawn."""
    output, num_jobs = console(), len(cells) - 1
    title: str | None = f"{num_jobs} job{'s' if num_jobs > 1 else ''}"
    for columns in fitting(cells, output.width):
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(escape(cells[0][column]), overflow="fold")
        for line in cells[1:]:
            table.add_row(*(escape(line[column]) for column in columns))
        output.print(table)
        title = None
    files = ", comparison.md and comparison.png" if drawn else " and comparison.md"
    output.print(f"Written to {folder / 'comparison.csv'}{files}", markup=False, highlight=False, soft_wrap=True)


def fitting(cells: list[list[str]], width: int) -> list[list[int]]:
    """The columns of each piece of a table that fit into a width, the first one in all of them.

    A column that does not fit beside the first one has a piece of its own.

    >>> fitting([["job", "model", "val/ne"], ["0", "dcn", "0.8123"]], width=20)
    [[0, 1], [0, 2]]
    """
    widths = [max(map(cell_len, column)) + _BORDER for column in zip(*cells, strict=True)]
    pieces: list[list[int]] = []
    for column in range(1, len(widths)):
        if not pieces or sum(widths[place] for place in (*pieces[-1], column)) >= width:
            pieces.append([0])
        pieces[-1].append(column)
    return pieces


def for_people(rows: list[dict[str, Any]], *, optimized_metric: str, own: Sequence[str] = ()) -> list[list[str]]:
    """Header and body of the table, rounded: the metric that the sweep is about, known ones, and ``own`` ones."""
    columns = list(rows[0])
    settings = columns[1 : columns.index("status")]
    metrics = {optimized_metric: (optimized_metric, ".4f")}
    metrics |= {name: (label.split(" (")[0], form) for label, name, form in METRICS}
    metrics |= {name: (name, ",.4g") for name in own}
    shown = [name for name in metrics if any(row.get(name) is not None for row in rows)]
    failed = ["error"] if any(row["error"] for row in rows) else []
    header = ["job", *settings, "status", *(metrics[name][0] for name in shown), "seconds", *failed]
    return [header] + [
        [
            str(row["job"]),
            *(_short(row[name]) for name in settings),
            row["status"],
            *("" if row[name] is None else format(row[name], metrics[name][1]) for name in shown),
            f"{row['wall_time_s']:.1f}",
            *((row["error"] or "").partition("\n")[0] for _ in failed),
        ]
        for row in rows
    ]


def _short(value: str | None) -> str:
    """A setting as it was written, but 4 digits of a drawn number."""
    try:
        return format(float(value or ""), ".4g") if len(value or "") > 8 else value or ""
    except ValueError:
        return value or ""
