"""A plan as a picture: operators in the rows of their devices, and what goes from one to another."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from lightning_recsys.placement.operator_plans.plan import OperatorPlan, levels
from lightning_recsys.placement.operators import TRAINER, OperatorGraph, server_name

_COLOURS = ("#dfe7f2", "#fbe3c8", "#d7ecd5", "#f0d5e3", "#e5e0f3", "#f6f0c4")


def draw_plan(path: Path, plan: OperatorPlan, graph: OperatorGraph) -> None:
    """Draw a plan: a band for each device, time from left to right, bold arrows for what is sent.

    Args:
        path: Path of the picture; its suffix says which format.
        plan: Which device computes each operator.
        graph: The operators, with what they take and send.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'lightning-recsys[plots]'``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # an extra, and no display
    from matplotlib.figure import Figure

    devices = [TRAINER, *map(server_name, range(plan.num_servers))]
    places, heights = _places(plan, graph, devices)
    width = max(x for x, _ in places.values()) + 1
    figure = Figure(figsize=(1.5 * width + 1, 0.55 * sum(heights.values()) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bottom = 0.0
    for number, device in enumerate(devices):
        axes.axhspan(bottom - 0.5, bottom + heights[device] - 0.5, color=_COLOURS[number % len(_COLOURS)], zorder=0)
        axes.text(-0.95, bottom + (heights[device] - 1) / 2, device, va="center", weight="bold")
        bottom += heights[device]
    for first, second in graph.edges:
        crosses = plan.devices[first] != plan.devices[second]
        style = {"arrowstyle": "->", "color": "#b03a2e" if crosses else "#888888", "lw": 1.8 if crosses else 0.8}
        axes.annotate("", places[second], places[first], arrowprops=style | {"shrinkA": 10, "shrinkB": 10}, zorder=1)
    for name, (x, y) in places.items():
        owns = graph.by_name[name].owns_parameters
        box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": "black" if owns else "#aaaaaa"}
        axes.text(x, y, name, ha="center", va="center", fontsize=7, bbox=box, zorder=2)
    axes.set(xlim=(-1.0, width - 0.4), ylim=(bottom - 0.5, -0.5))
    axes.axis("off")
    figure.savefig(path, dpi=150)


def _places(
    plan: OperatorPlan, graph: OperatorGraph, devices: list[str]
) -> tuple[dict[str, tuple[float, float]], dict[str, int]]:
    """Column and row of each operator, and the rows of each device."""
    level_of = levels(graph, plan.devices)
    steps: dict[str, int] = {}
    for operator in sorted(graph.operators, key=lambda x: level_of[x.name]):  # stable: those of a level in their order
        before = (graph.value_of[name].producer for name in operator.inputs)
        steps[operator.name] = max((steps[x] + 1 for x in before if x is not None), default=0)
    cells: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, step in steps.items():
        cells[plan.devices[name], step].append(name)
    heights = {device: max([len(x) for (d, _), x in cells.items() if d == device], default=1) for device in devices}
    top, places = 0, {}
    for device in devices:
        for (other, step), names in cells.items():
            if other == device:
                places.update({name: (float(step), float(top + row)) for row, name in enumerate(names)})
        top += heights[device]
    return places, heights
