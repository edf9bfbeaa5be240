"""Synchronous data parallelism: the baseline for the other strategies, and its dense part over rows that are free."""

from __future__ import annotations

from typing import Any

from lightning_recsys.strategies.common.base import RecsysStrategy
from lightning_recsys.strategies.rows.versioned import VersionedRows
from lightning_recsys.strategies.served import ServedStrategy


class ForkserverDDPStrategy(RecsysStrategy):
    """DDP on processes from a fork server, so that sweeps, notebooks and repeated runs are safe.

    Every worker holds the whole model and takes its share of the batches; gradients are averaged at each step, over
    gloo on CPUs and NCCL on GPUs. Under ``torchrun`` or SLURM, which start the processes themselves, nothing is
    launched.

    Args:
        num_threads: Threads per worker, as in :func:`lightning_recsys.runtime.configure_worker`.
        **kwargs: As for ``DDPStrategy``, which passes what it does not know to ``DistributedDataParallel``. The start
            method is not among them.

    Communication: one all-reduce of the dense gradients per step; parameters and rows are broadcast once at the start.

    >>> from pytorch_lightning import Trainer
    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_forkserver", logger=False)
    >>> trainer.strategy.num_processes
    2
    """

    strategy_name = "ddp_forkserver"


class FreeRowsDDPStrategy(ServedStrategy):
    """DDP for the dense part, in step; rows on servers, where each worker trains them without waiting for the others.

    At each step the workers' dense gradients are averaged. Row gradients go to the servers as soon as they are there,
    each as an update of its own that counts in full, while the next rows are read: a worker may read a row before
    another worker's last update of it has arrived. How many updates that are (``staleness/rows``) is counted.

    Args:
        **kwargs: Arguments of :class:`~lightning_recsys.strategies.served.ServedStrategy` and of
            ``DistributedDataParallel``.

    Communication: per step, one all-reduce of the dense gradients; the rows of the batch from the servers, and their
    gradients to them.
    Reference: the hybrid of Lian et al. 2022, "Persia: an open, hybrid system scaling deep learning-based recommenders
    up to 100 trillion parameters".
    Differs from the paper: a worker has at most one step's row gradients under way.

    >>> from pytorch_lightning import Trainer
    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_free", logger=False)
    >>> trainer.strategy.gradient_scale
    1.0
    """

    strategy_name = "ddp_free"

    def own_rows(self, **settings: Any) -> VersionedRows:
        """Rows that count their updates, of which each counts in full."""
        return VersionedRows(normalization="identity", **settings)
