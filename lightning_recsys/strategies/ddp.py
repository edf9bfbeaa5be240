"""Synchronous data parallelism: the baseline for the other strategies."""

from __future__ import annotations

from lightning_recsys.strategies.common.base import RecsysStrategy


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
