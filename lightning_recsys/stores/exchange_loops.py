"""The work of an exchange as compiled loops: add to rows, move their clocks, compare clocks; or all at once.

Rows are written before their clocks and read after them: who runs beside it without a lock may take a row for older
than it is, never for newer. What a push makes of a clock, and when a copy is too old, is for
:mod:`lightning_recsys.sync.clocks` to say.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from lightning_recsys.compiled.bfloat16 import noise_of, number_at, put_number
from lightning_recsys.compiled.loops import AHEAD, SOON, compile_inline, compile_loop, prefetch_row
from lightning_recsys.compiled.vectors import copy_floats
from lightning_recsys.optim.accumulating import CURRENT, HELD, START, UNSENT
from lightning_recsys.sync.clocks import hear, is_too_far


def _replace_if(typing_context, array, position, expected, value):  # noqa: ANN001, ANN202
    """Set an element of a contiguous int32 array if it is as expected, in one indivisible step; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [arguments[1]])
        return builder.extract_value(builder.cmpxchg(place, arguments[2], arguments[3], "seq_cst", "seq_cst"), 0)

    return types.int32(array, types.intp, types.int32, types.int32), generate


_replace: Any = intrinsic(_replace_if)


def _read_before(typing_context, array, position):  # noqa: ANN001, ANN202
    """An element of a contiguous int32 array, read before all that is read later."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(data, [arguments[1]]), "acquire", 4)

    return types.int32(array, types.intp), generate


_read: Any = intrinsic(_read_before)


@compile_loop
def _move_clock(clocks, row, sent, by_sum):  # noqa: ANN001, ANN202
    """Let a clock hear of a push, in one indivisible step: other processes may push the same row at this moment."""
    found = clocks[row, 0]
    while True:
        before = found
        found = _replace(clocks, row, before, hear(before, sent, by_sum))
        if found == before:
            return


@compile_inline
def _number_of(clocks, row, sent):  # noqa: ANN001, ANN202
    """A number for a push of a row, which the next one that changes it does not have: it finds another clock."""
    return (np.int64(clocks[row, 0]) << 32) + np.int64(sent)


@compile_loop
def add_rows(touched, amounts, array, sign, clocks, sent):  # noqa: ANN001, ANN201
    """``array[touched] += sign * amounts``.

    Args:
        touched: Row numbers, int64 ``[P]``.
        amounts: Float32 ``[P, W]``.
        array: ``[R, W]``, float32 or bfloat16's bits; the latter are rounded by the rows' clocks.
        sign: 1 or -1.
        clocks: Clocks of all rows before the push, int32 ``[R, 1]``.
        sent: What the push tells of each row's clock, int32 ``[P]``.
    """
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        prefetch_row(array, touched[min(i + AHEAD, last)])
        row = touched[i]
        noise = noise_of(array, row, _number_of(clocks, row, sent[i]))
        for d in range(array.shape[1]):
            put_number(array, row, d, number_at(array, row, d) + sign * amounts[i, d], noise)


@compile_loop
def move_clocks(touched, sent, clocks, by_sum):  # noqa: ANN001, ANN201
    """Let the clocks of rows hear of a push.

    Args:
        touched: Row numbers, int64 ``[P]``.
        sent: What the push tells of each row's clock, int32 ``[P]``, at least 0.
        clocks: Clocks of all rows, int32 ``[R, 1]``; written to.
        by_sum: Add what was sent; else take it where it is higher.
    """
    for i in range(touched.shape[0]):
        _move_clock(clocks, touched[i], sent[i], by_sum)


@compile_loop
def compare_clocks(checked, own, clocks, staleness, stale):  # noqa: ANN001, ANN201
    """Find copies that are older than they may be.

    Args:
        checked: Row numbers, int64 ``[C]``.
        own: Clocks of the copies, int32 ``[C]``.
        clocks: Clocks of all rows, int32 ``[R, 1]``.
        staleness: How far a row's clock may be ahead of its copy's; ``NO_BOUND`` where it may be any.
        stale: Result, bool ``[C]``: whether each copy is too old.
    """
    last = checked.shape[0] - 1
    for i in range(checked.shape[0]):
        prefetch_row(clocks, checked[min(i + AHEAD, last)])
        stale[i] = is_too_far(clocks[checked[i], 0], own[i], staleness)


# What is counted of exchanges that happen at once, in an int64 [8].
FETCHED = 0  # rows that were not here
CHECKED = 1  # copies whose clocks were compared
STALE = 2  # those that were too old
AHEAD_OF_START = 3  # copies with too many updates since they were fetched
PUSHED = 4  # rows that took updates
RETURNED = 5  # rows that came back for copies that were too far ahead, or too old
EXCHANGES = 6  # messages that would have said it
MISSED = 7  # the most updates of others that a copy lacked and was fit for use, where clocks count every update
NUM_COUNTS = 8


@compile_loop
def _push(slot, row, copies, own_clocks, stored, clocks, by_sum):  # noqa: ANN001, ANN202
    """Bring what a copy owes to its row, if it owes anything; returns whether it did."""
    if not own_clocks[slot, UNSENT]:
        return False
    _, _, owed, owed_state = copies
    rows, state = stored
    sent = own_clocks[slot, UNSENT] if by_sum else own_clocks[slot, CURRENT]
    noise = noise_of(rows, row, _number_of(clocks, row, sent))
    for d in range(rows.shape[1]):
        put_number(rows, row, d, number_at(rows, row, d) - owed[slot, d], noise)
    for d in range(state.shape[1]):
        state[row, d] += owed_state[slot, d]
    # The clock moves last: whoever sees it moved sees the update as well.
    _move_clock(clocks, row, sent, by_sum)
    own_clocks[slot, UNSENT] = 0
    return True


@compile_loop
def push_copies(slots, touched, copies, own_clocks, stored, clocks, by_sum, leave, counts):  # noqa: ANN001, ANN201
    """Bring what copies owe to their rows; the arguments are those of :func:`update_copies_for`.

    ``leave`` says that their slots hold nothing from then on.
    """
    last = slots.shape[0] - 1
    for i in range(slots.shape[0]):
        prefetch_row(own_clocks, slots[min(i + AHEAD, last)])
        soon = min(i + SOON, last)
        if own_clocks[slots[soon], UNSENT]:
            prefetch_row(clocks, touched[soon])
            prefetch_row(stored[0], touched[soon])
            prefetch_row(copies[2], slots[soon])
        counts[PUSHED] += _push(slots[i], touched[i], copies, own_clocks, stored, clocks, by_sum)
        own_clocks[slots[i], HELD] &= not leave


@cache
def update_copies_for(dim: int) -> Callable[..., None]:
    """A loop that makes a batch's copies of rows of width ``dim`` fit for use, with the rows in the same memory.

    Rows that are new here come. Copies that are too far ahead or behind push what they owe, and come again.

    Its arguments:
        slots: Of the copies, int64 ``[U]``.
        touched: The rows that they are copies of, int64 ``[U]``.
        copies: Float32 ``[C, D]``, their state ``[C, W]``, and what they owe of both.
        own_clocks: Of the copies, int32 ``[C, 4]``.
        stored: The rows, float32 or bfloat16's bits ``[R, D]``, and their state ``[R, W]``.
        clocks: The rows', int32 ``[R, 1]``.
        staleness: How far ahead or behind a copy may be, or ``NO_BOUND``.
        by_sum: How pushes move clocks, as in :func:`move_clocks`.
        lags: Result, int32 ``[U]``: by how much each copy is ahead of what was fetched.
        counts: Grows by what was done, int64 ``[8]``.
    """

    @compile_loop
    def update_copies(slots, touched, copies, own_clocks, stored, clocks, staleness, by_sum, lags, counts):  # noqa: ANN001, ANN202
        copied_rows, copied_state, _, _ = copies
        rows, state = stored
        last = slots.shape[0] - 1
        fetched, checked, stale = counts[FETCHED], counts[CHECKED], counts[STALE]
        for u in range(slots.shape[0]):
            coming, soon = min(u + AHEAD, last), min(u + SOON, last)
            prefetch_row(own_clocks, slots[coming])
            prefetch_row(clocks, touched[coming])
            if not own_clocks[slots[soon], HELD]:
                prefetch_row(rows, touched[soon])
                prefetch_row(copied_rows, slots[soon])
            slot, row = slots[u], touched[u]
            if not own_clocks[slot, HELD]:
                counts[FETCHED] += 1
                own_clocks[slot, HELD] = 1
            else:
                current, start = own_clocks[slot, CURRENT], own_clocks[slot, START]
                lags[u] = current - start
                is_ahead = is_too_far(current, start, staleness)
                counts[CHECKED] += staleness >= 0 and not is_ahead
                found = clocks[row, 0]
                if not is_ahead and not is_too_far(found, current, staleness):
                    missed = found - current + own_clocks[slot, UNSENT]
                    counts[MISSED] = max(counts[MISSED], missed)
                    continue
                counts[AHEAD_OF_START if is_ahead else STALE] += 1
                counts[PUSHED] += _push(slot, row, copies, own_clocks, stored, clocks, by_sum)
                counts[RETURNED] += 1
            # The clock is read before the row, so that the row has at least the updates that the clock counts.
            clock = _read(clocks, row)
            own_clocks[slot, START], own_clocks[slot, CURRENT], lags[u] = clock, clock, 0
            copy_floats(copied_rows, slot * dim, rows, row * dim, dim)
            for d in range(state.shape[1]):
                copied_state[slot, d] = state[row, d]
        counts[EXCHANGES] += (counts[FETCHED] > fetched or counts[CHECKED] > checked) + (counts[STALE] > stale)

    return cast(Callable[..., None], update_copies)
