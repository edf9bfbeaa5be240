"""Words into numbers, times and bags: whole columns at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def as_categories(column: pa.ChunkedArray, *, strip: bool, missing: Sequence[str]) -> pa.DictionaryArray:
    """Strings or dictionary-encoded strings, trimmed of white space, each distinct one once; null where missing.

    >>> column = as_categories(pa.chunked_array([["a ", "?", "b", "a"]]), strip=True, missing=["?"])
    >>> column.indices.to_pylist(), column.dictionary.to_pylist()
    ([0, None, 1, 0], ['a', 'b'])
    """
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    if not column.num_chunks:
        return pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string()))
    raw = column.chunk(0).dictionary.cast(pa.string())
    indices = pa.concat_arrays([chunk.indices for chunk in column.chunks]).cast(pa.int32())
    tidy = pc.utf8_trim_whitespace(raw) if strip else raw
    tidy = pc.if_else(pc.is_in(tidy, value_set=pa.array(missing, pa.string())), pa.scalar(None, pa.string()), tidy)
    merged = tidy.dictionary_encode()
    return pa.DictionaryArray.from_arrays(merged.indices.take(indices), merged.dictionary)


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
