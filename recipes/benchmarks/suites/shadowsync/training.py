"""What each process of a job trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.jobs.training import Batches, StepTimes, make_strategy
from benchmarks.harness.ours import TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.workload import Workload

from lightning_recsys.models import DLRM
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies import ShadowSyncStrategy

ROWS = 65_536  # held in memory; workers go round and round, each from a place of its own


class Slowed(pl.Callback):
    """Makes a rank so many times slower: it does not wait, but computes, as much of the machine as ever is in use.

    Args:
        rank: Which.
        factor: How many times.
    """

    def __init__(self, rank: int, factor: float) -> None:
        self.rank, self.factor = rank, factor

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.thread_time()  # stands still while the job does

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if trainer.global_rank == self.rank:
            end = self._began + self.factor * (time.thread_time() - self._began)
            with torch.no_grad():
                while time.thread_time() < end:
                    pl_module.training_step(batch, 0)


class SyncServersOverTcp(ShadowSyncStrategy):
    """Rows in shared memory, but the centre of the replicas behind a server."""

    def stores(self, kind: str) -> list[Stores]:
        self.transport = "tcp" if kind == "sync" else "auto"
        return super().stores(kind)


def make_task(work: Workload) -> TaskAlone:
    """DLRM with a million dense parameters: 1.06 million where rows are 16 wide."""
    network = DLRM(
        work.num_dense,
        work.fields,
        embedding_dim=work.dim,
        bottom_hidden=(512, 256, 64),
        top_hidden=(1024, 512),
        row_optimizer=RowWiseAdagrad(lr=0.01),
    )
    return TaskAlone(network, optimizer=partial(torch.optim.Adagrad, lr=0.01, fused=True))


def train(
    *,
    folder: Path,
    asker: int,
    batch_size: int,
    dim: int = 16,
    strategy: Mapping[str, Any] | None,
    name: str = "shadowsync",
    sync_over_tcp: bool = False,
    num_nodes: int = 1,
    start: float = 0.0,
    slowed: tuple[int, float] | None = None,
) -> None:
    """Train until told to stop.

    Args:
        folder: As in :class:`StepTimes`.
        asker: Id of the process that wants the training.
        batch_size: Examples of a step of a worker.
        dim: Width of the rows.
        strategy: Arguments of the strategy; ``None`` trains in this process alone.
        name: Which strategy, of two workers.
        sync_over_tcp: Use :class:`SyncServersOverTcp`.
        num_nodes: Lightning's.
        start: As in :class:`Batches`.
        slowed: Arguments of :class:`Slowed`, if a rank is to be.
    """
    work = Workload(rows=ROWS, dim=dim)
    make = SyncServersOverTcp if sync_over_tcp else partial(make_strategy, name)
    on_one_machine: str | int = "auto" if name == "shadowsync" else 2
    trainer = quiet_trainer(
        StepTimes(folder, asker=asker),
        callbacks=[Slowed(*slowed)] if slowed else [],
        devices=on_one_machine if strategy is not None and num_nodes == 1 else 1,
        num_nodes=num_nodes,
        strategy="auto" if strategy is None else make(**strategy),
    )
    loader: Any = Batches(work.batches(batch_size), start)
    trainer.fit(make_task(work), loader)
