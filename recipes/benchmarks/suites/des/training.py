"""What each process of a job trains."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.hosts import counted_by
from benchmarks.harness.job_training import StepTimes
from benchmarks.harness.ours import TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.suites.des.rows import ROWS, HeldRows, Rows

from lightning_recsys.models import DeepFM, LogisticRegression, WideDeep
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.strategies import DESStrategy, ForkserverDDPStrategy, HETStrategy

MODELS: dict[str, Callable[..., torch.nn.Module]] = {"LR": LogisticRegression, "W&D": WideDeep, "DeepFM": DeepFM}
STRATEGIES: dict[str, Callable[..., Any]] = {
    "des": DESStrategy,
    "het": HETStrategy,
    "ddp_forkserver": ForkserverDDPStrategy,
}


class CountedSteps(StepTimes):
    """Times of every step, and what the network interface had sent by then.

    Processes go in step, so they end at the same step: the first one says which, before it begins the step before that.
    """

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        self._traffic = (self.folder / f"traffic-{trainer.global_rank}").open("wb", buffering=0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.monotonic()
        self._file.write(struct.pack("d", now))
        self._traffic.write(struct.pack("3d", now, *counted_by(os.environ["GLOO_SOCKET_IFNAME"])[:2]))
        last = self.folder / "last"
        asked = (self.folder / "stop").exists() or not self.asker.exists()
        if trainer.global_rank == 0 and asked and not last.exists():
            (self.folder / "last.new").write_text(str(trainer.global_step + 2))
            (self.folder / "last.new").rename(last)
        if last.exists() and trainer.global_step >= int(last.read_text()):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_end(trainer)
        self._traffic.close()
        del self._traffic


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
        folder: As in :class:`StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``MODELS``.
        data: One of ``des_data.ROWS``.
        batch_size: Examples of a global batch.
        strategy: ``name`` is one of ``STRATEGIES``, the others its arguments.
        num_nodes: Lightning's.
    """
    arguments = {name: value for name, value in strategy.items() if name != "name"}
    trainer = quiet_trainer(
        CountedSteps(folder, asker=asker),
        num_nodes=num_nodes,
        strategy=STRATEGIES[strategy["name"]](**arguments),
    )
    network = make_model(model, ROWS[data], device="meta" if arguments.get("num_embedding_servers") else None)
    task = TaskAlone(network, optimizer=partial(torch.optim.Adagrad, lr=0.01, fused=True))
    trainer.fit(task, datamodule=HeldRows(ROWS[data], batch_size=batch_size))
