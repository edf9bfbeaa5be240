"""Words into numbers, times and bags: whole columns at a time."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.tables.schema_parts import TableFormat
from lightning_recsys.data.tables.words import present, tidy_words

_YEAR_FIRST = r"(?P<y1>\d{4})[-/](?P<m1>\d\d?)[-/](?P<d1>\d\d?)"
_DOTS = r"(?P<d2>\d\d?)\.(?P<m2>\d\d?)\.(?P<y2>\d{4})"
_SLASHES = {
    "day_first": r"(?P<d3>\d\d?)[-/](?P<m3>\d\d?)[-/](?P<y3>\d{4})",
    "month_first": r"(?P<m3>\d\d?)[-/](?P<d3>\d\d?)[-/](?P<y3>\d{4})",
}
_CLOCK = (
    r"(?:[ T]+(?P<hour>\d\d?):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.(?P<fraction>\d{1,6})\d*)?)?"
    r"(?: ?(?P<half>[AaPp])[Mm])?"
    r"(?: ?(?:Z|UTC|(?P<sign>[+-])(?P<hours>\d\d):?(?P<minutes>\d\d)))?)?"
)
_LISTED = r"^\s*(?:\[[^\x00]*\]|\(\s*['\"][^\x00]*['\"]\s*,?\s*\))\s*$"  # in brackets; those of tuples with quotes
_ITEM = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|([^\s,'"][^,]*)""")
_NO_ITEM = ("None", "null", "nan", "NaN")
GROUPED_BY_DOTS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+$"  # a fraction, unless dots stand between thousands
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def as_categories(
    column: pa.ChunkedArray, *, strip: bool, missing: Sequence[str], written: TableFormat | None = None
) -> pa.DictionaryArray:
    """Strings or dictionary-encoded strings, trimmed of white space, each distinct one once; null where missing.

    They are tidied by :func:`~lightning_recsys.data.tables.words.tidy_words`.

    Args:
        column: Texts as a file has them, null where there is none.
        strip: Whether they are trimmed.
        missing: Those that stand for a missing value.
        written: How numbers among them are written, if they are texts of a table.

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
    if written is not None and has_marks(written):
        raw = plain_words(present(pc.utf8_trim_whitespace(raw) if strip else raw, missing), written)
    indices = pa.concat_arrays([chunk.indices for chunk in column.chunks]).cast(pa.int32())
    merged = tidy_words(raw, strip=strip, missing=missing).dictionary_encode()
    return pa.DictionaryArray.from_arrays(merged.indices.take(indices), merged.dictionary)


def split_lists(texts: pa.StringArray, separator: str) -> pa.ListArray:
    """The items of texts that hold lists: between separators, or as Python, pandas, NumPy and JSON write a list.

    Of the latter, brackets and quotes are no part of an item, a separator in quotes is, and what stands for no item
    without quotes (``None``, ``nan``) is none. Without quotes and the separator, commas part items. Brackets around
    each item belong to the items, and so do those around a single word, unless commas or spaces are the separator.

    >>> split_lists(pa.array(["a|b", "['a', 'b|c', None]", '["d"]', "[1, 2]", None]), "|").to_pylist()
    [['a', 'b'], ['a', 'b|c'], ['d'], ['1', '2'], None]
    >>> split_lists(pa.array(["[a]|[b]", "[a]", "['[a]', 'b']"]), "|").to_pylist()
    [['[a]', '[b]'], ['[a]'], ['[a]', 'b']]
    """
    lists = pc.split_pattern(texts, separator)
    written = are_lists(texts)
    if not pc.any(written).as_py():
        return lists
    items = pa.array([_items(text, separator) for text in texts.filter(written).to_pylist()], pa.list_(pa.string()))
    places = np.arange(len(texts))
    places[np.asarray(written)] = len(texts) + np.arange(len(items))
    return pa.concat_arrays([lists, items]).take(pa.array(places))


def are_lists(texts: pa.StringArray) -> pa.BooleanArray:
    """Which texts are one list in brackets each: within it such brackets stand in quotes only.

    >>> are_lists(pa.array(["[a, b]", "['a]', 'b']", "('a', 'b')", "[a]|[b]", "(a)", None])).to_pylist()
    [True, True, True, False, False, False]
    """
    listed = pc.fill_null(pc.match_substring_regex(texts, _LISTED), False)
    if not pc.any(listed).as_py():
        return listed
    whole = [_is_one_list(text.strip()) for text in texts.filter(listed).to_pylist()]
    return pc.replace_with_mask(listed, listed, pa.array(whole))


def _is_one_list(text: str) -> bool:
    plain = "".join(item for _, item in _ITEM.findall(text[1:-1]))
    return text[0] not in plain and text[-1] not in plain


def _items(text: str, separator: str) -> list[str]:
    """The items of a list in brackets."""
    inner = text.strip()[1:-1]
    if not re.search(r"(^|[\s,])['\"]", inner):
        items = [item.strip() for item in inner.split(separator if separator in inner else ",")]
        is_word = len(items) == 1 and not re.fullmatch(NUMBER, items[0]) and items[0] not in ("", *_NO_ITEM)
        return [text] if is_word and separator not in (",", " ") else [item for item in items if item not in _NO_ITEM]
    found = ((quoted, plain.strip()) for quoted, plain in _ITEM.findall(inner))
    return [_unquoted(quoted) if quoted else plain for quoted, plain in found if plain not in _NO_ITEM]


def _unquoted(item: str) -> str:
    """An item without its quotes, and without backslashes, as JSON or else Python reads it."""
    for read in (json.loads, ast.literal_eval) if "\\" in item else ():
        with suppress(ValueError, SyntaxError):
            return str(read(item))
    return item[1:-1]


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


def has_marks(table: TableFormat) -> bool:
    """Whether a table writes numbers in another way than with a dot before the fraction alone."""
    return table.decimal != "." or table.thousands is not None


def plain_words(words: pa.StringArray, table: TableFormat) -> pa.StringArray:
    """Words, of which those that are numbers are written as :func:`plain_numbers` writes them.

    >>> table = TableFormat(decimal=",", thousands=".")
    >>> plain_words(pa.array(["0,5", "1.234,50", "a,5", "12.34", None]), table).to_pylist()
    ['0.5', '1234.50', 'a,5', '12.34', None]
    """
    mark, point = re.escape(table.thousands or ""), re.escape(table.decimal)
    whole = rf"(\d+|\d{{1,3}}({mark}\d{{3}})+)" if mark else r"\d+"
    numbers = pc.match_substring_regex(words, rf"^[+-]?{whole}({point}\d+)?$")
    return pc.if_else(numbers, plain_numbers(words, table), words)


def parse_times(
    strings: pa.Array | pa.ChunkedArray, *, dates: Literal["day_first", "month_first"] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers, or times as seconds since 1970, NaN where there is none; and which rows are none of these.

    Times are ISO 8601, or have dates as ``2026/01/31`` or ``31.01.2026``; the clock has 24 hours, or AM and PM.
    Times without an offset are taken as UTC.

    Args:
        strings: One time a row, as a file has it without white space around it; null where it is missing.
        dates: How to read ``01/02/2026`` and ``01-02-2026``; they are no times if absent.

    >>> parse_times(pa.array(["1970-01-02", "1970-01-01T00:01:01.5Z", None, "soon"]))[0].tolist()
    [86400.0, 61.5, nan, nan]
    >>> parse_times(pa.array(["1970-01-01T02:00:00+02:00", "02.01.1970 00:00", "1970/01/02"]))[0].tolist()
    [0.0, 86400.0, 86400.0]
    >>> parse_times(pa.array(["02/01/1970 1:00 PM"]), dates="day_first")[0].tolist()
    [133200.0]
    """
    numbers, bad = parse_numbers(strings)
    if not bad.any():
        return numbers, bad
    forms = [_YEAR_FIRST, _DOTS, *([] if dates is None else [_SLASHES[dates]])]
    found = pc.extract_regex(strings, pattern=f"^(?:{'|'.join(forms)}){_CLOCK}$")
    day, month, year = (
        pc.binary_join_element_wise(*(pc.struct_field(found, f"{part}{i}") for i in range(1, len(forms) + 1)), "")
        for part in "dmy"
    )
    midnight = pc.strptime(
        pc.binary_join_element_wise(year, month, day, "-"), format="%Y-%m-%d", unit="s", error_is_null=True
    )

    def number(part: str, *, width: int = 1) -> NDArray[np.int64]:
        digits = pc.utf8_rpad(pc.struct_field(found, part), width, "0")
        return np.asarray(pc.fill_null(pc.cast(digits, pa.int64()), 0))

    def letter(part: str, *letters: str) -> NDArray[np.bool_]:
        return np.asarray(pc.fill_null(pc.is_in(pc.struct_field(found, part), value_set=pa.array(letters)), False))

    hour, minute, second = number("hour"), number("minute"), number("second")
    hour = np.where(letter("half", "P", "p"), hour % 12 + 12, np.where(letter("half", "A", "a"), hour % 12, hour))
    ahead = np.where(letter("sign", "-"), -1, 1) * (number("hours") * 60 + number("minutes"))
    seconds = np.asarray(pc.fill_null(midnight.cast(pa.int64()), 0)) + (hour * 60 + minute - ahead) * 60 + second
    days = pc.cast(pc.if_else(midnight.is_valid(), day, pa.scalar(None, day.type)), pa.int64())
    exists = np.asarray(pc.fill_null(pc.equal(pc.day(midnight), days), False))  # 31 February is parsed as 3 March
    valid = exists & (hour < 24) & (minute < 60) & (second <= 60)
    microseconds = seconds * 1_000_000 + number("fraction", width=6)
    return np.where(valid, microseconds / 1e6, numbers), bad & ~valid


def date_numbers(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds since 1970 of dates that are written as numbers, such as 20260131; NaN where a number is no such date.

    Dates are of the years 1900 to 2100.

    >>> date_numbers(np.array([19700102.0, 20260231.0, 86400.0, np.nan])).tolist()
    [86400.0, nan, nan, nan]
    """
    plausible = (numbers >= 1900_01_01) & (numbers <= 2100_12_31) & (np.floor(numbers) == numbers)
    whole = np.where(plausible, numbers, 0).astype(np.int64)
    year, month, day = whole // 10_000, whole // 100 % 100, whole % 100
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    dates = months.astype("datetime64[D]") + (day - 1)
    exists = plausible & (month >= 1) & (month <= 12) & (day >= 1) & (dates.astype("datetime64[M]") == months)
    return np.where(exists, dates.astype(np.int64) * 86400.0, np.nan)


def fixed_time(text: str) -> float | None:
    """Seconds since 1970 of a time as :func:`parse_times` reads it; ``None`` for a number or a name.

    >>> fixed_time("1970-01-02"), fixed_time("86400"), fixed_time("born")
    (86400.0, None, None)
    """
    words = pa.array([text])
    (number,), _ = parse_numbers(words)
    (time,), (bad,) = parse_times(words)
    return None if bad or not np.isnan(number) else float(time)
