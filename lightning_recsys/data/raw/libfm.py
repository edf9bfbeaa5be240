"""The sparse text format of libFM, LIBSVM and their kin."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.compiled.loops import compile_rule
from lightning_recsys.data.raw.columns import BadLine, Bags, LineFormat, RawColumns

_BAG = "features"
_OK, _LABEL, _INDEX, _VALUE, _COUNT, _NOT_ONE = range(6)
_PROBLEMS = {  # the column, and what is wrong there
    _LABEL: ("label", "must be 1, 0 or -1, got {line}"),
    _INDEX: (None, "an entry must be index:value with an index of at most 18 digits, got {line}"),
    _VALUE: (None, "a value must be a number that float32 holds, got {line}"),
    _COUNT: (None, "{width} entries expected, got {length}: {line}"),
    _NOT_ONE: (None, "the value of a categorical feature must be 1, got {line}"),
}


class LibfmFormat(LineFormat):
    r"""Lines ``label index:value index:value ...``, separated by spaces; what follows a ``#`` is a remark.

    Where every line has the same entries in the same places (as in the benchmark versions of Criteo, Frappe or
    MovieLens), the first ``num_dense`` entries are dense features ``d0, d1, ...`` with their values, and the next
    ``num_fields`` are categorical features ``f0, f1, ...`` with their indices, whose values must be 1. Otherwise all
    entries of a line make one bag of weighted ids, ``features``.

    Args:
        num_fields: Categorical features of each line; ``None`` for a bag.
        num_dense: Dense features of each line, before the categorical ones.

    Raises:
        ValueError: the numbers make no sense.

    >>> rows = LibfmFormat(num_fields=2, num_dense=1).parse(b"1 0:0.5 7:1 19:1\n-1 0:2 8:1 20:1\n")
    >>> rows.labels_N.tolist(), rows.dense_IN.tolist(), rows.categories["f1"].to_pylist()
    ([1.0, 0.0], [[0.5, 2.0]], [b'19', b'20'])
    >>> LibfmFormat().parse(b"0 3:0.5 4:2\n1\n").bags["features"].lengths_N.tolist()
    [2, 0]
    """

    name = "libfm"

    def __init__(self, *, num_fields: int | None = None, num_dense: int = 0) -> None:
        if num_fields is None and num_dense:
            raise ValueError(f"data.num_dense={num_dense} needs data.num_fields: how many entries follow in each line.")
        if num_dense < 0 or (num_fields is not None and num_fields < 1):
            raise ValueError(f"data.num_fields must be at least 1 and data.num_dense 0, got {num_fields}, {num_dense}.")
        self._num_fields, self._num_dense = num_fields, num_dense
        self.dense = tuple(f"d{i}" for i in range(num_dense))
        self.categories = tuple(f"f{i}" for i in range(num_fields or 0))
        self.bags: Mapping[str, bool] = {_BAG: True} if num_fields is None else {}
        self.number_base = dict.fromkeys((*self.categories, *self.bags), 10)

    def options(self) -> dict[str, object]:
        """See the base class."""
        return {"name": self.name, "num_fields": self._num_fields, "num_dense": self._num_dense}

    def parse(self, block: bytes) -> RawColumns:
        """The rows of a block of whole lines."""
        text = np.frombuffer(block, dtype=np.uint8)
        num_lines = block.count(b"\n")
        labels, lengths, problems = (
            np.empty(num_lines, np.float32),
            np.zeros(num_lines, np.int64),
            np.zeros(num_lines, np.int8),
        )
        capacity = block.count(b":") + 1
        indices, values = np.empty(capacity, np.int64), np.empty(capacity, np.float64)
        _parse(text, labels, lengths, problems, indices, values)
        if self._num_fields is not None:
            self._check_fields(lengths, problems, values)
        good = problems == _OK
        kept = np.repeat(good, lengths)
        indices, values = indices[: len(kept)][kept], values[: len(kept)][kept]
        bad = [self._describe(block, line, problems[line], lengths[line]) for line in np.flatnonzero(~good).tolist()]
        lines, labels, lengths = np.flatnonzero(good), labels[good], lengths[good]
        if self._num_fields is None:
            bags = {_BAG: Bags(_texts(indices), lengths, values.astype(np.float32))}
            return RawColumns(lines, labels, np.empty((0, len(lines))), {}, bags, bad=bad)
        split = self._num_dense
        by_place = indices.reshape(len(lines), -1).T
        categories = {name: _texts(by_place[split + i]) for i, name in enumerate(self.categories)}
        dense = np.ascontiguousarray(values.reshape(len(lines), -1).T[:split])
        return RawColumns(lines, labels, dense.reshape(split, len(lines)), categories, bad=bad)

    def _check_fields(
        self, lengths: NDArray[np.int64], problems: NDArray[np.int8], values: NDArray[np.float64]
    ) -> None:
        """Mark lines with another number of entries, or with a categorical value that is not 1."""
        width = self._num_dense + (self._num_fields or 0)
        problems[(problems == _OK) & (lengths != width)] = _COUNT
        starts = (np.cumsum(lengths) - lengths)[problems == _OK]
        not_one = np.zeros(len(starts), dtype=np.bool_)
        for place in range(self._num_dense, width):
            not_one |= values[starts + place] != 1
        problems[np.flatnonzero(problems == _OK)[not_one]] = _NOT_ONE

    def _describe(self, block: bytes, line: int, problem: int, length: int) -> BadLine:
        text = block.split(b"\n", line + 1)[line].decode("utf-8", "backslashreplace")
        shown = repr(text if len(text) <= 60 else f"{text[:60]}...")
        width = self._num_dense + (self._num_fields or 0)
        column, message = _PROBLEMS[problem]
        return BadLine(line, column, message.format(line=shown, width=width, length=length))


def _texts(indices: NDArray[np.int64]) -> pa.Array:
    return pa.array(indices).cast(pa.string()).cast(pa.binary())


@compile_rule
def _parse(text, labels, lengths, problems, indices, values):  # noqa: ANN001, ANN202, C901
    """Entries of bad lines are taken back, except that lines with the wrong number of them are found later."""
    position = entry = 0
    for line in range(len(labels)):
        stop = position
        while text[stop] != 10:
            stop += 1
        end = position
        while end < stop and text[end] != 35 and text[end] != 13:  # a remark, or the end of a line from Windows
            end += 1
        first_entry = entry
        label, position, ok = _number(text, position, end)
        ok &= position == end or _is_space(text[position])
        labels[line] = 1 if label == 1 else 0
        if not ok or not (label == 1 or label == 0 or label == -1):
            problems[line] = _LABEL
        while problems[line] == _OK:
            while position < end and _is_space(text[position]):
                position += 1
            if position == end:
                break
            index, start = np.int64(0), position
            while position < end and 48 <= text[position] <= 57:
                index = index * 10 + (np.int64(text[position]) - 48)
                position += 1
            if not 0 < position - start <= 18 or position == end or text[position] != 58:
                problems[line] = _INDEX
                break
            value, position, ok = _number(text, position + 1, end)
            if not ok or not np.isfinite(np.float32(value)) or (position < end and not _is_space(text[position])):
                problems[line] = _VALUE
                break
            indices[entry], values[entry] = index, value
            entry += 1
        if problems[line] != _OK:
            entry = first_entry
        lengths[line] = entry - first_entry
        position = stop + 1


@compile_rule
def _is_space(letter):  # noqa: ANN001, ANN202
    return letter == 32 or letter == 9


@compile_rule
def _number(text, position, end):  # noqa: ANN001, ANN202
    """A decimal number from ``position`` on: its value, where it ends, and whether it is one."""
    negative = position < end and text[position] == 45
    if position < end and (text[position] == 45 or text[position] == 43):
        position += 1
    mantissa, exponent, digits = 0.0, 0, 0
    while position < end and 48 <= text[position] <= 57:
        mantissa = mantissa * 10 + (text[position] - 48)
        digits += 1
        position += 1
    if position < end and text[position] == 46:
        position += 1
        while position < end and 48 <= text[position] <= 57:
            mantissa = mantissa * 10 + (text[position] - 48)
            exponent -= 1
            digits += 1
            position += 1
    if digits and position < end and (text[position] | 32) == 101:
        position += 1
        downwards = position < end and text[position] == 45
        if position < end and (text[position] == 45 or text[position] == 43):
            position += 1
        power, start = 0, position
        while position < end and 48 <= text[position] <= 57:
            power = min(power * 10 + (np.int64(text[position]) - 48), 9999)
            position += 1
        if position == start:
            return 0.0, position, False
        exponent += -power if downwards else power
    value = mantissa * 10.0**exponent if exponent >= 0 else mantissa / 10.0**-exponent
    return (-value if negative else value), position, digits > 0
