"""Loops over a worker's copies of rows: their clocks, what they owe, and the gradients of a batch's rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: B batch, F features, N ids, U distinct rows, C slots, D dim.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np

from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch_row
from lightning_recsys.compiled.vectors import add_floats, vector_width
from lightning_recsys.optim.accumulating import CURRENT, START, UNSENT
from lightning_recsys.sync.clocks import advance, is_too_far


@cache
def sum_by_position_for(dim: int) -> Callable[..., None]:
    """A loop that sums gradients of width ``dim`` by the position of their rows."""
    width = vector_width(dim)

    @compile_loop
    def sum_by_position(distinct_N, offsets, weights, grad_BFD, sums_UD):  # noqa: ANN001, ANN202
        batch_size, num_features = grad_BFD.shape[0], grad_BFD.shape[1]
        last_id = distinct_N.shape[0] - 1
        sums_UD[:] = np.float32(0)
        for f in range(num_features):
            for b in range(batch_size):
                bag, source = f * batch_size + b, (b * num_features + f) * dim
                first, end = bag, bag + 1
                if offsets.shape[0]:
                    first, end = offsets[bag], offsets[bag + 1]
                for position in range(first, end):
                    prefetch_row(sums_UD, distinct_N[min(position + AHEAD, last_id)])
                    target = distinct_N[position] * dim
                    weight = weights[position] if weights.shape[0] else np.float32(1)
                    for d in range(0, dim, width):
                        add_floats(sums_UD, target + d, grad_BFD, source + d, weight, width)

    return cast(Callable[..., None], sum_by_position)


@compile_loop
def set_clocks(slots, fetched, clocks):  # noqa: ANN001, ANN201
    """Rows were fetched at these clocks; returns whether updates have been made here meanwhile."""
    has_updates = False
    for i in range(slots.shape[0]):
        slot, unsent = slots[i], clocks[slots[i], UNSENT]
        clocks[slot, START], clocks[slot, CURRENT] = fetched[i], advance(fetched[i], unsent)
        has_updates |= unsent > 0
    return has_updates


@compile_loop
def take_unsent(slots, clocks, taken, current, unsent):  # noqa: ANN001, ANN201
    """Let slots owe nothing; fills those that did, and their clocks, and returns how many."""
    count, last = 0, slots.shape[0] - 1
    for i in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(i + AHEAD, last)])
        slot = slots[i]
        if clocks[slot, UNSENT] > 0:
            taken[count], current[count], unsent[count] = slot, clocks[slot, CURRENT], clocks[slot, UNSENT]
            clocks[slot, UNSENT] = 0
            count += 1
    return count


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
    """Find copies that went too far ahead after they had been asked for.

    A row that is as it was fetched is fit for use, even where its clock has come to its end.

    Args:
        slots: Of a batch's rows, int64 ``[U]``.
        clocks: Of all copies, int32 ``[C, 4]``.
        staleness: How far a copy may be ahead of what was fetched, or ``NO_BOUND``.
        lags: Result, int32 ``[U]``: by how much each copy is ahead of what was fetched.
        is_outrun: Result, bool ``[U]``.
    """
    last = slots.shape[0] - 1
    for u in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(u + AHEAD, last)])
        start, current = clocks[slots[u], START], clocks[slots[u], CURRENT]
        lags[u] = current - start
        is_as_fetched = current == start and clocks[slots[u], UNSENT] == 0
        is_outrun[u] = not is_as_fetched and is_too_far(current, start, staleness)
