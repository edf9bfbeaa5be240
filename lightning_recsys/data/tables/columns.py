"""Whole columns between the file and the ids: categories, bags of categories, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Codes = NDArray[np.int64]
MISSING = -1
_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


@dataclass(frozen=True)
class Categories:
    """A column of strings, each distinct one stored once.

    Args:
        codes: For each row the position of its string in ``values``, or -1 where it is missing.
        values: The distinct strings.
    """

    codes: Codes
    values: pa.StringArray

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Codes) -> Categories:
        """Some rows; -1 among them gives a missing one."""
        return Categories(_take(self.codes, rows, MISSING), self.values)

    def counts(self) -> Codes:
        """How often each of ``values`` occurs."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    @classmethod
    def from_strings(cls, column: pa.ChunkedArray, *, strip: bool, missing: Sequence[str]) -> Categories:
        """From strings or dictionary-encoded strings, trimmed of white space; those in ``missing`` become missing.

        >>> Categories.from_strings(pa.chunked_array([["a ", "?", "b", "a"]]), strip=True, missing=["?"]).codes.tolist()
        [0, -1, 1, 0]
        """
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        column = column.unify_dictionaries()
        if not column.num_chunks:
            return cls(np.empty(0, dtype=np.int64), pa.array([], pa.string()))
        raw = column.chunk(0).dictionary.cast(pa.string())
        codes = np.concatenate([_indices(chunk) for chunk in column.chunks])
        tidy = pc.utf8_trim_whitespace(raw) if strip else raw
        tidy = pc.if_else(pc.is_in(tidy, value_set=pa.array(missing, pa.string())), pa.scalar(None, pa.string()), tidy)
        merged = tidy.dictionary_encode()
        return cls(_take(_indices(merged), codes, MISSING), merged.dictionary)

    @classmethod
    def concatenate(cls, parts: Sequence[Categories]) -> Categories:
        """The rows of several columns, one after the other."""
        merged = pa.concat_arrays([part.values for part in parts]).dictionary_encode()
        indices, codes, start = _indices(merged), [], 0
        for part in parts:
            codes.append(_take(indices[start : start + len(part.values)], part.codes, MISSING))
            start += len(part.values)
        return cls(np.concatenate(codes), merged.dictionary)


@dataclass(frozen=True)
class Bags:
    """A column of bags of strings; a missing bag is an empty one.

    Args:
        offsets: Where each row's bag starts in ``items``, and the last one ends; shape ``[rows + 1]``.
        items: The strings in all bags, in order.
    """

    offsets: Codes
    items: Categories

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: Codes) -> Bags:
        """Some rows; -1 among them gives an empty bag."""
        lengths = _take(np.diff(self.offsets), rows, 0)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shift = _take(self.offsets[:-1], rows, 0) - offsets[:-1]
        return Bags(offsets, self.items.take(np.arange(offsets[-1]) + np.repeat(shift, lengths)))

    @classmethod
    def from_categories(cls, column: Categories, *, separator: str, strip: bool, missing: Sequence[str]) -> Bags:
        """From joined strings such as ``Comedy|Drama``; empty items are dropped.

        >>> column = Categories.from_strings(pa.chunked_array([["b|a", "", "a||b"]]), strip=True, missing=[""])
        >>> bags = Bags.from_categories(column, separator="|", strip=True, missing=[""])
        >>> bags.offsets.tolist(), [bags.items.values[i].as_py() for i in bags.items.codes]
        ([0, 2, 2, 4], ['b', 'a', 'a', 'b'])
        """
        lists = pc.split_pattern(column.values, separator)
        return cls.from_lists(pa.chunked_array([lists]), strip=strip, missing=missing).take(column.codes)

    @classmethod
    def from_lists(cls, column: pa.ChunkedArray, *, strip: bool, missing: Sequence[str]) -> Bags:
        """From an Arrow column of lists; missing items are dropped."""
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        items = pc.list_flatten(column)
        items = Categories.from_strings(items.dictionary_encode(), strip=strip, missing=[*missing, ""])
        present = items.codes != MISSING
        before = np.concatenate([[0], np.cumsum(present)])
        offsets = before[np.concatenate([[0], np.cumsum(lengths)])]
        return cls(offsets, items.take(np.flatnonzero(present)))

    @classmethod
    def concatenate(cls, parts: Sequence[Bags]) -> Bags:
        """The rows of several columns, one after the other."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(offsets, Categories.concatenate([part.items for part in parts]))


def parse_numbers(strings: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers, NaN where there is none, and which rows are neither missing nor a finite number.

    >>> numbers, bad = parse_numbers(pa.array(["1.5", None, "x", "inf"]))
    >>> numbers.tolist(), bad.tolist()
    ([1.5, nan, nan, nan], [False, False, True, True])
    """
    try:
        parsed = pc.cast(strings, pa.float64())
    except pa.ArrowInvalid:  # only then pay for looking at every string
        fits = pc.match_substring_regex(strings, NUMBER)
        parsed = pc.cast(pc.if_else(fits, strings, pa.scalar(None, strings.type)), pa.float64())
    numbers = parsed.to_numpy(zero_copy_only=False) if isinstance(parsed, pa.Array) else parsed.to_numpy()
    numbers = np.where(np.isfinite(numbers), numbers, np.nan)
    return numbers, np.isnan(numbers) & np.asarray(strings.is_valid())


def parse_times(strings: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers, or ISO 8601 times as seconds since 1970, NaN where there is none; and which rows are none of these.

    Fractions of seconds are dropped, and times without a zone are taken as UTC: enough to put rows in order.

    >>> parse_times(pa.array(["1970-01-02", "1970-01-01T00:01:01.5Z", None, "soon"]))[0].tolist()
    [86400.0, 61.0, nan, nan]
    """
    numbers, bad = parse_numbers(strings)
    if not bad.any():
        return numbers, bad
    words = pc.replace_substring_regex(strings, pattern=r"(\.\d+)?Z?$", replacement="")
    words = pc.replace_substring(words, pattern="T", replacement=" ")
    times = pc.coalesce(*(pc.strptime(words, format=f, unit="s", error_is_null=True) for f in _TIME_FORMATS))
    seconds = np.asarray(pc.fill_null(times.cast(pa.int64()), 0)).astype(np.float64)
    valid = np.asarray(times.is_valid())
    return np.where(valid, seconds, numbers), bad & ~valid


def _indices(dictionary_array: pa.DictionaryArray) -> Codes:
    """The codes of a dictionary array, -1 for missing."""
    indices: Codes = pc.fill_null(dictionary_array.indices, MISSING).to_numpy().astype(np.int64)
    return indices


def _take(array: Codes, rows: Codes, missing: int) -> Codes:
    """``array[rows]``, and ``missing`` where a row is negative."""
    if not len(array):
        return np.full(len(rows), missing, dtype=np.int64)
    return np.where(rows >= 0, array[rows], missing)
