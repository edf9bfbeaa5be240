"""One index for caches of several collections whose batches have the same ids: each batch is planned once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import ref

import numpy as np

from lightning_recsys.row_cache.held import HeldRows
from lightning_recsys.row_cache.index import BatchPlan, CacheIndex, CachePolicy, Integers

_REMEMBERED = 4
"""Plans that a second cache may still ask for: of the batch at hand, and of lookups between its own and the first's."""

_AT_ONCE = 64
"""When it is full one of so many rows goes: dropping the few new ones of each step costs more than finding them."""


@dataclass(frozen=True)
class _Planned:
    """A plan that may serve another cache.

    Attributes:
        keys_N: The keys that it was made for.
        plan: The plan that may be used again.
        used_by: The caches that have had the plan, by ``id``.
    """

    keys_N: Integers
    plan: BatchPlan
    used_by: set[int]


class SharedIndex:
    """Gives the same slots to several caches, and makes one plan of what each of them looks up with the same ids.

    DeepFM, say, has vectors and first-order weights of the same tables: two collections, whose batches are the same.
    A slot belongs to a key in all caches; which of them hold a copy there is theirs to know. Nothing breaks where one
    looks up what the others do not.

    Args:
        limit: Rows that outlast a step, in each cache; up to a 64th fewer, as rows go many at once.
        policy: Which rows go first when there are too many; see :class:`CacheIndex`.
        num_keys: A number above all keys; see :class:`CacheIndex`.
    """

    def __init__(self, limit: int, *, policy: CachePolicy, num_keys: int | None = None) -> None:
        self.limit = limit
        self.index = CacheIndex(limit - int(limit / _AT_ONCE), policy=policy, num_keys=num_keys)
        self._sharers: list[ref[HeldRows]] = []
        self._num_slots = 0  # that all of them have
        self._plans: deque[_Planned] = deque(maxlen=_REMEMBERED)

    def join(self, sharer: HeldRows) -> None:
        """Let a cache use the index, as long as it lives."""
        sharer.cache.make_room(self._num_slots)
        self._sharers.append(ref(sharer, self._sharers.remove))

    def plan(self, sharer: HeldRows, keys_N: Integers) -> BatchPlan:
        """Plan like :meth:`CacheIndex.plan`; a row that is new to the index may be old to a cache, and the reverse.

        Args:
            sharer: Which cache asks. It gets each plan once.
            keys_N: The key of each id, in memory of their own, so that a batch that is changed in place is told from
                what it was.
        """
        for known in self._plans:
            if id(sharer) not in known.used_by and np.array_equal(known.keys_N, keys_N):
                known.used_by.add(id(sharer))
                return known.plan
        self.evict()
        plan = self.index.plan(keys_N)
        self._plans.append(_Planned(keys_N, plan, {id(sharer)}))
        if self.index.num_slots > self._num_slots:
            self._num_slots = self.index.num_slots * 5 // 4
            for each in self._living():
                each.cache.make_room(self._num_slots)
        return plan

    def evict(self) -> None:
        """Bring the index below its limit; what any of the caches still needs stays."""
        if len(self.index) <= self.limit:
            return
        slots_V = self.index.evict(spare_from=min(each.needs_from for each in self._living()))
        if slots_V.size:
            self._plans.clear()  # they may have rows that are gone
            for each in self._living():
                each.leave(slots_V)

    def _living(self) -> list[HeldRows]:
        return [sharer for each in self._sharers if (sharer := each()) is not None]
