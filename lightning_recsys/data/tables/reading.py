"""Files into whole columns, each row knowing where it stood."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from lightning_recsys.data.tables.schema_parts import TableFormat

BLOCK_BYTES = 1 << 24  # also the longest row that can be read
_UNIT_SEPARATOR = b"\x1f"  # stands in for separators of several characters, which Arrow does not know
_QUOTED_CHARACTERS = 80
_HEADER_BYTES = 1 << 14


@dataclass(frozen=True)
class MisshapenRow:
    """A row with the wrong number of columns.

    Args:
        row: Its number in the file, from 1; empty lines are no rows.
        problem: What is wrong with it.
    """

    row: int
    problem: str


@dataclass(frozen=True)
class RawTable:
    """Columns as they stand in one file.

    Args:
        path: The file.
        columns: By name: strings, dictionary-encoded strings, or whatever types a Parquet file has.
        rows: Number of each row in the file, from 1; int64. Empty lines are no rows.
        first_line: Line of the file behind the header; ``None`` where there are no lines.
    """

    path: Path
    columns: Mapping[str, pa.ChunkedArray]
    rows: NDArray[np.int64]
    first_line: int | None

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, row: int) -> str:
        """File and row in words, as in ``ratings.csv, row 2 (line 3)``."""
        line = "" if self.first_line is None else f" (line {_line_of(self.path, row, self.first_line)})"
        return f"{self.path}, row {row}{line}"


def column_names(path: Path, table: TableFormat) -> list[str]:
    """Names of all columns of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, or repeats a name.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if is_parquet(path, table):
        return list(parquet.read_schema(path).names)
    names = list(table.column_names) if table.column_names else _split_line(_header(path, table)[1], path, table)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: the first line names column {', '.join(map(repr, twice))} more than once.")
    return names


def read_table(
    path: Path, table: TableFormat, *, columns: Sequence[str], plain: Sequence[str]
) -> tuple[RawTable, list[MisshapenRow]]:
    """Read some columns of a file.

    Args:
        path: The file.
        table: How it is written.
        columns: Columns to read; all are in the file.
        plain: Those of them that are mostly distinct, so that storing distinct values once is no use.

    Returns:
        The columns, without the rows that have the wrong number of columns, and those rows.

    Raises:
        ValueError: the file is empty, has no rows, or cannot be decoded.
    """
    if is_parquet(path, table):
        data = parquet.read_table(path, columns=list(columns))
        raw = RawTable(path, dict(zip(data.column_names, data.columns, strict=True)), np.arange(1, len(data) + 1), None)
        bad: list[MisshapenRow] = []
    else:
        raw, bad = _read_text(path, table, columns=columns, plain=plain)
    if not len(raw) and not bad:
        raise ValueError(f"{path} has no rows.")
    return raw, bad


def is_parquet(path: Path, table: TableFormat) -> bool:
    """Whether the file is a Parquet file, by the schema or else by its suffix."""
    return table.format == "parquet" if table.format else path.suffix in (".parquet", ".pq")


def separator_of(path: Path, table: TableFormat) -> str:
    """The separator of a text file: the schema's, else a tab or a comma by the file's suffix."""
    if table.separator is not None:
        return table.separator
    return "\t" if {".tsv", ".tab"} & set(path.suffixes) else ","


def _read_text(
    path: Path, table: TableFormat, *, columns: Sequence[str], plain: Sequence[str]
) -> tuple[RawTable, list[MisshapenRow]]:
    skip = lines_to_skip(path, table)
    source: object = path
    if len(separator_of(path, table)) > 1:
        with pa.input_stream(str(path), compression="detect") as stream:
            source = pa.BufferReader(_with_short_separator(stream.read(), path, table, encoding=table.encoding))
    data, bad = _parse(source, path, table, columns=columns, plain=plain, skip=skip, encoding=table.encoding)
    numbers = np.setdiff1d(np.arange(1, len(data) + len(bad) + 1), [row.row for row in bad], assume_unique=True)
    return RawTable(path, dict(zip(data.column_names, data.columns, strict=True)), numbers, skip + 1), bad


def parse_block(
    block: bytes, path: Path, table: TableFormat, *, columns: Sequence[str], plain: Sequence[str]
) -> tuple[Mapping[str, pa.ChunkedArray], list[MisshapenRow]]:
    """Read some columns of some whole rows of a file: in UTF-8, without its first lines. See :func:`read_table`."""
    source: object = pa.py_buffer(block)
    if len(separator_of(path, table)) > 1:
        source = pa.BufferReader(_with_short_separator(block, path, table, encoding="utf-8"))
    data, bad = _parse(source, path, table, columns=columns, plain=plain, skip=0, encoding="utf-8")
    return dict(zip(data.column_names, data.columns, strict=True)), bad


def lines_to_skip(path: Path, table: TableFormat) -> int:
    """Lines at the top of a text file that are no rows: comments, empty ones, the header.

    Raises:
        ValueError: the file is empty.
    """
    return _header(path, table)[0] + (0 if table.column_names else 1)


def _parse(
    source: object,
    path: Path,
    table: TableFormat,
    *,
    columns: Sequence[str],
    plain: Sequence[str],
    skip: int,
    encoding: str,
) -> tuple[pa.Table, list[MisshapenRow]]:
    separator = separator_of(path, table)
    quote: str | bool = (table.quote or False) if len(separator) == 1 else False
    text, coded = pa.string(), pa.dictionary(pa.int32(), pa.string())
    bad: list[MisshapenRow] = []

    def note(row: arrow_csv.InvalidRow) -> str:
        shown = row.text if len(row.text) <= _QUOTED_CHARACTERS else row.text[:_QUOTED_CHARACTERS] + "..."
        shown = shown.replace("\x1f", separator)
        problem = f"{row.expected_columns} columns expected, got {row.actual_columns}: {shown!r}"
        bad.append(MisshapenRow(row.number - skip, problem))
        return "skip"

    try:
        data = arrow_csv.read_csv(
            source,
            # One thread, because only then Arrow knows the number of an invalid row.
            read_options=arrow_csv.ReadOptions(
                use_threads=False,
                block_size=BLOCK_BYTES,
                column_names=column_names(path, table),
                skip_rows=skip,
                encoding=encoding,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=separator if len(separator) == 1 else "\x1f",
                quote_char=quote,
                newlines_in_values=bool(quote),
                invalid_row_handler=note,
            ),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=list(columns),
                column_types={name: text if name in plain else coded for name in columns},
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(explain(error, path, table)) from error
    return data, bad


def explain(error: Exception, path: Path, table: TableFormat) -> str:
    """Why a file cannot be read, in words that say what to do."""
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return f"{path} is not written in {table.encoding}. Name its encoding in the schema, such as encoding: latin-1."
    if "Could not skip" in str(error):
        return f"{path} has no rows."
    return f"{path} cannot be read: {error}"


def _line_of(path: Path, row: int, first_line: int) -> int:
    """The line of a row, counting the empty ones on the way, which Arrow leaves out without a word."""
    with io.BufferedReader(pa.input_stream(str(path), compression="detect")) as stream:
        numbered = islice(enumerate(stream, start=1), first_line - 1, None)
        filled = (number for number, line in numbered if line.strip(b"\r\n"))
        return next(islice(filled, row - 1, None), first_line + row - 1)


def _header(path: Path, table: TableFormat) -> tuple[int, str]:
    """How many comments and empty lines the file starts with, and the line after them."""
    encoding = "utf-8-sig" if table.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else table.encoding
    comment = table.comment
    with pa.input_stream(str(path), compression="detect") as stream:
        start, size = b"", _HEADER_BYTES
        while True:  # a look at more of the file, where what has been read are comments and empty lines only
            start += (more := stream.read(size))
            lines = start.decode(encoding, errors="replace").splitlines()
            num_comments = len(list(takewhile(lambda line: not line or (comment and line.startswith(comment)), lines)))
            if num_comments + 1 < len(lines) or not more:
                break
            size *= 2
    if num_comments == len(lines) or not start.strip():
        raise ValueError(f"{path} is empty.")
    return num_comments, lines[num_comments]


def _split_line(line: str, path: Path, table: TableFormat) -> list[str]:
    separator = separator_of(path, table)
    if len(separator) > 1:
        names = line.split(separator)
    else:
        quoting: dict[str, Any] = {"quotechar": table.quote} if table.quote else {"quoting": csv.QUOTE_NONE}
        (names,) = csv.reader([line], delimiter=separator, **quoting)
    return [name.strip() for name in names] if table.strip else names


def _with_short_separator(content: bytes, path: Path, table: TableFormat, *, encoding: str) -> bytes:
    if _UNIT_SEPARATOR in content:
        raise ValueError(
            f"{path} holds the control character 0x1f, so separators of several characters cannot be read."
        )
    return content.replace(separator_of(path, table).encode(encoding), _UNIT_SEPARATOR)
