"""A file of a table, CSV, TSV or Parquet: read a block at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.files import DAMAGED, ByteSource, InputFile, open_parquet, stored_file
from lightning_recsys.data.raw.cleaning import Column, clean
from lightning_recsys.data.raw.columns import BadLine, RowJudge
from lightning_recsys.data.raw.kernels import find_records
from lightning_recsys.data.raw.text import Block, Position
from lightning_recsys.data.tables.features import Input
from lightning_recsys.data.tables.reading import (
    BLOCK_BYTES,
    Header,
    explain,
    is_parquet,
    leaf,
    parse_block,
    separator_of,
)
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import TableFormat

_LONGEST_ROW = BLOCK_BYTES
_ROW_BYTES = 64  # of a Parquet file, for want of knowing
_NUMERIC = {"number", "time", "moment", "vector"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TableFile:
    """A file of a table.

    Text is in any encoding, with rows of 16 MiB at most.

    Args:
        path: The file of the table.
        table: The format in which the file is written.
        header: What was learned from the beginning of the file.
        schema: Says what the columns mean.
        columns: Columns to read; all are in the file.
        keys: Those of them that are also kept as categories; see :func:`~lightning_recsys.data.raw.cleaning.clean`.
        texts: Those of them that are also kept as they stand in the file.
    """

    def __init__(
        self,
        path: Path,
        table: TableFormat,
        header: Header,
        schema: Schema,
        *,
        columns: Sequence[str],
        keys: Sequence[str],
        texts: Sequence[str] = (),
    ) -> None:
        self.path = path
        self._table = table
        self._header = header
        self._schema = schema
        self._columns = columns
        self._keys = keys
        self._texts = texts
        # Columns of numbers alone are mostly distinct, so that storing distinct values once is no use.
        uses = {name: {source.parse for source, _ in schema.inputs() if source.column == name} for name in columns}
        self._plain = [name for name, parses in uses.items() if parses and parses <= _NUMERIC]

    @property
    def num_comments(self) -> int:
        """Number of lines above the header and the rows that are left out."""
        return len(self._header.left_out)

    # --- from the file to blocks -------------------------------------------------------------------------------------

    def blocks(self, *, block_bytes: int = BLOCK_BYTES, position: Position = Position()) -> Iterator[Block]:  # noqa: B008
        """The file in blocks: the same ones from the position of any of them on.

        Raises:
            ValueError: the file is empty, damaged, not in the encoding that the schema says, or has a row without end.
        """
        if is_parquet(self.path, self._table):
            return self._column_blocks(num_rows=max(1, block_bytes // _ROW_BYTES), position=position)
        return self._text_blocks(block_bytes=block_bytes, position=position)

    def _text_blocks(self, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """A block is what is whole in ``block_bytes`` from its start on, or in twice as much where nothing is."""
        path, table = self.path, self._table
        separator = separator_of(path, table)
        quote = table.quote if len(separator) == 1 else None
        with ByteSource(path, encoding=table.encoding) as stream:
            try:
                rest = b""
                if position == Position():
                    rest, position = _skip_lines(stream, self._header.num_lines)
                else:
                    stream.skip(position.offset)
                size = block_bytes
                while True:
                    while len(rest) <= size and (more := stream.read(size + 1 - len(rest))):
                        rest += more
                    if not rest:
                        return
                    text = np.frombuffer(rest, dtype=np.uint8, count=min(size, len(rest)))
                    whole = len(rest) <= size
                    lines, end, num_lines = find_records(text, delimiter=separator, quote=quote, whole=whole)
                    if not end:
                        if whole or size >= _LONGEST_ROW:
                            raise ValueError(_no_end(path, position, whole=whole))
                        size = min(2 * size, _LONGEST_ROW)
                        continue
                    following = Position(position.offset + end, position.line + num_lines, position.row + len(lines))
                    if len(lines):
                        yield Block(rest[:end], position, following, stream.consumed, lines)
                    rest, position, size = rest[end:], following, block_bytes
            except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                raise ValueError(explain(error, path, table)) from error
            except OSError as error:
                raise ValueError(f"{path}, after row {position.row - 1}: the file is damaged ({error}).") from error

    def _column_blocks(self, *, num_rows: int, position: Position) -> Iterator[Block]:
        """``num_rows`` each, fewer at the end of a row group."""
        size, start = InputFile.of(self.path).bytes, 0
        columns = [".".join(self._header.places[name]) for name in self._columns]
        whole = stored_file(self.path) == self.path  # else one column after the other, as they lie in the archive
        with open_parquet(self.path) as file:
            try:
                for group in range(file.num_row_groups):
                    stop = start + file.metadata.row_group(group).num_rows
                    if stop > position.offset:
                        batches = file.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=whole)
                        for batch in batches:
                            first, start = start, start + len(batch)
                            if first >= position.offset:
                                consumed = size * start // file.metadata.num_rows
                                yield Block(batch, _at_row(first), _at_row(start), consumed)
                    start = stop
            except (OSError, pa.ArrowInvalid, *DAMAGED) as error:
                raise ValueError(f"{self.path}, after row {start}: the file is damaged ({error}).") from error

    # --- from blocks to rows -----------------------------------------------------------------------------------------

    def rows(self, block: Block) -> tuple[dict[Input, Column], NDArray[np.int64], list[BadLine]]:
        """The good rows of a block, the number of each in the file, and the bad ones.

        Args:
            block: A block of rows of this file.

        Raises:
            ValueError: a column has a type that does not fit, or the text is in another encoding.
        """
        misshapen: dict[int, str] = {}
        values: Mapping[str, pa.ChunkedArray]
        if isinstance(block.data, bytes):
            values, misshapen = parse_block(
                block.data, self.path, self._table, names=self._header.names, columns=self._columns, plain=self._plain
            )
        else:
            places = self._header.places
            values = {name: pa.chunked_array([leaf(block.data, places[name])]) for name in self._columns}
        num_rows = block.next_position.row - block.position.row
        found = len(misshapen) + len(next(iter(values.values())))
        if found != num_rows:
            raise ValueError(
                f"{self.path}, rows {block.position.row} to {block.next_position.row - 1}: the quotes make {found} "
                f"rows or {num_rows}. Are they ordinary letters? Then write quote: null in the schema."
            )
        start, lines = block.position, block.lines

        def place(row: int) -> str:
            return f"row {start.row + row}{'' if lines is None else f' (line {start.line + lines[row]})'}"

        bad = [BadLine(row - 1, None, problem, place(row - 1)) for row, problem in misshapen.items()]
        rows_N = np.setdiff1d(np.arange(num_rows), [line.line for line in bad], assume_unique=True)
        judge = RowJudge(rows_N, bad, place)
        columns = clean(self.path, values, self._schema, self._table, judge, keys=self._keys, texts=self._texts)
        return columns, rows_N[judge.good] + start.row, judge.bad


def _at_row(row: int) -> Position:
    return Position(row, 1, row + 1)


def _no_end(path: Path, position: Position, *, whole: bool) -> str:
    what = "a quote that is never closed" if whole else f"no end within {_LONGEST_ROW >> 20} MiB"
    return (
        f"{path}: row {position.row} (line {position.line}) has {what}. Is there a quote too many? With quote: null in"
        " the schema, quotes are ordinary letters."
    )


def _skip_lines(stream: ByteSource, count: int) -> tuple[bytes, Position]:
    """Leave out the first lines, and a byte order mark; what was read behind them, and where that is."""
    start = b""
    while more := stream.read(BLOCK_BYTES // 16):
        start += more
        if len(ends := list(islice(re.finditer(rb"\r\n|\n|\r", start), count + 1))) > count:
            break
    if len(ends) < count:  # a header alone, without the end of its line
        return b"", Position(len(start), count + 1)
    end = ends[count - 1].end() if count else len(_BYTE_ORDER_MARK) * start.startswith(_BYTE_ORDER_MARK)
    return start[end:], Position(end, count + 1)
