"""The work of an exchange as compiled loops: add to rows, move their clocks, compare clocks.

Rows are written before their clocks and read after them: who runs beside it without a lock may take a row for older
than it is, never for newer.

A push that leaves a clock where it was sets its sign bit, and one that moves it takes that away. So a clock that is
still what somebody read, and has no such mark, says that no push came between.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from lightning_recsys.optim.compiled import AHEAD, compile_loop, prefetch_row

MAX_CLOCK = 2**31 - 1  # and what is left of a clock without its mark
_MARK = -(2**31)


def _replace_if(typing_context, array, position, expected, value):  # noqa: ANN001, ANN202
    """Set an element of a contiguous int32 array if it is as expected, in one indivisible step; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [arguments[1]])
        return builder.extract_value(builder.cmpxchg(place, arguments[2], arguments[3], "seq_cst", "seq_cst"), 0)

    return types.int32(array, types.intp, types.int32, types.int32), generate


_replace: Any = intrinsic(_replace_if)


@compile_loop
def add_rows(touched, amounts, array, sign):  # noqa: ANN001, ANN201
    """``array[touched] += sign * amounts``.

    Args:
        touched: Row numbers, int64 ``[P]``.
        amounts: Float32 ``[P, W]``.
        array: Float32 ``[R, W]``.
        sign: 1 or -1.
    """
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        prefetch_row(array, touched[min(i + AHEAD, last)])
        row = touched[i]
        for d in range(array.shape[1]):
            array[row, d] += sign * amounts[i, d]


@compile_loop
def move_clocks(touched, sent, clocks, by_sum, before):  # noqa: ANN001, ANN201
    """Let the clocks of rows hear of a push.

    Args:
        touched: Row numbers, int64 ``[P]``.
        sent: Int32 ``[P]``, at least 0.
        clocks: Of all rows, int32 ``[R]``.
        by_sum: Add what was sent; else take it where it is higher.
        before: Result, int32 ``[P]``: the clocks before, with their marks.
    """
    for i in range(touched.shape[0]):
        row = touched[i]
        found = clocks[row]
        while True:
            before[i] = found
            clock = found & MAX_CLOCK
            # It stops at its end rather than to start again from below.
            moved = clock + min(sent[i], MAX_CLOCK - clock) if by_sum else max(clock, sent[i])
            found = _replace(clocks, row, before[i], np.int32(moved if moved > clock else moved | _MARK))
            if found == before[i]:
                break


@compile_loop
def compare_clocks(checked, own, clocks, staleness, stale):  # noqa: ANN001, ANN201
    """Find copies that are older than they may be.

    Args:
        checked: Row numbers, int64 ``[C]``.
        own: Clocks of the copies, int32 ``[C]``.
        clocks: Of all rows, int32 ``[R, 1]``.
        staleness: How far a row's clock may be ahead of its copy's.
        stale: Result, bool ``[C]``.
    """
    last = checked.shape[0] - 1
    for i in range(checked.shape[0]):
        prefetch_row(clocks, checked[min(i + AHEAD, last)])
        stale[i] = np.int64(clocks[checked[i], 0] & MAX_CLOCK) - np.int64(own[i]) > staleness
