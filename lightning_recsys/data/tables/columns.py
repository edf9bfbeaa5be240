"""Words into numbers, times and bags: whole columns at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.tables.schema_parts import TableFormat

_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y")
_TIME_FORMATS = tuple(f"{date}{time}" for date in _DATES for time in (" %H:%M:%S", " %H:%M", ""))
TIME = (
    r"^(\d{4}-\d\d-\d\d|\d{4}/\d\d/\d\d|\d\d\.\d\d\.\d{4})"
    r"([ T]\d\d:\d\d(:\d\d(\.\d+)?)?( ?(Z|UTC|[+-]\d\d:?\d\d))?)?$"
)
_OFFSET = r"([+-])(\d\d):?(\d\d)$"
_WHOLE = r"^([+-]?\d+)\.0$"
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def as_categories(column: pa.ChunkedArray, *, strip: bool, missing: Sequence[str]) -> pa.DictionaryArray:
    """Strings or dictionary-encoded strings, trimmed of white space, each distinct one once; null where missing.

    Whole numbers are written without a fraction: ``3.0``, as pandas writes a column of numbers of which some are
    missing, is the ``3`` of another file.

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
    merged = pc.replace_substring_regex(tidy, pattern=_WHOLE, replacement=r"\1").dictionary_encode()
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


def plain_numbers(strings: pa.ChunkedArray, table: TableFormat) -> pa.ChunkedArray:
    """Numbers as a table writes them, written with a dot and without anything between thousands.

    >>> table = TableFormat(decimal=",", thousands=".")
    >>> plain_numbers(pa.chunked_array([["1.234,5", "12.34", None]]), table).to_pylist()
    ['1234.5', '12.34', None]
    """
    if table.thousands is not None:
        mark = re.escape(table.thousands)
        grouped = pc.match_substring_regex(strings, rf"^[+-]?\d{{1,3}}({mark}\d{{3}})+([^\d]|$)")
        without = pc.replace_substring(strings, pattern=table.thousands, replacement="")
        strings = pc.if_else(grouped, without, strings)
    if table.decimal != ".":
        strings = pc.replace_substring(strings, pattern=table.decimal, replacement=".")
    return strings


def parse_times(strings: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers, or times as seconds since 1970, NaN where there is none; and which rows are none of these.

    Times are ISO 8601, or have dates as ``2026/01/31`` or ``31.01.2026``. Fractions of seconds are dropped, and times
    without an offset are taken as UTC: enough to put rows in order.

    >>> parse_times(pa.array(["1970-01-02", "1970-01-01T00:01:01.5Z", None, "soon"]))[0].tolist()
    [86400.0, 61.0, nan, nan]
    >>> parse_times(pa.array(["1970-01-01T02:00:00+02:00", "02.01.1970 00:00", "1970/01/02"]))[0].tolist()
    [0.0, 86400.0, 86400.0]
    """
    numbers, bad = parse_numbers(strings)
    if not bad.any():
        return numbers, bad
    is_time = pc.match_substring_regex(strings, TIME)
    words = pc.replace_substring_regex(strings, pattern=r"(:\d\d)\.\d+", replacement=r"\1")
    words = pc.replace_substring_regex(words, pattern=r"( ?(Z|UTC)| ?[+-]\d\d:?\d\d)$", replacement="")
    words = pc.if_else(pc.match_substring(strings, ":"), words, strings)  # the end of a date alone is no offset
    words = pc.replace_substring(words, pattern="T", replacement=" ")
    times = pc.coalesce(*(pc.strptime(words, format=f, unit="s", error_is_null=True) for f in _TIME_FORMATS))
    seconds = np.asarray(pc.fill_null(times.cast(pa.int64()), 0)).astype(np.float64)
    if pc.any(pc.match_substring_regex(strings, rf":.*{_OFFSET}")).as_py():  # few tables have them
        seconds -= _offsets(strings)
    valid = np.asarray(times.is_valid()) & np.asarray(pc.fill_null(is_time, False))
    return np.where(valid, seconds, numbers), bad & ~valid


def fixed_time(text: str) -> float | None:
    """Seconds since 1970 of a time as :func:`parse_times` reads it; ``None`` for a number or a name.

    >>> fixed_time("1970-01-02"), fixed_time("86400"), fixed_time("born")
    (86400.0, None, None)
    """
    words = pa.array([text])
    (number,), _ = parse_numbers(words)
    (time,), (bad,) = parse_times(words)
    return None if bad or not np.isnan(number) else float(time)


def _offsets(strings: pa.Array | pa.ChunkedArray) -> NDArray[np.float64]:
    """Seconds by which times are ahead of UTC, by their ends; 0 where they do not say."""
    words = [str(word) if word is not None and ":" in word else "" for word in strings.to_pylist()]
    found = [re.search(_OFFSET, word) for word in words]
    ahead = [0 if x is None else (int(x[2]) * 60 + int(x[3])) * (-60 if x[1] == "-" else 60) for x in found]
    return np.array(ahead, dtype=np.float64)
