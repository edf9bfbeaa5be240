"""Anybody's own table in CSV, TSV or Parquet, described by a schema: read a block at a time."""

# Shape suffixes: N rows, I dense features.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lightning_recsys.data.module import Split
from lightning_recsys.data.raw.columns import BadLine, Bags, RawColumns, RawFormat, SkippedRows
from lightning_recsys.data.raw.derived import derive
from lightning_recsys.data.raw.table_file import TableFile
from lightning_recsys.data.raw.table_reader import OnBadRow, TableReader
from lightning_recsys.data.raw.text import Block, Position
from lightning_recsys.data.tables.features import Input
from lightning_recsys.data.tables.schema import Schema, feature_name
from lightning_recsys.data.tables.schema_parts import Label, TableFormat
from lightning_recsys.data.tables.schema_parts import Split as SchemaSplit

_GLANCE = 1 << 16  # bytes of a file that are read to see whether it is what the schema says


class TabularFormat(RawFormat):
    """Rows as a schema describes them.

    Side tables are held in memory. Values are dictionary-encoded, and null where missing. Times are numbers, or seconds
    since 1970.

    Args:
        schema: Path of a schema file, or its content; see ``docs/data.md``.
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
        root = (folder if root is None else Path(root)).expanduser().absolute()
        self._reader = TableReader(self.schema, root=root, on_bad_row=on_bad_row, labelled=labelled)
        self._labelled = labelled
        # What the columns mean; where there are no labels, their column is one like any other.
        meaning = replace(self.schema, label=Label(column="\0"), time=None, split=SchemaSplit())
        self._meaning = self.schema if labelled else meaning
        self._files: dict[Path, TableFile] = {}
        self._matched: dict[Path, list[bool]] = {}
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
        needed = split in ("train", "predict")
        return self._reader.paths(split) if needed or split in self.schema.files else []

    def format_of(self, path: Path) -> TableFormat:
        """How a file of rows is written; see :meth:`TableReader.format_of`."""
        return self._reader.format_of(path)

    def side_files(self) -> Sequence[Path]:
        """See the base class."""
        return self._reader.side_paths

    def skipped(self) -> Mapping[Path, SkippedRows]:
        """See the base class."""
        return self._reader.skipped

    def check_read(self) -> None:
        """Raise ``ValueError`` if no row of a file refers to any row of some side table."""
        for path, matched in self._matched.items():
            self._reader.check_joins(matched, path)

    def check_file(self, path: Path, *, on_bad_row: OnBadRow = "error") -> None:
        """Open a file and read its first rows.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: a column of the schema is missing, the file has no rows, or it cannot be read; or a row is bad,
                and such rows are errors.
        """
        file = self._reader.file(path)
        if (block := next(file.blocks(block_bytes=_GLANCE), None)) is None:
            raise ValueError(f"{path} has a header and no rows.")
        _, rows_N, bad = file.rows(block, self._meaning, keys=self._reader.keys)
        SkippedRows().add(path, len(rows_N), bad, on_bad_row=on_bad_row)

    def good_rows(self, path: Path, column: str | None) -> Iterator[pa.Array]:
        """A column of the good rows of a file as strings, a block at a time, or their numbers from 1.

        Args:
            path: The file.
            column: The column; ``None`` for the numbers, int64.

        Raises:
            ValueError: the file has no such column.
        """
        carried = [] if column is None else [column]
        file = self._reader.file(path, carried=carried)
        for block in file.blocks():
            columns, rows_N, _ = file.rows(block, self._meaning, keys=[*self._reader.keys, *carried])
            yield pa.array(rows_N) if column is None else columns[Input(column, "key")].cast(pa.string())  # type: ignore[union-attr]

    def blocks(self, path: Path, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """See the base class; :meth:`TableFile.blocks` says more."""
        return self._file(path).blocks(block_bytes=block_bytes, position=position)

    def parse_block(self, path: Path, block: Block) -> RawColumns:
        """See the base class.

        Raises:
            ValueError: a column is missing or has a type that does not fit, or the text is in another encoding.
        """
        reader = self._reader
        columns, rows_N, bad = self._file(path).rows(block, self._meaning, keys=reader.keys)
        joined, matched = reader.join(columns)
        if len(rows_N):
            before = self._matched.get(path, [False] * len(matched))
            self._matched[path] = [a or b for a, b in zip(before, matched, strict=True)]
        return self._columns(joined, rows_N, bad)

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

    def _file(self, path: Path) -> TableFile:
        if path not in self._files:
            self._files[path] = self._reader.file(path)
        return self._files[path]


def _binary(column: pa.DictionaryArray) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.binary()))
