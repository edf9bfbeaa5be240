"""HET: embedding rows on servers, copies of the busy ones in every worker's cache, with bounded staleness per row."""

from __future__ import annotations

from typing import Any

from lightning_recsys.row_cache.index import CachePolicy
from lightning_recsys.strategies.common.settings import refuse_meaningless
from lightning_recsys.strategies.parts import InStep
from lightning_recsys.strategies.rows.cached import (
    AUTO,
    DEFAULT_LOOKAHEAD_BATCHES,
    DEFAULT_LOOKAHEAD_BYTES,
    CachedAlgorithm,
    CachedRows,
)
from lightning_recsys.strategies.served import ServedStrategy
from lightning_recsys.sync import ClockName


class HETStrategy(ServedStrategy):
    r"""DDP for the dense part; rows on servers, and in each worker a cache of those that it needs most.

    The dense part is that of DDP: its gradients are averaged at each step. Rows are
    :class:`~lightning_recsys.strategies.CachedRows`, which explain themselves. Workers go in step by batches, so a
    row's update is by the mean of their gradients.

    Args:
        algorithm: ``het``, or ``hybrid``, which it is compared with and which has no cache.
        cache_rows: Rows that a worker keeps of each collection.
        cache_fraction: The same as a share of the collection's rows, in ``(0, 1]``; 0.1 where neither is given.
        staleness: :math:`s`, in updates of a row; 0 gives the result of no cache and of ``ddp``, ``None`` or ``"inf"``
            no bound; ``"auto"`` follows the length of the run.
        max_missed_updates: How many updates of a row, of all other workers together, a read may lack; instead of
            ``staleness`` and ``clock``.
        policy: Which rows leave a full cache, of those that no known batch needs: ``lru``, ``lfu`` or ``light_lfu``.
        clock: What a push makes of a row's clock on its server: ``max``, as in the paper, or ``sum``.
        prefetch: Look at the next batch one step early, and let its rows travel while the present one computes.
        lookahead_batches: Look at up to so many batches ahead, and keep the rows that they need soonest.
        lookahead_bytes: But at no more than the next one once those that wait take so much memory.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.served.ServedStrategy`, but for
            ``rows``, and of ``DistributedDataParallel``.

    Raises:
        ValueError: an argument is out of range, both cache sizes are given, ``dynamic_rows`` without ``cache_rows``, or
            settings of a cache with ``hybrid``.
        TypeError: an argument is of another type.

    Communication: per step, one all-reduce of the dense gradients, and what the rows send.
    Reference: Miao et al. 2022, "HET: scaling out huge embedding model training via cache-enabled distributed
    framework".
    Differs from the paper: as the rows say.

    >>> from pytorch_lightning import Trainer
    >>> strategy = HETStrategy(cache_fraction=0.05, staleness=10)
    >>> Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False).world_size
    2
    """

    strategy_name = "het"
    rows: CachedRows
    pace = InStep()

    def __init__(
        self,
        *,
        algorithm: CachedAlgorithm = "het",
        cache_rows: int | None = None,
        cache_fraction: float | None = None,
        staleness: int | float | str | None = AUTO,
        max_missed_updates: int | None = None,
        policy: CachePolicy = "light_lfu",
        clock: ClockName = "max",
        prefetch: bool = True,
        lookahead_batches: int = DEFAULT_LOOKAHEAD_BATCHES,
        lookahead_bytes: int = DEFAULT_LOOKAHEAD_BYTES,
        **kwargs: Any,
    ) -> None:
        self._cache: dict[str, Any] = {
            "algorithm": algorithm,
            "cache_rows": cache_rows,
            "cache_fraction": cache_fraction,
            "staleness": staleness,
            "max_missed_updates": max_missed_updates,
            "policy": policy,
            "clock": clock,
            "prefetch": prefetch,
            "lookahead_batches": lookahead_batches,
            "lookahead_bytes": lookahead_bytes,
        }
        if (rows := kwargs.get("rows")) is not None:
            if not isinstance(rows, CachedRows):
                raise ValueError(
                    f"strategy.rows={rows}: HETStrategy is DDP with CachedRows, which take its own arguments, such as"
                    " strategy.staleness. Leave strategy.rows out, or give CachedRows(...)."
                )
            refuse_meaningless(HETStrategy, self._cache, "where strategy.rows is an object, which has its own")
        super().__init__(**kwargs)

    def own_rows(self, **settings: Any) -> CachedRows:
        """Rows with a cache in each worker."""
        return CachedRows(**self._cache, **settings)
