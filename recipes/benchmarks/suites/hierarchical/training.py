"""What a job of suite ``hierarchical`` trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.jobs.training import Batches, StepTimes
from benchmarks.harness.ours import MODELS, TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.workload import Workload
from benchmarks.suites.het.training import CrossedBytes

from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.strategies import HierarchicalStrategy, ShadowSyncStrategy
from lightning_recsys.strategies.hierarchical import OperatorPlacement

ROWS = 65_536  # held in memory; a trainer goes round and round
WARM_STEPS = 5
PLAN = "operators.yaml"  # in a job's folder, with what the job measured of its machines
make_optimizer = partial(torch.optim.Adagrad, lr=0.01, fused=True)


class Waits(StepTimes):
    """Makes the first steps with the others, and then waits for the end: its node only runs the servers."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        while trainer.global_step >= WARM_STEPS and not trainer.should_stop:
            time.sleep(0.05)
            trainer.should_stop = self.is_over(trainer)


def make_network(work: Workload, model: str, *, device: str | None = "meta") -> torch.nn.Module:
    """A model; on ``meta`` its rows are in the stores."""
    optimizer = RowWiseAdagrad(lr=0.01)
    make = MODELS[model]
    return make(work.num_dense, work.fields, embedding_dim=work.dim, row_optimizer=optimizer, device=device)


def train(
    *,
    folder: Path,
    asker: int,
    model: str,
    batch_size: int,
    strategy: Mapping[str, Any] | None,
    plan: str | None = None,
    interface: str | None = None,
    rows: int = ROWS,
) -> None:
    """Train until told to stop.

    Args:
        folder: As in :class:`StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``benchmarks.harness.ours.MODELS``.
        batch_size: Examples of a step.
        strategy: Arguments of :class:`HierarchicalStrategy` on two nodes; ``None`` trains in this process alone.
        plan: A file that says where operators are.
        interface: Where bytes are counted after each step; without it this process only waits.
        rows: Examples held in memory.
    """
    work = Workload(rows=rows)
    times: StepTimes
    if strategy is None:
        times = StepTimes(folder, asker=asker)
    elif interface is None:
        times = Waits(folder, asker=asker)
    else:
        times = CrossedBytes(folder, asker=asker, interface=interface)
    trainer = quiet_trainer(
        times,
        num_nodes=1 if strategy is None else 2,
        strategy=ShadowSyncStrategy()
        if strategy is None
        else HierarchicalStrategy(**strategy, operator_placement=OperatorPlacement(plan=plan, save=folder / PLAN)),
    )
    loader: Any = Batches(work.batches(batch_size))
    trainer.fit(TaskAlone(make_network(work, model), optimizer=make_optimizer), loader)
