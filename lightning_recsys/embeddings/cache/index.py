"""Which rows a cache holds, where, and which of them go when it is full."""

# Shape suffixes: N ids of a batch, U distinct ones, V victims, S slots.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CachePolicy = Literal["lru", "lfu", "light_lfu"]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """Where a batch's rows are.

    Attributes:
        number: Counts the plans of a cache, from 1.
        slots_N: Slot of each id, int64 ``[N]``: what a kernel looks up.
        distinct_N: Position of each id in the arrays below, int64 ``[N]``, to sum gradients by row.
        keys_U: The distinct keys, in the order of their first occurrence, int64 ``[U]``.
        slots_U: Their slots, int64 ``[U]``.
        new_U: Which of them the cache did not hold, bool ``[U]``: their slots hold nothing yet.
    """

    number: int
    slots_N: Integers
    distinct_N: Integers
    keys_U: Integers
    slots_U: Integers
    new_U: NDArray[np.bool_]


class CacheIndex:
    """Key -> slot, and the order in which rows go. Holds no rows.

    Args:
        policy: Which rows go first: ``lru`` those whose last batch is the longest ago, ``lfu`` those that the fewest
            batches had, ``light_lfu`` the same without keeping order among rows that many batches had.
    """

    def __init__(self, *, policy: CachePolicy) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        """Rows held."""
        raise NotImplementedError

    @property
    def num_slots(self) -> int:
        """Slots in use so far are all below this; it only grows."""
        raise NotImplementedError

    def plan(self, keys_N: Integers) -> BatchPlan:
        """Find a batch's keys, give the new ones slots, and note that they were used."""
        raise NotImplementedError

    def evict(self, limit: int, *, spare_from: int) -> tuple[Integers, Integers]:
        """Forget rows until at most ``limit`` are held: keys and slots, int64 ``[V]`` each, in the order they went.

        Rows of the plans ``spare_from`` and later stay, though they be more than ``limit``.
        """
        raise NotImplementedError

    def slots(self) -> Integers:
        """The slots of all rows held, in ascending order."""
        raise NotImplementedError
