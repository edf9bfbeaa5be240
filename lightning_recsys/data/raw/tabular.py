"""Anybody's own table in CSV, TSV or Parquet, described by a schema: read a block at a time."""

# Shape suffixes: N rows, I dense features.

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lightning_recsys.data.module import Split
from lightning_recsys.data.raw.columns import BadLine, Bags, RawColumns, RawFormat
from lightning_recsys.data.raw.kernels import find_records
from lightning_recsys.data.raw.text import Block, Position
from lightning_recsys.data.tables import columns
from lightning_recsys.data.tables.bad_rows import OnBadRow
from lightning_recsys.data.tables.columns import Categories
from lightning_recsys.data.tables.encoding import feature_name
from lightning_recsys.data.tables.examples import Examples, clean
from lightning_recsys.data.tables.reading import (
    BLOCK_BYTES,
    MisshapenRow,
    RawTable,
    explain,
    is_parquet,
    lines_to_skip,
    parse_block,
    separator_of,
)
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.table_reader import TableReader

_LONGEST_ROW = BLOCK_BYTES
_ROW_BYTES = 64  # of a Parquet file, for want of knowing
_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}  # those that pyarrow detects
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a table.

    Args:
        data: Text in UTF-8 without header, or columns.
        lines: Line of each row of text, from 0; empty for columns.
        position: Where they start.
        next_position: Where the next block starts.
        consumed: Bytes of the file that were read up to here.
    """

    data: bytes | pa.RecordBatch
    lines: NDArray[np.int64]
    position: Position
    next_position: Position
    consumed: int


class TabularFormat(RawFormat):
    """Rows as a schema describes them: the same that :class:`~lightning_recsys.data.TabularDataModule` holds in memory.

    Text is compressed (``.gz``, ``.bz2``, ``.zst`` and so on) or plain, in any encoding, with rows of 16 MiB at most.
    Side tables are held in memory. Values are dictionary-encoded, and null where missing. Times are numbers, or seconds
    since 1970.

    Args:
        schema: Path of a schema file, or its content; see ``docs/data.md``.
        root: Where the schema's relative paths start; the schema file's own folder if absent, else the current one.
        on_bad_row: What happens to bad rows of side tables: ``error`` or ``skip``.

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
    ) -> None:
        folder = Path()
        if isinstance(schema, str | Path):
            folder = Path(schema).parent
            schema = Schema.from_yaml(schema)
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        root = (folder if root is None else Path(root)).expanduser().absolute()
        self._reader = TableReader(self.schema, root=root, on_bad_row=on_bad_row)
        self._own_columns: dict[Path, list[str]] = {}
        self._matched: dict[Path, list[bool]] = {}
        self.dense = tuple(feature_name(name) for name in self.schema.dense)
        self.categories = tuple(feature_name(name) for name in self.schema.categorical)
        self.bags = {feature_name(name): False for name in self.schema.multi_valued}
        self.time_unit = None if self.schema.time is None else "numbers, or seconds since 1970"
        names = ["label", *self.dense, *self.categories, *self.bags]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"prepared rows cannot have two columns {twice[0]!r} (the label is called 'label', and dots in names "
                "become underscores). Rename that column of the schema."
            )

    def options(self) -> dict[str, object]:
        """See the base class."""
        return {"name": self.name, "schema": yaml.safe_load(self.schema.to_yaml())}

    def files(self, split: Split) -> list[Path]:
        """The files that the schema names for a split, none where it names none for evaluation.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: it names none for training.
        """
        return self._reader.paths(split) if split == "train" or split in self.schema.files else []

    def side_files(self) -> Sequence[Path]:
        """See the base class."""
        return self._reader.side_paths

    def check_read(self) -> None:
        """Raise ``ValueError`` if no row of a file refers to any row of some side table."""
        for path, matched in self._matched.items():
            self._reader.check_joins(matched, path)

    def parse(self, block: bytes) -> RawColumns:
        """Not for this format: what a block means depends on its file."""
        raise NotImplementedError

    # --- from files to blocks ----------------------------------------------------------------------------------------

    def blocks(self, path: Path, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """See the base class.

        Raises:
            ValueError: a file is empty, damaged, not in the encoding that the schema says, or has a row without end.
        """
        if is_parquet(path, self.schema.table):
            return self._column_blocks(path, num_rows=max(1, block_bytes // _ROW_BYTES), position=position)
        return self._text_blocks(path, block_bytes=block_bytes, position=position)

    def _text_blocks(self, path: Path, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """A block is what is whole in ``block_bytes`` from its start on, or in twice as much where nothing is."""
        table = self.schema.table
        separator = separator_of(path, table)
        quote = table.quote if len(separator) == 1 else None
        with path.open("rb") as raw:
            try:
                stream = _text_stream(path, raw, encoding=table.encoding)
                rest = b""
                if position == Position():
                    rest, position = _skip_lines(stream, lines_to_skip(path, table))
                else:
                    _skip(stream, position.offset)
                size = block_bytes
                while True:
                    while len(rest) <= size and (more := stream.read(size + 1 - len(rest))):
                        rest += more
                    if not rest:
                        return
                    text = np.frombuffer(rest, dtype=np.uint8, count=min(size, len(rest)))
                    lines, end, num_lines = find_records(
                        text, delimiter=separator, quote=quote, whole=len(rest) <= size
                    )
                    if not end:
                        if size >= _LONGEST_ROW:
                            raise ValueError(_no_end(path, position))
                        size = min(2 * size, _LONGEST_ROW)
                        continue
                    following = Position(position.offset + end, position.line + num_lines, position.row + len(lines))
                    if len(lines):
                        yield TableBlock(rest[:end], lines, position, following, raw.tell())
                    rest, position, size = rest[end:], following, block_bytes
            except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                raise ValueError(explain(error, path, table)) from error
            except OSError as error:
                raise ValueError(f"{path}, after row {position.row - 1}: the file is damaged ({error}).") from error

    def _column_blocks(self, path: Path, *, num_rows: int, position: Position) -> Iterator[Block]:
        """``num_rows`` each, fewer at the end of a row group."""
        size, start = path.stat().st_size, 0
        with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                if stop > position.offset:
                    for batch in file.iter_batches(num_rows, row_groups=[group], columns=self._own(path)):
                        first, start = start, start + len(batch)
                        if first >= position.offset:
                            consumed = size * start // file.metadata.num_rows
                            yield TableBlock(batch, np.empty(0, np.int64), _at_row(first), _at_row(start), consumed)
                start = stop

    # --- from blocks to rows -----------------------------------------------------------------------------------------

    def parse_block(self, path: Path, block: Block) -> RawColumns:
        """See the base class.

        Raises:
            ValueError: a column is missing or has a type that does not fit, or the text is in another encoding.
        """
        assert isinstance(block, TableBlock)
        reader, table, own = self._reader, self.schema.table, self._own(path)
        misshapen: list[MisshapenRow] = []
        if isinstance(block.data, bytes):
            values, misshapen = parse_block(block.data, path, table, columns=own, plain=reader.plain_columns(own))
        else:
            values = {name: pa.chunked_array([block.data[name]]) for name in own}
        num_rows = block.next_position.row - block.position.row
        found = len(misshapen) + len(next(iter(values.values())))
        if found != num_rows:
            raise ValueError(
                f"{path}, rows {block.position.row} to {block.next_position.row - 1}: the quotes make {found} rows or "
                f"{num_rows}. Are they ordinary letters? Then write quote: null in the schema."
            )
        judge = _BlockRows(block, num_rows, misshapen)
        raw = RawTable(path, values, judge.rows_N + block.position.row, None)
        examples, matched = reader.join(clean(raw, self.schema, table, judge, keys=reader.keys))
        if any(judge.good):
            before = self._matched.get(path, [False] * len(matched))
            self._matched[path] = [a or b for a, b in zip(before, matched, strict=True)]
        return self._columns(examples, judge.rows_N[judge.good] + block.position.row, judge.bad)

    def _columns(self, examples: Examples, rows_N: NDArray[np.int64], bad: Sequence[BadLine]) -> RawColumns:
        schema = self.schema
        dense = [examples.numbers(name) for name in schema.dense]
        return RawColumns(
            rows_N,
            examples.numbers(schema.label.column).astype(np.float32),
            np.stack(dense) if dense else np.empty((0, examples.num_rows)),
            {feature_name(name): _dictionary(examples.categories(name)) for name in schema.categorical},
            {feature_name(name): _bags(examples.bags(name)) for name in schema.multi_valued},
            None if schema.time is None else examples.numbers(schema.time),
            bad,
        )

    def _own(self, path: Path) -> list[str]:
        if path not in self._own_columns:
            self._own_columns[path] = self._reader.own_columns(path)
        return self._own_columns[path]


class _BlockRows:
    """The judge of a block's rows: notes the bad ones.

    Args:
        block: The block.
        num_rows: How many it has, those in ``misshapen`` too.
        misshapen: Rows that could not be split into columns.
    """

    def __init__(self, block: TableBlock, num_rows: int, misshapen: Sequence[MisshapenRow]) -> None:
        self._block = block
        self.rows_N = np.setdiff1d(np.arange(num_rows), [row.row - 1 for row in misshapen], assume_unique=True)
        self.good = np.ones(len(self.rows_N), dtype=np.bool_)
        self._bad = [self._line(row.row - 1, None, row.problem) for row in misshapen]

    @property
    def bad(self) -> list[BadLine]:
        """All bad rows, in the order of the file."""
        return sorted(self._bad, key=lambda line: line.line)

    def flag(self, bad: NDArray[np.bool_], *, column: str, problem: str, values: pa.ChunkedArray) -> None:
        for place in np.flatnonzero(bad & self.good).tolist():
            message = f"{problem}, got {values[place].as_py()!r}"
            self._bad.append(self._line(int(self.rows_N[place]), column, message))
        self.good &= ~bad

    def report(self) -> None:
        """What is wrong goes with the rows."""

    def _line(self, row: int, column: str | None, message: str) -> BadLine:
        start, lines = self._block.position, self._block.lines
        line = f" (line {start.line + lines[row]})" if len(lines) else ""
        return BadLine(row, column, message, place=f"row {start.row + row}{line}")


def _at_row(row: int) -> Position:
    return Position(row, 1, row + 1)


def _no_end(path: Path, position: Position) -> str:
    return (
        f"{path}: row {position.row} (line {position.line}) has no end within {_LONGEST_ROW >> 20} MiB. Is there a "
        "quote too many? With quote: null in the schema, quotes are ordinary letters."
    )


def _text_stream(path: Path, raw: IO[bytes], *, encoding: str) -> Any:
    """A file's text in UTF-8, uncompressed."""
    stream: Any = raw
    if path.suffix in _COMPRESSION:
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), _COMPRESSION[path.suffix])
    if codecs.lookup(encoding).name != "utf-8":
        stream = pa.transcoding_input_stream(pa.PythonFile(stream, mode="r"), encoding, "utf-8")
    return stream


def _skip(stream: Any, offset: int) -> None:
    if isinstance(stream, io.BufferedReader):
        stream.seek(offset)
        return
    while offset and (skipped := len(stream.read(min(offset, BLOCK_BYTES)))):
        offset -= skipped


def _skip_lines(stream: Any, count: int) -> tuple[bytes, Position]:
    """Leave out the first lines, and a byte order mark; what was read behind them, and where that is."""
    start = b""
    while more := stream.read(BLOCK_BYTES // 16):
        start += more
        if len(ends := list(islice(re.finditer(rb"\r\n|\n|\r", start), count + 1))) > count:
            break
    end = ends[count - 1].end() if count else len(_BYTE_ORDER_MARK) * start.startswith(_BYTE_ORDER_MARK)
    return start[end:], Position(end, count + 1)


def _dictionary(column: Categories) -> pa.DictionaryArray:
    codes = pa.array(column.codes, pa.int32(), mask=column.codes < 0)
    return pa.DictionaryArray.from_arrays(codes, column.values.cast(pa.binary()))


def _bags(column: columns.Bags) -> Bags:
    return Bags(_dictionary(column.items), np.diff(column.offsets))
