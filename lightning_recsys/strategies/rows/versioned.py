"""Rows on servers with a version each: the staleness of their gradients is counted, and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.versions import StalenessHistogram
from lightning_recsys.strategies.common.settings import require_kind
from lightning_recsys.strategies.rows import row_tags
from lightning_recsys.strategies.rows.served import ServedRows
from lightning_recsys.strategies.rows.staleness_of_all import StalenessOfAll, shares
from lightning_recsys.sync import StalenessNormalization, StalenessRule

STALENESS = "staleness/rows"


class VersionedRows(ServedRows):
    """Rows on servers that count the updates of each row, and let a stale gradient count for less.

    Args:
        normalization: What a stale gradient counts: a rule's name, or
            :class:`~lightning_recsys.sync.StalenessNormalization` with its numbers. With ``identity`` staleness is
            counted, and every gradient counts in full.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.rows.served.ServedRows`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is of another type.

    Communication: that of :class:`~lightning_recsys.strategies.rows.served.ServedRows`, and a version with each row.
    Reference: Liu & Zhao 2021, "Asynchronous stochastic gradient descent for extreme-scale recommender systems".
    """

    normalization: StalenessNormalization

    def __init__(self, *, normalization: StalenessNormalization | StalenessRule = "identity", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        kinds = (str, StalenessNormalization)
        require_kind("normalization", normalization, kinds, "a rule's name or a StalenessNormalization(...)")
        self.normalization = StalenessNormalization(normalization) if isinstance(normalization, str) else normalization

    def _reset(self) -> None:
        super()._reset()
        self._staleness = StalenessOfAll()
        # Versions of the checkpoint that the run goes on from, which this worker brings to the servers as it begins.
        self._restored: list[row_tags.Share] = []

    def begin(self) -> None:
        """Bring what a checkpoint had of versions to the servers."""
        super().begin()
        row_tags.write_shares(self.collections, self.normalization, self._restored)
        self._restored = []

    # --- Checkpoints: versions, and how far rows last moved ----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The versions of all rows, for a checkpoint that is a single file."""
        kept = super().state()
        return kept if self.strategy.saves_folders else kept | self._tags(rank=0, num_ranks=1)

    def own_state(self) -> dict[str, Any]:
        """The versions of this rank's share of the rows."""
        return self._tags(rank=self.strategy.living_rank, num_ranks=self.strategy.num_living)

    def _tags(self, *, rank: int, num_ranks: int) -> dict[str, Any]:
        if self.tables is None:
            return {}
        ranks = {"rank": rank, "num_ranks": num_ranks}
        return {row_tags.KEY: row_tags.read_share(self.tables.collections, self.normalization, **ranks)}

    def load_own(self, path: Any, loaded: dict[str, Any], *, weights_only: bool) -> None:  # noqa: D102 - inherited
        ranks: Any = {"rank": self.strategy.global_rank, "num_ranks": self.strategy.world_size}
        self._restored = row_tags.load_shares(path, **ranks, weights_only=weights_only)

    def load(self, checkpoint: Mapping[str, Any]) -> None:  # noqa: D102 - inherited
        if row_tags.KEY in checkpoint and self.strategy.is_global_zero:  # of a single file
            self._restored = [checkpoint[row_tags.KEY]]
        super().load(checkpoint)

    # --- Telemetry ---------------------------------------------------------------------------------------------------

    @property
    def observed(self) -> StalenessHistogram:
        """The staleness of this worker's pushes."""
        seen = StalenessHistogram()
        for collection in self.collections.values():
            if isinstance(collection.embedding_bags, StoreBackend):
                seen.update(collection.embedding_bags.observed)
        return seen

    def meet(self) -> None:
        """Learn of the staleness of the other workers' pushes."""
        self._staleness.meet({STALENESS: self.observed}, device=self.strategy.root_device)

    def telemetry(self) -> dict[str, Any]:
        """The staleness of all workers' pushes of rows; see ``docs/settings/async_ps.md`` for each name."""
        return super().telemetry() | shares({STALENESS: self._staleness.of_all(STALENESS, self.observed)})
