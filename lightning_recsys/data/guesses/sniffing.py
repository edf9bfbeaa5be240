"""How an unknown file is written, from its first rows and some of the others."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from lightning_recsys.data.files import COMPRESSION, ByteSource, stored_bytes, stored_file
from lightning_recsys.data.tables.columns import NUMBER
from lightning_recsys.data.tables.json_lines import NotAnObjectError, parse_line, parse_lines
from lightning_recsys.data.tables.reading import (
    kind_of,
    lines_of,
    read_header,
    refuse_binary,
    refuse_json,
    separator_of,
)
from lightning_recsys.data.tables.record_files import head_of, leaf, open_records
from lightning_recsys.data.tables.schema_parts import COMMENT_MARKS, Kind, TableFormat

_SEPARATORS = ("\t", "::", ",", ";", "|")
_LAST = (" ",)  # as R writes it; where none of the others fits, because it stands between words, too
_SAMPLE_BYTES = 32_000_000
_SAMPLE_ROWS = 200_000
_STRETCHES, _STRETCH_BYTES = 1024, 16_384  # at most, and at least, over the rest of a large file
_STRETCH_LINES = 100  # where a row may take several lines
_SEPARATOR_ROWS = 50_000  # that tell the separator
_STEADY = 0.9  # share of lines that must have the same number of columns
_TELLING = 20  # rows with as many columns as each other are no chance, however many lines each has


T = TypeVar("T")


@dataclass(frozen=True)
class Sniffed:
    """The result of a look at a sample of a file.

    Args:
        table: How it is written.
        columns: Its columns in the sample, as strings; ``None`` for a null of Parquet or JSON.
        num_rows: Number of its rows; by its size, where the sample is not all of a text file.
        kinds: The types of the columns of a file that has such.
    """

    table: TableFormat
    columns: dict[str, list[str | None]]
    num_rows: int
    kinds: Mapping[str, pa.DataType] = field(default_factory=dict)


def sniff(path: Path, num_rows: int = _SAMPLE_ROWS) -> Sniffed:
    """Look at a sample of a file: the first rows, and a third as many from all over the rest, which may be sorted.

    The rest of a compressed file is not read, nor that of a file with typed columns other than Parquet.

    Args:
        path: The file, of any format; its suffix or its first bytes say which.
        num_rows: How many rows of a text file to look at, at most; fewer where the bytes that are read hold fewer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, or is no table.
    """
    kind = kind_of(path, TableFormat())
    if kind not in ("text", "json"):
        return _sample_records(path, kind)
    text, encoding, share = _decode(path)
    numbered = [(number, line) for number, line in enumerate(lines_of(text)) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} is empty.")
    if kind == "json" or _is_object(numbered[0][1]):
        table = TableFormat(format=None if kind == "json" else "json", encoding=encoding)
        return _sample_json(path, table, [line for _, line in numbered], num_rows, share)
    stretch = _STRETCH_LINES if any(line.count('"') % 2 for _, line in numbered[:num_rows]) else 1
    left_out, numbered = max(len(numbered) - num_rows, 0), _spread(numbered, num_rows, stretch)
    places, lines = zip(*numbered, strict=True)
    refuse_json(lines[0], path)
    separator, num_columns = _separator(path, list(lines[:_SEPARATOR_ROWS]))
    rows, quoted = _split(list(lines), separator)
    top = _first_of_table(rows, lines, num_columns)
    header: list[str] | None = None  # where it is not one that the file's own would be
    first = places[_line_of(top, list(lines), separator, quoted=quoted)]
    above, rows = [value.strip() for value in rows[top - 1]] if top else [], _whole(rows[top:], num_columns)
    if _is_short_header(above, num_columns) and not _is_header(rows):
        ends_in_a_separator = not any(row[-1] for row in rows)
        header = [*above, ""] if ends_in_a_separator else ["", *above]  # the latter as R writes it
    named = header is None and _is_header(rows)
    if named and len(set(rows[0])) < len(rows[0]):  # the line is passed over, and its names are told apart
        named, first, header, rows = False, first + 1, rows[0], rows[1:]
    names = rows[0] if named else told_apart(header) if header else [f"column_{i + 1}" for i in range(num_columns)]
    opens = any(line.startswith('"') for line in lines)
    table = TableFormat(
        separator=None if separator == separator_of(path, TableFormat()) else separator,
        column_names=None if named else tuple(names),
        encoding=encoding,
        quote='"' if quoted and (separator in (",", ";") or f'{separator}"' in text or opens) else None,
        **_above(numbered, first),
    )
    if not rows[named:]:
        raise ValueError(f"{path} has a header and no rows.")
    columns = dict(zip(names, map(list, zip(*rows[named:], strict=True)), strict=True))
    return Sniffed(table, columns, round((len(rows) - named + left_out) / share))


def _spread(lines: Sequence[T], count: int, stretch: int) -> list[T]:
    """At most so many lines: the first ones, and stretches of so many lines from all over the rest.

    >>> _spread(range(100), 16, 1)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 41, 70, 99]
    """
    if len(lines) <= count:
        return list(lines)
    num_stretches = (count - head_of(count)) // stretch
    head = count - num_stretches * stretch
    starts = np.linspace(head, len(lines) - stretch, num_stretches).astype(int)
    return [*lines[:head], *chain.from_iterable(lines[start : start + stretch] for start in starts)]


def _whole(rows: list[list[str]], num_columns: int) -> list[list[str]]:
    return [list(map(str.strip, row)) for row in rows if len(row) == num_columns]


def _first_of_table(rows: list[list[str]], lines: Sequence[str], num_columns: int) -> int:
    """The number of the first row that is the header or a row of the table.

    What stands above has another number of columns, or starts with the mark of a comment and has a header and a row
    below it. Without them below it, a line such as ``#user,item`` is a header itself, or a row.
    """
    mark = _mark(lines[0])
    marked = 0 if mark is None else sum(1 for _ in takewhile(lambda row: row[:1] and row[0].startswith(mark), rows))
    below = _whole(rows[marked:], num_columns)
    top = marked if marked and len(below) > 1 and _is_header(below) else 0
    return top + next(place for place, row in enumerate(rows[top:]) if len(row) == num_columns)


def _mark(line: str) -> str | None:
    """The mark of a comment that a line starts with."""
    return next((mark for mark in COMMENT_MARKS if line.startswith(mark)), None)


def _is_short_header(row: list[str], num_columns: int) -> bool:
    """Whether a row is a header that lacks one name."""
    if len(row) != num_columns - 1 or _mark(row[0]) is not None or any(map(is_number, row)):
        return False
    return "" not in row and len(set(row)) > len(row) / 2


def _line_of(row: int, lines: list[str], separator: str, *, quoted: bool) -> int:
    """The line at which a row starts: a quoted value above it may hold line ends."""
    if not quoted:
        return row
    reader = csv.reader(lines, delimiter=separator)
    for _ in range(row):
        next(reader)
    return reader.line_num


def _above(numbered: Sequence[tuple[int, str]], first: int) -> dict[str, Any]:
    """How the schema leaves out what stands above a line: by its mark, or by the number of lines."""
    above = [line for number, line in numbered if number < first]
    kept = next((line for number, line in numbered if number >= first), "")
    mark = _mark(above[0]) if above else None
    if mark is not None and all(line.startswith(mark) for line in above) and not kept.startswith(mark):
        return {"comment": mark}
    return {"skip_lines": first} if above else {}


def is_number(word: str) -> bool:
    """Whether a word is a number, as the reader would take it."""
    return re.fullmatch(NUMBER, word) is not None


def _decode(path: Path) -> tuple[str, str, float]:
    """Bytes of a file as text, in whole lines; in which encoding, and which share of the file they are.

    They are the first ones, or the first and stretches of the rest, where the file can be read from anywhere.
    """
    with ByteSource(path) as stream:
        try:
            start: bytes = stream.read(_SAMPLE_BYTES)
            share = stream.consumed / max(stored_bytes(path), 1) if len(start) == _SAMPLE_BYTES else 1.0
        except OSError as error:
            raise ValueError(f"{path}: the file is damaged ({error}).") from error
    is_wide = start[:2] in (b"\xff\xfe", b"\xfe\xff")
    if len(start) == _SAMPLE_BYTES:
        head = start.rfind(b"\n", 0, head_of(len(start))) + 1
        if head and not is_wide and stored_file(path) == path and path.suffix.lower() not in COMPRESSION:
            start = start[:head] + _stretches(path, first=head - 1, num_bytes=len(start) - head)
            share = len(start) / path.stat().st_size
        start = start[: start.rfind(b"\n")]  # leave out the line that was cut off
    if is_wide:
        return start[: len(start) // 2 * 2].decode("utf-16"), "utf-16", share
    refuse_binary(start, path)
    try:
        return start.decode("utf-8-sig"), "utf-8", share
    except UnicodeDecodeError:
        return start.decode("latin-1"), "latin-1", share


def _stretches(path: Path, *, first: int, num_bytes: int) -> bytes:
    """Whole lines from all over a file, from a byte of it on."""
    count = max(1, min(_STRETCHES, num_bytes // _STRETCH_BYTES))
    found, size = [], num_bytes // count
    with path.open("rb") as file:
        for start in np.linspace(first, path.stat().st_size - size, count).astype(int):
            file.seek(start)
            found.append(file.read(size).partition(b"\n")[2].rpartition(b"\n")[0])
    return b"\n".join(found) + b"\n"


def _separator(path: Path, lines: list[str]) -> tuple[str, int]:
    """The separator that cuts most lines into the same number of columns, and that number.

    Lists of one length within a column are cut evenly as well, and often into more columns: of several separators, one
    that cuts the first line so, too, goes before the others.
    """
    found: list[tuple[bool, int, str]] = []
    for separator in (*_SEPARATORS, *_LAST):
        if found and separator in _LAST:
            break
        rows, _ = _split(lines, separator)
        num_columns, count = _usual_width(rows)
        told = len(rows) == len(lines) or count >= _TELLING  # few rows of many lines may be what a stray quote makes
        if told and num_columns > 1 and count >= _STEADY * (len(rows) - 1):  # one line may be a remark
            first = len(rows[0])
            found.append((first > 1 and num_columns - first in (0, 1), num_columns, separator))  # 1: a short header
    if not found:
        raise ValueError(
            f"{path}: none of {', '.join(map(repr, _SEPARATORS + _LAST))} cuts the first lines into equally many "
            "columns. Write the schema by hand, with its separator."
        )
    _, num_columns, separator = max(found, key=lambda option: option[:2])
    return separator, num_columns


def _split(lines: list[str], separator: str) -> tuple[list[list[str]], bool]:
    """The rows, and whether quotes stand around values: letters are those that would take many lines for one value."""
    if len(separator) > 1:
        return [line.split(separator) for line in lines], False
    plain = list(csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE))
    if not any('"' in line for line in lines):
        return plain, True
    try:
        rows = list(csv.reader(lines, delimiter=separator))
    except csv.Error:  # a value without end
        return plain, False
    _, whole_lines = _usual_width(plain)
    letters = whole_lines >= _STEADY * len(lines) and whole_lines > _usual_width(rows)[1]
    return (plain, False) if letters else (rows, True)


def _usual_width(rows: list[list[str]]) -> tuple[int, int]:
    """The number of columns that most rows have, and how many do."""
    return Counter(map(len, rows)).most_common(1)[0]


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: no number, and no name stands in its own column.

    One column may have no name: pandas writes the index of its rows so, and some programs a separator behind the last.
    """
    first, *others = rows
    columns = list(zip(*others, strict=True)) if others else [()] * len(first)
    return (
        first.count("") <= 1
        and len(set(first)) > len(first) / 2
        and not any(map(is_number, first))
        and not any(name and name in column for name, column in zip(first, columns, strict=True))
    )


def told_apart(names: list[str]) -> list[str]:
    """Names with numbers behind those that were there before.

    >>> told_apart(["a", "b", "a", ""])
    ['a', 'b', 'a_2', 'column_4']
    """
    found: list[str] = []
    for place, name in enumerate(names, 1):
        candidate, number = name or f"column_{place}", 1
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return found


def _sample_records(path: Path, kind: Kind) -> Sniffed:
    """Lists become strings joined by a bar, as they might stand in a text file."""
    places = read_header(path, TableFormat()).places
    with open_records(path, kind) as file:
        parts, num_rows, share = list[pa.RecordBatch](), 0, 1.0
        for _, batch, done in file.sample(_SAMPLE_ROWS, _SAMPLE_BYTES):  # as of text: long lists are dear in Python
            parts.append(batch)
            num_rows, share = num_rows + len(batch), done
        if not num_rows:
            raise ValueError(f"{path} has no rows.")
        columns = {name: pa.chunked_array([leaf(x, place) for x in parts]) for name, place in places.items()}
        return _of_typed(TableFormat(), columns, round(num_rows / share))


def _is_object(line: str) -> bool:
    """Whether a line is a JSON object as a whole."""
    with suppress(NotAnObjectError):
        return line.lstrip()[:1] == "{" and bool(parse_line(line))
    return False


def _sample_json(path: Path, table: TableFormat, lines: Sequence[str], num_rows: int, share: float) -> Sniffed:
    columns, _ = parse_lines(_spread(lines, num_rows, 1), read_header(path, table).places)
    return _of_typed(table, columns, round(len(lines) / share))


def _of_typed(table: TableFormat, columns: Mapping[str, pa.Array | pa.ChunkedArray], num_rows: int) -> Sniffed:
    words = {name: list(map(_as_string, column.to_pylist())) for name, column in columns.items()}
    return Sniffed(table, words, num_rows, {name: column.type for name, column in columns.items()})


def _as_string(value: object) -> str | None:
    if isinstance(value, list):
        return "|".join(map(str, value))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)
