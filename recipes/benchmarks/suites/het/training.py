"""What a job of suite ``het`` trains: ``python -m benchmarks.suites.het.training '{"folder": ..., ...}'``."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.job_training import Batches, StepTimes
from benchmarks.harness.ours import MODELS, TaskAlone
from benchmarks.harness.workload import Workload
from recipe_tools.quiet import be_quiet

from lightning_recsys.optim import SGD
from lightning_recsys.runtime import configure_worker
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy


def train(
    *,
    folder: Path,
    asker: int,
    model: str,
    batch_size: int,
    dim: int,
    rows: int,
    strategy: Mapping[str, Any] | None,
    server: Sequence[str] | None = None,
) -> None:
    """Train until told to stop, rows by SGD as in the paper.

    Args:
        folder: As in :class:`~benchmarks.suites.shadowsync.training.StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``benchmarks.harness.ours.MODELS``.
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples held in memory; training goes round and round.
        strategy: Arguments of :class:`HETStrategy`; ``None`` trains rows where they lie (ShadowSync, one worker).
        server: Command of a server to start beside the training, for another host; else the strategy starts one.
    """
    be_quiet()
    warnings.filterwarnings("ignore")
    configure_worker()
    pl.seed_everything(0, verbose=False)
    work = Workload(rows=rows, dim=dim)
    optimizer = SGD(learning_rate=0.01)
    network = MODELS[model](work.num_dense, work.fields, embedding_dim=dim, row_optimizer=optimizer, device="meta")
    task = TaskAlone(network, optimizer=partial(torch.optim.SGD, lr=0.01, fused=True))
    with _running(server) as endpoint:
        where: dict[str, Any] = {} if endpoint is None else {"servers": [endpoint]}
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ShadowSyncStrategy() if strategy is None else HETStrategy(**strategy, **where),
            callbacks=[StepTimes(folder, asker=asker)],
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: Any = Batches(work.batches(batch_size), 0.0)
        trainer.fit(task, loader)


@contextmanager
def _running(command: Sequence[str] | None) -> Iterator[str | None]:
    """A server's endpoint, once it is ready; it ends with the block."""
    if command is None:
        yield None
        return
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "ready: " not in line:
            raise RuntimeError(f"{' '.join(command)} did not start: {line or 'see its errors above'}")
        yield line.strip().partition("ready: ")[2]
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    from benchmarks.suites.het import training  # whose classes the workers can import

    settings = json.loads(sys.argv[1])
    training.train(**settings | {"folder": Path(settings["folder"])})
