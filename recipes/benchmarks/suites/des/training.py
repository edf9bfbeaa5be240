"""What each process of a job trains."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.jobs.hosts import counted_by
from benchmarks.harness.jobs.training import CountedSteps, make_strategy
from benchmarks.harness.ours import TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.suites.des.rows import ROWS, HeldRows, Rows

from lightning_recsys.models import DeepFM, LogisticRegression, WideDeep
from lightning_recsys.optim import RowWiseAdagrad

MODELS: dict[str, Callable[..., torch.nn.Module]] = {"LR": LogisticRegression, "W&D": WideDeep, "DeepFM": DeepFM}


class SentBytes(CountedSteps):
    """Counted are seconds, and bytes and packets that the network interface had sent by then."""

    def counted(self, trainer: pl.Trainer) -> Sequence[float]:
        return time.monotonic(), *counted_by(os.environ["GLOO_SOCKET_IFNAME"])[:2]


def make_model(name: str, rows: Rows, *, device: str | None = None) -> torch.nn.Module:
    """A model for such rows; on ``meta`` without its own rows, which servers then draw."""
    deep: dict[str, Any] = {} if name == "LR" else {"embedding_dim": rows.dim, "hidden": rows.hidden}
    rule = RowWiseAdagrad(lr=0.01)
    return MODELS[name](rows.num_dense, rows.fields, row_optimizer=rule, device=device, **deep)


def train(
    *, folder: Path, asker: int, model: str, data: str, batch_size: int, strategy: Mapping[str, Any], num_nodes: int = 2
) -> None:
    """Train until told to stop.

    Args:
        folder: As in :class:`~benchmarks.harness.jobs.training.StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``MODELS``.
        data: One of ``des_data.ROWS``.
        batch_size: Examples of a global batch.
        strategy: As :func:`make_strategy` takes it.
        num_nodes: Lightning's.
    """
    trainer = quiet_trainer(
        SentBytes(folder, asker=asker),
        num_nodes=num_nodes,
        strategy=make_strategy(**strategy),
    )
    network = make_model(model, ROWS[data], device="meta" if strategy.get("num_embedding_servers") else None)
    task = TaskAlone(network, optimizer=partial(torch.optim.Adagrad, lr=0.01, fused=True))
    trainer.fit(task, datamodule=HeldRows(ROWS[data], batch_size=batch_size))
