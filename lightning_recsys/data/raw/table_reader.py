"""The files of a schema: their paths, the columns to read from each, and side tables joined to the rows."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_recsys.data.files import find_files
from lightning_recsys.data.raw.cleaning import Column, concatenate, take
from lightning_recsys.data.raw.columns import SkippedRows
from lightning_recsys.data.raw.table_file import TableFile
from lightning_recsys.data.tables.features import Input
from lightning_recsys.data.tables.reading import Header, read_header
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import Join, TableFormat, require

OnBadRow = Literal["error", "skip"]

_NUMERIC = {"number", "time", "moment", "vector"}


class TableReader:
    """Finds the files of a schema, and joins its side tables.

    Args:
        schema: The schema, which names files and columns.
        root: The folder in which relative paths start.
        on_bad_row: What happens to bad rows of side tables: ``error`` or ``skip``.
        labelled: Whether rows have labels and times; without them neither column is read.
    """

    def __init__(self, schema: Schema, *, root: Path, on_bad_row: OnBadRow, labelled: bool = True) -> None:
        self.schema = schema
        self.root = root
        self.on_bad_row: OnBadRow = on_bad_row
        self._tables: dict[Path, TableFormat] = {}  # how each file that was found is written
        self._headers: dict[Path, Header] = {}
        self._unused = {"ignore"} if labelled else {"ignore", "label", "time"}

    def paths(self, split: Literal["train", "validation", "test", "predict"]) -> list[Path]:
        """The files of a split.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: the schema names none.
        """
        patterns = self.schema.files.get(split)
        if not patterns:
            raise ValueError(f"schema.files has no {split}, so there are no rows for it. Name their file there.")
        found: dict[Path, TableFormat] = {}
        for pattern in patterns:
            for path in find_files(pattern, name=f"schema.files.{split}", root=self.root):
                require(path not in found, f"schema.files.{split} names {path} twice.")
                if split == "predict" and pattern not in self.schema.formats:
                    found[path] = self.format_of(path)
                else:
                    found[path] = self.schema.formats.get(pattern, self.schema.table)
        self._tables |= found
        return list(found)

    def format_of(self, path: Path) -> TableFormat:
        """How a file of rows is written, however its path is spelt; as those of training, if no split names it.

        Raises:
            ValueError: no split names it, and the files of training are written in several ways.
        """
        if path not in self._tables:
            named = self._named.get(path.resolve())
            self._tables[path] = self.schema.usual_format(str(path)) if named is None else named
        return self._tables[path]

    @cached_property
    def _named(self) -> dict[Path, TableFormat]:
        """How the files are written that the schema names for training and evaluation, as far as they are there."""
        schema, found = self.schema, dict[Path, TableFormat]()
        patterns = [pattern for split, all_of in schema.files.items() if split != "predict" for pattern in all_of]
        for pattern in patterns if schema.formats else []:
            with suppress(FileNotFoundError, ValueError):  # told where they are read
                table = schema.formats.get(pattern, schema.table)
                found |= {path.resolve(): table for path in find_files(pattern, root=self.root)}
        return found

    @cached_property
    def side_paths(self) -> list[Path]:
        """The files of the side tables."""
        paths = []
        for i, join in enumerate(self.schema.joins):
            path, *more = find_files(join.file, name=f"schema.joins[{i}].file", root=self.root)
            require(
                not more, f"schema.joins[{i}].file must name one file, got {join.file}, which names {path} and others."
            )
            paths.append(path)
        return paths

    @property
    def skipped(self) -> dict[Path, SkippedRows]:
        """The bad rows of the side tables, by file."""
        return {side.path: side.skipped for side in self._side_tables if side.skipped.bad}

    def file(self, path: Path, *, carried: Sequence[str] = ()) -> TableFile:
        """A file of rows, of which the columns are read that the schema speaks of and no side table has alone.

        Args:
            path: The file.
            carried: Further columns to read.

        Raises:
            ValueError: a column of the schema is in none of them, or the file has not what is to be carried.
        """
        table = self.format_of(path)
        header = self._header(path, table)
        names = header.names
        used = [column for column, _ in self._uses()]
        for column in self.keys:
            if column not in names:
                raise ValueError(self._unknown_column("joins", column, [path], names))
        sides = self._side_tables
        for column, use in self._uses():
            if both := [side.path for side in sides if column in side.columns and column in names]:
                raise ValueError(self._ambiguous(use, column, path, both[0]))
            if not any(column in known for known in (names, *(side.columns for side in sides))):
                raise ValueError(self._unknown_column(use, column, [path, *(side.path for side in sides)], names))
        for column in carried:
            if column not in names:
                raise ValueError(f"{path} has no column {column!r}. It has {', '.join(names)}.")
        own = [name for name in dict.fromkeys([*used, *self.keys, *carried]) if name in names]
        return TableFile(path, table, header, columns=own, plain=self._plain(own))

    @property
    def keys(self) -> list[str]:
        """Columns that refer to side tables."""
        return [join.column for join in self.schema.joins]

    def join(self, columns: Mapping[Input, Column]) -> tuple[dict[Input, Column], list[bool]]:
        """The rows of a file with the columns of the side tables.

        Args:
            columns: Those of the file, with each of :attr:`keys` as such.

        Returns:
            The columns, and for each side table whether any row refers to a row of it.
        """
        joined = {source: column for source, column in columns.items() if source.parse != "key"}
        matched = []
        for side in self._side_tables:
            found, matches = side.look_up(columns[Input(side.join.column, "key")])
            joined |= found
            matched.append(matches)
        return joined, matched

    def check_joins(self, matched: Sequence[bool], path: Path) -> None:
        """Raise ``ValueError`` if no row of a file refers to a row of some side table."""
        for side, matches in zip(self._side_tables, matched, strict=True):
            if not matches:
                raise ValueError(
                    f"no value of column {side.join.column!r} of {path} is in column {side.join.key!r} of {side.path}, "
                    f"which has {', '.join(map(repr, side.key.dictionary[:3].to_pylist()))} and so on. Check "
                    "schema.joins."
                )

    @cached_property
    def _side_tables(self) -> list[_SideTable]:
        sides = []
        found: dict[str, Path] = {}  # the columns that are read from side tables
        for i, (join, path) in enumerate(zip(self.schema.joins, self.side_paths, strict=True)):
            names = self._header(path, join.table).names
            if join.key not in names:
                raise ValueError(
                    f"schema.joins[{i}].key names column {join.key!r}, which is not in {path}. "
                    f"It has {', '.join(names)}."
                )
            columns = []
            for column, use in self._uses():
                if column == join.key or column not in names or column in columns:
                    continue
                if column in found:
                    raise ValueError(self._ambiguous(use, column, found[column], path))
                columns.append(column)
            found |= dict.fromkeys(columns, path)
            side = self._read_side(join, path, columns)
            indices = side.key.indices
            counts = np.bincount(indices.drop_null().to_numpy(), minlength=1)
            if indices.null_count or (counts > 1).any():
                twice = "a missing value" if indices.null_count else side.key.dictionary[int(counts.argmax())]
                raise ValueError(f"{path}: each value of the key {join.key!r} must stand once, but {twice} does not.")
            sides.append(side)
        return sides

    def _read_side(self, join: Join, path: Path, columns: list[str]) -> _SideTable:
        header = self._header(path, join.table)
        file = TableFile(path, join.table, header, columns=[join.key, *columns], plain=self._plain(columns))
        parts, skipped = [], SkippedRows()
        for block in file.blocks():
            part, rows_N, bad = file.rows(block, self.schema, keys=[join.key])
            skipped.add(path, len(rows_N), bad, on_bad_row=self.on_bad_row)
            parts.append(part)
        skipped.check(path)
        key = Input(join.key, "key")
        wanted = [source for source in parts[0] if source == key or source.column in columns]
        whole = {source: concatenate([part[source] for part in parts]) for source in wanted}
        return _SideTable(join, path, columns, whole, skipped)

    def _uses(self) -> list[tuple[str, str]]:
        """The columns that rows are made of, each with the key of the schema that names it."""
        return [(column, use) for column, use in self.schema.uses() if use not in self._unused]

    def _plain(self, columns: Sequence[str]) -> list[str]:
        """Those columns that hold numbers, mostly distinct."""
        read = {name: {source.parse for source, _ in self.schema.inputs() if source.column == name} for name in columns}
        return [name for name, parses in read.items() if parses and parses <= _NUMERIC]

    def _header(self, path: Path, table: TableFormat) -> Header:
        if path not in self._headers:
            self._headers[path] = read_header(path, table)
        return self._headers[path]

    def _ambiguous(self, use: str, column: str, one: Path, other: Path) -> str:
        return (
            f"schema.{use} names column {column!r}, which is in {one} and in {other}: it could be either. Give it "
            "another name in one of them."
        )

    def _unknown_column(self, use: str, column: str, paths: list[Path], names: Sequence[str]) -> str:
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
    whole: Mapping[Input, Column]
    skipped: SkippedRows

    @property
    def key(self) -> pa.DictionaryArray:
        """The column that rows refer to."""
        return self.whole[Input(self.join.key, "key")]

    def look_up(self, column: pa.DictionaryArray) -> tuple[dict[Input, Column], bool]:
        """This table's row for each row that refers to it, one where everything is missing if there is none.

        Also whether there is any.
        """
        key = self.key
        row_of_key = np.full(len(key.dictionary), -1)
        row_of_key[key.indices.to_numpy()] = np.arange(len(key))
        place = pc.fill_null(pc.index_in(column.dictionary, value_set=key.dictionary), -1).to_numpy()
        row_of_value = np.append(np.where(place >= 0, row_of_key[place], -1), -1)  # the last one is for a missing value
        rows = row_of_value[column.indices.fill_null(len(column.dictionary)).to_numpy()]
        found = {source: take(whole, rows) for source, whole in self.whole.items() if source.column in self.columns}
        return found, bool((row_of_value >= 0).any())
