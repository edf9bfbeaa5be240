"""How an unknown file is written, from its first rows."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from lightning_recsys.data.tables.columns import NUMBER
from lightning_recsys.data.tables.reading import is_parquet, separator_of
from lightning_recsys.data.tables.schema_parts import TableFormat

_SEPARATORS = ("\t", "::", ",", ";", "|")
_SAMPLE_BYTES = 4_000_000
_SAMPLE_ROWS = 10_000
_STEADY = 0.9  # share of lines that must have the same number of columns


def sniff(path: Path) -> tuple[TableFormat, dict[str, list[str | None]]]:
    """The format of a file, and a sample of its columns as strings (``None`` for a Parquet null).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, or is no table.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if is_parquet(path, TableFormat()):
        return TableFormat(), _sample_parquet(path)
    text, encoding = _decode(path)
    lines = [line for line in text.splitlines() if line.strip()][:_SAMPLE_ROWS]
    if not lines:
        raise ValueError(f"{path} is empty.")
    separator, num_columns = _separator(path, lines)
    rows = _split(lines, separator)
    comment = None
    if len(rows[0]) != num_columns:
        comment = lines[0][0]
        rows = rows[next(i for i, line in enumerate(lines) if not line.startswith(comment)) :]
    rows = [[value.strip() for value in row] for row in rows if len(row) == num_columns]
    named = _is_header(rows)
    names = rows[0] if named else [f"column_{i}" for i in range(1, num_columns + 1)]
    table = TableFormat(
        separator=None if separator == separator_of(path, TableFormat()) else separator,
        column_names=None if named else tuple(names),
        comment=comment,
        encoding=encoding,
        quote='"' if separator in (",", ";") or f'{separator}"' in text else None,
    )
    return table, dict(zip(names, map(list, zip(*rows[named:], strict=True)), strict=True))


def is_number(word: str) -> bool:
    """Whether a word is a number, as the reader would take it."""
    return re.fullmatch(NUMBER, word) is not None


def _decode(path: Path) -> tuple[str, str]:
    with pa.input_stream(str(path), compression="detect") as stream:
        start: bytes = stream.read(_SAMPLE_BYTES)
    if len(start) == _SAMPLE_BYTES:
        start = start[: start.rfind(b"\n")]  # leave out the line that was cut off
    try:
        return start.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return start.decode("latin-1"), "latin-1"


def _separator(path: Path, lines: list[str]) -> tuple[str, int]:
    """The separator that cuts most lines into the same number of columns, and that number."""
    found = []
    for separator in _SEPARATORS:
        (num_columns, count), *_ = Counter(map(len, _split(lines, separator))).most_common(1)
        if num_columns > 1 and count >= _STEADY * (len(lines) - 1):  # one line may be a remark
            found.append((num_columns, separator))
    if not found:
        raise ValueError(
            f"{path}: none of {', '.join(map(repr, _SEPARATORS))} cuts the first lines into equally many columns. "
            "Write the schema by hand, with its separator."
        )
    num_columns, separator = max(found, key=lambda option: option[0])
    return separator, num_columns


def _split(lines: list[str], separator: str) -> list[list[str]]:
    if len(separator) > 1:
        return [line.split(separator) for line in lines]
    return list(csv.reader(lines, delimiter=separator))


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: no number, nothing twice, and no name stands in its own column."""
    first, *others = rows
    columns = list(zip(*others, strict=True)) if others else [()] * len(first)
    return (
        all(first)
        and len(set(first)) == len(first)
        and not any(map(is_number, first))
        and not any(name in column for name, column in zip(first, columns, strict=True))
    )


def _sample_parquet(path: Path) -> dict[str, list[str | None]]:
    """Lists become strings joined by a bar, as they might stand in a text file."""
    batches = parquet.ParquetFile(path).iter_batches(batch_size=_SAMPLE_ROWS)
    sample = next(batches, None)
    if sample is None:
        raise ValueError(f"{path} has no rows.")
    return {name: [_as_string(value) for value in column] for name, column in sample.to_pydict().items()}


def _as_string(value: object) -> str | None:
    if isinstance(value, list):
        return "|".join(map(str, value))
    return None if value is None else str(value)
