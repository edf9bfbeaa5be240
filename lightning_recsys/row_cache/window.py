"""The batches that are known to come: when each row is used next, and which held rows are used last.

Each announced batch has one occurrence for each of its distinct keys, in a ring. An occurrence knows the key's next
one, and the slot of the row if this is the first that it is held for; a table has each key's last occurrence. All
steps take constant time for a key.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.hash_table import (
    EMPTY,
    KeyTable,
    copy_into,
    erase,
    find,
    home,
    make_array,
    make_table,
    prefetch_cell,
    put,
    value_at,
    values,
)
from lightning_recsys.compiled.loops import AHEAD, SOON, compile_inline, compile_loop, prefetch_row
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.sparse_features import same_ids
from lightning_recsys.row_cache import order
from lightning_recsys.row_cache.order import COUNT, LIST, NEXT, NOWHERE, PLANNED

Integers = NDArray[np.int64]

_OUT_OF_ORDER = 8
"""An announced batch is recognised if fewer others than this were to come before it."""

# Columns of the occurrences' array, int32 [R, 4].
FOLLOWING = 0  # the key's next occurrence, or NOWHERE
SLOT = 1  # of the row, if it is held and used here next, or NOWHERE
BATCH = 2  # number of the announcement
CHAIN = 3  # another occurrence of this batch that has a slot, or NOWHERE

# Places in the array of numbers that the loops share.
OLDEST, NEWEST, FARTHEST, _FIRST, _LENGTH, _KEYS = range(6)


@compile_inline
def attach(slots, occurrences, chains, counts, slot, at):  # noqa: ANN001, ANN201
    """Note that a held row, which is in no list, is used next by an occurrence."""
    number = occurrences[at, BATCH]
    chain = number & (chains.shape[0] - 1)
    occurrences[at, SLOT], occurrences[at, CHAIN] = slot, chains[chain]
    chains[chain] = at
    slots[slot, NEXT] = at
    counts[FARTHEST] = max(counts[FARTHEST], number)


@compile_loop
def _announce(keys_N, occurrences, keys, last_of, chains, counts, table, slots, lists, distinct_N, fresh):  # noqa: ANN001, ANN202
    """Fill ``distinct_N``; returns how many keys are distinct."""
    ring, end = occurrences.shape[0] - 1, keys_N.shape[0] - 1
    counts[NEWEST] += 1
    number = counts[NEWEST]
    chains[number & (chains.shape[0] - 1)] = NOWHERE
    start, count, num_fresh = counts[_FIRST] + counts[_LENGTH], 0, 0
    for i in range(keys_N.shape[0]):
        prefetch_cell(last_of, home(last_of, keys_N[min(i + AHEAD, end)]))
        soon = value_at(last_of, home(last_of, keys_N[min(i + SOON, end)]))  # nearly always the key's own cell
        if soon != EMPTY:
            prefetch_row(occurrences, soon)
        key = keys_N[i]
        cell = find(last_of, key)
        last = value_at(last_of, cell)
        # A key that this batch has had already is one occurrence; any other is chained to its last one in the window.
        if last != EMPTY and occurrences[last, BATCH] == number:
            distinct_N[i] = (last - start) & ring
            continue
        at = (start + count) & ring
        keys[at] = key
        occurrences[at, FOLLOWING], occurrences[at, SLOT], occurrences[at, BATCH] = NOWHERE, NOWHERE, number
        if last != EMPTY:
            occurrences[last, FOLLOWING] = at
        else:
            fresh[num_fresh] = at
            num_fresh += 1
        put(last_of, cell, key, at)
        distinct_N[i] = count
        count += 1
    counts[_LENGTH] += count
    counts[_KEYS] += num_fresh
    # Keys that the window did not know: where the cache holds the row, it leaves the policy's order for this use.
    for i in range(num_fresh):
        prefetch_cell(table, home(table, keys[fresh[min(i + AHEAD, num_fresh - 1)]]))
        soon = value_at(table, home(table, keys[fresh[min(i + SOON, num_fresh - 1)]]))
        if soon >= 0:
            prefetch_row(slots, soon)
        slot = value_at(table, find(table, keys[fresh[i]]))
        if slot >= 0:
            if slots[slot, LIST] != NOWHERE:
                order.remove(slots, lists, slot)
            attach(slots, occurrences, chains, counts, slot, fresh[i])
    return count


@compile_loop
def _drop_oldest(start, size, occurrences, keys, last_of, chains, counts, slots, lists, bound):  # noqa: ANN001, ANN202
    """Forget the oldest announcement; rows that were held for it are held for their next use, or for none."""
    ring = occurrences.shape[0] - 1
    for u in range(size):
        prefetch_last(last_of, occurrences, keys, (start + min(u + AHEAD, size - 1)) & ring)
        at = (start + u) & ring
        slot, following = occurrences[at, SLOT], occurrences[at, FOLLOWING]
        if following == NOWHERE:
            drop_key(last_of, counts, keys[at])
        if slot != NOWHERE and following != NOWHERE:
            attach(slots, occurrences, chains, counts, slot, following)
        elif slot != NOWHERE:
            fall_out(slots, lists, slot, bound)
    drop_batch(counts, size, ring)


@compile_inline
def prefetch_last(last_of, occurrences, keys, at):  # noqa: ANN001, ANN201
    """Ask for where a key's last occurrence is noted, if this is it."""
    if occurrences[at, FOLLOWING] == NOWHERE:
        prefetch_cell(last_of, home(last_of, keys[at]))


@compile_inline
def drop_key(last_of, counts, key):  # noqa: ANN001, ANN201
    """A key does not occur any more."""
    erase(last_of, find(last_of, key))
    counts[_KEYS] -= 1


@compile_inline
def drop_batch(counts, size, ring):  # noqa: ANN001, ANN201
    """The oldest announcement, of so many keys, is done with."""
    counts[OLDEST] += 1
    counts[_FIRST], counts[_LENGTH] = (counts[_FIRST] + size) & ring, counts[_LENGTH] - size


@compile_inline
def fall_out(slots, lists, slot, bound):  # noqa: ANN001, ANN201
    """A held row, in no list, is not known to come any more: it is held in the order of the policy.

    It has at most the highest count that is kept in order, so that it can go.
    """
    slots[slot, NEXT] = NOWHERE
    order.add(slots, lists, slot, min(slots[slot, COUNT], bound - 1), bound)


@compile_loop
def _take_farthest(slots, occurrences, chains, counts, spare_from, victims):  # noqa: ANN001, ANN202
    """Fill the slots of victims with rows whose next use is the farthest; returns how many, which may be too few.

    Of one batch, the row goes first that it was known of last.
    """
    count, number = 0, counts[FARTHEST]
    while number >= counts[OLDEST] and count < victims.shape[0]:
        chain = number & (chains.shape[0] - 1)
        before, at = NOWHERE, chains[chain]
        while at != NOWHERE and count < victims.shape[0]:
            slot, after = occurrences[at, SLOT], occurrences[at, CHAIN]
            if slots[slot, PLANNED] < spare_from:
                occurrences[at, SLOT] = slots[slot, NEXT] = NOWHERE
                victims[count] = slot
                count += 1
                if before == NOWHERE:
                    chains[chain] = after
                else:
                    occurrences[before, CHAIN] = after
            else:
                before = at
            at = after
        if number == counts[FARTHEST] and chains[chain] == NOWHERE:
            counts[FARTHEST] -= 1
        number -= 1
    return count


@dataclass(frozen=True)
class Announced:
    """An announced batch.

    Attributes:
        number: Number of the announcement.
        start: Where its occurrences begin in the ring.
        size: Number ``U`` of its distinct keys.
        distinct_N: Position of each id among them, int32 ``[N]``.
    """

    number: int
    start: int
    size: int
    distinct_N: NDArray[np.int32]


class UpcomingBatches:
    """The announced batches of a cache, in the order in which they are expected.

    Attributes:
        batches: The announced batches, in the order in which they are expected.
        keys: Key of each occurrence, int64 ``[R]``; ``R`` is a power of two.
        occurrences: The ring of occurrences, with the columns above.
        chains: For each announcement, first of its occurrences that have slots; by number, modulo the size.
        counts: Numbers that the compiled loops share.
        last_of: The last occurrence of each key.

    Args:
        num_keys: All keys are from 0 to below this, and each has its place in an array; ``None`` for a hash table.
    """

    def __init__(self, num_keys: int | None = None) -> None:
        self.batches: deque[Announced] = deque()
        self.keys = np.zeros(1, dtype=np.int64)
        self.occurrences = np.zeros((1, 4), dtype=np.int32)
        self.chains = np.full(1, NOWHERE, dtype=np.int32)
        self.counts = np.array([1, 0, 0, 0, 0, 0], dtype=np.int64)
        self.last_of: KeyTable = make_table(0) if num_keys is None else make_array(num_keys)

    def announce(
        self, keys_N: Integers, table: KeyTable, slots: NDArray[np.int32], lists: NDArray[np.int32]
    ) -> Announced:
        """Put a batch behind all others; held rows that it uses, and no batch before it, leave their lists."""
        self._reserve(keys_N.size, slots)
        start = int(self.counts[_FIRST] + self.counts[_LENGTH]) & (len(self.keys) - 1)
        distinct_N, fresh = np.empty(keys_N.size, dtype=np.int32), np.empty(keys_N.size, dtype=np.int32)
        size = _announce(keys_N, *self.arrays(), table, slots, lists, distinct_N, fresh)
        self.batches.append(Announced(int(self.counts[NEWEST]), start, size, distinct_N))
        return self.batches[-1]

    def drop_oldest(self, slots: NDArray[np.int32], lists: NDArray[np.int32], bound: int) -> None:
        """Forget the oldest batch."""
        batch = self.batches.popleft()
        _drop_oldest(batch.start, batch.size, *self.arrays(), slots, lists, bound)

    def take_farthest(self, victims: Integers, slots: NDArray[np.int32], spare_from: int) -> int:
        """Fill victims with slots whose next use is the farthest; returns how many, which may be too few."""
        count: int = _take_farthest(slots, self.occurrences, self.chains, self.counts, spare_from, victims)
        return count

    def arrays(self) -> tuple[NDArray[np.int32], Integers, KeyTable, NDArray[np.int32], Integers]:
        """The window as the loops take it."""
        return self.occurrences, self.keys, self.last_of, self.chains, self.counts

    def release(self) -> None:
        """Know of no slots any more: nothing is held."""
        self.occurrences[:, SLOT] = NOWHERE
        self.chains[:] = NOWHERE
        self.counts[FARTHEST] = 0

    def _reserve(self, num_new: int, slots: NDArray[np.int32]) -> None:
        """Room for another batch."""
        num_batches, size = len(self.batches) + 1, len(self.keys)
        if num_batches > len(self.chains):
            mask = len(self.chains) - 1
            chains = np.full(1 << (2 * num_batches - 1).bit_length(), NOWHERE, dtype=np.int32)
            for batch in self.batches:
                chains[batch.number & (len(chains) - 1)] = self.chains[batch.number & mask]
            self.chains = chains
        if int(self.counts[_LENGTH]) + num_new > size:
            self._grow(1 << (int(self.counts[_LENGTH]) + num_new - 1).bit_length(), slots)
        if self.last_of.ndim > 1 and 2 * (int(self.counts[_KEYS]) + num_new) > len(self.last_of):
            larger = make_table(2 * (int(self.counts[_KEYS]) + num_new))
            copy_into(self.last_of, larger)
            self.last_of = larger

    def _grow(self, size: int, slots: NDArray[np.int32]) -> None:
        """A larger ring, which begins with the first occurrence."""
        first, length, mask = int(self.counts[_FIRST]), int(self.counts[_LENGTH]), len(self.keys) - 1
        place = (first + np.arange(length)) & mask
        keys, occurrences = np.zeros(size, dtype=np.int64), np.zeros((size, 4), dtype=np.int32)
        keys[:length], occurrences[:length] = self.keys[place], self.occurrences[place]
        for links in (
            occurrences[:, FOLLOWING],
            occurrences[:, CHAIN],
            self.chains,
            slots[:, NEXT],
            values(self.last_of),
        ):
            links[:] = np.where(links < 0, links, (links - first) & mask)
        self.batches = deque(Announced(x.number, (x.start - first) & mask, x.size, x.distinct_N) for x in self.batches)
        self.keys, self.occurrences, self.counts[_FIRST] = keys, occurrences, 0


class AnnouncedFeatures:
    """The ids of the announced batches, by which a batch is recognised when it comes."""

    def __init__(self) -> None:
        self._batches: deque[tuple[SparseFeatures, int]] = deque()  # in the order in which they are expected

    def __len__(self) -> int:
        """Batches that have not come."""
        return len(self._batches)

    def add(self, features: SparseFeatures, number: int) -> None:
        """Expect a batch behind all others; ``number`` is that of its announcement."""
        self._batches.append((features, number))

    def drop_beyond(self, ahead: int) -> Iterator[int]:
        """Expect so many at most; gives the numbers of the others, the oldest first."""
        while len(self._batches) > ahead:
            yield self._batches.popleft()[1]

    def take(self, features: SparseFeatures) -> int | None:
        """The number of a batch's announcement, which it uses up, and all before it."""
        for index, (coming, number) in enumerate(islice(self._batches, _OUT_OF_ORDER)):
            if same_ids(coming, features):
                for _ in range(index + 1):
                    self._batches.popleft()
                return number
        return None
