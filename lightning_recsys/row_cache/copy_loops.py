"""What a worker asks itself about its copies of rows, as compiled loops over their clocks.

The rules are those of :class:`~lightning_recsys.sync.ClockRule`, on a quarter of the passes over memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch_row
from lightning_recsys.optim.accumulating import CURRENT, START
from lightning_recsys.sync.clocks import MAX_CLOCK


@compile_loop
def sort_copies(slots, is_new, in_training, clocks, marks, staleness, positions):  # noqa: ANN001, ANN201
    """Sort a batch's rows by what has to be asked for them; returns how many are to be fetched, checked, refreshed.

    Args:
        slots: Theirs, int64 ``[U]``.
        is_new: Which of the slots hold nothing yet, bool ``[U]``.
        in_training: Slots of copies that get another update before this batch reads them, int64 ``[W]``.
        clocks: Of all copies, int32 ``[C, 4]``.
        marks: For each slot a place to write to, bool ``[C]``; all ``False``, before and afterwards.
        staleness: How far a copy may be ahead of what was fetched.
        positions: Result, int64 ``[3, U]``: positions of those to fetch, to check and to refresh.
    """
    for slot in in_training:
        marks[slot] = True
    fetched, checked, refreshed, last = 0, 0, 0, slots.shape[0] - 1
    for u in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(u + AHEAD, last)])
        slot = slots[u]
        if is_new[u]:
            positions[0, fetched] = u
            fetched += 1
        elif (
            clocks[slot, CURRENT] - clocks[slot, START] + marks[slot] > staleness or clocks[slot, CURRENT] == MAX_CLOCK
        ):
            positions[2, refreshed] = u
            refreshed += 1
        else:
            positions[1, checked] = u
            checked += 1
    for slot in in_training:
        marks[slot] = False
    return fetched, checked, refreshed


@compile_loop
def measure_lags(slots, clocks, lags):  # noqa: ANN001, ANN201
    """By how much copies are ahead of what was fetched, into int32 ``[U]``; returns the largest, and at least 0."""
    largest, last = 0, slots.shape[0] - 1
    for u in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(u + AHEAD, last)])
        lags[u] = clocks[slots[u], CURRENT] - clocks[slots[u], START]
        largest = max(largest, lags[u])
    return largest
