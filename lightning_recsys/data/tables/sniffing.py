"""How an unknown file is written, from its first rows."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa

from lightning_recsys.data.files import ByteSource, open_parquet
from lightning_recsys.data.tables.columns import NUMBER
from lightning_recsys.data.tables.reading import is_parquet, leaf, lines_of, read_header, separator_of
from lightning_recsys.data.tables.schema_parts import TableFormat

_SEPARATORS = ("\t", "::", ",", ";", "|")
_SAMPLE_BYTES = 16_000_000
_SAMPLE_ROWS = 50_000
_STEADY = 0.9  # share of lines that must have the same number of columns
_TELLING = 20  # rows with as many columns as each other are no chance, however many lines each has


def sniff(path: Path) -> tuple[TableFormat, dict[str, list[str | None]], dict[str, pa.DataType]]:
    """The format of a file, a sample of its columns as strings (``None`` for a Parquet null), and their Parquet types.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, or is no table.
    """
    if is_parquet(path, TableFormat()):
        return TableFormat(), *_sample_parquet(path)
    text, encoding = _decode(path)
    lines = [line for line in lines_of(text) if line.strip()][:_SAMPLE_ROWS]
    if not lines:
        raise ValueError(f"{path} is empty.")
    separator, num_columns = _separator(path, lines)
    rows, quoted = _split(lines, separator)
    comment = None
    header: list[str] | None = None  # where it is not one that the file's own would be
    if _lacks_a_separator(rows, num_columns):  # all other lines end in one
        comment, header, rows = lines[0], [*rows[0], ""], rows[1:]
    elif len(rows[0]) != num_columns:
        comment = lines[0][0]
        rows = rows[next(i for i, line in enumerate(lines) if not line.startswith(comment)) :]
    rows = [[value.strip() for value in row] for row in rows if len(row) == num_columns]
    named = header is None and _is_header(rows)
    if named and len(set(rows[0])) < len(rows[0]):  # the line is passed over, and its names are told apart
        named, comment, header, rows = False, lines[0] if comment is None else comment, rows[0], rows[1:]
    names = rows[0] if named else told_apart(header) if header else [f"column_{i + 1}" for i in range(num_columns)]
    opens = any(line.startswith('"') for line in lines)
    table = TableFormat(
        separator=None if separator == separator_of(path, TableFormat()) else separator,
        column_names=None if named else tuple(names),
        comment=comment,
        encoding=encoding,
        quote='"' if quoted and (separator in (",", ";") or f'{separator}"' in text or opens) else None,
    )
    if not rows[named:]:
        raise ValueError(f"{path} has a header and no rows.")
    return table, dict(zip(names, map(list, zip(*rows[named:], strict=True)), strict=True)), {}


def is_number(word: str) -> bool:
    """Whether a word is a number, as the reader would take it."""
    return re.fullmatch(NUMBER, word) is not None


def _decode(path: Path) -> tuple[str, str]:
    with ByteSource(path) as stream:
        try:
            start: bytes = stream.read(_SAMPLE_BYTES)
        except OSError as error:
            raise ValueError(f"{path}: the file is damaged ({error}).") from error
    if len(start) == _SAMPLE_BYTES:
        start = start[: start.rfind(b"\n")]  # leave out the line that was cut off
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return start[: len(start) // 2 * 2].decode("utf-16"), "utf-16"
    if start[:4] == b"PAR1":
        raise ValueError(f"{path} is a Parquet file: name it .parquet.")
    try:
        return start.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return start.decode("latin-1"), "latin-1"


def _separator(path: Path, lines: list[str]) -> tuple[str, int]:
    """The separator that cuts most lines into the same number of columns, and that number."""
    found = []
    for separator in _SEPARATORS:
        rows, _ = _split(lines, separator)
        num_columns, count = _usual_width(rows)
        told = len(rows) == len(lines) or count >= _TELLING  # few rows of many lines may be what a stray quote makes
        if told and num_columns > 1 and count >= _STEADY * (len(rows) - 1):  # one line may be a remark
            found.append((num_columns, separator))
    if not found:
        raise ValueError(
            f"{path}: none of {', '.join(map(repr, _SEPARATORS))} cuts the first lines into equally many columns. "
            "Write the schema by hand, with its separator."
        )
    num_columns, separator = max(found, key=lambda option: option[0])
    return separator, num_columns


def _split(lines: list[str], separator: str) -> tuple[list[list[str]], bool]:
    """The rows, and whether quotes stand around values: letters are those that would take many lines for one value."""
    if len(separator) > 1:
        return [line.split(separator) for line in lines], False
    plain = list(csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE))
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


def _lacks_a_separator(rows: list[list[str]], num_columns: int) -> bool:
    """Whether the first row is a header without the separator that ends all others."""
    others = [row for row in rows[1:] if len(row) == num_columns]
    ends = not any(row[-1].strip() for row in others)
    return len(rows[0]) == num_columns - 1 and ends and not any(map(is_number, rows[0]))


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


def _sample_parquet(path: Path) -> tuple[dict[str, list[str | None]], dict[str, pa.DataType]]:
    """Lists become strings joined by a bar, as they might stand in a text file."""
    places = read_header(path, TableFormat()).places
    with open_parquet(path) as file:
        sample = next(file.iter_batches(batch_size=_SAMPLE_ROWS, use_threads=False), None)
        if sample is None:
            raise ValueError(f"{path} has no rows.")
        if sample.nbytes > _SAMPLE_BYTES:  # as of text: vectors and long lists are dear as objects of Python
            sample = sample.slice(0, max(1, len(sample) * _SAMPLE_BYTES // sample.nbytes))
        columns = {name: leaf(sample, place) for name, place in places.items()}
    return (
        {name: [_as_string(value) for value in column.to_pylist()] for name, column in columns.items()},
        {name: column.type for name, column in columns.items()},
    )


def _as_string(value: object) -> str | None:
    if isinstance(value, list):
        return "|".join(map(str, value))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)
