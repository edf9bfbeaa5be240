"""Side tables: read once, held in memory, and joined to the rows that refer to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_recsys.data.files import find_files
from lightning_recsys.data.raw.cleaning import Column, concatenate, take
from lightning_recsys.data.raw.columns import OnBadRow, SkippedRows
from lightning_recsys.data.raw.table_file import TableFile
from lightning_recsys.data.tables.features import Input
from lightning_recsys.data.tables.reading import Header, read_header
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import Join, require


@dataclass(frozen=True)
class SideTable:
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


class SideTables:
    """The side tables of a schema.

    Args:
        schema: The schema, which names them and what rows refer to.
        root: The folder in which relative paths start.
        on_bad_row: What happens to bad rows: ``error`` or ``skip``.
        uses: The columns that rows are made of, each with the key of the schema that names it.
    """

    def __init__(self, schema: Schema, *, root: Path, on_bad_row: OnBadRow, uses: Sequence[tuple[str, str]]) -> None:
        self._schema = schema
        self._root = root
        self._on_bad_row: OnBadRow = on_bad_row
        self._uses = uses

    @cached_property
    def paths(self) -> list[Path]:
        """Their files."""
        paths = []
        for i, join in enumerate(self._schema.joins):
            path, *more = find_files(join.file, name=f"schema.joins[{i}].file", root=self._root)
            require(
                not more, f"schema.joins[{i}].file must name one file, got {join.file}, which names {path} and others."
            )
            paths.append(path)
        return paths

    @cached_property
    def tables(self) -> list[SideTable]:
        """The tables, read when they are first asked for.

        Raises:
            ValueError: a column is in two of them, or one has no such key, or not each value of it once.
        """
        sides = []
        found: dict[str, Path] = {}  # the columns that are read from side tables
        for i, (join, path) in enumerate(zip(self._schema.joins, self.paths, strict=True)):
            header = read_header(path, join.table)
            names = header.columns
            if join.key not in names:
                raise ValueError(
                    f"schema.joins[{i}].key names column {join.key!r}, which is not in {path}. "
                    f"It has {', '.join(names)}."
                )
            columns = []
            for column, use in self._uses:
                if column == join.key or column not in names or column in columns:
                    continue
                if column in found:
                    raise ValueError(ambiguous(use, column, found[column], path))
                columns.append(column)
            found |= dict.fromkeys(columns, path)
            side = self._read(join, path, header, columns)
            indices = side.key.indices
            counts = np.bincount(indices.drop_null().to_numpy(), minlength=1)
            if indices.null_count or (counts > 1).any():
                twice = "a missing value" if indices.null_count else side.key.dictionary[int(counts.argmax())]
                raise ValueError(f"{path}: each value of the key {join.key!r} must stand once, but {twice} does not.")
            sides.append(side)
        return sides

    def join(self, columns: Mapping[Input, Column]) -> tuple[dict[Input, Column], list[bool]]:
        """The rows of a file with the columns of the side tables.

        Args:
            columns: Those of the file, with each that refers to a side table as a key.

        Returns:
            The columns, and for each side table whether any row refers to a row of it.
        """
        joined = {source: column for source, column in columns.items() if source.parse != "key"}
        matched = []
        for side in self.tables:
            found, matches = side.look_up(columns[Input(side.join.column, "key")])
            joined |= found
            matched.append(matches)
        return joined, matched

    def check(self, matched: Sequence[bool], path: Path) -> None:
        """Raise ``ValueError`` if no row of a file refers to a row of some side table."""
        for side, matches in zip(self.tables, matched, strict=True):
            if not matches:
                raise ValueError(
                    f"no value of column {side.join.column!r} of {path} is in column {side.join.key!r} of {side.path}, "
                    f"which has {', '.join(map(repr, side.key.dictionary[:3].to_pylist()))} and so on. Check "
                    "schema.joins."
                )

    def _read(self, join: Join, path: Path, header: Header, columns: list[str]) -> SideTable:
        file = TableFile(path, join.table, header, self._schema, columns=[join.key, *columns], keys=[join.key])
        parts, skipped = [], SkippedRows(comments=file.num_comments)
        for block in file.blocks():
            part, rows_N, bad = file.rows(block)
            skipped.add(path, len(rows_N), bad, on_bad_row=self._on_bad_row)
            parts.append(part)
        skipped.check(path)
        key = Input(join.key, "key")
        wanted = [source for source in parts[0] if source == key or source.column in columns]
        whole = {source: concatenate([part[source] for part in parts]) for source in wanted}
        return SideTable(join, path, columns, whole, skipped)


def ambiguous(use: str, column: str, one: Path, other: Path) -> str:
    """The complaint about a column that is in two tables."""
    return (
        f"schema.{use} names column {column!r}, which is in {one} and in {other}: it could be either. Give it "
        "another name in one of them."
    )
