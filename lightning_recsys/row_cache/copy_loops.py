"""What a worker asks itself about its copies of rows, as compiled loops over their clocks."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch_row
from lightning_recsys.optim.accumulating import CURRENT, START, UNSENT
from lightning_recsys.sync.clocks import advance, is_too_far


@compile_loop
def sort_copies(slots, is_new, in_training, clocks, marks, staleness, positions):  # noqa: ANN001, ANN201
    """Sort a batch's rows by what has to be asked for them; returns how many are to be fetched, checked, refreshed.

    Args:
        slots: Theirs, int64 ``[U]``.
        is_new: Which of the slots hold nothing yet, bool ``[U]``.
        in_training: Slots of copies that get another update before this batch reads them, int64 ``[W]``.
        clocks: Of all copies, int32 ``[C, 4]``.
        marks: For each slot a place to write to, bool ``[C]``; all ``False``, before and afterwards.
        staleness: How far a copy may be ahead of what was fetched, or ``NO_BOUND``.
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
        elif is_too_far(advance(clocks[slot, CURRENT], marks[slot]), clocks[slot, START], staleness):
            positions[2, refreshed] = u
            refreshed += 1
        else:
            positions[1, checked] = u
            checked += 1
    for slot in in_training:
        marks[slot] = False
    return fetched, checked, refreshed


@compile_loop
def find_outrun(slots, clocks, staleness, lags, is_outrun):  # noqa: ANN001, ANN201
    """Find copies that went too far ahead after they had been asked for; returns how many there are.

    A row that is as it was fetched is fit for use, even where its clock has come to its end.

    Args:
        slots: Of a batch's rows, int64 ``[U]``.
        clocks: Of all copies, int32 ``[C, 4]``.
        staleness: How far a copy may be ahead of what was fetched, or ``NO_BOUND``.
        lags: Result, int32 ``[U]``: by how much each copy is ahead of what was fetched.
        is_outrun: Result, bool ``[U]``.
    """
    count, last = 0, slots.shape[0] - 1
    for u in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(u + AHEAD, last)])
        start, current = clocks[slots[u], START], clocks[slots[u], CURRENT]
        lags[u] = current - start
        is_as_fetched = current == start and clocks[slots[u], UNSENT] == 0
        is_outrun[u] = not is_as_fetched and is_too_far(current, start, staleness)
        count += is_outrun[u]
    return count
