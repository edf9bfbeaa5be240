"""A worker's copies of rows: trained in place, with what they have not sent yet."""

# Shape suffixes: N ids of a batch, U distinct ones, M rows fetched, P rows with updates, C slots, D embedding dim.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings.cache.index import BatchPlan, CachePolicy, Integers
from lightning_recsys.optim import RowOptimizer

Clocks = NDArray[np.int32]


@dataclass(frozen=True)
class RowUpdates:
    """What rows owe their server; every row has something.

    Attributes:
        keys: int64 ``[P]``.
        current: The rows' own clocks ``c_c``, int32 ``[P]``.
        unsent: Updates that each row has accumulated here, int32 ``[P]``, at least 1.
        values: By name, float32 ``[P, ...]`` on the cache's device: ``weight`` is to be subtracted from the server's
            rows, every state to be added to the server's.
    """

    keys: Integers
    current: Clocks
    unsent: Clocks
    values: dict[str, Tensor]


class RowCache:
    """A bounded set of rows with optimizer state and clocks, trained here and sent later.

    The slots may exceed ``limit`` for the rows of the batch at hand and of a batch planned ahead; :meth:`evict`, after
    the update, brings them back to it.

    Args:
        limit: Rows that outlast a step; 0 keeps none.
        embedding_dim: ``D``.
        optimizer: The update rule: one whose state is a sum (SGD, Adagrad, RowwiseAdagrad).
        policy: As in :class:`CacheIndex`.
        device: Where rows, state and updates are; index and clocks are on the CPU.

    Attributes:
        rows: float32 ``[C, D]``, contiguous; a new tensor whenever the slots grow, so read it after :meth:`plan`.
        row_state: The rule's state by name, ``[C]`` or ``[C, D]``.
        start: ``c_s`` of each slot, int32 ``[C]``.
        current: ``c_c`` of each slot, int32 ``[C]``.
        unsent: Updates of each slot that its server does not have yet, int32 ``[C]``.

    Raises:
        ValueError: ``limit`` is negative.
        TypeError: a rule whose updates of several workers cannot be added.
    """

    rows: Tensor
    row_state: dict[str, Tensor]
    start: Clocks
    current: Clocks
    unsent: Clocks

    def __init__(
        self,
        limit: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        *,
        policy: CachePolicy = "lru",
        device: torch.device | str | None = None,
    ) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        """Rows held."""
        raise NotImplementedError

    def plan(self, keys_N: Integers) -> BatchPlan:
        """Find a batch's rows; new ones get slots whose content :meth:`install` has to bring before any lookup.

        Args:
            keys_N: int64 ``[N]``, any numbers, repeated as the batch repeats them.
        """
        raise NotImplementedError

    def install(self, slots_M: Integers, values: dict[str, Tensor], clocks_M: Clocks) -> None:
        """Fetch: put rows as a server sent them into their slots; ``c_s`` and ``c_c`` become the server's clock.

        Args:
            slots_M: Distinct slots, int64 ``[M]``; none of them may have unsent updates (:meth:`take` them first).
            values: ``weight`` and every state, float32 ``[M, ...]``, on any device.
            clocks_M: The server's clocks, int32 ``[M]``.
        """
        raise NotImplementedError

    def sum_gradients(
        self, plan: BatchPlan, offsets: Tensor | None, weights: Tensor | None, grad_BFD: Tensor
    ) -> Tensor:
        """The gradient of each distinct row of a batch, float32 ``[U, D]``.

        Args:
            plan: The batch's.
            offsets: Of its bags, int64 ``[F * B + 1]``; ``None`` where each holds one id.
            weights: Of its ids, float32 ``[N]``; ``None`` where all are 1.
            grad_BFD: The gradient of the pooled lookup.
        """
        raise NotImplementedError

    def update(self, slots_U: Integers, grads_UD: Tensor, *, learning_rate: float) -> None:
        """Train rows in place, accumulate the same update for the server, and tick their clocks once.

        Args:
            slots_U: Distinct slots, int64 ``[U]``.
            grads_UD: Their summed gradients, float32 ``[U, D]``.
            learning_rate: Step size of this update.
        """
        raise NotImplementedError

    def take(self, slots: Integers) -> RowUpdates:
        """Take the updates of those of the given slots that have some; the rows stay, and owe nothing afterwards.

        ``c_s`` stays as well: a row that was updated since it was fetched does not have what others sent meanwhile.
        """
        raise NotImplementedError

    def evict(self, *, spare_from: int) -> tuple[RowUpdates, int]:
        """Drop rows by policy until ``limit`` are left, but none of the plans ``spare_from`` and later.

        Returns:
            What the dropped rows owed, and how many were dropped. (Rows without updates owe nothing.)
        """
        raise NotImplementedError

    def dirty_slots(self) -> Integers:
        """Slots of all rows with unsent updates, in ascending order."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop all rows, unsent updates included."""
        raise NotImplementedError
