"""From the config of ``recipes/prepare.py data=...`` to prepared rows, with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe_tools.build import Config, build
from recipe_tools.report import console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lightning_recsys.data.preparation import Preparation, split_rule
from lightning_recsys.data.preparation import Progress as Report
from lightning_recsys.data.prepared import Manifest
from lightning_recsys.data.raw import find_files

PHASES = {"learn": "Reading the training rows", "write": "Writing shards"}


def prepare_rows(config: Config) -> Manifest:
    """Do what the config says, show how far it is, print what came of it."""
    with _progress_bar() as on_progress:
        preparation = Preparation(
            Path(config["out"]),
            raw_format=build(config["data"]),
            files=find_files(config["raw"]),
            split=split_rule(**config["split"]),
            preprocessing=build(config["preprocessing"]),
            on_bad_row=config["on_bad_row"],
            shard_bytes=config["shard_bytes"],
            compression=config["compression"],
            num_threads=config["num_threads"],
            on_progress=on_progress,
        )
        manifest = preparation.run()
    print_manifest(manifest, Path(config["out"]))
    return manifest


def print_manifest(manifest: Manifest, root: Path) -> None:
    """Print rows, positives and shards of each split, what was skipped, and what to do next."""
    table = Table("split", "rows", "positive", "shards", "bytes", title=str(root), title_justify="left")
    statistics = manifest.details["statistics"]
    for split, shards in manifest.splits.items():
        rows = sum(shard.rows for shard in shards)
        positive = f"{statistics['positives'].get(split, 0) / rows:.2%}" if rows else ""
        table.add_row(split, f"{rows:,}", positive, str(len(shards)), f"{sum(shard.bytes for shard in shards):,}")
    output = console()
    output.print(table)
    if statistics["skipped_rows"]:
        output.print(f"{statistics['skipped_rows']:,} bad rows were skipped, such as:", highlight=False)
        for message in statistics["skipped_examples"]:
            output.print(f"  {message}", markup=False, highlight=False, soft_wrap=True)
    asked, used = manifest.details["options"]["preprocessing"]["min_count"], manifest.details["learned"]["min_count"]
    if used > asked:
        output.print(
            f"Vocabularies hold values of at least {used} training rows instead of {asked}: max_vocabulary was reached."
        )
    output.print(f"Train: python recipes/train.py data=prepared data.root={root}", markup=False, soft_wrap=True)


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        rows, seconds = task.fields["rows"], task.finished_time or task.elapsed or 0
        return Text(f"{rows:,} rows, {rows / seconds if seconds else 0:,.0f}/s")


@contextmanager
def _progress_bar() -> Iterator[object]:
    """Yields what :class:`Preparation` tells its progress; time is estimated from the bytes of the raw files."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        _RowsPerSecond(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console(), speed_estimate_period=60) as bar:
        tasks = {}

        def show(report: Report) -> None:
            if report.phase not in tasks:
                tasks[report.phase] = bar.add_task(PHASES[report.phase], total=report.total_bytes, rows=0)
            bar.update(tasks[report.phase], completed=report.bytes, rows=report.rows)

        yield show
