"""The work of an exchange as compiled loops: add to rows, move their clocks, compare clocks.

Rows are written before their clocks and read after them: who runs beside it without a lock may take a row for older
than it is, never for newer.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from lightning_recsys.optim.compiled import AHEAD, compile_loop, prefetch_row

_MAX_CLOCK = np.int32(2**31 - 1)


def _atomic(operation: str) -> Any:
    """Do ``operation`` on an element of a contiguous int32 array in one indivisible step; returns what it was."""

    def call(typing_context, array, position, amount):  # noqa: ANN001, ANN202
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.atomic_rmw(operation, builder.gep(data, [arguments[1]]), arguments[2], "seq_cst")

        return types.int32(array, types.intp, types.int32), generate

    return intrinsic(call)


_atomic_max, _atomic_add = _atomic("max"), _atomic("add")


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
def move_clocks(touched, sent, clocks, by_sum):  # noqa: ANN001, ANN201
    """Let the clocks of rows hear of a push.

    Args:
        touched: Row numbers, int64 ``[P]``.
        sent: Int32 ``[P]``, at least 0.
        clocks: Of all rows, int32 ``[R]``.
        by_sum: Add what was sent; else take it where it is higher.
    """
    for i in range(touched.shape[0]):
        row = touched[i]
        if not by_sum:
            _atomic_max(clocks, row, sent[i])
        elif sent[i] > _MAX_CLOCK - _atomic_add(clocks, row, sent[i]):
            clocks[row] = _MAX_CLOCK  # it stops rather than to start again from below


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
        stale[i] = np.int64(clocks[checked[i], 0]) - np.int64(own[i]) > staleness
