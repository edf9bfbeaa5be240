"""What a cache does with stores that this process maps: the exchanges of its messages, at once and in place."""

# Shape suffixes: U distinct rows of a batch, K rows, C copies, R rows of a store, W width of their state.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.row_cache.copies import RowCache
from lightning_recsys.row_cache.held import CachedTicket, HeldRows
from lightning_recsys.row_cache.index import BatchPlan, Integers
from lightning_recsys.row_cache.messages import Clocks, RowMessages, RowPlaces
from lightning_recsys.row_cache.owners import StepGradients
from lightning_recsys.row_cache.shared_index import SharedIndex
from lightning_recsys.stores import exchange_loops as loops
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.exchange import bytes_by_kind
from lightning_recsys.stores.interfaces import EmbeddingStore
from lightning_recsys.sync import ClockRule

Arrays = tuple[NDArray[np.float32], ...]

_NO_STATE = np.empty((0, 0), dtype=np.float32)


class RowTransfers:
    """Moves rows and updates between a cache and mapped stores, by the rule that their messages would follow.

    Args:
        stores: The collection's stores, all of them mapped.
        places: Knows which store has which row.
        rule: What a push tells the stores' clocks, and when a copy is too old.
        row_shapes: Shape of what one row has of ``weight`` and of each state, of which there is one at most.
    """

    def __init__(
        self,
        stores: Sequence[MappedEmbeddingStore],
        places: RowPlaces,
        rule: ClockRule,
        row_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._stores, self._places, self._row_shapes = stores, places, row_shapes
        self._staleness, self._by_sum = rule.bound, rule.by_sum
        self._update = loops.update_copies_for(*row_shapes["weight"])
        self._counts = np.zeros((len(stores), loops.NUM_COUNTS), dtype=np.int64)
        self._copies_of: tuple[Tensor, Arrays] | None = None

    @staticmethod
    def between(stores: Sequence[EmbeddingStore], copies: torch.device) -> list[MappedEmbeddingStore] | None:
        """The stores, if rows can move between them and copies there without a message."""
        # A subclass may do something else with exchanges.
        mapped = [x for x in stores if type(x) is MappedEmbeddingStore and copies.type == "cpu"]
        return mapped if len(mapped) == len(stores) else None

    def update_copies(self, cache: RowCache, plan: BatchPlan) -> Clocks:
        """Make a batch's copies fit for use: fetch those that are not here, refresh those too far ahead or behind.

        Returns:
            By how many updates each is ahead of what was fetched, int32 ``[U]``.
        """
        lags_U = np.empty(len(plan.slots_U), dtype=np.int32)
        copies, there = self._copies(cache), self._checked()
        for index, (which, rows) in enumerate(self._places.split(plan.keys_U)):
            (stored, clocks), lags = there[index], lags_U[which]
            self._update(
                plan.slots_U[which],
                rows,
                copies,
                cache.clocks,
                stored,
                clocks,
                self._staleness,
                self._by_sum,
                lags,
                self._counts[index],
            )
            lags_U[which] = lags
        return lags_U

    def push(self, cache: RowCache, slots: Integers, *, leave: bool = False) -> None:
        """Bring what copies owe to their rows, and let the slots be empty if they are to leave."""
        copies, there = self._copies(cache), self._checked()
        for index, (which, rows) in enumerate(self._places.split(cache.keys(slots))):
            rule = self._by_sum, leave, self._counts[index]
            loops.push_copies(slots[which], rows, copies, cache.clocks, *there[index], *rule)

    def _copies(self, cache: RowCache) -> Arrays:
        """A cache's rows, their state, and what they owe of both, as the loops take them."""
        if self._copies_of is None or self._copies_of[0] is not cache.rows:  # another tensor when the cache has grown
            owed = cache.owed["weight"].numpy(), _state(cache.owed)
            self._copies_of = cache.rows, (cache.rows.numpy(), _state(cache.row_state), *owed)
        return self._copies_of[1]

    def _checked(self) -> list[tuple[Arrays, NDArray[np.int32]]]:
        """What the loops take of each store, none of which was removed.

        Raises:
            StoreReplacedError: one was. What is written to its memory from then on is nobody else's.
        """
        for store in self._stores:
            _ = store.rows  # which looks at the number of its generation
        return self._stored

    @cached_property
    def _stored(self) -> list[tuple[Arrays, NDArray[np.int32]]]:
        """Of each store the rows with their state, and the clocks, as the loops take them."""
        return [((x.rows.numpy(), _state(x.row_state)), x.clocks.numpy()[:, None]) for x in self._stores]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_copies_of": None}
        state.pop("_stored", None)  # mapped memory
        return state

    @property
    def counts(self) -> Counter[str]:
        """What happened so far, in the names of :class:`RowMessages` and of the cache."""
        total: Counter[str] = Counter()
        for store, counts in zip(self._stores, self._counts.tolist(), strict=True):
            fetched, checked, stale, ahead, pushed, returned, exchanges = counts
            sizes = {"pushed": pushed, "fetched": fetched + returned, "checked": checked}
            total.update(bytes_by_kind(store.layout.num_rows, self._row_shapes, **sizes))
            total.update(misses=fetched, stale=stale, refreshes=ahead, messages=exchanges)
        return total


class RowsInPlace(HeldRows):
    """Moves rows between the cache and this machine's memory, where nothing has to be known ahead.

    Args:
        cache: As in :class:`HeldRows`, with the index of ``shared``.
        messages: Tells the stores of steps; rows do not travel in messages here.
        places: Knows the key of each id, and the store that has it.
        gradients: Gradients of batches that wait for those of other workers; see :class:`HeldRows`.
        transfers: Moves rows between the cache and the stores' memory.
        shared: Plans the batches, perhaps for other collections' caches as well.
    """

    def __init__(
        self,
        cache: RowCache,
        messages: RowMessages,
        places: RowPlaces,
        gradients: StepGradients | None,
        *,
        transfers: RowTransfers,
        shared: SharedIndex,
    ) -> None:
        super().__init__(cache, messages, places, gradients)
        self._transfers, self._shared = transfers, shared
        shared.join(self)

    def keys_of(self, features: SparseFeatures) -> Integers:
        """The key of each id of a batch on the CPU, int64 ``[N]``."""
        return self._places.keys_of(features)

    def make_room(self, num_slots: int) -> None:
        """Have so many slots; the index may be another cache's as well."""
        self.cache.make_room(num_slots)

    def evict(self) -> None:  # noqa: D102 - inherited
        self._shared.evict()

    def leave(self, slots: Integers) -> None:  # noqa: D102 - inherited
        self.counts["evictions"] += len(slots)
        self._transfers.push(self.cache, slots, leave=True)

    def _push(self, slots: Integers) -> None:
        self._transfers.push(self.cache, slots)

    def _begin(self, features: SparseFeatures, *, trained: bool = True, validate: bool = True) -> CachedTicket:
        plan = self._shared.plan(self, features)
        self.lags_U = self._transfers.update_copies(self.cache, plan)
        self.counts["reads"] += len(plan.keys_U)
        return CachedTicket(features, plan=plan)

    def _await(self, batch: CachedTicket, *, validate: bool = True) -> None:
        pass  # they came as the batch began


def _state(tensors: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """The one state of a rule that has one, ``[C, W]``."""
    for name, tensor in tensors.items():
        if name != "weight":
            array: NDArray[np.float32] = tensor.numpy()
            return array if array.ndim > 1 else array[:, None]
    return _NO_STATE
