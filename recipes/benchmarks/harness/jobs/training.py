"""What processes of a :class:`benchmarks.harness.jobs.job.Job` share, whatever they train: start, step times, batches.

Each is ``python -m benchmarks.harness.jobs.training MODULE '{"folder": ..., ...}'``.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import StrategyRegistry
from recipe_tools.quiet import be_quiet

from lightning_recsys.data import Batch
from lightning_recsys.runtime import configure_worker
from lightning_recsys.strategies.common.base import RecsysStrategy

TRAFFIC = "traffic"  # how the files of `CountedSteps` begin


def main(module: str, settings: str) -> None:
    """Train quietly, seeded and set up as a worker, whatever the suite.

    Args:
        module: Whose ``train`` is called. It is imported by its name, so that workers can import its classes.
        settings: What ``train`` takes, a JSON object; its ``folder`` comes as a path.
    """
    be_quiet()
    warnings.filterwarnings("ignore")
    configure_worker()
    pl.seed_everything(0, verbose=False)
    arguments = json.loads(settings)
    import_module(module).train(**arguments | {"folder": Path(arguments["folder"])})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_strategy(name: str, **arguments: Any) -> Any:
    """A strategy by the name under which Lightning knows it."""
    return StrategyRegistry[name]["strategy"](**arguments)


class StepTimes(pl.Callback):
    """Writes the time of every step of this process into a folder, and in the end what the strategy tells.

    Training ends when there is a file ``stop``, or the process that asked for it is gone. Workers that go in step end
    at the same step: the first one says which, before it begins the step before that. One that ended as soon as it saw
    the file would leave another, which looked a moment earlier, at a collective of the next step.
    """

    def __init__(self, folder: Path, *, asker: int) -> None:
        self.folder = folder
        self.asker = Path(f"/proc/{asker}")

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._file = (self.folder / f"steps-{trainer.global_rank}-{os.getpid()}").open("wb", buffering=0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._file.write(struct.pack("d", time.monotonic()))
        trainer.should_stop |= self.is_over(trainer)

    def is_over(self, trainer: pl.Trainer) -> bool:
        """Whether this step is the last one."""
        asked = (self.folder / "stop").exists() or not self.asker.exists()
        if trainer.world_size == 1 or getattr(trainer.strategy, "asynchronous", False):
            return asked
        last = self.folder / "last"
        if asked and trainer.is_global_zero and not last.exists():
            (self.folder / "last.new").write_text(str(trainer.global_step + 2))
            (self.folder / "last.new").rename(last)
        return last.exists() and trainer.global_step >= int(last.read_text())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._file.close()
        del self._file
        if isinstance(trainer.strategy, RecsysStrategy):
            told = {name: value for name, value in trainer.strategy.telemetry().items() if isinstance(value, float)}
            (self.folder / f"telemetry-{trainer.global_rank}.json").write_text(json.dumps(told))


class CountedSteps(StepTimes):
    """Times of every step, and numbers that were counted by then: a row of float64 after each."""

    def counted(self, trainer: pl.Trainer) -> Sequence[float]:
        """The numbers so far."""
        raise NotImplementedError

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        path = self.folder / f"{TRAFFIC}-{trainer.global_rank}-{os.getpid()}"
        self._counts = path.open("wb", buffering=0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        self._counts.write(np.array(self.counted(trainer), dtype=np.float64).tobytes())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_end(trainer)
        self._counts.close()
        del self._counts


@dataclass(frozen=True)
class Batches:
    """Batches that lie in memory, again and again; each rank starts elsewhere.

    Args:
        batches: All of them.
        start: The first one of rank 0, as a share of all.
    """

    batches: list[Batch]
    start: float = 0.0

    def __iter__(self) -> Iterator[Batch]:
        ranks = torch.distributed.is_initialized()
        share = torch.distributed.get_rank() / torch.distributed.get_world_size() if ranks else self.start
        return islice(cycle(self.batches), int(share * len(self.batches)), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
