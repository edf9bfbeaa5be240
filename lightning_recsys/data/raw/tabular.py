"""Anybody's own table, described by a schema: read a block at a time."""

# Shape suffixes: N rows, I dense features.

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lightning_recsys.data.files import find_files
from lightning_recsys.data.options import Split
from lightning_recsys.data.raw.columns import BadLine, Bags, OnBadRow, RawColumns, RawFormat, RowJudge, SkippedRows
from lightning_recsys.data.raw.derived import derive
from lightning_recsys.data.raw.side_tables import SideTables, ambiguous
from lightning_recsys.data.raw.table_file import TableFile
from lightning_recsys.data.raw.text import Block, Position
from lightning_recsys.data.tables.features import Input
from lightning_recsys.data.tables.reading import Header, header_of, partitions_of, read_header
from lightning_recsys.data.tables.schema import Schema, feature_name
from lightning_recsys.data.tables.schema_parts import Label, TableFormat, require
from lightning_recsys.data.tables.schema_parts import Split as SchemaSplit

_GLANCE = 1 << 16  # bytes of a file that are read to see whether it is what the schema says


class TabularFormat(RawFormat):
    """Rows as a schema describes them.

    Side tables are held in memory. Values are dictionary-encoded, and null where missing. Times are numbers, or seconds
    since 1970.

    Args:
        schema: Path of a schema file, or its content; see ``docs/schema.md``.
        root: Where the schema's relative paths start; the schema file's own folder if absent, else the current one.
        on_bad_row: What happens to bad rows of side tables: ``error`` or ``skip``.
        labelled: Whether rows have labels and times. Without them they need neither column; all labels are 0 then.

    Raises:
        FileNotFoundError: there is no such schema file, or a side table is not there.
        ValueError: the schema has a mistake, which the message names, or two features the same name.
    """

    name = "tabular"
    time_unit: str | None

    def __init__(
        self,
        *,
        schema: str | Path | Mapping[str, Any] | Schema,
        root: str | Path | None = None,
        on_bad_row: OnBadRow = "error",
        labelled: bool = True,
    ) -> None:
        folder = Path()
        if isinstance(schema, str | Path):
            folder = Path(schema).parent
            schema = Schema.from_yaml(schema)
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        self.root = (folder if root is None else Path(root)).expanduser().absolute()
        self._labelled = labelled
        # What the columns mean; where there are no labels, their column is one like any other.
        meaning = replace(self.schema, label=Label(column="\0"), time=None, split=SchemaSplit())
        self._meaning = self.schema if labelled else meaning
        # The columns that rows are made of, each with the key of the schema that names it; and those that refer to
        # side tables.
        unused = {"ignore"} if labelled else {"ignore", "label"}
        self._uses = [(column, use) for column, use in self._meaning.uses() if use not in unused]
        self._keys = [join.column for join in self.schema.joins]
        self._sides = SideTables(self.schema, root=self.root, on_bad_row=on_bad_row, uses=self._uses)
        self._tables: dict[Path, TableFormat] = {}  # how each file that was found is written
        self._files: dict[Path, TableFile] = {}  # those that are read
        self._matched: dict[Path, list[bool]] = {}  # whether any of its rows refers to a row of each side table
        self.dense = tuple(feature_name(name) for name in self.schema.numeric)
        self.categories = tuple(feature_name(name) for name in self.schema.categorical)
        self.bags = {feature_name(name): False for name in self.schema.multi_valued}
        self.time_unit = None if self.schema.time is None or not labelled else "numbers, or seconds since 1970"
        names = ["label", *self.dense, *self.categories, *self.bags]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two columns would be called {twice[0]!r}: that of the labels is always called 'label', whatever "
                "schema.label names, and dots in names become underscores. Rename the column in the file, or under "
                "schema.column_names where the file has no header line."
            )

    def options(self) -> dict[str, object]:
        """See the base class."""
        return {"name": self.name, "schema": yaml.safe_load(self.schema.to_yaml())}

    def files(self, split: Split) -> list[Path]:
        """The files that the schema names for a split, none where it names none for evaluation.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: it names none for training, or for prediction.
        """
        patterns = self.schema.files.get(split, ())
        if not patterns and split in ("train", "predict"):
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
        """The format of a file of rows, however its path is spelt; that of the training rows, if no split names it.

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

    def side_files(self) -> Sequence[Path]:
        """See the base class."""
        return self._sides.paths

    def side_rows(self) -> Mapping[Path, SkippedRows]:
        """See the base class."""
        return {side.path: side.skipped for side in self._sides.tables}

    def num_comments(self, path: Path) -> int:
        """See the base class."""
        return self._known_file(path).num_comments

    def check_read(self) -> None:
        """Raise ``ValueError`` if no row of a file refers to any row of some side table."""
        for path, matched in self._matched.items():
            self._sides.check(matched, path)

    def check_file(self, path: Path, *, on_bad_row: OnBadRow = "error") -> None:
        """Open a file and read its first rows.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: a column of the schema is missing, the file has no rows, or it cannot be read; or a row is bad,
                and such rows are errors.
        """
        file = self._known_file(path)
        if (block := next(file.blocks(block_bytes=_GLANCE), None)) is None:
            raise ValueError(f"{path} has a header and no rows.")
        _, rows_N, bad = file.rows(block)
        SkippedRows().add(path, len(rows_N), bad, on_bad_row=on_bad_row)

    def good_rows(self, path: Path, column: str | None) -> Iterator[pa.Array]:
        """A column of the good rows of a file as strings, a block at a time, or their numbers from 1.

        Args:
            path: One of the format's files of rows.
            column: The column; ``None`` for the numbers, int64.

        Raises:
            ValueError: the file has no such column.
        """
        file = self._file(path, carried=[] if column is None else [column])
        for block in file.blocks():
            columns, rows_N, _ = file.rows(block)
            yield pa.array(rows_N) if column is None else columns[Input(column, "text")]

    def blocks(self, path: Path, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """See the base class; :meth:`TableFile.blocks` says more."""
        return self._known_file(path).blocks(block_bytes=block_bytes, position=position)

    def parse_table(self, path: Path, table: pa.Table) -> RawColumns:
        """The rows of a table in memory, as if they were those of a file.

        Args:
            path: The name by which errors call it.
            table: Rows in any number of chunks, whose columns may differ from those of a table of this name before.

        Raises:
            ValueError: a column is missing or has a type that does not fit, or has more than 2 GiB, which Arrow keeps
                in several pieces.
        """
        self._files[path] = self._file(path, header=header_of(path, table.schema))
        batches = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
        if len(batches) > 1:
            raise ValueError(f"{path}: a column of {len(table)} rows has more than 2 GiB. Give smaller tables.")
        (batch,) = batches
        return self.parse_block(path, Block(batch, Position(), Position(len(batch), 1, len(batch) + 1), 0))

    def parse_block(self, path: Path, block: Block) -> RawColumns:
        """See the base class.

        Raises:
            ValueError: a column is missing or has a type that does not fit, or the text is in another encoding.
        """
        columns, rows_N, bad = self._known_file(path).rows(block)
        joined, matched = self._sides.join(columns)
        if len(rows_N):
            before = self._matched.get(path, [False] * len(matched))
            self._matched[path] = [a or b for a, b in zip(before, matched, strict=True)]
        rows = self._columns(joined, rows_N, bad)
        return self._complete(rows) if self.schema.joins else rows

    def _columns(self, columns: Mapping[Input, Any], rows_N: NDArray[np.int64], bad: Sequence[BadLine]) -> RawColumns:
        schema = self.schema
        made: Mapping[str, Any] = derive(columns, schema)
        dense = [made[name] for name in schema.numeric]
        labels = columns[Input(schema.label.column, "label")] if self._labelled else np.zeros(len(rows_N))
        return RawColumns(
            rows_N,
            labels.astype(np.float32),
            np.stack(dense) if dense else np.empty((0, len(rows_N))),
            {feature_name(name): _binary(made[name]) for name in schema.categorical},
            {
                feature_name(name): Bags(_binary(made[name].values), made[name].lengths_N)
                for name in schema.multi_valued
            },
            None if self.time_unit is None else columns[Input(schema.time or "", "time")],
            bad,
        )

    def _complete(self, rows: RawColumns) -> RawColumns:
        """The rows that have a label and a time: where those stand in a side table, it may have no row for some."""
        judge = RowJudge(rows.lines_N, rows.bad, lambda row: f"row {row}")
        for column, values_N in ((self.schema.label.column, rows.labels_N), (self.schema.time, rows.time_N)):
            if column is not None and values_N is not None:
                problem = "must have a value, and its side table has no row for this one"
                judge.flag(np.isnan(values_N), column=column, problem=problem, values=pa.array(values_N))
        return replace(rows.keep(judge.good), bad=judge.bad)

    def _known_file(self, path: Path) -> TableFile:
        if path not in self._files:
            self._files[path] = self._file(path)
        return self._files[path]

    def _file(self, path: Path, *, carried: Sequence[str] = (), header: Header | None = None) -> TableFile:
        """A file of rows, of which the columns are read that the schema speaks of and no side table has alone.

        Args:
            path: Path of the file, or of one in an archive.
            carried: Further columns to read.
            header: Its columns, of a table in memory.

        Raises:
            ValueError: a column of the schema is in none of them, or the file has not what is to be carried.
        """
        table = self.format_of(path)
        header = header or read_header(path, table)
        names = header.columns
        for column in self._keys:
            if column not in names:
                raise ValueError(self._unknown_column("joins", column, [path], header))
        sides = self._sides.tables
        for column, use in self._uses:
            if both := [side.path for side in sides if column in side.columns and column in names]:
                raise ValueError(ambiguous(use, column, path, both[0]))
            if not any(column in known for known in (names, *(side.columns for side in sides))):
                raise ValueError(self._unknown_column(use, column, [path, *(side.path for side in sides)], header))
        for column in carried:
            if column not in names:
                raise ValueError(f"{path} has no column {column!r}. It has {', '.join(names)}.")
        asked = dict.fromkeys([*(column for column, _ in self._uses), *self._keys, *carried])
        own = [name for name in asked if name in names]
        return TableFile(path, table, header, self._meaning, columns=own, keys=self._keys, texts=carried)

    def _unknown_column(self, use: str, column: str, paths: list[Path], found: Header) -> str:
        names = found.columns
        near = difflib.get_close_matches(column, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        places = " or ".join(map(str, paths))
        if around := next((path for path in self._tables if column in partitions_of(path)), None):
            return (
                f"schema.{use} names column {column!r}, which the folder around {around} says, and no folder around "
                f"{paths[0]}. Move the file into a folder {column}=..., or name the files that are in such folders."
            )
        header = " If its first line is no header, list the names of its columns under schema.column_names."
        has_names = bool(self.schema.table.column_names or found.places)  # a typed file has them in itself
        return (
            f"schema.{use} names column {column!r}, which is not in {places}.{hint} {paths[0].name} has "
            f"{', '.join(names)}.{'' if has_names else header}"
        )


def _binary(column: pa.DictionaryArray) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.binary()))
