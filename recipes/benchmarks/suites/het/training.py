"""What a job of suite ``het`` trains."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.jobs.hosts import counted_by
from benchmarks.harness.jobs.training import Batches, CountedSteps, StepTimes
from benchmarks.harness.ours import MODELS, TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.workload import Workload

from lightning_recsys.models import DCN, DeepFM, WideDeep
from lightning_recsys.optim import RowSGD
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy, compose
from lightning_recsys.strategies.served import ServedStrategy

PAPERS_MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    # Dense parameters as in Miao et al. 2022, Table 3: 0.14, 0.92 and 1.01 million. The paper's WDL has three layers of
    # 256 over the numeric features alone; ours, which puts the rows through its tower as well, is narrower for that.
    "WDL": partial(WideDeep, hidden=(41,)),
    "DFM": partial(DeepFM, hidden=(256, 256, 256)),
    "DCN": partial(DCN, num_cross_layers=3, hidden=(256, 256, 256)),
}


class CrossedBytes(CountedSteps):
    """Counted is what had crossed the interface by then: as it counted, and as the strategy tells.

    Args:
        folder: As in :class:`StepTimes`.
        asker: As in :class:`StepTimes`.
        interface: Of this host, to the server.
    """

    def __init__(self, folder: Path, *, asker: int, interface: str) -> None:
        super().__init__(folder, asker=asker)
        self.interface = interface

    def counted(self, trainer: pl.Trainer) -> Sequence[float]:
        assert isinstance(trainer.strategy, ServedStrategy)
        told = trainer.strategy.traffic()
        return *counted_by(self.interface), told["comm/sent_bytes"], told["comm/received_bytes"]


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
    interface: str | None = None,
) -> None:
    """Train until told to stop, rows by SGD as in the paper.

    Args:
        folder: As in :class:`~benchmarks.suites.shadowsync.training.StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``benchmarks.harness.ours.MODELS`` or :data:`PAPERS_MODELS`.
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples held in memory; training goes round and round.
        strategy: Arguments of :class:`HETStrategy`, or of :func:`compose` where a dense part is among them; ``None``
            trains rows where they lie (ShadowSync, one worker).
        server: Command of a server to start beside the training, for another host; else the strategy starts one.
        interface: Where bytes are counted after each step.
    """
    work = Workload(rows=rows, dim=dim)
    optimizer = RowSGD(lr=0.01)
    make = (MODELS | PAPERS_MODELS)[model]
    network = make(work.num_dense, work.fields, embedding_dim=dim, row_optimizer=optimizer, device="meta")
    task = TaskAlone(network, optimizer=partial(torch.optim.SGD, lr=0.01, fused=True))
    times = CrossedBytes(folder, asker=asker, interface=interface) if interface else StepTimes(folder, asker=asker)
    with running(server) as endpoint:
        where: dict[str, Any] = {} if endpoint is None else {"servers": [endpoint]}
        make = compose if strategy and "dense" in strategy else HETStrategy
        chosen = ShadowSyncStrategy() if strategy is None else make(**strategy, **where)
        trainer = quiet_trainer(times, strategy=chosen)
        loader: Any = Batches(work.batches(batch_size))
        trainer.fit(task, loader)


@contextmanager
def running(command: Sequence[str] | None) -> Iterator[str | None]:
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
        process.wait(60)
