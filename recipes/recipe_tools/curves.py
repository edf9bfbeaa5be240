"""A run's curves: read from its log, and drawn against the examples that it was trained on."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_tools.pictures import pyplot

LOG = Path("curves", "metrics.csv")  # in a run's folder
PANELS = {
    "NE": {"validation": "val/ne", "training": "train/window_ne"},
    "AUC": {"validation": "val/auc"},
    "accuracy": {"validation": "val/accuracy"},
    "examples per second": {"training": "eps"},
}
"""What is drawn: by panel, each line's column in the log. Validations are marked."""

_NAMED = 12  # runs of a picture that its legend names

log = logging.getLogger(__name__)

Points = list[tuple[float, float]]
Curves = dict[str, dict[str, Points]]
"""By panel and line: number of examples, value."""


def read_curves(path: Path, *, examples_per_step: float | None = None) -> Curves:
    """The curves that a run has logged, of finite numbers; panels and lines without one are left out.

    A validation logs its step and not the examples: these are what the training's lines say of steps.

    Args:
        path: ``metrics.csv``, as the CSV logger writes it.
        examples_per_step: Examples of a step of all workers, where no line says how many there were.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["step"]]  # a line that was cut off may have none
    told = [(float(row["step"]) + 1, float(row["examples"])) for row in rows if row.get("examples")]
    if told:
        examples_per_step = told[-1][1] / told[-1][0]
    if examples_per_step is None:
        return {}
    curves: Curves = {}
    for panel, lines in PANELS.items():
        for line, column in lines.items():
            points = [
                (float(row.get("examples") or (float(row["step"]) + 1) * examples_per_step), float(row[column]))
                for row in rows
                if row.get(column) and math.isfinite(float(row[column]))
            ]
            if points:
                curves.setdefault(panel, {})[line] = sorted(points)
    return curves


def draw_run(folder: Path) -> Path | None:
    """Draw a run's curves beside its log, as ``curves.png``; returns as :func:`draw_curves` does.

    Args:
        folder: The run's folder.
    """
    path = folder / LOG
    return draw_curves({"": read_curves(path)}, path.with_name("curves.png")) if path.is_file() else None


def draw_curves(runs: Mapping[str, Curves], path: Path) -> Path | None:
    """Draw the curves of a run, or of several in one picture.

    Args:
        runs: By label; runs without curves have no line.
        path: The picture, a PNG.

    Returns:
        The picture; ``None``, and nothing is drawn, where no run has two points of a line, or without matplotlib. A
        picture that cannot be written is a warning: the run that it is of has its results.
    """
    if not any(len(points) > 1 for run in runs.values() for lines in run.values() for points in lines.values()):
        return None
    if (plt := pyplot()) is None:
        return None
    panels = [panel for panel in PANELS if any(panel in run for run in runs.values())]
    drawing, all_axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False)
    for axes, panel in zip(all_axes[0], panels, strict=True):
        for number, (label, run) in enumerate(runs.items()):
            for line, points in run.get(panel, {}).items():
                _draw_line(axes, points, line=line, label=line if len(runs) == 1 else label, color=f"C{number % 10}")
        if panel == "examples per second":
            fastest = max(
                value for run in runs.values() for points in run.get(panel, {}).values() for _, value in points
            )
            axes.set_ylim(0, 1.05 * fastest or None)
        axes.set_xlabel("examples")
        axes.set_ylabel(panel)
        if panel == panels[0] and len(runs) <= _NAMED:
            axes.legend(fontsize=7)
    drawing.tight_layout()
    try:
        drawing.savefig(path, dpi=110)
    except OSError as error:
        log.warning("%s was not drawn: %s", path, error)
        return None
    finally:
        plt.close(drawing)
    return path


def _draw_line(axes: Any, points: Points, *, line: str, label: str, color: str) -> None:
    marks = line == "validation" or len(points) == 1
    style = {"marker": "o", "markersize": 4} if marks else {"alpha": 0.6, "linewidth": 1}
    # One entry of the legend for each run: its validations, or what stands alone.
    axes.plot(*zip(*points, strict=True), color=color, label=label if marks or label == line else None, **style)
