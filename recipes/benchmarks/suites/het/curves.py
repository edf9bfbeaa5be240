"""Tables of numbers that are drawn as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.suites.het.cache import Columns
from rich.table import Table


@dataclass(frozen=True)
class Curves:
    """A table, and a picture of its columns over the first one.

    Args:
        columns: The table. A drawn cell begins with a number, perhaps with ``± spread`` behind it.
        drawn: Names of the columns that become curves.
        label: What these are.
        name: Of the picture: ``<suite>-<name>.png``.
    """

    columns: Columns
    drawn: Sequence[str]
    label: str
    name: str

    def table(self) -> Table:
        return self.columns.table()

    def to_dict(self) -> dict[str, Any]:
        return self.columns.to_dict()

    def draw(self, axes: Any) -> None:
        """Into matplotlib's axes."""
        header, rows = self.columns.header, self.columns.rows
        for name in self.drawn:
            cells = [row[header.index(name)].partition("±") for row in rows]
            numbers, spreads = ([float(part or 0) for part in parts] for parts in list(zip(*cells, strict=True))[::2])
            axes.errorbar([row[0] for row in rows], numbers, yerr=spreads, marker="o", capsize=3, label=name)
        axes.set_xlabel(header[0])
        axes.set_ylabel(self.label)
        axes.set_title(self.columns.title)
        axes.legend()
