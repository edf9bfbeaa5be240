"""Records kept in the tree: one is trained again and compared, and all stand in a table beside published figures."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from recipe_tools.record import FILE_NAME
from recipe_tools.report import console
from rich.table import Table

RECIPES = Path(__file__).resolve().parents[1]
PUBLISHED = "published.yaml"
START, END = "<!-- records -->", "<!-- end of records -->"
COMPARED = ("test/auc", "test/logloss", "test/ne")
LEAST = 0.0005  # a difference that another processor or another build of torch may make


def train_again(overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """Train with the recipe; the run's ``metrics.json``, empty where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(RECIPES / "train.py"), *overrides, f"seed={seed}", f"hydra.run.dir={folder}"]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # noqa: S603 - our own recipe
        path = Path(folder, FILE_NAME)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return {} if done.returncode else found


def redo(name: str, runs: Mapping[int, Mapping[str, Any]], overrides: Sequence[str], *, seed: int | None) -> bool:
    """Train one kept run again, and print whether it agrees.

    It agrees where no metric differs from the kept one by more than seeds differ: three standard deviations over the
    kept seeds where there are three of them, else, or where that is less, :data:`LEAST`.

    Args:
        name: ``DATA/MODEL``.
        runs: What is kept of each seed.
        overrides: Of the command line.
        seed: Which of the seeds; ``None`` for the first.

    Raises:
        ValueError: that seed is not kept.
    """
    seed = min(runs) if seed is None else seed
    if seed not in runs:
        raise ValueError(f"{name} has no seed {seed}, but {', '.join(map(str, sorted(runs)))}.")
    kept = runs[seed]
    now = train_again(overrides, seed)
    if not now:
        console().print(f"{name}, seed {seed}: the run failed. Are its rows there? Set LIGHTNING_RECSYS_DATA.")
        return False
    table = Table(
        "metric", "kept", "now", "difference", "allowed", "", title=f"{name}, seed {seed}", title_justify="left"
    )
    good = True
    for metric in COMPARED:
        if (before := kept["metrics"].get(metric)) is None:
            continue
        after, limit = now["metrics"].get(metric), allowed(metric, runs)
        same = after is not None and abs(after - before) <= limit
        good &= same
        shown = ("none", "") if after is None else (f"{after:.5f}", f"{after - before:+.5f}")
        table.add_row(metric, f"{before:.5f}", *shown, f"{limit:.5f}", "" if same else "DIFFERS")
    console().print(table)
    versions = {
        key: (kept["versions"].get(key), now["versions"].get(key)) for key in kept["versions"] | now["versions"]
    }
    if others := [f"{key} {then} then, {here} now" for key, (then, here) in versions.items() if then != here]:
        console().print(f"Other versions: {'; '.join(others)}.")
    console().print(f"{name}, seed {seed}: {'agrees' if good else 'DIFFERS'}.")
    return good


def allowed(metric: str, runs: Mapping[int, Mapping[str, Any]]) -> float:
    """How far a repetition's metric may be from the kept one."""
    values = [run["metrics"][metric] for run in runs.values() if metric in run["metrics"]]
    return max(LEAST, 3 * statistics.stdev(values)) if len(values) > 2 else LEAST


def records_table(kept: Mapping[str, Mapping[int, Mapping[str, Any]]], root: Path) -> str:
    """All records as Markdown, those that are published and were not run here among them.

    Args:
        kept: The runs of each seed, by ``DATA/MODEL``.
        root: The folder of kept runs, with :data:`PUBLISHED`.
    """
    text = (root / PUBLISHED).read_text(encoding="utf-8")
    published: dict[str, dict[str, dict[str, float]]] = yaml.safe_load(text)
    names = [f"{data}/{model}" for data, models in published.items() for model in models]
    names += [name for name in kept if name not in names]
    lines = ["| record | AUC, published | log loss | AUC, ours | log loss | NE | seeds | torch |"]
    lines.append("|" + " --- |" * 8)
    for name in names:
        data, model = name.split("/")
        told = published.get(data, {}).get(model, {})
        cells = [f"{told[key]:.4f}" if key in told else "" for key in ("auc", "logloss")]
        if name in kept:
            runs = kept[name]
            cells += [_spread([run["metrics"].get(metric) for run in runs.values()]) for metric in COMPARED]
            torch = sorted({run["versions"]["torch"] for run in runs.values()})
            cells += [", ".join(map(str, sorted(runs))), ", ".join(torch)]
        else:
            cells += ["not run", "", "", "", ""]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def write_page(page: Path, table: str) -> None:
    """Put the table between the page's marks.

    Raises:
        ValueError: the page has no marks.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, start, rest = text.partition(START)
    _, end, behind = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{page} must have a line {START} and below it a line {END}, between which the table goes.")
    page.write_text(f"{before}{start}\n{table}\n{end}{behind}", encoding="utf-8")


def _spread(values: Sequence[float | None]) -> str:
    """Mean, and the standard deviation where there are several."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    deviation = f" ± {statistics.stdev(numbers):.4f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.4f}{deviation}"
