"""The settings of dynamic rows: made when they are first trained, and perhaps forgotten again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DynamicRows:
    """Rows that exist from their first update on, for ids without bound: ``num_embeddings`` may be astronomical.

    With ``num_embeddings=2**64 - 1`` raw 64-bit hashes can be ids: every int64 is one, but -1.

    A row that does not exist is looked up as what it would be made as, a function of seed and key. So lookups make no
    rows, evaluation takes no memory, and it matters neither in which order ids come nor which process makes their rows.

    Args:
        admission: A row exists from the update on that is the ``admission``-th to name its id; earlier updates of it
            are dropped. Rare ids then take 16 to 32 bytes for their count, and none for a row. Counts are kept in
            memory only: they begin again where a server is started again. A push that sums up the updates of a
            worker's copy counts as that many. It is one piece: it is applied as a whole if the ``admission``-th update
            is in it, and dropped as a whole if all of it comes before. So no cache makes a row lose more than the
            ``admission - 1`` updates that it would lose without one.
        expire_after: A row, or a count, that no lookup and no update named during so many updates of the store is
            forgotten, its state too, and its room used for another. ``None``: never. A worker that keeps copies names
            them while it trains, so that rows in its cache stay. Should one be forgotten all the same, as while the
            worker stood still, then the next push of its copy makes the row as the copy is; where another worker has
            made it anew by then, that row takes the copy's update.
        first_keys: For each table of a store the key of its first row; what a row is made as depends on its key. By
            default the tables lie behind each other. Whoever cuts tables over several stores gives each part the keys
            of its own rows.
        key_steps: For each table of a store by how much the keys of two successive rows differ; by default by 1.

    Raises:
        ValueError: a number is too small, or too large to be counted.
    """

    admission: int = 1
    expire_after: int | None = None
    first_keys: tuple[int, ...] | None = None
    key_steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.admission < 2**31:
            raise ValueError(f"admission must be from 1 to 2**31 - 1 updates, got {self.admission}.")
        if self.expire_after is not None and not 1 <= self.expire_after < 2**30:
            raise ValueError(f"expire_after must be None or from 1 to 2**30 updates, got {self.expire_after}.")
        if self.first_keys is not None and not all(0 <= key < 2**64 for key in self.first_keys):
            raise ValueError(f"first_keys must be numbers from 0 to 2**64 - 1, got {self.first_keys}.")
        if self.key_steps is not None and not all(1 <= step < 2**63 for step in self.key_steps):
            raise ValueError(f"key_steps must be numbers from 1 to 2**63 - 1, got {self.key_steps}.")

    def keys(self, starts: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each table of a store the key of its first row, and by how much the keys of two successive rows differ.

        Args:
            starts: For each table the number of its first row in the store.
        """
        first = tuple(starts) if self.first_keys is None else self.first_keys
        return first, (1,) * len(first) if self.key_steps is None else self.key_steps
