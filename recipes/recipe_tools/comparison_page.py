"""Runs beside each other in one HTML file: results, the settings in which they differ, and their curves.

The file needs nothing else: its pictures are SVG in it, and its colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from recipe_tools.curves import LOG, PANELS, Curves, Points, read_curves
from recipe_tools.record import FILE_NAME
from recipe_tools.report import METRICS

_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_WIDTH, _HEIGHT = 460, 300  # of a picture, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 40  # around the curves
_OF_THE_MACHINE = ("paths", "hydra", "name")  # settings that say nothing of a run
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --text: #222; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scrolled { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: right; vertical-align: top; }
th, td { max-width: 18rem; overflow-wrap: break-word; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; max-width: 40vw; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 11px; }
svg .grid { stroke: var(--line); } svg .line { fill: none; stroke-width: 2; }
svg .training { stroke-width: 1; opacity: .6; }
"""


@dataclass(frozen=True)
class ComparedRun:
    """A run, or one seed of a kept one.

    Args:
        name: As it was asked for, with the seed of a kept one.
        record: Its ``metrics.json``, or what is kept of that.
        config: Its resolved configuration.
        curves: What it has logged; empty where it logged nothing.
    """

    name: str
    record: Mapping[str, Any]
    config: Mapping[str, Any]
    curves: Curves = field(default_factory=dict)


def find_runs(name: str, root: Path) -> list[ComparedRun]:
    """The runs that a name stands for: those below a folder, or the seeds of a kept one.

    Args:
        name: The folder of a run or of a sweep, or ``DATA/MODEL``.
        root: The folder of kept runs.

    Raises:
        ValueError: there is neither, or no run of a folder was completed.
    """
    if (root / name / "config.yaml").is_file() and ".." not in Path(name).parts:
        return _kept(name, root / name)
    paths = sorted(Path(name).rglob(FILE_NAME))
    if not paths:
        raise ValueError(
            f"{name} is neither the folder of a run or of a sweep (logs/train/<time>), with a {FILE_NAME} in it or"
            " below, nor a kept run (DATA/MODEL)."
        )
    records = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    completed = {folder: record for folder, record in records.items() if record["status"] == "completed"}
    if not completed:
        states = ", ".join(sorted({record["status"] for record in records.values()}))
        raise ValueError(f"{name} has no run that was completed ({states}).")
    names = {folder: name if folder == Path(name) else str(folder.relative_to(name)) for folder in completed}
    return [
        ComparedRun(
            names[folder], record, record["config"], read_curves(folder / LOG) if (folder / LOG).is_file() else {}
        )
        for folder, record in completed.items()
    ]


def _kept(name: str, folder: Path) -> list[ComparedRun]:
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["config"]
    found = []
    for path in sorted(folder.glob("seed-*.json")):
        log = path.with_suffix(".csv")
        curves = read_curves(log, examples_per_step=config["data"].get("batch_size")) if log.is_file() else {}
        record = json.loads(path.read_text(encoding="utf-8"))
        found.append(ComparedRun(f"{name}, {path.stem.replace('-', ' ')}", record, config, curves))
    return found


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """The whole page.

    Args:
        runs: In the order in which they stand in it; a name may come again.
    """
    results = [("run", *(title for title, metric, _ in METRICS if _has(runs, metric)), "seconds")]
    for run in runs:
        cells = [_shown(run.record["metrics"].get(x), form) for _, x, form in METRICS if _has(runs, x)]
        results.append((run.name, *cells, _shown(run.record.get("wall_time_s"), ",.1f")))
    settings = _differing([_settings(run.config) for run in runs])
    parts = [_table(results, keys=True)]
    if settings:
        rows = [("setting", *(run.name for run in runs)), *((key, *values) for key, values in settings.items())]
        parts += ["<h2>Settings in which they differ</h2>", _table(rows)]
    panels = [panel for panel in PANELS if any(panel in run.curves for run in runs)]
    if panels:
        figures = "".join(_figure(panel, [run.curves.get(panel, {}) for run in runs]) for panel in panels)
        parts += ["<h2>Curves</h2>", f'<div class="curves">{figures}</div>']
        parts.append("<p>Dots are validations; thin lines are the training's own. All are by examples trained.</p>")
    if silent := [run.name for run in runs if not run.curves]:
        parts.append(f"<p>No curves were logged by {escape(', '.join(silent))}.</p>")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{len(runs)} runs</title><style>{_STYLE}</style>"
    )
    body = f"<h1>{len(runs)} runs</h1>{''.join(parts)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _has(runs: Sequence[ComparedRun], metric: str) -> bool:
    return any(metric in run.record["metrics"] for run in runs)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted name, but for the places of the run's own files.

    >>> trainer = {"default_root_dir": "/runs/1", "max_epochs": 2}
    >>> _settings({"trainer": trainer, "logger": {"save_dir": "/runs/1/logs"}})
    {'trainer.max_epochs': '2'}
    """
    flat = _flat(config)
    folder = flat.get("trainer.default_root_dir")
    return flat if not folder else {name: x for name, x in flat.items() if not f"{x}/".startswith(f"{folder}/")}


def _flat(config: Any, prefix: str = "") -> dict[str, str]:
    """Settings by dotted name.

    >>> _flat({"a": {"b": 1}, "c": [2, 3]})
    {'a.b': '1', 'c': '[2, 3]'}
    """
    if not isinstance(config, Mapping):
        return {prefix: str(config)}
    found: dict[str, str] = {}
    for key, value in config.items():
        if prefix or key not in _OF_THE_MACHINE:
            found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _differing(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The values of each setting that is not the same in all; empty where a run has none of that name."""
    names = dict.fromkeys(name for each in settings for name in each)
    found = {name: [each.get(name, "") for each in settings] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _table(rows: Sequence[Sequence[str]], *, keys: bool = False) -> str:
    """A table whose first row is its head; with ``keys``, each other row has its run's colour."""
    lines = []
    for number, row in enumerate(rows):
        cells = [escape(cell) for cell in row]
        if keys and number:
            cells[0] = f'<span class="key" style="background:{_color(number - 1)}"></span>{cells[0]}'
        kind = "td" if number else "th"
        lines.append(f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for cell in cells)}</tr>")
    return f'<div class="scrolled"><table>{"".join(lines)}</table></div>'


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _figure(panel: str, runs: Sequence[Mapping[str, Points]]) -> str:
    """A panel of curves, a colour for each run."""
    points = [point for lines in runs for line in lines.values() for point in line]
    to_x, x_ticks = _axis([0.0, *(x for x, _ in points)], _LEFT, _WIDTH - _RIGHT)
    from_zero = [0.0] if panel == "examples per second" else []
    to_y, y_ticks = _axis([*from_zero, *(y for _, y in points)], _HEIGHT - _BOTTOM, _TOP)
    drawn = []
    for tick in y_ticks:
        y = to_y(tick)
        drawn.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    for tick in x_ticks:
        x = to_x(tick)
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(tick)}</text>')
    drawn.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">examples</text>')
    for number, lines in enumerate(runs):
        for line, places in lines.items():
            at = [(to_x(x), to_y(y)) for x, y in places]
            way = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
            drawn.append(f'<path class="line {line}" stroke="{_color(number)}" d="M{way}"/>')
            if line == "validation" or len(at) == 1:
                drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_color(number)}"/>' for x, y in at]
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(panel)} by examples"'
    return f"<figure><figcaption>{escape(panel)}</figcaption><svg {view}>{''.join(drawn)}</svg></figure>"


def _axis(values: Sequence[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value lies between two places, and round values to name."""
    low, high = min(values), max(values)
    if high == low:
        low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(x for x in (1, 2, 5, 10) if (high - low) / (step * x) <= 5)
    ticks = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return lambda value: begin + (value - low) / (high - low) * (end - begin), ticks


def _short(number: float) -> str:
    """A number of examples.

    >>> _short(0), _short(2500), _short(40_000_000)
    ('0', '2.5k', '40M')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.4g}"
