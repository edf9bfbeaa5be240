"""A file of a table, in any format that a schema may name: read a block at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.files import DAMAGED, ByteSource, InputFile
from lightning_recsys.data.guesses.sniffing import is_number
from lightning_recsys.data.raw.cleaning import Column, clean
from lightning_recsys.data.raw.columns import BadLine, RowJudge
from lightning_recsys.data.raw.kernels import find_records
from lightning_recsys.data.raw.text import Block, Position, text_blocks
from lightning_recsys.data.tables.columns import as_categories
from lightning_recsys.data.tables.features import Input
from lightning_recsys.data.tables.json_lines import parse_lines
from lightning_recsys.data.tables.reading import (
    BLOCK_BYTES,
    Header,
    explain,
    kind_of,
    parse_block,
    separator_of,
)
from lightning_recsys.data.tables.record_files import leaf, open_records
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import TableFormat
from lightning_recsys.data.tables.words import as_words

_LONGEST_ROW = BLOCK_BYTES
_ROW_BYTES = 64  # of typed columns, for want of knowing
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
        columns: Columns to read; all are in the file, or in the names of the folders around it.
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
        # Those that stand in the file (some, to count its rows, if none is asked for), and what the folders say.
        self._own = [name for name in columns if name in header.names] or list(header.names[:1])
        self._partitions = {name: header.partitions[name] for name in columns if name in header.partitions}
        self._keys = keys
        self._texts = texts
        # Columns of numbers alone are mostly distinct, so that storing distinct values once is no use.
        uses = {name: {source.parse for source, _ in schema.inputs() if source.column == name} for name in columns}
        self._plain = [name for name, parses in uses.items() if parses and parses <= _NUMERIC]
        of_lists = {source.column for source, _ in schema.inputs() if source.takes_lists}
        self._lists = {name for name, parses in uses.items() if not parses or name in of_lists}

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
        match kind_of(self.path, self._table):
            case "text":
                return self._text_blocks(block_bytes=block_bytes, position=position)
            case "json":
                return self._json_blocks(block_bytes=block_bytes, position=position)
        return self._column_blocks(num_rows=max(1, block_bytes // _ROW_BYTES), position=position)

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

    def _json_blocks(self, *, block_bytes: int, position: Position) -> Iterator[Block]:
        row, encoding = position.row, self._table.encoding
        try:
            for block in text_blocks(self.path, block_bytes=block_bytes, position=position, encoding=encoding):
                assert isinstance(block.data, bytes)
                data = block.data if block.position.offset else block.data.removeprefix(_BYTE_ORDER_MARK)
                filled = [number for number, line in enumerate(data.split(b"\n")) if line.strip()]
                start, following = block.position._replace(row=row), block.next_position._replace(row=row + len(filled))
                if filled:
                    yield Block(data, start, following, block.consumed, np.array(filled))
                row += len(filled)
        except UnicodeDecodeError as error:
            raise ValueError(explain(error, self.path, self._table)) from error

    def _column_blocks(self, *, num_rows: int, position: Position) -> Iterator[Block]:
        """``num_rows`` each, fewer at the end of a row group or batch."""
        size, stop = InputFile.of(self.path).bytes, position.offset
        places = [self._header.places[name] for name in self._own]
        with open_records(self.path, kind_of(self.path, self._table)) as file:
            try:
                for first, batch, share in file.batches(num_rows, places=places, first=position.offset):
                    stop = first + len(batch)
                    yield Block(batch, _at_row(first), _at_row(stop), round(size * share))
            except (OSError, pa.ArrowInvalid, *DAMAGED) as error:
                raise ValueError(f"{self.path}, after row {stop}: the file is damaged ({error}).") from error

    # --- from blocks to rows -----------------------------------------------------------------------------------------

    def rows(self, block: Block) -> tuple[dict[Input, Column], NDArray[np.int64], list[BadLine]]:
        """The good rows of a block, the number of each in the file, and the bad ones.

        Args:
            block: A block of rows of this file.

        Raises:
            ValueError: a column has a type that does not fit, or the text is in another encoding.
        """
        values, misshapen = self._columns_of(block)
        num_rows = block.next_position.row - block.position.row
        found = len(misshapen) + len(next(iter(values.values())))
        if found != num_rows:
            raise ValueError(
                f"{self.path}, rows {block.position.row} to {block.next_position.row - 1}: the quotes make {found} "
                f"rows or {num_rows}. Are they ordinary letters? Then write quote: null in the schema."
            )
        values = self._with_partitions(values, num_rows - len(misshapen))
        start, lines = block.position, block.lines

        def place(row: int) -> str:
            return f"row {start.row + row}{'' if lines is None else f' (line {start.line + lines[row]})'}"

        bad = [BadLine(row - 1, name, problem, place(row - 1)) for row, (name, problem) in misshapen.items()]
        rows_N = np.setdiff1d(np.arange(num_rows), [line.line for line in bad], assume_unique=True)
        judge = RowJudge(rows_N, bad, place)
        columns = clean(self.path, values, self._schema, self._table, judge, keys=self._keys, texts=self._texts)
        return columns, rows_N[judge.good] + start.row, judge.bad

    def _with_partitions(self, values: Mapping[str, pa.ChunkedArray], num_rows: int) -> dict[str, pa.ChunkedArray]:
        """The columns of some rows, with those of the folders around the file."""
        found = dict(values)
        for name, value in self._partitions.items():
            if name not in found:
                words = pa.repeat(pa.scalar(value, pa.string()), num_rows).dictionary_encode()
                found[name] = pa.chunked_array([words])
                continue
            in_file = as_categories(as_words(found[name]), strip=self._table.strip, missing=self._table.missing)
            here = [*in_file.dictionary.to_pylist(), *([None] if in_file.null_count else [])]
            if other := [word for word in here if not _is_same(word, value)]:
                raise ValueError(
                    f"{self.path}: column {name!r} has the value {other[0]!r}, and the folder around the file says "
                    f"{name}={value}. Give one of them another name, or leave the column out of the file."
                )
        return found

    def _columns_of(self, block: Block) -> tuple[Mapping[str, pa.ChunkedArray], Mapping[int, tuple[str | None, str]]]:
        """The columns of a block, and its rows that are none: what is wrong with each, by its number from 1."""
        places = {name: self._header.places.get(name, ()) for name in self._own}
        if not isinstance(block.data, bytes):
            return {name: pa.chunked_array([leaf(block.data, place)]) for name, place in places.items()}, {}
        if kind_of(self.path, self._table) == "json":
            lines = block.data.split(b"\n")
            assert block.lines is not None
            rows, decimal = [lines[number] for number in block.lines], self._table.decimal
            return parse_lines(rows, places, lists=self._lists, decimal=decimal)
        values, misshapen = parse_block(
            block.data, self.path, self._table, names=self._header.names, columns=self._own, plain=self._plain
        )
        return values, {row: (None, problem) for row, problem in misshapen.items()}


def _is_same(word: str | None, other: str | None) -> bool:
    """Whether words are the same, or the same number, as ``01`` in the name of a folder and ``1`` in a file are."""
    if word is None or other is None or word == other:
        return word == other
    return is_number(word) and is_number(other) and float(word) == float(other)


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
