"""Training with and without publications, the bytes of increments, and how soon an update is served."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from benchmarks.harness.bars import Bar
from benchmarks.harness.ours import make_task
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Row
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.turns import Measurement
from benchmarks.harness.workload import Workload
from rich.table import Table

from lightning_recsys.serving import ModelPublisher, ModelReader

NONE, PUBLISHING = "no publication", "publishing"


class Paced(pl.Callback):
    """Trains for some seconds, counted from the first step after which nothing has to be prepared.

    Args:
        seconds: How long.
        batch_size: Examples of a step.
        is_ready: Whether preparations are over.
    """

    def __init__(self, seconds: float, batch_size: int, is_ready: Callable[[], bool]) -> None:
        self.seconds, self.batch_size, self.is_ready = seconds, batch_size, is_ready
        self.began: float | None = None
        self.steps: list[float] = []  # when each step ended, in seconds since 1970

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.time()
        if self.began is None:
            self.began = now if self.is_ready() else None
            return
        self.steps.append(now)
        trainer.should_stop = now - self.began >= self.seconds

    @property
    def rate(self) -> float:
        """Examples per second."""
        assert self.began is not None
        return self.batch_size * len(self.steps) / (self.steps[-1] - self.began)


@dataclass(frozen=True)
class Published:
    """What publications were like.

    Args:
        base_bytes: Of the first version.
        increment_bytes: Of each increment.
        delays: Seconds from each step to the moment at which its updates were served.
    """

    base_bytes: int
    increment_bytes: Sequence[int]
    delays: Sequence[float]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        share = float(np.median(self.increment_bytes)) / self.base_bytes if self.increment_bytes else None
        found: dict[str, Any] = {"base_bytes": self.base_bytes, "increment_bytes": list(self.increment_bytes)}
        found |= {"increment_over_base": share, "updates_served": len(self.delays)}
        for name, quantile in (("delay_median_s", 0.5), ("delay_p99_s", 0.99)):
            found[name] = float(np.quantile(self.delays, quantile)) if self.delays else None
        return found

    def table(self) -> Table:
        """A line for each number; of the increments, their median."""
        found, table = self.to_dict(), Table("", "measured", title="publications")
        sizes = found.pop("increment_bytes")
        found["increments"] = len(sizes)
        found["increment_bytes_median"] = int(np.median(sizes)) if sizes else None
        for name, value in found.items():
            number = "-" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
            table.add_row(name.replace("_", " "), number)
        return table


def measure(
    *, model: str, batch_size: int, rows: int, seconds: float, rounds: int, every_seconds: float, at_least: float
) -> Measured:
    """Train with and without publications in turns, each for ``seconds`` in each of ``rounds`` rounds.

    Args:
        model: As in :mod:`benchmarks.harness.ours`.
        batch_size: Examples of a step.
        rows: Rows held in memory.
        seconds: Of a turn.
        rounds: Turns of each variant.
        every_seconds: Between two publications.
        at_least: The bar: examples per second over those without publications.
    """
    work, rates = Workload(rows=rows), Measurement({NONE: [], PUBLISHING: []})
    turns: list[Published] = []
    for round_index in range(rounds):
        for variant in (NONE, PUBLISHING) if round_index % 2 == 0 else (PUBLISHING, NONE):
            if variant == NONE:
                paced = _train(work, model, batch_size, seconds, None)
            else:
                paced, published = _publish(work, model, batch_size, seconds, every_seconds)
                turns.append(published)
            rates.rates[variant].append(paced.rate)
    sizes = [size for turn in turns for size in turn.increment_bytes]
    delays = [delay for turn in turns for delay in turn.delays]
    name = f"{model}, B={batch_size}, a version every {every_seconds:g} s"
    bar = Bar(f"{name}: over none", rates.ratio(PUBLISHING, NONE), "at least", at_least)
    return [Row(name, rates, NONE), Published(turns[-1].base_bytes, sizes, delays)], [bar]


def _publish(
    work: Workload, model: str, batch_size: int, seconds: float, every_seconds: float
) -> tuple[Paced, Published]:
    """One turn with publications, which a reader beside it opens."""
    base, sizes = 0, []
    with tempfile.TemporaryDirectory() as folder:
        publisher = ModelPublisher(folder, every_seconds=every_seconds, keep=10**6, compact_share=1e9)
        with _Follower(folder) as follower:
            paced = _train(work, model, batch_size, seconds, publisher)
            follower.catch_up()
        for path in Path(folder).glob("versions/*/manifest.json"):
            manifest = json.loads(path.read_text())
            size = sum(entry["size"] for entry in manifest["files"].values())
            if manifest["kind"] == "base":
                base = size
            else:
                sizes.append(size)
        return paced, Published(base, sizes, follower.delays(paced.steps))


def _train(work: Workload, model: str, batch_size: int, seconds: float, publisher: ModelPublisher | None) -> Paced:
    def is_ready() -> bool:
        return publisher is None or publisher._work is None or publisher._work.is_exported

    paced, callbacks = Paced(seconds, batch_size, is_ready), [] if publisher is None else [publisher]
    trainer = quiet_trainer(paced, callbacks=callbacks, max_epochs=-1)
    trainer.fit(make_task(work, model), work.loader(batch_size))
    return paced


class _Follower:
    """Opens versions as soon as they count, and notes when; a context manager."""

    def __init__(self, url: str) -> None:
        self._url, self._ended = url, threading.Event()
        self._served: list[tuple[float, float]] = []  # when each version was cut, and when it was open
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> _Follower:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def catch_up(self) -> None:
        """Wait for the last version of the run."""
        last = ModelReader(self._url).model.manifest.created
        while self._thread.is_alive() and last not in {cut for cut, _ in self._served}:
            time.sleep(0.02)

    def _follow(self) -> None:
        reader: ModelReader | None = None
        while not self._ended.wait(0.05):
            try:
                if reader is None:
                    reader = ModelReader(self._url)
                elif not reader.refresh():
                    continue
            except FileNotFoundError:
                continue
            self._served.append((reader.model.manifest.created, time.time()))

    def delays(self, steps: Sequence[float]) -> list[float]:
        """From the end of each step to when the first version that was cut after it was open."""
        firsts = [next((opened for cut, opened in self._served if cut >= step), None) for step in steps]
        return [opened - step for step, opened in zip(steps, firsts, strict=True) if opened is not None]
