"""The order in which rows go: lists of slots, one for each count of uses, as compiled loops over arrays.

Lists are in ascending order of their count; within a list the slot whose last use is the longest ago comes first. LRU
is the case in which nothing is counted, so that there is one list. All steps take constant time, but for a row that
comes back with a count: it walks past the lists of lower counts, which are few, as it was dropped for its low count.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.loops import compile_inline, compile_loop

# Columns of the slots' array, int32 [S, 8]; two slots share a cache line.
PLANNED = 0  # number of the last plan that has the row
POSITION = 1  # the row's place among that plan's distinct rows
COUNT = 2  # uses, as far as the policy counts them
LIST = 3  # or NOWHERE
BEFORE, AFTER = 4, 5  # neighbours in the list, or NOWHERE
HELD = 6  # whether the slot holds a row
NEXT = 7  # the announced occurrence that uses the row next, or NOWHERE; a row that has one is in no list
SLOT_COLUMNS = 8

# Columns of the lists' array, int32 [S + 2, 5]. List 0 holds no slots: it closes the ring of lists.
OF_COUNT, FIRST, LAST, LOWER, HIGHER = range(5)
_RING = 0

NOWHERE = -1


def make_lists(num_slots: int) -> NDArray[np.int32]:
    """No slots in lists; there can be as many lists as slots, and one more while a slot moves."""
    lists = np.zeros((num_slots + 2, 5), dtype=np.int32)
    reset_lists(lists)
    return lists


def grow_lists(lists: NDArray[np.int32], extra: int) -> NDArray[np.int32]:
    """The same lists, with room for more slots."""
    size = lists.shape[0]
    grown = np.pad(lists, ((0, extra), (0, 0)))
    grown[size:, HIGHER] = np.arange(size + 1, size + extra + 1)
    grown[-1, HIGHER] = grown[_RING, LAST]
    grown[_RING, LAST] = size
    return grown


@compile_loop
def reset_lists(lists):  # noqa: ANN001, ANN201
    """Forget all lists. Free ones are chained by HIGHER, from LAST of the ring."""
    lists[_RING, LOWER] = lists[_RING, HIGHER] = _RING
    lists[_RING, LAST] = 1
    for i in range(1, lists.shape[0]):
        lists[i, HIGHER] = i + 1 if i + 1 < lists.shape[0] else NOWHERE


@compile_inline
def lowest_list(lists):  # noqa: ANN001, ANN201
    """The list of the lowest count, or NOWHERE."""
    return next_list(lists, _RING)


@compile_inline
def next_list(lists, at):  # noqa: ANN001, ANN201
    """The list of the next higher count, or NOWHERE."""
    higher = lists[at, HIGHER]
    return higher if higher != _RING else NOWHERE


@compile_inline
def _list_after(lists, lower, count):  # noqa: ANN001, ANN202
    """The list of a count that belongs right after the list ``lower``; made if it is not there."""
    higher = lists[lower, HIGHER]
    if higher != _RING and lists[higher, OF_COUNT] == count:
        return higher
    made = lists[_RING, LAST]
    lists[_RING, LAST] = lists[made, HIGHER]
    lists[made, OF_COUNT] = count
    lists[made, FIRST] = lists[made, LAST] = NOWHERE
    lists[made, LOWER], lists[made, HIGHER] = lower, higher
    lists[lower, HIGHER] = lists[higher, LOWER] = made
    return made


@compile_inline
def _append(slots, lists, slot, at):  # noqa: ANN001, ANN202
    last = lists[at, LAST]
    slots[slot, LIST], slots[slot, BEFORE], slots[slot, AFTER] = at, last, NOWHERE
    if last == NOWHERE:
        lists[at, FIRST] = slot
    else:
        slots[last, AFTER] = slot
    lists[at, LAST] = slot


@compile_inline
def _unlink(slots, lists, slot):  # noqa: ANN001, ANN202
    at, before, after = slots[slot, LIST], slots[slot, BEFORE], slots[slot, AFTER]
    if before == NOWHERE:
        lists[at, FIRST] = after
    else:
        slots[before, AFTER] = after
    if after == NOWHERE:
        lists[at, LAST] = before
    else:
        slots[after, BEFORE] = before


@compile_inline
def _drop_if_empty(lists, at):  # noqa: ANN001, ANN202
    if lists[at, FIRST] == NOWHERE:
        lower, higher = lists[at, LOWER], lists[at, HIGHER]
        lists[lower, HIGHER], lists[higher, LOWER] = higher, lower
        lists[at, HIGHER] = lists[_RING, LAST]
        lists[_RING, LAST] = at


@compile_inline
def add(slots, lists, slot, count, bound):  # noqa: ANN001, ANN201
    """Put a slot that is in no list where its count belongs; from ``bound`` on, into none."""
    slots[slot, COUNT] = count
    slots[slot, LIST] = NOWHERE
    if count < bound:
        lower = _RING
        while lists[lower, HIGHER] != _RING and lists[lists[lower, HIGHER], OF_COUNT] < count:
            lower = lists[lower, HIGHER]
        _append(slots, lists, slot, _list_after(lists, lower, count))


@compile_inline
def add_last(slots, lists, slot, count):  # noqa: ANN001, ANN201
    """Count as :func:`add` does where no slot exceeds the count yet."""
    slots[slot, COUNT] = count
    highest = lists[_RING, LOWER]
    if highest == _RING or lists[highest, OF_COUNT] != count:
        highest = _list_after(lists, highest, count)
    _append(slots, lists, slot, highest)


@compile_inline
def use(slots, lists, slot, step, bound):  # noqa: ANN001, ANN201
    """A slot was used: its count rises by ``step`` (0 or 1), and it becomes the last of its list."""
    at = slots[slot, LIST]
    if at == NOWHERE:
        return
    count = slots[slot, COUNT] + step
    slots[slot, COUNT] = count
    _unlink(slots, lists, slot)
    if count >= bound:
        slots[slot, LIST] = NOWHERE
    else:
        _append(slots, lists, slot, _list_after(lists, at, count) if step else at)
    if step:
        _drop_if_empty(lists, at)


@compile_inline
def remove(slots, lists, slot):  # noqa: ANN001, ANN201
    """Take a slot out of its list."""
    at = slots[slot, LIST]
    _unlink(slots, lists, slot)
    _drop_if_empty(lists, at)
    slots[slot, LIST] = NOWHERE
