"""What each process of a job trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.job_training import Batches, StepTimes
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.workload import Workload
from benchmarks.suites.shadowsync.training import ROWS, make_task

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
    work = Workload(rows=ROWS, dim=16)
    trainer = quiet_trainer(
        StepTimes(folder, asker=asker),
        devices="auto" if strategy == "shadowsync" else 2,
        strategy=STRATEGIES[strategy](**options),
    )
    loader: Any = Batches(work.batches(batch_size), 0.0)
    trainer.fit(make_task(work), loader)
