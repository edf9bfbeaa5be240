"""This package as its users run it: ``Trainer.fit`` over prepared rows on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytorch_lightning as pl
import torch
from benchmarks.harness.trainer import StepsToTurn, quiet_trainer
from benchmarks.harness.turns import Turn
from benchmarks.harness.workload import Workload
from pytorch_lightning.loggers import CSVLogger

from lightning_recsys.callbacks import ExamplesPerSecond, NormalizedEntropyMonitor
from lightning_recsys.data import PreparedDataModule
from lightning_recsys.models import DCN, DLRM, DeepFM, WideDeep
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.tasks import CTRTask

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "dlrm": partial(DLRM, bottom_hidden=(512, 256, 64), top_hidden=(512, 256)),
    "deepfm": partial(DeepFM, hidden=(400, 400, 400)),
    "wide_deep": partial(WideDeep, hidden=(400, 400)),
    "dcn": partial(DCN, num_cross_layers=3, hidden=(400, 400)),
}


class TaskAlone(CTRTask):
    """Without the monitor that a task brings."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return []


def make_task(work: Workload, model: str, *, kind: type[CTRTask] = CTRTask) -> CTRTask:
    """A model, its rows and its optimizers, as the floor has them."""
    rule = RowWiseAdagrad(lr=0.01)
    network = MODELS[model](work.num_dense, work.fields, embedding_dim=work.dim, row_optimizer=rule)
    return kind(network, optimizer=partial(torch.optim.Adagrad, lr=0.01, fused=True))


@dataclass(frozen=True)
class Ours:
    """Makes variants of :func:`benchmarks.harness.turns.in_turns`.

    Args:
        root: Prepared rows.
        precision: Lightning's.
        metrics: Normalized entropy, throughput and a CSV logger; none of them otherwise.
    """

    root: Path
    precision: str = "32-true"
    metrics: bool = True

    def __call__(self, work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
        """A training that a turn pauses and stops."""

        def run(turn: Turn) -> None:
            task = make_task(work, model, kind=CTRTask if self.metrics else TaskAlone)
            data = PreparedDataModule(root=self.root, batch_size=batch_size, drop_last=True)
            with tempfile.TemporaryDirectory() as folder:
                trainer = quiet_trainer(
                    StepsToTurn(turn, batch_size),
                    callbacks=[ExamplesPerSecond(), NormalizedEntropyMonitor()] if self.metrics else [],
                    logger=CSVLogger(folder) if self.metrics else False,
                    precision=self.precision,
                )
                trainer.fit(task, datamodule=data)

        return run


def reader_alone(root: Path, batch_size: int) -> Callable[[Turn], None]:
    """The reader that :class:`Ours` trains from, with nothing done to its batches."""

    def run(turn: Turn) -> None:
        data = PreparedDataModule(root=root, batch_size=batch_size, drop_last=True)
        data.setup()
        loader = data.train_dataloader()
        for _ in count():
            for batch in loader:
                turn.step_done(len(batch))

    return run
