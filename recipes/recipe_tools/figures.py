"""Figures of simulated runs: which runs each takes, how far one is, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic
from typing import Any

from recipe_tools.build import Config
from recipe_tools.pictures import draw
from recipe_tools.record import RunRecord, finite
from recipe_tools.report import console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_recsys.simulation import Results

# A single run, as a figure.
RUN = {"title": None, "paper": None, "panels": ["ne", "ne_by_time", "staleness", "utilization"], "x": None}


def runs_of(figure: Config) -> dict[str, list[str]]:
    """Overrides by label: each series, at each place of the x axis where there is one (``series @ 10``)."""
    if (axis := figure["x"]) is None:
        return dict(figure["series"])
    return {
        f"{label} @ {value}": [*overrides, *(f"{key}={value}" for key in axis["keys"])]
        for label, overrides in figure["series"].items()
        for value in axis["values"]
    }


class Watch:
    """A bar with the time left, drawn a few times a second; around a run it gives what the run calls after pushes."""

    def __init__(self, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console(), refresh_per_second=2)
        self._task = self._bar.add_task(label, total=total, state="")
        self._due = 0.0

    def __enter__(self) -> Callable[[Results], None]:
        self._bar.start()
        return self._watch

    def _watch(self, results: Results) -> None:
        if (now := monotonic()) >= self._due:
            self._due = now + 0.5
            last = results.curve[-1].get("val/ne", float("nan")) if results.curve else float("nan")
            state = f"{results.examples:,} examples  val/ne {last:.4f}"
            self._bar.update(self._task, completed=results.examples, state=state)

    def __exit__(self, *_: object) -> None:
        self._bar.update(self._task, completed=self._bar.tasks[0].total)
        self._bar.stop()


def report(figure: Config, runs: dict[str, dict[str, Any]], record: RunRecord) -> None:
    """Print a line for each run; write everything beside the record, and draw it where matplotlib is installed."""
    folder = record.path.parent
    names = sorted({name for run in runs.values() for name in run["metrics"]})
    table = Table("metric", *runs, title=figure["title"] or "simulation", title_justify="left")
    for name in names:
        table.add_row(name, *(format(run["metrics"].get(name, float("nan")), ",.5g") for run in runs.values()))
    console().print(table)
    if figure["paper"]:
        console().print(f"The paper: {figure['paper']}")
    record.metrics |= {
        f"{label}/{name}": value for label, run in runs.items() for name, value in run["metrics"].items()
    }
    (folder / "simulation.json").write_text(json.dumps(finite({"figure": figure, "runs": runs}), indent=1) + "\n")
    picture = draw(figure, runs, folder / "simulation.png")
    console().print(f"wrote {folder / 'simulation.json'}" + (f" and {picture}" if picture else ""))
