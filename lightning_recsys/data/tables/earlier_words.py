"""The words of earlier vocabularies by today's names.

In format 1 times, decimals and truths had other names; up to format 2 a number of a text was called as it was written.
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_recsys.data.tables.columns import NUMBER, plain_words
from lightning_recsys.data.tables.schema_parts import TableFormat
from lightning_recsys.data.tables.words import BETWEEN, as_words, float_words, tidy_words, truths_as_numbers

_DECIMAL = r"^(-?\d+\.\d\d+|-?\d(\.\d+)?E-\d+)?$"  # at least two digits: of one, the names are those of before
_WIDEST = 76  # digits of a decimal
_ZEROS = r"(\d\d:\d\d:\d\d\.\d{6})0+([+-]\d\d:?\d\d)$"  # of nanoseconds in a zone, which Python's times do not have


def present_words(
    words: pa.StringArray, *, words_format: int = 1, written: TableFormat | None = None
) -> pa.StringArray:
    r"""The name of each word of a vocabulary today; of a cross, the names of its parts.

    Decimals are told from texts such as prices by all of a vocabulary, whose words then have one number of digits.

    Args:
        words: All words of one vocabulary, in any order.
        words_format: The format of the vocabulary, which is an earlier one.
        written: How numbers were written in the texts that were learned from, if otherwise than they are called.

    >>> present_words(pa.array(["1.50", "3.00"])).to_pylist()
    ['1.5', '3']
    >>> present_words(pa.array(["true\x1f2026-01-31 12:00:00.000", "false\x1f"])).to_pylist()
    ['1\x1f2026-01-31 12:00:00', '0\x1f']
    >>> present_words(pa.array(["0,5", "3,0"]), words_format=2, written=TableFormat(decimal=",")).to_pylist()
    ['0.5', '3']
    """
    parts = pc.split_pattern(words, BETWEEN)
    widths = set(pc.unique(pc.list_value_length(parts)).to_pylist())
    if len(widths) != 1 or widths == {1}:
        return _present(words, words_format, written)
    flat, (width,) = pc.list_flatten(parts), widths
    places = [pa.array(np.arange(i, len(flat), width)) for i in range(width)]
    columns = [_present(flat.take(some), words_format, written) for some in places]
    return pc.binary_join_element_wise(*columns, BETWEEN)


def _present(words: pa.StringArray, words_format: int, written: TableFormat | None) -> pa.StringArray:
    if words_format < 2:
        words = _floats(_decimals(words))
        words = pc.replace_substring_regex(words, pattern=_ZEROS, replacement=r"\1\2")
        words = truths_as_numbers(tidy_words(words, strip=False, missing=[]))
    return words if written is None else tidy_words(plain_words(words, written), strip=False, missing=[])


def _decimals(words: pa.StringArray) -> pa.StringArray:
    """Those of a column of decimals; words of any other column stay as they are."""
    if not pc.all(pc.match_substring_regex(words, _DECIMAL)).as_py():
        return words
    numbers = [Decimal(word) if word else None for word in words.to_pylist()]
    scales = {-int(number.as_tuple().exponent) for number in numbers if number is not None}
    if len(scales) != 1:
        return words
    try:
        typed = pa.chunked_array([pa.array(numbers, pa.decimal256(_WIDEST, scales.pop()))])
    except (pa.ArrowInvalid, TypeError, ValueError):  # more digits than a decimal has
        return words
    return pc.coalesce(as_words(typed).combine_chunks(), words)


def _floats(words: pa.StringArray) -> pa.StringArray:
    """Those of a column of 64 bits whose numbers 32 bits hold."""
    candidates = pc.if_else(pc.match_substring_regex(words, NUMBER), words, pa.scalar(None, pa.string()))
    floats = pc.cast(candidates, pa.float64())
    same = pc.fill_null(pc.equal(pc.cast(floats, pa.string()), words), False)
    return pc.if_else(same, float_words(floats), words)
