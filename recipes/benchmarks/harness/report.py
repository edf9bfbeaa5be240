"""Benchmark results as a table, JSON and a picture, with the machine that they were taken on."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import llvmlite.binding
import torch
from benchmarks.harness.turns import Measurement
from recipe_tools.report import console
from rich.table import Table


class Result(Protocol):
    """What a suite measures: a table for people, plain containers for the JSON file."""

    def table(self) -> Table:
        """For people."""

    def to_dict(self) -> dict[str, Any]:
        """For programs."""


@runtime_checkable
class Drawn(Protocol):
    """A result with a picture of its own, ``<suite>-<name>.png``."""

    name: str

    def draw(self, axes: Any) -> None:
        """Into matplotlib's axes."""


@dataclass(frozen=True)
class Row:
    """One interleaved measurement: several variants of one workload, compared with a base."""

    workload: str
    measured: Measurement
    base: str

    def to_dict(self) -> dict[str, Any]:
        """Medians, ratios and every round's rate, as plain containers."""
        return {
            "workload": self.workload,
            "base": self.base,
            "examples_per_second": {name: round(self.measured.median(name)) for name in self.measured.rates},
            "ratio_to_base": {name: round(self.measured.ratio(name, self.base), 3) for name in self.measured.rates},
            **({"ours_over": self.ours_over()} if "ours" in self.measured.rates else {}),
            "rounds": {name: [round(rate) for rate in rates] for name, rates in self.measured.rates.items()},
        }

    def table(self) -> Table:
        """Median rates, ratios to the base with their smallest and largest round, and how much faster ours is."""
        table = Table("variant", "examples/s", f"ratio to {self.base}", "range", title=self.workload)
        table.title_justify = "left"
        ours_over = self.ours_over() if "ours" in self.measured.rates else {}
        if ours_over:
            table.add_column("ours / it")
        for name in self.measured.rates:
            low, high = self.measured.spread(name, self.base)
            ratio = f"{self.measured.ratio(name, self.base):.2f}"
            cells = [name, f"{self.measured.median(name):,.0f}", ratio, f"{low:.2f} to {high:.2f}"]
            table.add_row(*cells, *([f"{ours_over[name]:.2f}"] if name in ours_over else []))
        return table

    def ours_over(self) -> dict[str, float]:
        """How many times as fast as each other variant this package is."""
        others = [name for name in self.measured.rates if name != "ours"]
        return {name: round(self.measured.ratio("ours", name), 3) for name in others}


@dataclass(frozen=True)
class Columns:
    """A table of numbers with names, as one of a suite's results.

    Args:
        title: Above it.
        header: Names of the columns.
        rows: Cells, as they are shown.
        details: What programs get besides, as plain containers by name: the numbers in full.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    details: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> Table:
        """For people."""
        table = Table(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        rows = [dict(zip(self.header, row, strict=True)) for row in self.rows]
        return {"table": self.title, "rows": rows, **self.details}


@dataclass(frozen=True, kw_only=True)
class Curves(Columns):
    """A table, and a picture of some columns over the first one: ``<suite>-<name>.png``.

    Args:
        drawn: Names of the columns that become curves. Their cells begin with a number, perhaps with ``± spread``
            behind it.
        label: What these are.
        name: Of the picture.
    """

    drawn: Sequence[str]
    label: str
    name: str

    def draw(self, axes: Any) -> None:
        """Into matplotlib's axes."""
        for name in self.drawn:
            cells = [row[self.header.index(name)].partition("±") for row in self.rows]
            numbers, spreads = ([float(part or 0) for part in parts] for parts in list(zip(*cells, strict=True))[::2])
            axes.errorbar([row[0] for row in self.rows], numbers, yerr=spreads, marker="o", capsize=3, label=name)
        axes.set_xlabel(self.header[0])
        axes.set_ylabel(self.label)
        axes.set_title(self.title)
        axes.legend()


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "pytorch-lightning", "lightning-recsys")},
    }


def _processor() -> str:
    """The processor's name, and its generation: virtual machines name all of AMD's alike."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({llvmlite.binding.get_host_cpu_name()})"


def _variants(rows: list[Row]) -> list[str]:
    """All variants, in the order in which they first come; not every row has every one."""
    return list(dict.fromkeys(name for row in rows for name in row.measured.rates))


def show(rows: Sequence[Result]) -> None:
    """Print a table for each result that has lines."""
    for row in rows:
        if (table := row.table()).rows:
            console().print(table)


def markdown(results: Sequence[Result]) -> str:
    """All results as Markdown: rows of one base share a table of rates, each with its ratio to the base in brackets."""
    about = machine()
    parts = [
        f"{date.today():%Y-%m-%d}, {about['processor']}, {about['cores']} cores, {about['threads']} thread, torch "
        f"{about['torch']}, Lightning {about['pytorch-lightning']}."
    ]
    if _by_base(results):
        parts[0] += " Examples per second, in brackets the ratio to the first column."
    for base, rows in _by_base(results).items():
        names = _variants(rows)
        names.insert(0, names.pop(names.index(base)))
        lines = [[row.workload, *(_cell(row, name) for name in names)] for row in rows]
        parts.append(_markdown_table(["", *names], lines))
    for result in results:
        if not isinstance(result, Row) and (table := result.table()).rows:  # parts of a suite may have no bars
            cells = zip(*(map(str, column.cells) for column in table.columns), strict=True)
            title = str(table.title)
            parts.append(f"{title[:1].upper()}{title[1:]}:")
            parts.append(
                _markdown_table([str(column.header) for column in table.columns], [list(line) for line in cells])
            )
    return "\n\n".join(parts) + "\n"


def fill(page: Path, folder: Path, *, suite: str) -> None:
    """Put what :func:`write` left in ``folder`` into a Markdown page, and its pictures into ``images`` beside that.

    The tables go between the page's marks, and behind them the pictures of single results. The picture of all rates
    comes along where the page shows it, outside its marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, after = around(page, suite=suite)
    own = sorted(folder.glob(f"{suite}-*.png"))
    links = "".join(f"\n![{picture.stem}](images/{picture.name})\n" for picture in own)
    page.write_text(f"{before}\n{(folder / f'{suite}.md').read_text()}{links}{after}")
    rates = [picture for picture in folder.glob(f"{suite}.png") if f"(images/{picture.name})" in before + after]
    for picture in [*rates, *own]:
        (page.parent / "images").mkdir(exist_ok=True)
        shutil.copy(picture, page.parent / "images" / picture.name)


def around(page: Path, *, suite: str) -> tuple[str, str]:
    """What stands in a page up to the mark ``<!-- suite=... -->``, and from ``<!-- end of suite=... -->`` on.

    Raises:
        ValueError: there is no such page, or it has no such marks.
    """
    if not page.is_file():
        raise ValueError(f"page={page} is no file.")
    start, end = f"<!-- suite={suite} -->", f"<!-- end of suite={suite} -->"
    before, found, rest = page.read_text().partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"page={page} has no place for the results: it needs the lines {start} and {end}.")
    return before + start, end + after


def _by_base(results: Sequence[Result]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for result in results:
        if isinstance(result, Row):
            rows.setdefault(result.base, []).append(result)
    return rows


def _cell(row: Row, name: str) -> str:
    if name not in row.measured.rates:
        return ""
    rate = f"{row.measured.median(name):,.0f}"
    return rate if name == row.base else f"{rate} ({row.measured.ratio(name, row.base):.2f})"


def _markdown_table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(results: Sequence[Result], folder: Path, *, suite: str, settings: dict[str, Any]) -> list[Path]:
    """Write ``<suite>.json``, ``.md`` and, where matplotlib is there, pictures; returns what was written.

    ``<suite>.png`` has the rates, if there are any; results that are :class:`Drawn` have one each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = next(iter(_by_base(results).values()), [])
    drawn = [result for result in results if isinstance(result, Drawn)]
    content = {"suite": suite, "machine": machine(), "settings": settings, "rows": [row.to_dict() for row in results]}
    written = [folder / f"{suite}.json"]
    written[0].write_text(json.dumps(content, indent=2) + "\n")
    written.append(folder / f"{suite}.md")
    written[1].write_text(markdown(results))
    if not (rows or drawn):
        return written
    try:
        import matplotlib as mpl
    except ImportError:
        return written
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pictures: list[tuple[Path, float, Callable[[Any], None]]] = []
    if rows:
        pictures.append((folder / f"{suite}.png", 1.5 + 1.6 * len(rows), partial(_draw_rates, rows, suite=suite)))
    pictures += [(folder / f"{suite}-{result.name}.png", 6.0, result.draw) for result in drawn]
    for path, width, draw in pictures:
        figure, axes = plt.subplots(figsize=(width, 4), layout="constrained")
        draw(axes)
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def _draw_rates(rows: Sequence[Row], axes: Any, *, suite: str) -> None:
    variants = _variants(rows)
    for i, name in enumerate(variants):
        positions = [j + (i - (len(variants) - 1) / 2) * 0.8 / len(variants) for j in range(len(rows))]
        heights = [row.measured.median(name) if name in row.measured.rates else 0.0 for row in rows]
        axes.bar(positions, heights, 0.8 / len(variants), label=name)
    axes.set_xticks(range(len(rows)), [row.workload.replace(", ", "\n") for row in rows])
    axes.set_ylabel("examples per second")
    axes.set_title(f"suite {suite}, {_processor()}, {torch.get_num_threads()} thread")
    axes.legend()
