"""A plan as a picture: examples per second against the number of machines, and where a line bends."""

from __future__ import annotations

import itertools
from pathlib import Path

from lightning_recsys.planning import Forecast, Plan


def draw_plan(made: Plan, path: Path) -> Path | None:
    """A line for each strategy, the best that it gives with so many machines; ``None`` without matplotlib.

    Where what limits a strategy changes from one number of machines to the next, the line says what limits it there.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, line in lines_of(made).items():
        (drawn,) = axes.plot(
            [each.layout.num_machines for each in line], [each.examples_per_second for each in line], ".-", label=name
        )
        for before, after in itertools.pairwise(line):
            if before.limit != after.limit:
                place = (after.layout.num_machines, after.examples_per_second)
                words = {"textcoords": "offset points", "xytext": (-4, 5), "ha": "right", "fontsize": 7}
                axes.annotate(after.limit, place, color=drawn.get_color(), **words)
    axes.set_xlabel("machines")
    axes.set_ylabel("examples per second")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def lines_of(made: Plan) -> dict[str, list[Forecast]]:
    """For each strategy the best forecast that more machines improve, in the order of their number."""
    found: dict[str, list[Forecast]] = {}
    for each in sorted(made.forecasts, key=lambda each: (each.layout.num_machines, -each.examples_per_second)):
        line = found.setdefault(each.method.name, [])
        if not line or each.examples_per_second > line[-1].examples_per_second:
            line.append(each)
    return found
