"""Which rows a cache holds, where, and which of them go when it is full."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: N ids of a batch, U distinct ones, V victims, S slots.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled import hash_table as key_table
from lightning_recsys.compiled.hash_table import (
    EMPTY,
    find,
    home,
    key_at,
    make_array,
    make_like,
    make_table,
    prefetch_cell,
    put,
    value_at,
)
from lightning_recsys.compiled.loops import AHEAD, SOON, compile_inline, compile_loop, prefetch_row
from lightning_recsys.row_cache import order
from lightning_recsys.row_cache.order import COUNT, HELD, LIST, NEXT, NOWHERE, PLANNED, POSITION
from lightning_recsys.row_cache.window import (
    FOLLOWING,
    SLOT,
    UpcomingBatches,
    attach,
    drop_batch,
    drop_key,
    fall_out,
    prefetch_last,
)

CachePolicy = Literal["lru", "lfu", "light_lfu"]
Integers = NDArray[np.int64]

REMEMBERED = 8
"""For how many dropped rows, as a multiple of those that stay, LFU remembers how often they were used."""

LIGHT_BOUND = 16
"""From this many uses on, light LFU no longer keeps a row in order."""

_NO_BOUND = np.iinfo(np.int32).max

# Places in the array of numbers that the loops share.
_PLANS, _ROWS, _SLOTS, _FREE, _MEMORIES = range(5)


@dataclass(frozen=True)
class BatchPlan:
    """The places of a batch's rows.

    Attributes:
        number: Number of the plan; the plans of a cache are counted from 1.
        slots_N: Slot of each id, int64 ``[N]``: what a kernel looks up.
        distinct_N: Position of each id in the arrays below, int32 ``[N]``, to sum gradients by row.
        keys_U: The distinct keys, in the order of their first occurrence, int64 ``[U]``.
        slots_U: Slots of the distinct keys, int64 ``[U]``.
        new_U: Which of them the cache did not hold, bool ``[U]``: their slots hold nothing yet.
    """

    number: int
    slots_N: Integers
    distinct_N: NDArray[np.int32]
    keys_U: Integers
    slots_U: Integers
    new_U: NDArray[np.bool_]


@compile_inline
def _insert(key, cell, table, slots, slot_keys, free, numbers):  # noqa: ANN001, ANN202
    """Give a key that is not held a slot, in no list; returns the slot."""
    uses = EMPTY - value_at(table, cell)  # what is remembered of a dropped row; 0 for an empty cell
    if uses:
        numbers[_MEMORIES] -= 1
    if numbers[_FREE]:
        numbers[_FREE] -= 1
        slot = free[numbers[_FREE]]
        prefetch_row(slots, free[max(numbers[_FREE] - SOON, 0)])
    else:
        slot = numbers[_SLOTS]
        numbers[_SLOTS] += 1
    numbers[_ROWS] += 1
    put(table, cell, key, slot)
    slot_keys[slot] = key
    slots[slot, HELD], slots[slot, COUNT] = 1, uses
    slots[slot, NEXT] = slots[slot, LIST] = NOWHERE
    return slot


@compile_loop
def _plan(keys_N, table, slots, slot_keys, lists, free, numbers, step, bound, found, moving_U):  # noqa: ANN001, ANN202
    """Fill what is found, which is all of a plan but its number; returns ``U``.

    The last array is for the loop's own use: slots that come into a list, or to another place in one.
    """
    slots_N, distinct_N, keys_U, slots_U, new_U = found
    numbers[_PLANS] += 1
    number, count, moving, last = numbers[_PLANS], 0, 0, keys_N.shape[0] - 1
    # First all slots. A row that is announced for a later batch is in no list: its use is only counted.
    for i in range(keys_N.shape[0]):
        prefetch_cell(table, home(table, keys_N[min(i + AHEAD, last)]))
        soon = home(table, keys_N[min(i + SOON, last)])  # nearly always the key's own cell
        prefetch_row(slots, value_at(table, soon))
        key = keys_N[i]
        cell = find(table, key)
        slot = value_at(table, cell)
        is_new = slot < 0
        if is_new:
            slot = _insert(key, cell, table, slots, slot_keys, free, numbers)
        if is_new or slots[slot, PLANNED] != number:
            slots[slot, PLANNED], slots[slot, POSITION] = number, count
            keys_U[count], slots_U[count], new_U[count] = key, slot, is_new
            count += 1
            if slots[slot, NEXT] != NOWHERE:
                slots[slot, COUNT] += step
            moving_U[moving] = slot
            moving += is_new or slots[slot, LIST] != NOWHERE
        slots_N[i], distinct_N[i] = slot, slots[slot, POSITION]
    # Then the order in which rows go, in a pass of its own, for which neighbours in the lists can be asked for ahead.
    for m in range(moving):
        prefetch_row(slots, moving_U[min(m + AHEAD, moving - 1)])
        soon = moving_U[min(m + SOON, moving - 1)]
        prefetch_row(slots, slots[soon, order.BEFORE])
        prefetch_row(slots, slots[soon, order.AFTER])
        slot = moving_U[m]
        if slots[slot, LIST] == NOWHERE:
            order.add(slots, lists, slot, slots[slot, COUNT] + step, bound)
        else:
            order.use(slots, lists, slot, step, bound)
    return count


@compile_loop
def _plan_announced(start, ahead, table, slots, slot_keys, lists, free, numbers, step, bound, found):  # noqa: ANN001, ANN202
    """Plan as :func:`_plan` for the oldest announced batch, which the window forgets; its distinct keys are known."""
    occurrences, keys, last_of, chains, counts = ahead
    slots_N, distinct_N, keys_U, slots_U, new_U = found
    ring, last = occurrences.shape[0] - 1, slots_U.shape[0] - 1
    numbers[_PLANS] += 1
    for u in range(slots_U.shape[0]):
        coming = (start + min(u + AHEAD, last)) & ring
        if occurrences[coming, SLOT] != NOWHERE:
            prefetch_row(slots, occurrences[coming, SLOT])
        else:
            prefetch_cell(table, home(table, keys[coming]))
        prefetch_last(last_of, occurrences, keys, coming)
        soon = (start + min(u + SOON, last)) & ring
        if occurrences[soon, FOLLOWING] != NOWHERE:
            prefetch_row(occurrences, occurrences[soon, FOLLOWING])
        at = (start + u) & ring
        slot, following = occurrences[at, SLOT], occurrences[at, FOLLOWING]
        keys_U[u], new_U[u] = keys[at], False
        if slot == NOWHERE:
            cell = find(table, keys[at])
            slot = value_at(table, cell)
            if slot < 0:
                slot = _insert(keys[at], cell, table, slots, slot_keys, free, numbers)
                new_U[u] = True
            elif slots[slot, LIST] != NOWHERE:
                order.remove(slots, lists, slot)
        slots_U[u], slots[slot, PLANNED], slots[slot, POSITION] = slot, numbers[_PLANS], u
        slots[slot, COUNT] += step
        # With a further use in the window the row waits for that; without one it is in the policy's order again.
        if following != NOWHERE:
            attach(slots, occurrences, chains, counts, slot, following)
        else:
            drop_key(last_of, counts, keys[at])
            fall_out(slots, lists, slot, bound)
    drop_batch(counts, slots_U.shape[0], ring)
    for i in range(distinct_N.shape[0]):
        slots_N[i] = slots_U[distinct_N[i]]


@compile_loop
def _find_slots(keys, table, slots_K):  # noqa: ANN001, ANN202
    for k in range(keys.shape[0]):
        slots_K[k] = max(value_at(table, find(table, keys[k])), NOWHERE)  # below it is what is remembered


@compile_loop
def _forget(victims, table, slots, slot_keys, free, numbers, remembers):  # noqa: ANN001, ANN202
    last = victims.shape[0] - 1
    for i in range(victims.shape[0]):
        prefetch_cell(table, home(table, slot_keys[victims[min(i + SOON, last)]]))
        slot = victims[i]
        cell = find(table, slot_keys[slot])
        if remembers and slots[slot, COUNT]:
            put(table, cell, slot_keys[slot], EMPTY - slots[slot, COUNT])
            numbers[_MEMORIES] += 1
        else:
            key_table.erase(table, cell)
        slots[slot, HELD] = 0
        free[numbers[_FREE]] = slot
        numbers[_FREE] += 1
    numbers[_ROWS] -= victims.shape[0]


@compile_loop
def _evict(table, slots, slot_keys, lists, free, numbers, spare_from, remembers, victims):  # noqa: ANN001, ANN202
    """Fill the slots of victims from those in lists; returns how many, which may be too few."""
    count, at = 0, order.lowest_list(lists)
    while at != NOWHERE and count < victims.shape[0]:
        slot, higher = lists[at, order.FIRST], order.next_list(lists, at)
        while slot != NOWHERE and count < victims.shape[0]:
            after = slots[slot, order.AFTER]
            if slots[slot, PLANNED] < spare_from:
                order.remove(slots, lists, slot)
                victims[count] = slot
                count += 1
            slot = after
        at = higher
    _forget(victims[:count], table, slots, slot_keys, free, numbers, remembers)
    return count


@compile_loop
def _halve_counts(table, halved, slots, lists, numbers, in_order):  # noqa: ANN001, ANN202
    """Halve all counts, forget dropped rows that come to 0, and put rows back into lists, in the same order."""
    # The rows in lists, in their order, before any count changes.
    count, at = 0, order.lowest_list(lists)
    while at != NOWHERE:
        slot = lists[at, order.FIRST]
        while slot != NOWHERE:
            in_order[count] = slot
            count += 1
            slot = slots[slot, order.AFTER]
        at = order.next_list(lists, at)
    # Rows with a known use stay out of lists. Behind the others come those that were no longer counted, if any.
    for slot in range(numbers[_SLOTS]):
        if slots[slot, HELD] and slots[slot, NEXT] != NOWHERE:
            slots[slot, COUNT] //= 2
        elif slots[slot, HELD] and slots[slot, LIST] == NOWHERE:
            in_order[count] = slot
            count += 1
    order.reset_lists(lists)
    for i in range(count):
        order.add_last(slots, lists, in_order[i], slots[in_order[i], COUNT] // 2)
    # What is remembered of dropped rows, into the other table: those that come to 0 are left out.
    numbers[_MEMORIES] = 0
    for cell in range(table.shape[0]):
        value = value_at(table, cell)
        if value < EMPTY:
            value = EMPTY - (EMPTY - value) // 2
            numbers[_MEMORIES] += value != EMPTY
        if value != EMPTY:
            put(halved, find(halved, key_at(table, cell)), key_at(table, cell), value)


class CacheIndex:
    """Key -> slot, and the order in which rows go. Holds no rows.

    ``lru``
        The row whose last batch is the longest ago goes first; of one batch, the row that occurred first.
    ``lfu``
        The row that the fewest batches had goes first, of equal ones as in ``lru``. Dropped rows are remembered: one
        that comes back goes on counting. Where there are more than ``REMEMBERED * limit`` of them, all counts are
        halved and those that come to 0 forgotten, so that memory stays bounded and old glory fades.
    ``light_lfu``
        The same, but from ``LIGHT_BOUND`` batches on a row is no longer counted and goes only when nothing else is
        left; then, too, all counts are halved. Such rows, often most of a batch, cost no upkeep.

    Where batches are announced (:meth:`announce`), this order holds among rows without a known use; they go before all
    others. Of those, the row goes first whose next use is the farthest. With an endless window that is Belady's
    algorithm, which no other can beat. In ``light_lfu`` a row that falls out of the window counts as one below
    ``LIGHT_BOUND``.

    Args:
        limit: Rows that outlast :meth:`evict`.
        policy: Which rows go first: ``lru``, ``lfu`` or ``light_lfu``, as above.
        num_keys: All keys are from 0 to below this; ``None`` where any int64 may come. Where the keys that are held and
            remembered are more than an eighth of them, each has its place in an array instead of a hash table.

    Raises:
        ValueError: ``limit`` is negative, or the policy is unknown.

    >>> index = CacheIndex(2, policy="lru")
    >>> plan = index.plan(np.array([70, -5, 70, 8]))
    >>> plan.slots_N.tolist(), plan.keys_U.tolist(), plan.new_U.tolist()
    ([0, 1, 0, 2], [70, -5, 8], [True, True, True])
    >>> slots = index.evict(spare_from=2)
    >>> index.keys(slots).tolist(), slots.tolist(), len(index)
    ([70], [0], 2)
    """

    def __init__(self, limit: int, *, policy: CachePolicy, num_keys: int | None = None) -> None:
        if limit < 0:
            raise ValueError(f"strategy.cache_rows must be at least 0, got {limit}. 0 keeps no rows.")
        if policy not in get_args(CachePolicy):
            raise ValueError(f"strategy.policy must be one of {list(get_args(CachePolicy))}, got {policy!r}.")
        self.limit, self.policy = limit, policy
        # Settings of the compiled loops: what a use adds to a row's count, the count from which on a row is no longer
        # counted, and whether dropped rows keep theirs.
        self._step = 0 if policy == "lru" else 1
        self._bound = LIGHT_BOUND if policy == "light_lfu" else _NO_BOUND
        self._remembers = bool(self._step and limit)
        self._numbers = np.zeros(5, dtype=np.int64)  # by _PLANS to _MEMORIES; the loops count in it
        kept = limit * (1 + REMEMBERED) if self._remembers else limit  # at 32 to 128 bytes each in a hash table
        # All keys are below it, and have places in an array; None where they are in a hash table.
        self._bound_of_keys = num_keys if num_keys is not None and num_keys <= 8 * kept else None
        self._window = UpcomingBatches(self._bound_of_keys)
        self._make_room(0)

    def _make_room(self, num_slots: int) -> None:
        # For each slot what is known of its row, and the row's key, valid where it is held; slots that are free again,
        # as many as `_numbers` says; the order in which rows go, as linked lists; and the way from a key to its slot.
        self._slots = np.zeros((num_slots, order.SLOT_COLUMNS), dtype=np.int32)
        self._slot_keys = np.zeros(num_slots, dtype=np.int64)
        self._free = np.zeros(num_slots, dtype=np.int64)
        self._lists = order.make_lists(num_slots)
        self._table = make_table(num_slots) if self._bound_of_keys is None else make_array(self._bound_of_keys)

    def __len__(self) -> int:
        """Rows held."""
        return int(self._numbers[_ROWS])

    @property
    def num_slots(self) -> int:
        """All slots in use so far are below this; it only grows."""
        return int(self._numbers[_SLOTS])

    @property
    def num_plans(self) -> int:
        """The number of the last plan."""
        return int(self._numbers[_PLANS])

    def announce(self, keys_N: Integers) -> int:
        """Note that a batch is to come, after all that were announced before it.

        Args:
            keys_N: As for :meth:`plan`.

        Returns:
            The announcement's number.
        """
        return self._window.announce(keys_N, self._table, self._slots, self._lists).number

    def forget(self, number: int) -> None:
        """Forget announcements up to this number: those batches will not be planned as announced."""
        while self._window.batches and self._window.batches[0].number <= number:
            self._window.drop_oldest(self._slots, self._lists, self._bound)

    def plan(self, keys_N: Integers) -> BatchPlan:
        """Find a batch's keys, give the new ones slots, and note that they were used.

        Rows that come with a batch that was not announced have no known use until one that has them is planned.

        Args:
            keys_N: int64 ``[N]``, any numbers, repeated as the batch repeats them.
        """
        self._reserve(keys_N.size)
        slots_N, keys_U, slots_U, moving_U = np.empty((4, keys_N.size), dtype=np.int64)
        distinct_N, new_U = np.empty(keys_N.size, dtype=np.int32), np.empty(keys_N.size, dtype=np.bool_)
        arrays = self._table, *self._arrays(), self._numbers, self._step, self._bound
        count = _plan(keys_N, *arrays, (slots_N, distinct_N, keys_U, slots_U, new_U), moving_U)
        return BatchPlan(self.num_plans, slots_N, distinct_N, keys_U[:count], slots_U[:count], new_U[:count])

    def plan_announced(self, number: int) -> BatchPlan:
        """Plan like :meth:`plan` for the batch of that announcement; it and those before it are used up."""
        self.forget(number - 1)
        batch = self._window.batches.popleft()
        self._reserve(batch.size)
        slots_N, (keys_U, slots_U) = (
            np.empty(batch.distinct_N.size, dtype=np.int64),
            np.empty((2, batch.size), np.int64),
        )
        found = slots_N, batch.distinct_N, keys_U, slots_U, np.empty(batch.size, dtype=np.bool_)
        arrays = self._table, *self._arrays(), self._numbers, self._step, self._bound
        _plan_announced(batch.start, self._window.arrays(), *arrays, found)
        return BatchPlan(self.num_plans, *found)

    def evict(self, *, spare_from: int) -> Integers:
        """Drop rows until at most ``limit`` are held.

        Args:
            spare_from: Number of a plan. Rows of it and of later plans stay, though they be more than ``limit``.

        Returns:
            The slots of the dropped rows, int64 ``[V]``, in the order of the policy. They are free: the next plan may
            give them away.
        """
        victims = np.empty(max(len(self) - self.limit, 0), dtype=np.int64)
        arguments = self._numbers, spare_from, self._remembers
        count = _evict(self._table, *self._arrays(), *arguments, victims)
        if count < victims.size and self._only_unordered_left(spare_from):
            self._halve_counts()
            count += _evict(self._table, *self._arrays(), *arguments, victims[count:])
        if count < victims.size:
            farthest = self._window.take_farthest(victims[count:], self._slots, spare_from)
            slots, slot_keys, _, free = self._arrays()
            _forget(victims[count : count + farthest], self._table, slots, slot_keys, free, *arguments[::2])
            count += farthest
        victims = victims[:count]
        if self._numbers[_MEMORIES] > REMEMBERED * self.limit:
            self._halve_counts()
        return victims

    def find(self, keys_K: Integers) -> Integers:
        """The slots of keys, -1 for those that are not held, int64 ``[K]``; not a use of any."""
        slots_K = np.empty(keys_K.size, dtype=np.int64)
        _find_slots(keys_K, self._table, slots_K)
        return slots_K

    def slots(self) -> Integers:
        """The slots of all rows held, in ascending order."""
        return np.flatnonzero(self._slots[: self.num_slots, HELD])

    def keys(self, slots: Integers) -> Integers:
        """The keys of slots that hold rows, or held them until the last :meth:`evict`."""
        return self._slot_keys[slots]

    def clear(self) -> None:
        """Forget all rows, remembered ones included; numbers of plans and announcements go on."""
        plans = self._numbers[_PLANS]
        self._numbers[:] = 0
        self._numbers[_PLANS] = plans
        self._make_room(0)
        self._window.release()

    def _arrays(self) -> tuple[NDArray[np.int32], Integers, NDArray[np.int32], Integers]:
        return self._slots, self._slot_keys, self._lists, self._free

    def _only_unordered_left(self, spare_from: int) -> bool:
        slots = self._slots[: self.num_slots]
        unordered = (slots[:, HELD] > 0) & (slots[:, LIST] == NOWHERE) & (slots[:, NEXT] == NOWHERE)
        return bool((unordered & (slots[:, PLANNED] < spare_from)).any())

    def _halve_counts(self) -> None:
        halved = make_like(self._table)
        in_order = np.empty(self.num_slots, dtype=np.int64)
        _halve_counts(self._table, halved, self._slots, self._lists, self._numbers, in_order)
        self._table = halved

    def _reserve(self, num_new: int) -> None:
        """Room for as many new rows as a batch may bring."""
        _, rows, slots, free, memories = self._numbers.tolist()
        num_slots = slots + max(num_new - free, 0)
        if num_slots > self._slots.shape[0]:
            extra = num_slots + num_slots // 4 - self._slots.shape[0]
            self._slots = np.pad(self._slots, ((0, extra), (0, 0)))
            self._slot_keys, self._free = np.pad(self._slot_keys, (0, extra)), np.pad(self._free, (0, extra))
            self._lists = order.grow_lists(self._lists, extra)
        if self._bound_of_keys is None and 2 * (rows + memories + num_new) > self._table.shape[0]:
            bigger = make_table(2 * (rows + memories + num_new))
            key_table.copy_into(self._table, bigger)
            self._table = bigger
