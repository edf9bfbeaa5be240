"""Lines of separated values, split by pyarrow; every value stays the bytes that it is in the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from lightning_recsys.data.raw.columns import BadLine
from lightning_recsys.data.raw.kernels import one_chunk, parse_integers


def split_columns(
    block: bytes, names: Sequence[str], *, separator: str
) -> tuple[list[pa.Array], NDArray[np.int64], list[BadLine]]:
    r"""Split lines into columns.

    Args:
        block: Whole lines of the file.
        names: The name of each column, in their order.
        separator: The character between two columns; exactly one.

    Returns:
        An arrow binary array for each column; the number of each row's line in the block, from 0; the lines that have
        another number of columns, and so are no rows.

    >>> columns, lines, bad = split_columns(b"1,a\n2\n3,\n", ["x", "y"], separator=",")
    >>> columns[1].to_pylist(), lines.tolist(), [(line.line, line.message) for line in bad]
    ([b'a', b''], [0, 2], [(1, '2 columns expected, got 1')])
    """
    bad: list[BadLine] = []

    def refuse(row: pyarrow.csv.InvalidRow) -> str:
        bad.append(BadLine(row.number - 1, None, f"{row.expected_columns} columns expected, got {row.actual_columns}"))
        return "skip"

    table = pyarrow.csv.read_csv(
        pa.py_buffer(block),
        read_options=pyarrow.csv.ReadOptions(column_names=list(names), use_threads=False, block_size=len(block) + 1),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=separator, quote_char=False, ignore_empty_lines=False, invalid_row_handler=refuse
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={name: pa.binary() for name in names}, strings_can_be_null=False
        ),
    )
    lines = np.arange(table.num_rows + len(bad))
    if bad:
        lines = np.delete(lines, [line.line for line in bad])
    return [one_chunk(column) for column in table.columns], lines, bad


def parse_labels(values: pa.Array) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Labels ``0`` and ``1``, and which strings are neither."""
    numbers, wrong = parse_integers(values)
    wrong = wrong | ~((numbers == 0) | (numbers == 1))
    return numbers.astype(np.float32), wrong
