"""The word for a value in a vocabulary, whichever type it has: the one function of files and of requests."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

TRUTHS = (("1", "true", "True", "TRUE"), ("0", "false", "False", "FALSE"))
"""How true and false are written: first as they are called here, then as texts may have them."""

BETWEEN = "\x1f"
"""The separator of a cross, between the words that it is made of."""

_WHOLE = r"^([+-]?\d+)\.0$"
_CLOCK = r"^(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d"
_ZONED = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,6})?[+-]\d\d:?\d\d$"
_T = r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)"
_FRACTION = rf"({_CLOCK})(?:\.0+|(\.\d*[1-9])0+)(Z?)$"
_EXACT_DIGITS = 15  # which every number of 64 bits keeps


def as_words(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as words: those of one number, time or truth are the same in every type that can hold it.

    Words stay as they are; true and false are 1 and 0; numbers are written without a fraction that says nothing; times
    with a zone in UTC. :func:`tidy_words` does the rest.

    Raises:
        pyarrow.ArrowNotImplementedError: the type is one of lists or structures.
        pyarrow.ArrowInvalid: bytes are no UTF-8.

    >>> [as_words(pa.chunked_array([[x]]))[0].as_py() for x in (True, 7, 0.5, 3.0, Decimal("1.50"), "1.50", b"a")]
    ['1', '7', '0.5', '3', '1.5', '1.50', 'a']
    """
    kind = values.type
    if pa.types.is_dictionary(kind):
        if pa.types.is_string(kind.value_type):
            return values
        # First words, then the rows: Arrow decodes dictionaries of few types.
        chunks = [
            pa.DictionaryArray.from_arrays(
                chunk.indices, as_words(pa.chunked_array([chunk.dictionary])).combine_chunks()
            )
            for chunk in values.chunks
        ]
        return pa.chunked_array([chunk.dictionary_decode() for chunk in chunks], pa.string())
    if pa.types.is_string(kind):
        return values
    make = next((make for is_a, make in _KINDS if is_a(kind)), _cast)
    return make(values)


def typed_array(values: Sequence[Any]) -> pa.Array:
    """Values of one type, as Python has them, as what a Parquet file could have as well.

    Raises:
        pyarrow.ArrowInvalid: they are of several types. ``pyarrow.ArrowTypeError`` may be raised, too.
    """
    try:
        return pa.array(values)
    except OverflowError:  # of ids of 64 bits without sign
        return pa.array([value if value is None else str(value) for value in values], pa.string())


def mixed_words(values: Sequence[Any], *, decimal: str = ".") -> list[Any]:
    """Each value as the text that it is in a column where all are of its kind; lists, which have none, as JSON.

    The items of such a list are texts as well, so that they are read back as what they are called in a column of lists.

    Args:
        values: Values as Python has them.
        decimal: What stands before the fraction of a number in texts of that column.

    Raises:
        TypeError: one is a mapping.

    >>> mixed_words([1e-05, 2.0, True, "a", None, 3, [0.5, True, None]])
    ['0.00001', '2', '1', 'a', None, '3', '["0.5", "1", null]']
    >>> mixed_words([0.5, "0,5"], decimal=",")
    ['0,5', '0,5']
    """
    words = list(values)
    for kind in set(map(type, values)) - {str, type(None)}:
        places = [place for place, value in enumerate(values) if type(value) is kind]
        some = [values[place] for place in places]
        if kind in (list, tuple):
            items = iter(mixed_words([item for value in some for item in value], decimal=decimal))
            found = [json.dumps(list(islice(items, len(value)))) for value in some]
        else:
            array = pa.chunked_array([typed_array(some)])
            if pa.types.is_nested(array.type):
                raise TypeError("they are nested")
            found = as_words(array).to_pylist()
            if issubclass(kind, float | Decimal):
                found = [word.replace(".", decimal) for word in found]
        for place, word in zip(places, found, strict=True):
            words[place] = word
    return words


def tidy_words(words: pa.StringArray, *, strip: bool, missing: Sequence[str]) -> pa.StringArray:
    """Words without white space around them, null where they stand for a missing value.

    Whole numbers lose a fraction of 0 (``3.0``, as pandas writes a column of numbers of which some are missing, is the
    ``3`` of another file), and times the ``T`` before the clock and a fraction that says nothing; those with an offset
    are in UTC, which is ``Z``.

    >>> words = pa.array([" a", "?", "3.0", "2026-01-31T12:00:00.500000+01:00"])
    >>> tidy_words(words, strip=True, missing=["?"]).to_pylist()
    ['a', None, '3', '2026-01-31 11:00:00.5Z']
    """
    words = present(pc.utf8_trim_whitespace(words) if strip else words, missing)
    if pc.any(pc.ends_with(words, ".0")).as_py():  # patterns are dear, and few columns have such words
        words = pc.replace_substring_regex(words, pattern=_WHOLE, replacement=r"\1")
    if pc.any(pc.match_substring_regex(words, _CLOCK)).as_py():
        if pc.any(zoned := pc.match_substring_regex(words, _ZONED)).as_py():
            moved = [_in_utc(word) for word in words.filter(zoned).to_pylist()]
            words = pc.replace_with_mask(words, pc.fill_null(zoned, False), pa.array(moved, pa.string()))
        for pattern, replacement in ((_T, r"\1 \2"), (_FRACTION, r"\1\2\3")):
            words = pc.replace_substring_regex(words, pattern=pattern, replacement=replacement)
    return words


def present(words: pa.Array | pa.ChunkedArray, missing: Sequence[str]) -> pa.Array | pa.ChunkedArray:
    """Words, null where they stand for a missing value: a whole number does with and without a fraction of 0.

    >>> present(pa.array(["-999.0", "-999", "?", "0"]), ["?", "-999"]).to_pylist()
    [None, None, None, '0']
    """
    whole = [re.sub(_WHOLE, r"\1", word) for word in missing]
    spelled = [*missing, *whole, *(f"{word}.0" for word in whole if word.lstrip("+-").isdecimal())]
    stand_for_one = pc.is_in(words, value_set=pa.array(spelled, pa.string()))
    return pc.if_else(stand_for_one, pa.scalar(None, pa.string()), words)


def truths_as_numbers(words: pa.Array) -> pa.Array:
    """Words, where texts of true and false are 1 and 0: for ids that are made without a look into a vocabulary.

    >>> truths_as_numbers(pa.array(["True", "false", "truth", None])).to_pylist()
    ['1', '0', 'truth', None]
    """
    for number, *texts in TRUTHS:
        if pc.any(found := pc.is_in(words, value_set=pa.array(texts).cast(words.type))).as_py():
            words = pc.if_else(found, pa.scalar(number, pa.string()).cast(words.type), words)
    return words


def _in_utc(word: str) -> str:
    """A time with an offset as the same time in UTC; a word that is none stays as it is."""
    try:
        return dt.datetime.fromisoformat(word).astimezone(dt.UTC).isoformat(sep=" ").replace("+00:00", "Z")
    except (ValueError, OverflowError):
        return word


def float_words(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floating-point numbers as words, whole ones as integers: ids that pandas holds so because some are missing.

    A number that 32 bits hold has the digits that it has there: 0.1 of a column of 32 bits is 0.10000000149011612 to
    whoever reads it in 64. What becomes of a number does not depend on those beside it.

    >>> float_words(pa.chunked_array([[1e16, None, 0.5, 0.1, 0.10000000149011612]])).to_pylist()
    ['10000000000000000', None, '0.5', '0.1', '0.1']
    """
    floats = pc.cast(values, pa.float64())
    whole = pc.and_(pc.less(pc.abs(floats), 2.0**63), pc.equal(pc.trunc(floats), floats))
    integers = pc.cast(pc.if_else(whole, floats, 0.0), pa.int64(), safe=False)
    narrow = pc.cast(floats, pa.float32(), safe=False)
    fits = pc.equal(pc.cast(narrow, pa.float64()), floats)
    words = pc.if_else(fits, pc.cast(narrow, pa.string()), pc.cast(floats, pa.string()))
    return pc.if_else(whole, pc.cast(integers, pa.string()), words)


def _decimal_words(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The number in floating point, where that has all digits; else with all of them, but for zeros at the end."""
    written = pc.cast(values, pa.string())
    floats = pc.cast(written, pa.float64())
    short = pc.less(pc.abs(floats), 10.0 ** (_EXACT_DIGITS - values.type.scale))
    words = pc.replace_substring_regex(written, pattern=r"(\.\d*?)0+$", replacement=r"\1")
    words = pc.replace_substring_regex(words, pattern=r"\.$", replacement="")
    return pc.if_else(short, float_words(floats), words)


def _timestamp_words(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if values.type.tz is not None:
        values = pc.cast(values, pa.timestamp(values.type.unit, tz="UTC"))
    return _cast(values)


def _bool_words(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(values, "1", "0")


def _cast(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(values, pa.string())


# What the values of a type are called; those of other types are what Arrow writes for them.
_KINDS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.ChunkedArray], pa.ChunkedArray]], ...] = (
    (pa.types.is_boolean, _bool_words),
    (pa.types.is_floating, float_words),
    (pa.types.is_decimal, _decimal_words),
    (pa.types.is_timestamp, _timestamp_words),
)
