"""Items that users have not taken, drawn at random."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Shape suffixes: U users, T pairs that were taken, B draws asked for.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.hashing import GOLDEN, mix
from lightning_recsys.compiled.loops import compile_rule
from lightning_recsys.data.graph.csr import Ids
from lightning_recsys.data.graph.sampling import draw_positions
from lightning_recsys.data.hashing import key64


@compile_rule
def _draw(key, numbers, bounds, starts, distinct, positions):  # noqa: ANN001, ANN202
    """Fill the positions from ``starts[i]`` to ``starts[i + 1]`` with draws below ``bounds[i]``."""
    marks = np.zeros((bounds.max() if distinct else np.int64(0)) + 1, np.int64)
    for i in range(numbers.shape[0]):
        state = mix(key ^ (np.uint64(numbers[i]) * GOLDEN))
        chosen = positions[starts[i] : starts[i + 1]]
        draw_positions(state, bounds[i], chosen.shape[0], not distinct, marks, chosen)


@dataclass(frozen=True)
class Ranking:
    """Draws items that a user has not taken, each as likely as any other.

    What is drawn depends on the seed, the key and a number that the caller gives each draw, and not on what else is
    drawn with it: ranks that share a batch draw what one rank would.

    Args:
        users: Who has taken an item, int64 ``[T]``; a pair that comes twice counts once.
        items: The item of each pair, int64 ``[T]``.
        num_users: Number of users ``U``; those in ``users`` are below it.
        num_items: Items are below this.
        seed: Seed of all draws: with another one, other items are drawn for the same keys and numbers.
    """

    users: Ids
    items: Ids
    num_users: int
    num_items: int
    seed: int

    @cached_property
    def _taken(self) -> tuple[Ids, Ids]:
        """Where each user's pairs begin, ``[U + 1]``, and how many free items lie before each pair, over all users."""
        users, items = np.divmod(np.unique(self.users * self.num_items + self.items), self.num_items)
        starts = np.concatenate([[0], np.bincount(users, minlength=self.num_users).cumsum()])
        return starts, users * self.num_items + items - (np.arange(len(users)) - starts[users])

    def negatives(self, users: Ids, numbers: Ids, count: int, *, key: int) -> Ids:
        """Items for each draw, int64 ``[B, count]``, in which one may come twice.

        Args:
            users: For whom, int64 ``[B]``. Those who have taken all items get any of them.
            numbers: The draws' own numbers, int64 ``[B]``.
            count: How many for each.
            key: Of the random numbers, such as that of a step.
        """
        free = self._free(users)
        bounds = np.where(free, free, self.num_items)
        positions = self._positions(numbers, bounds, np.full(len(users), count), key, distinct=False)
        of, all_taken = np.repeat(users, count), np.repeat(free == 0, count)
        return np.where(all_taken, positions, self._item_at(of, positions)).reshape(-1, count)

    def candidates(self, users: Ids, count: int) -> tuple[Ids, Ids]:
        """Distinct items for each user, as pairs: ``count``, or all that there are; the same in every call.

        Args:
            users: For whom, int64 ``[B]``.
            count: How many for each.
        """
        free = self._free(users)
        counts = np.minimum(free, count)
        of = np.repeat(users, counts)
        return of, self._item_at(of, self._positions(users, free, counts, 0, distinct=True))

    def _free(self, users: Ids) -> Ids:
        """How many items each user has not taken."""
        starts, _ = self._taken
        return self.num_items - (starts[users + 1] - starts[users])

    def _positions(self, numbers: Ids, bounds: Ids, counts: Ids, key: int, *, distinct: bool) -> Ids:
        starts = np.concatenate([[0], counts.cumsum()])
        positions = np.empty(starts[-1], np.int64)
        if len(numbers):
            _draw(key64(self.seed, key), numbers, bounds, starts, distinct, positions)
        return positions

    def _item_at(self, users: Ids, positions: NDArray[np.int64]) -> Ids:
        """The items that stand at these places among those that a user has not taken."""
        starts, free_before = self._taken
        taken_before = np.searchsorted(free_before, users * self.num_items + positions, side="right") - starts[users]
        items: Ids = positions + taken_before
        return items
