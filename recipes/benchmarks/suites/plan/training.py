"""What the jobs of suite ``plan`` train, and what is measured beforehand: the same task on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.harness.job_training import StepTimes
from benchmarks.harness.ours import MODELS, TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.workload import Workload
from benchmarks.suites.het.training import CrossedBytes, running

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.planning.methods import METHODS
from lightning_recsys.tasks import CTRTask


def make_task(model: str, dim: int) -> CTRTask:
    """A model for the rows of :func:`make_data`, with its update rules."""
    work = Workload(dim=dim)
    network = MODELS[model](work.num_dense, work.fields, embedding_dim=dim, row_optimizer=RowWiseAdagrad(lr=0.01))
    return TaskAlone(network, optimizer=partial(torch.optim.Adagrad, lr=0.01, fused=True))


def make_data(batch_size: int, rows: int) -> SyntheticDataModule:
    """Rows of Criteo's shape."""
    work = Workload()
    made = SyntheticDataModule(
        batch_size=batch_size,
        train_rows=rows,
        val_rows=0,
        test_rows=0,
        cardinalities=work.cardinalities,
        num_dense=work.num_dense,
        zipf_exponent=work.zipf_exponent,
    )
    made.prepare_data()
    made.setup("fit")
    return made


def train(
    *,
    folder: Path,
    asker: int,
    model: str,
    batch_size: int,
    dim: int,
    rows: int,
    method: str,
    num_nodes: int = 1,
    server: Sequence[str] | None = None,
    key_file: str | None = None,
    interface: str | None = None,
) -> None:
    """Train until told to stop.

    Args:
        folder: As in :class:`~benchmarks.harness.job_training.StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``benchmarks.harness.ours.MODELS``.
        batch_size: Examples of a worker's step, or of all workers' where they share it.
        dim: Width of the rows.
        rows: Examples of an epoch; there is no last one.
        method: One of ``lightning_recsys.planning.methods.METHODS``.
        num_nodes: Lightning's.
        server: Command of a server to start beside the training, for another host.
        key_file: Of that server.
        interface: Where bytes are counted after each step of a worker that has a server.
    """
    times: StepTimes = StepTimes(folder, asker=asker)
    if interface is not None:
        times = CrossedBytes(folder, asker=asker, interface=interface)
    with running(server) as endpoint:
        served = {} if endpoint is None else {"servers": [endpoint], "key_file": key_file, "transport": "tcp"}
        strategy = METHODS[method].make(num_nodes, **served)
        trainer = quiet_trainer(times, strategy=strategy, num_nodes=num_nodes, limit_val_batches=0)
        trainer.fit(make_task(model, dim), datamodule=make_data(batch_size, rows))
