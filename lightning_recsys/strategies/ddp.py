"""Synchronous data parallelism: the baseline for the other strategies."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.strategies.registry import _StrategyRegistry
from lightning_fabric.utilities.types import _PATH
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_recsys.launchers import ForkserverLauncher


class ForkserverDDPStrategy(DDPStrategy):
    """Lightning's DDP on processes from a fork server, so that sweeps, notebooks and repeated runs are safe.

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

    def __init__(self, *, num_threads: int = 1, **kwargs: Any) -> None:
        super().__init__(start_method="forkserver", **kwargs)
        self.num_threads = num_threads

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the strategy known to ``Trainer(strategy="ddp_forkserver")``."""
        strategy_registry.register(
            cls.strategy_name, cls, description="DDP on processes from a fork server", override=True
        )

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = ForkserverLauncher(self, num_threads=self.num_threads)

    def on_train_start(self) -> None:
        """Refuse data that would leave the ranks waiting for each other.

        Raises:
            ValueError: the ranks have unequal numbers of training batches.
        """
        assert self.lightning_module is not None
        per_rank: list[int | float] = [0] * self.world_size
        # inf where a loader has no length
        torch.distributed.all_gather_object(per_rank, self.lightning_module.trainer.num_training_batches)
        if len(set(per_rank)) > 1:
            raise ValueError(
                "every rank needs the same number of training batches, or the first to finish leaves the others waiting"
                f" for ever; got {per_rank} on ranks 0 to {self.world_size - 1}. Drop or repeat batches in the loader,"
                f" or set trainer.limit_train_batches={min(per_rank)}."
            )

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce over the ranks; a mean of integers is not rounded.

        Lightning floors it (its issue 21838), which inflates ``self.log(..., sync_dist=True)`` where ranks logged
        different numbers of examples.
        """
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, but not what the main process of a failed run holds: the weights from before that run.

        Lightning runs ``on_exception`` of the callbacks there, and some of them save checkpoints.
        """
        if isinstance(self.launcher, ForkserverLauncher) and self.launcher.failed:
            rank_zero_warn(
                f"{filepath} was not written: the run failed in its workers, and the main process has the weights from"
                " before it only. `ModelCheckpoint(every_n_train_steps=...)` saves while the workers run."
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)
