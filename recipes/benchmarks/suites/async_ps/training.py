"""What each process of a job trains: ``python -m benchmarks.suites.async_ps.training '{"folder": ..., ...}'``."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.job_training import Batches, StepTimes
from benchmarks.harness.workload import Workload
from benchmarks.suites.shadowsync.training import ROWS, make_task
from recipe_tools.quiet import be_quiet

from lightning_recsys.runtime import configure_worker
from lightning_recsys.strategies import AsyncParameterServerStrategy, ForkserverDDPStrategy, ShadowSyncStrategy

STRATEGIES: Mapping[str, Any] = {
    "async_ps": AsyncParameterServerStrategy,
    "ddp": ForkserverDDPStrategy,
    "shadowsync": ShadowSyncStrategy,
}


def train(*, folder: Path, asker: int, batch_size: int, strategy: str, options: Mapping[str, Any]) -> None:
    """Train until told to stop.

    Args:
        folder: As in :class:`StepTimes`.
        asker: Id of the process that wants the training.
        batch_size: Examples of a step of each of the two workers.
        strategy: One of :data:`STRATEGIES`.
        options: Its arguments.
    """
    be_quiet()
    warnings.filterwarnings("ignore")
    configure_worker()
    pl.seed_everything(0, verbose=False)
    work = Workload(rows=ROWS, dim=16)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto" if strategy == "shadowsync" else 2,
        strategy=STRATEGIES[strategy](**options),
        callbacks=[StepTimes(folder, asker=asker)],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = Batches(work.batches(batch_size), 0.0)
    trainer.fit(make_task(work), loader)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from benchmarks.suites.async_ps import training  # whose classes the workers can import

    settings = json.loads(sys.argv[1])
    training.train(**settings | {"folder": Path(settings["folder"])})
