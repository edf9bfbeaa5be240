"""The order in which rows come: the same for all ranks, whatever their number and batch size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.hashing import key64

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class WindowPlan:
    """Some row groups that are read together.

    Args:
        groups: Numbers of the row groups, counted over all shards of the split.
        start: Position of the first of their rows in the epoch.
        stop: Position behind the last.
    """

    groups: NDArray[np.int64]
    start: int
    stop: int


class EpochOrder:
    """Rows of an epoch in windows, each shuffled.

    All row groups of all shards are put into a random order. Groups that follow each other make a window of at least
    ``window`` rows, within which rows are drawn in random order. So rows of one shard end up anywhere in the epoch, and
    rows of one batch come from anywhere in a window.

    Args:
        group_rows: Rows of each row group.
        seed: Seed of the order.
        epoch: Number of the epoch; each has another order.
        window: Rows to shuffle among; 0 keeps the order of the shards.

    >>> order = EpochOrder(np.array([2, 2, 2]), seed=0, epoch=0, window=4)
    >>> [(plan.start, plan.stop) for plan in order.windows], sorted(order.permutation(0).tolist())
    ([(0, 4), (4, 6)], [0, 1, 2, 3])
    """

    def __init__(self, group_rows: Positions, *, seed: int, epoch: int, window: int) -> None:
        self._key = (seed, epoch)
        self._shuffled = window > 0
        groups = np.arange(len(group_rows))
        if self._shuffled:
            groups = np.random.default_rng(int(key64(*self._key, "groups"))).permutation(groups)
        self.windows: list[WindowPlan] = []
        first = start = stop = 0
        for i, rows in enumerate(group_rows[groups].tolist(), 1):
            stop += rows
            if stop - start >= window or i == len(groups):
                self.windows.append(WindowPlan(groups[first:i], start, stop))
                first, start = i, stop

    def permutation(self, number: int) -> Positions:
        """The order of the rows of a window, as positions in it."""
        plan = self.windows[number]
        positions = np.arange(plan.stop - plan.start)
        if self._shuffled:
            positions = np.random.default_rng(int(key64(*self._key, number))).permutation(positions)
        return positions

    def find(self, position: int) -> int:
        """Number of the window that holds a position of the epoch."""
        starts = [plan.start for plan in self.windows]
        return int(np.searchsorted(starts, position, side="right")) - 1
