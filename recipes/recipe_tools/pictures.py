"""Pictures of simulations: one panel for each question; and what draws any picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, Any]]


def _curve(axes: Any, runs: Runs, *, x: str, y: str) -> None:
    for label, run in runs.items():
        points = [point for point in run["curve"] if point.get(y) is not None]
        axes.plot([point[x] for point in points], [point[y] for point in points], marker=".", label=label)
    axes.set_xlabel({"examples": "examples", "seconds": "virtual seconds"}[x])
    axes.set_ylabel(y)


def _staleness(axes: Any, runs: Runs) -> None:
    for label, run in runs.items():
        found = run["staleness"]["dense"]
        if found["count"]:
            width = found["bin_width"]
            axes.step([width * i for i in range(len(found["bins"]))], found["bins"], where="post", label=label)
    axes.set_xlabel("staleness of the dense part, in updates")
    axes.set_ylabel("pushes")


def _utilization(axes: Any, runs: Runs) -> None:
    kinds = sorted({kind for run in runs.values() for kind, share in run["utilization"].items() if share > 0})
    for i, (label, run) in enumerate(runs.items()):
        shares = [run["utilization"].get(kind, 0.0) for kind in kinds]
        axes.barh([j + 0.8 * i / len(runs) for j in range(len(kinds))], shares, height=0.8 / len(runs), label=label)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("share of the time that it was busy")


def _by_x(axes: Any, runs: Runs, *, metric: str, x: str) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for label, run in runs.items():
        name, _, place = label.rpartition(" @ ")
        series.setdefault(name, []).append((float(place), run["metrics"][metric]))
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(metric)


def _by_run(axes: Any, runs: Runs, *, metric: str) -> None:
    axes.bar(range(len(runs)), [run["metrics"][metric] for run in runs.values()])
    axes.set_xticks(range(len(runs)), runs, rotation=20, fontsize=7)
    axes.set_ylabel(metric)


PANELS: dict[str, Callable[..., None]] = {
    "ne": partial(_curve, x="examples", y="val/ne"),
    "auc": partial(_curve, x="examples", y="val/auc"),
    "ne_by_time": partial(_curve, x="seconds", y="val/ne"),
    "staleness": _staleness,
    "utilization": _utilization,
}
"""What a figure may show; any metric's name besides, over the figure's x axis, or by run where it has none."""


def pyplot() -> Any | None:
    """What draws into files; ``None`` where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(figure: dict[str, Any], runs: Runs, path: Path) -> Path | None:
    """Draw the panels of a figure beside each other; ``None``, and nothing is drawn, where matplotlib is missing."""
    if (plt := pyplot()) is None:
        return None
    panels = figure["panels"]
    drawing, all_axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for axes, panel in zip(all_axes[0], panels, strict=True):
        if panel in PANELS:
            PANELS[panel](axes, runs)
        elif figure["x"] is None:
            _by_run(axes, runs, metric=panel)
            continue
        else:
            _by_x(axes, runs, metric=panel, x=figure["x"]["label"])
        if axes.get_legend_handles_labels()[0]:  # none where a run was too short for a panel
            axes.legend(fontsize=7)
    drawing.suptitle(figure["title"] or "")
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    plt.close(drawing)
    return path
