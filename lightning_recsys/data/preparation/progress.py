"""A progress bar for a preparation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lightning_recsys.data.preparation.source import Progress

_PHASES = {"survey": "Counting rows", "learn": "Reading the training rows", "write": "Writing shards"}


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        rows, seconds = task.fields["rows"], task.finished_time or task.elapsed or 0
        return Text(f"{rows:,} rows, {rows / seconds if seconds else 0:,.0f}/s")


@contextmanager
def progress_bar(
    console: Console, *, delay: float = 0.0, transient: bool = False
) -> Iterator[Callable[[Progress], None]]:
    """Yields what a preparation tells its progress; time is estimated from the bytes of the raw files.

    Args:
        console: The console on which the bar is drawn.
        delay: Seconds until it appears: a short preparation shows none.
        transient: Whether it goes away at the end.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        _RowsPerSecond(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    bar = Bar(*columns, console=console, speed_estimate_period=60, transient=transient)
    begun, tasks = time.monotonic(), {}

    def show(report: Progress) -> None:
        if report.phase not in tasks:
            tasks[report.phase] = bar.add_task(_PHASES[report.phase], total=report.total_bytes, rows=0)
        bar.update(tasks[report.phase], completed=report.bytes, rows=report.rows)
        if time.monotonic() - begun >= delay:
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:  # else rich ends the line of a bar that was never drawn
            bar.stop()
