"""Compiled loops over columns of text: numbers, hashes, look-ups. Without the GIL, so that blocks run in threads."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.compiled.hash_table import EMPTY, find, make_table, put, value_at
from lightning_recsys.compiled.hashing import GOLDEN, mix
from lightning_recsys.compiled.loops import compile_rule


def text_of(values: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The bytes of an arrow binary array, all strings in a row, and where each starts: shapes ``[bytes], [N + 1]``."""
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, dtype=np.int32, count=len(values) + 1 + values.offset)[values.offset :]
    return np.frombuffer(data if data is not None else b"", dtype=np.uint8), starts


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, which is not copied where it is so already."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([*column.chunks, pa.array([], column.type)])


def parse_integers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Decimal integers; NaN where a string is empty. Also which strings are no integer.

    >>> numbers, wrong = parse_integers(pa.array([b"12", b"-3", b"", b"1x"]))
    >>> numbers.tolist(), wrong.tolist()
    ([12.0, -3.0, nan, nan], [False, False, False, True])
    """
    numbers = np.empty(len(values), dtype=np.float64)
    wrong = np.zeros(len(values), dtype=np.bool_)
    _parse_integers(*text_of(values), numbers, wrong)
    return numbers, wrong


def parse_keys(values: pa.Array, *, base: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Numbers to the base 10 or 16 without sign, of at most 16 digits; 0 where a string is empty. Also which are none.

    >>> keys, wrong = parse_keys(pa.array([b"ff", b"", b"-1", b"10"]), base=16)
    >>> keys.tolist(), wrong.tolist()
    ([255, 0, 0, 16], [False, False, True, False])
    """
    keys = np.empty(len(values), dtype=np.uint64)
    wrong = np.zeros(len(values), dtype=np.bool_)
    _parse_keys(*text_of(values), base, keys, wrong)
    return keys, wrong


def hash_values(values: pa.Array) -> NDArray[np.uint64]:
    """Hashes of byte strings; the same in every process and on every platform.

    A polynomial in an odd constant, modulo ``2**64``, of the bytes, to which the length is added; then scrambled.

    >>> hash_values(pa.array([b"ab", b"c", b""])).tolist()
    [11698481724046877294, 5694221423795747153, 0]
    """
    hashes = np.empty(len(values), dtype=np.uint64)
    _hash_strings(*text_of(values), hashes)
    return hashes


def find_records(
    text: NDArray[np.uint8], *, delimiter: str, quote: str | None, whole: bool
) -> tuple[NDArray[np.int64], int, int]:
    r"""Where the rows of delimited text are, as Arrow cuts it: empty lines are none, and quoted values hold line ends.

    Args:
        text: From the start of a row on.
        delimiter: Between values; looked at only where there are quotes.
        quote: Character around values that hold delimiters or line ends, in ASCII.
        whole: Whether nothing follows, so that what has no line end is a row all the same,
            unless a quote in it is not closed.

    Returns:
        The line of each whole row, from 0; the bytes that they take; the lines that they take.

    >>> text = np.frombuffer(b'1,"a\nb"\n\n2,c\r\n3,', dtype=np.uint8)
    >>> lines, end, num_lines = find_records(text, delimiter=",", quote='"', whole=False)
    >>> lines.tolist(), end, num_lines
    ([0, 3], 14, 4)
    """
    lines = np.empty(np.count_nonzero((text == 10) | (text == 13)) + 1, dtype=np.int64)
    opening = -1 if quote is None else ord(quote)
    found, end, num_lines = _find_records(text, ord(delimiter[0]), opening, whole, lines)
    return lines[:found], end, num_lines


class KeyTable:
    """Numbers 64-bit keys from 1 on, in the order given; unknown keys are 0. Takes 32 to 64 bytes per key.

    Args:
        keys: Shape ``[n]``. Of equal keys the first counts.

    >>> KeyTable(np.array([7, 0, 9], dtype=np.uint64)).ids(np.array([9, 8, 0], dtype=np.uint64)).tolist()
    [3, 0, 2]
    """

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self._table = make_table(len(keys))
        _fill(keys.view(np.int64), self._table)

    def ids(self, keys: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The number of each key."""
        ids = np.empty(len(keys), dtype=np.int32)
        _look_up(keys.view(np.int64), self._table, ids)
        return ids


@compile_rule
def _parse_integers(text, starts, numbers, wrong):  # noqa: ANN001, ANN202
    for i in range(len(numbers)):
        start, stop = starts[i], starts[i + 1]
        if start == stop:
            numbers[i] = np.nan
            continue
        negative = text[start] == 45
        if negative:
            start += 1
        ok = 0 < stop - start <= 18
        total = 0
        for j in range(start, stop):
            digit = np.int64(text[j]) - 48
            ok &= 0 <= digit <= 9
            total = total * 10 + digit
        wrong[i] = not ok
        numbers[i] = (-total if negative else total) if ok else np.nan


@compile_rule
def _parse_keys(text, starts, base, keys, wrong):  # noqa: ANN001, ANN202
    for i in range(len(keys)):
        start, stop = starts[i], starts[i + 1]
        ok = stop - start <= 16
        total = np.uint64(0)
        for j in range(start, stop):
            digit = np.int64(text[j]) - 48
            if digit > 9:
                letter = (np.int64(text[j]) | 32) - 97
                digit = letter + 10 if letter >= 0 else -1
            ok &= 0 <= digit < base
            total = total * np.uint64(base) + np.uint64(digit)
        wrong[i] = not ok
        keys[i] = total if ok else np.uint64(0)


@compile_rule
def _hash_strings(text, starts, hashes):  # noqa: ANN001, ANN202
    for i in range(len(hashes)):
        total = np.uint64(starts[i + 1] - starts[i])
        power = GOLDEN
        for j in range(starts[i], starts[i + 1]):
            total += (np.uint64(text[j]) + np.uint64(1)) * power
            power *= GOLDEN
        hashes[i] = mix(total)


@compile_rule
def _fill(keys, table):  # noqa: ANN001, ANN202
    for i in range(len(keys)):
        cell = find(table, keys[i])
        if value_at(table, cell) == EMPTY:
            put(table, cell, keys[i], i)


@compile_rule
def _look_up(keys, table, ids):  # noqa: ANN001, ANN202
    for i in range(len(keys)):
        ids[i] = value_at(table, find(table, keys[i])) + 1


@compile_rule
def _find_records(text, delimiter, quote, whole, lines):  # noqa: ANN001, ANN202, C901
    found = end = line = end_line = position = 0
    while position < len(text):
        start, first_line = position, line
        quoted, field_start, done = False, True, False
        while position < len(text) and not done:
            letter = text[position]
            if quoted:
                if letter == quote:
                    if position + 1 < len(text) and text[position + 1] == quote:
                        position += 1
                    else:
                        quoted = False
                elif letter == 10:
                    line += 1
            elif letter == quote and field_start:
                quoted, field_start = True, False
            elif letter == 10 or letter == 13:
                stop = position
                if letter == 13:
                    if position + 1 == len(text) and not whole:  # a line feed may follow
                        return found, end, end_line
                    if position + 1 < len(text) and text[position + 1] == 10:
                        position += 1
                done = True
            else:
                field_start = letter == delimiter
            position += 1
        if done:
            line += 1
        elif whole and not quoted:
            stop, line = position, line + 1
        else:
            break
        if stop > start:
            lines[found] = first_line
            found += 1
        end, end_line = position, line
    return found, end, end_line
