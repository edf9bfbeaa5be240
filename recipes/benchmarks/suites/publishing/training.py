"""What publications take of training, the bytes of increments, and how soon an update is served.

Of two trainings that do the same, one is several percent faster for as long as it lives, by where its memory lies. So
what a publication takes is measured inside one training, where publications are switched on and off. Bytes and delays
are those of a second training, with a reader beside it: what a reader takes of the machine is no cost of publishing.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from benchmarks.harness.bars import Bar
from benchmarks.harness.ours import make_task
from benchmarks.harness.parts import Measured
from benchmarks.harness.quadruples import Quadruples
from benchmarks.harness.report import Columns, Row
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.turns import Stopped
from benchmarks.harness.workload import Workload
from benchmarks.suites.publishing.switching import (
    NONE,
    PUBLISHING,
    TRAINING,
    WALL,
    PublicationSwitch,
    processor_seconds,
)

from lightning_recsys.serving import ModelPublisher, ModelReader, list_versions

ENOUGH = 0.005
"""Standard error of the ratio at which its measurement ends."""

LEAST_QUADRUPLES = 4
"""Of blocks; fewer say little about their own standard error."""

WARM_UP = 2
"""Versions, a base and an increment: what is compiled when the first of each is written counts for neither side."""


class Paced(pl.Callback):
    """Trains for some seconds, counted from the first step after which nothing has to be prepared.

    Args:
        seconds: How long.
        is_ready: Whether preparations are over.
    """

    def __init__(self, seconds: float, is_ready: Callable[[], bool]) -> None:
        self.seconds, self.is_ready = seconds, is_ready
        self.began: float | None = None
        self.steps: list[float] = []  # when each step ended, in seconds since 1970

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.time()
        if self.began is None:
            self.began = now if self.is_ready() else None
            return
        self.steps.append(now)
        trainer.should_stop = now - self.began >= self.seconds


def table_of(base_bytes: int, increment_bytes: Sequence[int], delays: Sequence[float]) -> Columns:
    """What publications were like, a line for each number; of the increments, their median.

    Args:
        base_bytes: Of the first version.
        increment_bytes: Of each increment.
        delays: Seconds from each step to the moment at which its updates were served.
    """
    median = float(np.median(increment_bytes)) if increment_bytes else None
    found: dict[str, Any] = {
        "base_bytes": base_bytes,
        "increment_over_base": None if median is None else median / base_bytes,
        "updates_served": len(delays),
        "delay_median_s": float(np.quantile(delays, 0.5)) if delays else None,
        "delay_p99_s": float(np.quantile(delays, 0.99)) if delays else None,
        "increments": len(increment_bytes),
        "increment_bytes_median": None if median is None else int(median),
    }
    lines = []
    for name, value in found.items():
        number = "-" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        lines.append([name.replace("_", " "), number])
    return Columns("publications", ("", "measured"), lines, {**found, "increment_bytes": list(increment_bytes)})


def measure(
    *,
    model: str,
    batch_size: int,
    rows: int,
    most_seconds: float,
    served_seconds: float,
    every_seconds: float,
    at_least: float,
) -> Measured:
    """What publications take of a training; then the bytes of increments and how soon updates are served.

    Args:
        model: As in :mod:`benchmarks.harness.ours`.
        batch_size: Examples of a step.
        rows: Rows held in memory. They go by within ``every_seconds``, so that each increment has the rows of all of
            them, whether the version before it lies one period back or three.
        most_seconds: When to end the first measurement although its standard error is still above :data:`ENOUGH`.
        served_seconds: Seconds of the second training, which a reader follows.
        every_seconds: Between two publications.
        at_least: The bar: examples per second over those without publications.
    """
    work = Workload(rows=rows)
    blocks = _switched(work, model, batch_size, every_seconds, most_seconds)
    published = _served(work, model, batch_size, served_seconds, every_seconds)
    name = f"{model}, B={batch_size}, a version every {every_seconds:g} s"
    measured, of_thread = (blocks.rates(clock, on=PUBLISHING, off=NONE) for clock in (WALL, TRAINING))
    wall, training = (x.estimate(PUBLISHING, NONE) for x in (measured, of_thread))
    told = f"{processor_seconds(blocks):.2f} s of processor time a version; training thread: {training.value:.3f}"
    told += f" ± {training.standard_error:.3f}"
    bar = Bar(f"{name}: over none ({told})", wall.value, "at least", at_least, standard_error=wall.standard_error)
    return [Row(name, measured, NONE), published], [bar]


def _switched(work: Workload, model: str, batch_size: int, every_seconds: float, most_seconds: float) -> Quadruples:
    """One training whose publications are switched on and off."""

    def is_enough(blocks: Quadruples, elapsed: float) -> bool:
        if len(blocks) < LEAST_QUADRUPLES:
            return False
        error = blocks.rates(WALL, on=PUBLISHING, off=NONE).estimate(PUBLISHING, NONE).standard_error
        return elapsed >= most_seconds or error <= ENOUGH

    with tempfile.TemporaryDirectory() as folder:
        publisher = ModelPublisher(folder, every_seconds=every_seconds)

        def is_warm() -> bool:
            current = list_versions(folder)[0]
            return current is not None and current.version >= WARM_UP and not publisher.is_writing

        switch = PublicationSwitch(publisher, batch_size, is_warm=is_warm, is_enough=is_enough)
        trainer = quiet_trainer(publisher, callbacks=[switch], max_epochs=-1)
        with suppress(Stopped):
            trainer.fit(make_task(work, model), work.loader(batch_size))
        return switch.blocks


def _served(work: Workload, model: str, batch_size: int, seconds: float, every_seconds: float) -> Columns:
    """A training with publications, which a reader beside it opens."""
    base, sizes = 0, []
    with tempfile.TemporaryDirectory() as folder:
        publisher = ModelPublisher(folder, every_seconds=every_seconds, keep=10**6, compact_share=1e9)
        paced = Paced(seconds, lambda: publisher.is_exported)
        with _Follower(folder) as follower:
            trainer = quiet_trainer(paced, callbacks=[publisher], max_epochs=-1)
            trainer.fit(make_task(work, model), work.loader(batch_size))
            follower.catch_up()
        for path in Path(folder).glob("versions/*/manifest.json"):
            manifest = json.loads(path.read_text())
            size = sum(entry["size"] for entry in manifest["files"].values())
            if manifest["kind"] == "base":
                base = size
            else:
                sizes.append(size)
        return table_of(base, sizes, follower.delays(paced.steps))


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
