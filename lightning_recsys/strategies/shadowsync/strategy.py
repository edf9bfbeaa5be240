"""ShadowSync: replicas that train on their own and are kept together in the background."""

from __future__ import annotations

from typing import Any

from lightning_recsys.strategies.common.settings import require_whole
from lightning_recsys.strategies.served import ServedStrategy
from lightning_recsys.strategies.shadowsync.replicas import Final, Replicas, RoundsIn
from lightning_recsys.sync import SyncAlgorithm


class ShadowSyncStrategy(ServedStrategy):
    r"""Trainers with a dense replica each, kept together beside training; embedding rows in stores, once for all.

    A *trainer* has ``workers_per_trainer`` processes, Lightning's ranks, which train one replica of the dense part and
    one optimizer state in shared memory, without a lock (Hogwild). Rows lie in stores on the embedding servers, where
    all workers read and write them without a lock. A shadow thread in each trainer's first worker runs round after
    round of a :class:`~lightning_recsys.sync.SyncAlgorithm` and knows nothing of training.

    Args:
        num_trainers: Replicas, over all nodes. Default: as many as ``Trainer(devices=..., num_nodes=...)`` gives.
        workers_per_trainer: Processes that share a replica; all on one node.
        algorithm: ``easgd``, ``ma``, ``bmuf``, a name registered with
            :func:`~lightning_recsys.sync.register_algorithm`, or an algorithm.
        rounds: ``background`` runs rounds in the shadow thread, ``foreground`` between two steps, while the worker
            waits, and with ``ma`` and ``bmuf`` all workers of its trainer.
        alpha: Elastic parameter, in ``(0, 1]``: how far a round moves a replica; ``None`` is the algorithm's default,
            0.5 for those named above.
        gap: Foreground: steps of a worker from one round to the next.
        interval: Seconds from one round to the next: in the background instead of as often as 1.75 % of a core allows,
            in the foreground instead of ``gap``.
        eta: BMUF's step size; ``None`` is its default, 1.
        block_momentum: BMUF's momentum; ``None`` is its default, 0.
        nesterov: BMUF's look-ahead; ``None`` is its default, off.
        num_sync_servers: Servers for the centre of ``easgd``, each with an equal part of it; 1 where there is none.
        final: What the trained model is: ``trainer0``'s replica, or the ``average`` of all.
        min_workers: Workers may die as long as so many are left.
        max_replacements: How many workers that died are replaced by other processes, in all, where trainers have one
            worker each. Default: none.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.served.ServedStrategy`, such as
            ``table_placement``.

    Raises:
        ValueError: an argument is out of range, or does not go with another.
        TypeError: an argument is of another type.

    Communication: in the background, per round and trainer, the replica to the sync servers and the centre back, or one
    all-reduce among the trainers. Training itself communicates with the embedding servers only.
    Reference: Zheng et al. 2020, "ShadowSync: performing synchronization in the background for highly scalable
    distributed training".
    Differs from the paper: workers are processes, not threads; a trainer that finishes early goes on with its rounds
    until all have finished; a single trainer does not synchronise.

    >>> from pytorch_lightning import Trainer
    >>> strategy = ShadowSyncStrategy(num_trainers=2, workers_per_trainer=2)
    >>> Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False).world_size
    4
    """

    strategy_name = "shadowsync"
    asynchronous = True
    wraps_model = False
    dense: Replicas

    def __init__(
        self,
        *,
        num_trainers: int | None = None,
        workers_per_trainer: int = 1,
        algorithm: str | SyncAlgorithm = "easgd",
        rounds: RoundsIn = "background",
        alpha: float | None = None,
        gap: int = 5,
        interval: float | None = None,
        eta: float | None = None,
        block_momentum: float | None = None,
        nesterov: bool | None = None,
        num_sync_servers: int = 1,
        final: Final = "trainer0",
        min_workers: int = 1,
        max_replacements: int = 0,
        **kwargs: Any,
    ) -> None:
        self.dense = Replicas(
            num_trainers=num_trainers,
            workers_per_trainer=workers_per_trainer,
            algorithm=algorithm,
            rounds=rounds,
            alpha=alpha,
            gap=gap,
            interval=interval,
            eta=eta,
            block_momentum=block_momentum,
            nesterov=nesterov,
            num_sync_servers=num_sync_servers,
            final=final,
        )
        super().__init__(**kwargs)
        require_whole("min_workers", min_workers)
        require_whole("max_replacements", max_replacements, at_least=0, hint="0 replaces none.")
        self.min_workers, self.max_replacements = min_workers, max_replacements
