"""The files of a schema as examples: paths, columns that may stand in side tables, joins."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.compute as pc

from lightning_recsys.data.tables.bad_rows import BadRows, OnBadRow
from lightning_recsys.data.tables.columns import MISSING, Categories
from lightning_recsys.data.tables.examples import Examples, clean
from lightning_recsys.data.tables.reading import column_names, read_table
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import Join, TableFormat


class TableReader:
    """Reads the splits of a schema.

    Args:
        schema: Files and columns.
        root: Where relative paths start.
        on_bad_row: ``error`` or ``skip``.

    ``skipped`` counts the rows that were skipped, by file.
    """

    def __init__(self, schema: Schema, *, root: Path, on_bad_row: OnBadRow) -> None:
        self.schema = schema
        self.root = root
        self.on_bad_row: OnBadRow = on_bad_row
        self.skipped: dict[str, int] = {}

    def read(self, split: Literal["train", "validation", "test"]) -> Examples:
        """All rows of a split's files.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: a file, column or row is not as the schema says.
        """
        return Examples.concatenate([self._read_file(path) for path in self.paths(split)])

    def paths(self, split: Literal["train", "validation", "test"]) -> list[Path]:
        """The files of a split.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: the schema names none.
        """
        patterns = self.schema.files.get(split)
        if not patterns:
            raise ValueError(f"schema.files has no {split}, so there are no rows for it. Name their file there.")
        return [path for pattern in patterns for path in self._paths(pattern, f"schema.files.{split}")]

    @property
    def side_paths(self) -> list[Path]:
        """The files of the side tables."""
        return [side.path for side in self._side_tables]

    def own_columns(self, path: Path) -> list[str]:
        """The columns to read from a file of rows; the others stand in side tables.

        Raises:
            ValueError: a column of the schema is in none of them.
        """
        names = column_names(path, self.schema.table)
        used = [column for column, use in self.schema.uses() if use != "ignore"]
        for column in self.keys:
            if column not in names:
                raise ValueError(self._unknown_column("joins", column, [path], names))
        sides = self._side_tables
        for column, use in self.schema.uses():
            if use != "ignore" and not any(column in known for known in (names, *(side.columns for side in sides))):
                raise ValueError(self._unknown_column(use, column, [path, *(side.path for side in sides)], names))
        return [name for name in dict.fromkeys([*used, *self.keys]) if name in names]

    @property
    def keys(self) -> list[str]:
        """Columns that refer to side tables."""
        return [join.column for join in self.schema.joins]

    def plain_columns(self, columns: Sequence[str]) -> list[str]:
        """Those columns that hold numbers, mostly distinct."""
        return [name for name in columns if name in self.schema.dense or name == self.schema.time]

    def join(self, examples: Examples) -> tuple[Examples, list[bool]]:
        """The rows of a file with the columns of the side tables.

        Args:
            examples: The columns of the file, with ``key:<name>`` for each of :attr:`keys`.

        Returns:
            The rows, and for each side table whether any row refers to a row of it.
        """
        columns = {name: column for name, column in examples.columns.items() if not name.startswith("key:")}
        own, matched = set(columns), []
        for side in self._side_tables:
            joined, matches = side.look_up(examples.categories(f"key:{side.join.column}"))
            columns |= {name: joined.columns[name] for name in side.columns if name not in own}
            matched.append(matches)
        return Examples(columns, examples.num_rows), matched

    def check_joins(self, matched: Sequence[bool], path: Path) -> None:
        """Raise ``ValueError`` if no row of a file refers to a row of some side table."""
        for side, matches in zip(self._side_tables, matched, strict=True):
            if not matches:
                raise ValueError(
                    f"no value of column {side.join.column!r} of {path} is in column {side.join.key!r} of {side.path}, "
                    f"which has {', '.join(map(repr, side.key.values[:3].to_pylist()))} and so on. Check schema.joins."
                )

    def _read_file(self, path: Path) -> Examples:
        examples = self._clean(path, self.schema.table, self.own_columns(path), self.keys)
        examples, matched = self.join(examples)
        self.check_joins(matched, path)
        return examples

    def _clean(self, path: Path, table: TableFormat, columns: list[str], keys: list[str]) -> Examples:
        raw, misshapen = read_table(path, table, columns=columns, plain=self.plain_columns(columns))
        bad_rows = BadRows(raw, misshapen, on_bad_row=self.on_bad_row)
        examples = clean(raw, self.schema, table, bad_rows, keys=keys)
        if bad_rows.num_bad:
            self.skipped[str(path)] = bad_rows.num_bad
        return examples

    @cached_property
    def _side_tables(self) -> list[_SideTable]:
        sides = []
        found: list[str] = []
        for i, join in enumerate(self.schema.joins):
            (path,) = self._paths(join.file, f"schema.joins[{i}].file")
            names = column_names(path, join.table)
            if join.key not in names:
                raise ValueError(
                    f"schema.joins[{i}].key names column {join.key!r}, which is not in {path}. "
                    f"It has {', '.join(names)}."
                )
            used = [column for column, use in self.schema.uses() if use != "ignore" and column != join.key]
            columns = [name for name in used if name in names and name not in found]
            found += columns
            examples = self._clean(path, join.table, [join.key, *columns], [join.key])
            key = examples.categories(f"key:{join.key}")
            if (key.counts() > 1).any() or (key.codes < 0).any():
                twice = next((str(key.values[int(i)]) for i in np.flatnonzero(key.counts() > 1)), "a missing value")
                raise ValueError(f"{path}: each value of the key {join.key!r} must stand once, but {twice} does not.")
            sides.append(_SideTable(join, path, columns, examples))
        return sides

    def _paths(self, pattern: str, where: str) -> list[Path]:
        path = self.root / Path(pattern).expanduser()
        if path.is_file():
            return [path]
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if set("*?[") & set(pattern) else []
        if not found:
            raise FileNotFoundError(
                f"{where}: there is no file {path}. Relative paths start from data.root, which is {self.root}."
            )
        return found

    def _unknown_column(self, use: str, column: str, paths: list[Path], names: list[str]) -> str:
        near = difflib.get_close_matches(column, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        places = " or ".join(map(str, paths))
        header = " If its first line is no header, list the names of its columns under schema.column_names."
        return (
            f"schema.{use} names column {column!r}, which is not in {places}.{hint} {paths[0].name} has "
            f"{', '.join(names)}.{'' if self.schema.table.column_names else header}"
        )


@dataclass(frozen=True)
class _SideTable:
    """A side table, its ``columns`` that the schema speaks of, and its rows."""

    join: Join
    path: Path
    columns: list[str]
    examples: Examples

    @property
    def key(self) -> Categories:
        """The column that rows refer to."""
        return self.examples.categories(f"key:{self.join.key}")

    def look_up(self, column: Categories) -> tuple[Examples, bool]:
        """This table's row for each row that refers to it, one where everything is missing if there is none.

        Also whether there is any.
        """
        key = self.key
        row_of_key = np.full(len(key.values), MISSING)
        row_of_key[key.codes] = np.arange(len(key.codes))
        place = pc.fill_null(pc.index_in(column.values, value_set=key.values), MISSING).to_numpy()
        row_of_value = np.where(place >= 0, row_of_key[place], MISSING)
        return self.examples.take(np.append(row_of_value, MISSING)[column.codes]), bool((row_of_value >= 0).any())
