"""The exchanges of a cache with stores that this process maps: those of its messages, at once and in place."""

# Shape suffixes: U distinct rows of a batch, K rows, C copies, R rows of a store, W width of their state.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import as_loop_array
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.row_cache.copies import RowCache
from lightning_recsys.row_cache.held import CachedTicket, HeldRows
from lightning_recsys.row_cache.index import Integers
from lightning_recsys.row_cache.messages import RowMessages
from lightning_recsys.row_cache.owners import StepGradients
from lightning_recsys.row_cache.shared_index import SharedIndex
from lightning_recsys.stores import exchange_loops as loops
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.interfaces import EmbeddingStore

Arrays = tuple[NDArray[np.float32], ...]

_NO_STATE = np.empty((0, 0), dtype=np.float32)


def mapped_stores(stores: Sequence[EmbeddingStore], copies: torch.device) -> list[MappedEmbeddingStore] | None:
    """The stores, if rows can move between them and copies there without a message."""
    mapped = [x for x in stores if type(x) is MappedEmbeddingStore and copies.type == "cpu"]
    return mapped if len(mapped) == len(stores) else None


class RowsInPlace(HeldRows):
    """Moves rows and updates between the cache and mapped stores, by the rule that their messages would follow.

    Nothing has to be known ahead.

    Args:
        cache: The cache of copies, which is empty at first and has the index of ``shared``. Its update rule has one
            state at most.
        messages: Tells the stores of steps; rows do not travel in messages here.
        gradients: Gradients of batches that wait for those of other workers; see :class:`HeldRows`.
        stores: The collection's stores, all of them mapped.
        shared: Plans the batches, perhaps for other collections' caches as well.
    """

    def __init__(
        self,
        cache: RowCache,
        messages: RowMessages,
        gradients: StepGradients | None,
        *,
        stores: Sequence[MappedEmbeddingStore],
        shared: SharedIndex,
    ) -> None:
        super().__init__(cache, messages, gradients)
        self._stores, self._shared = stores, shared
        self._update = loops.update_copies_for(cache.rows.shape[1])
        # Of each store the rows with their state, and the clocks, as the loops take them.
        self._stored: list[tuple[Arrays, NDArray[np.int32]]] = [
            ((as_loop_array(x.rows), _state(x.row_state)), x.clocks.numpy()[:, None]) for x in stores
        ]
        self._copies_of: tuple[Tensor, Arrays] | None = None
        shared.join(self)

    def evict(self) -> None:  # noqa: D102 - inherited
        self._shared.evict()

    def leave(self, slots: Integers) -> None:  # noqa: D102 - inherited
        self.counts["evictions"] += len(slots)
        self._push(slots, leave=True)

    def _push(self, slots: Integers, *, leave: bool = False) -> None:
        """Bring what copies owe to their rows, and let the slots be empty if they are to leave."""
        cache, copies, there = self.cache, self._copies(), self._checked()
        for index, (which, rows) in enumerate(self._messages.places.split(cache.index.keys(slots))):
            rule = self._rule.by_sum, leave, self._messages.moved[index]
            loops.push_copies(slots[which], rows, copies, cache.clocks, *there[index], *rule)

    def _begin(self, features: SparseFeatures, *, trained: bool = True, validate: bool = True) -> CachedTicket:
        """Bring all rows of a batch here that are missing or too old, after what their copies owe has been pushed."""
        plan = self._shared.plan(self, self._messages.places.keys_of(features))
        lags_U = np.empty(len(plan.slots_U), dtype=np.int32)
        clocks, copies, there = self.cache.clocks, self._copies(), self._checked()
        for index, (which, rows) in enumerate(self._messages.places.split(plan.keys_U)):
            lags, rule = lags_U[which], (self._rule.bound, self._rule.by_sum)
            self._update(
                plan.slots_U[which], rows, copies, clocks, *there[index], *rule, lags, self._messages.moved[index]
            )
            lags_U[which] = lags
        self.lags_U = lags_U
        self.counts["reads"] += len(plan.keys_U)
        return CachedTicket(features, plan=plan)

    def _await(self, batch: CachedTicket, *, validate: bool = True) -> None:
        pass  # they came as the batch began

    def _copies(self) -> Arrays:
        """The cache's rows, their state, and what they owe of both, as the loops take them."""
        cache = self.cache
        if self._copies_of is None or self._copies_of[0] is not cache.rows:  # another tensor when the cache has grown
            owed = cache.owed["weight"].numpy(), _state(cache.owed)
            self._copies_of = cache.rows, (cache.rows.numpy(), _state(cache.row_state), *owed)
        return self._copies_of[1]

    def _checked(self) -> list[tuple[Arrays, NDArray[np.int32]]]:
        """The arrays that the loops take of each store, none of which was removed.

        Raises:
            StoreReplacedError: one was. What is written to its memory from then on is nobody else's.
        """
        for store in self._stores:
            _ = store.rows  # which looks at the number of its generation
        return self._stored


def _state(tensors: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """The one state of a rule that has one, ``[C, W]``."""
    for name, tensor in tensors.items():
        if name != "weight":
            array: NDArray[np.float32] = tensor.numpy()
            return array if array.ndim > 1 else array[:, None]
    return _NO_STATE
