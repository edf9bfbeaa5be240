"""The choice of the largest elements, and what their rounding leaves."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from lightning_recsys.compiled.loops import compile_rule

_SIZE = np.uint32(0x7FFF_FFFF)  # the bits of a float without its sign
_UPPER, _HALF = np.uint32(16), np.uint32(0x7FFF)
_DIGIT_BITS, _DIGIT = 11, np.uint32((1 << 11) - 1)


@compile_rule
def take_largest(unsent, words, bits, values):  # noqa: ANN001, ANN201
    """Move the elements that are largest in size to ``values``, as bfloat16; what that rounds off stays.

    Args:
        unsent: Numbers that were not sent so far, float32 ``[N]``; what is taken is subtracted.
        words: The same memory as ``unsent``, read as uint32.
        bits: Result: a bit for each element, 1 where it was taken, the first element in the highest bit; all 0 at the
            start.
        values: Result: the upper halves of the rounded elements that were taken, uint16.
    """
    limit, of_limit = _limit(words, values.size)
    place = 0
    for i in range(words.size):
        size = words[i] & _SIZE
        if size > limit or (size == limit and of_limit > 0):
            if size == limit:
                of_limit -= 1
            bits[i >> 3] |= np.uint8(128) >> np.uint8(i & 7)
            value = unsent[i]
            rounded = (words[i] + _HALF + ((words[i] >> _UPPER) & np.uint32(1))) >> _UPPER  # to even where it is a tie
            values[place] = np.uint16(rounded)
            place += 1
            words[i] = rounded << _UPPER
            unsent[i] = value - unsent[i]


@compile_rule
def _limit(words, wanted):  # noqa: ANN001, ANN202
    """The size of the last of so many elements, counted from the largest, and how many of that size are taken.

    Positive floats are in the order of their bits. So the limit is found digit by digit, from how many of the elements
    that share its digits so far have each next one.
    """
    limit = np.uint32(0)
    counts = np.empty(1 << _DIGIT_BITS, dtype=np.int64)
    for first_bit, end_bit in ((21, 31), (10, 21), (0, 10)):
        shift, above = np.uint32(first_bit), np.uint32(end_bit)
        counts[:] = 0
        for i in range(words.size):
            size = words[i] & _SIZE
            if size >> above == limit >> above:
                counts[(size >> shift) & _DIGIT] += 1
        digit = counts.size - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        limit |= np.uint32(digit) << shift
    return limit, wanted
