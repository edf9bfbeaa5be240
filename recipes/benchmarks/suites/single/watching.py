"""What metrics and callbacks take of a step: switched on and off inside one training, a block of steps each.

Of two trainings that do the same, one is two or three percent faster for as long as it lives, by where its memory lies.
Here both sides are the same training: the same memory, reader and model.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import rich
from benchmarks.harness.estimates import Estimate
from benchmarks.harness.ours import make_task
from benchmarks.harness.processes import RECIPES
from benchmarks.harness.quadruples import Clocks, Quadruples
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.turns import Measurement, Stopped
from benchmarks.harness.workload import Workload
from omegaconf import OmegaConf
from recipe_tools.build import build_all

from lightning_recsys.data import Batch, PreparedDataModule
from lightning_recsys.typed_yaml import load_yaml

OURS, ALONE = "ours", "no metrics"

WALL, PROCESSOR = range(2)
"""The clocks: that on the wall, and the processor time of the thread that trains, in which nothing else ran."""

BLOCK = 512
"""Examples of a block, of two steps at least: a tenth of a second or less, within which a machine hardly changes."""

WARM_UP = 5
"""Quadruples of blocks that do not count."""

ENOUGH = 0.3
"""Standard error of the cost, in percent of the step, at which a measurement ends."""

_CONF = RECIPES.parent / "conf"


@dataclass(frozen=True)
class Endless:
    """Epoch after epoch as one, so that no block has an epoch's end in it, with its checkpoint."""

    loader: Any

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.loader


class Switch(pl.Callback):
    """Gives a trainer other callbacks and loggers, or none, for a block of steps at a time, and takes the time of each.

    Blocks come in quadruples, as :class:`benchmarks.harness.quadruples.Quadruples` has them. What callbacks put off
    they do at a later step of theirs.

    Args:
        steps: Of a block.
        batch_size: Examples of a step.
        is_enough: Asked after each quadruple with those so far and the seconds since the first one that counts; ends
            the training by :class:`benchmarks.harness.turns.Stopped`.
        clock: Seconds by :data:`WALL` and :data:`PROCESSOR`.

    Attributes:
        blocks: What was measured.
    """

    def __init__(
        self,
        steps: int,
        batch_size: int,
        *,
        is_enough: Callable[[Quadruples, float], bool],
        clock: Callable[[], Clocks],
    ) -> None:
        self.blocks = Quadruples(batch_size)
        self._steps_of_block, self._is_enough, self._clock = steps, is_enough, clock
        self._warm_up, self._steps = WARM_UP, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what there is to switch, and begin."""
        self._callbacks = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        self._loggers = list(trainer.loggers)
        self._began = self._clock()[WALL]
        self._switch(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Last of all callbacks: at the end of a block, note its time and switch."""
        self._steps += 1
        if self._steps % self._steps_of_block:
            return
        if self.blocks.add(self._steps_of_block, self._clock() - self._since):
            self._end_quadruple()
        self._switch(trainer)

    def _end_quadruple(self) -> None:
        if self._warm_up:
            self._warm_up -= 1
            self.blocks.forget()
            self._began = self._clock()[WALL]
        elif self._is_enough(self.blocks, self._clock()[WALL] - self._began):
            raise Stopped

    def _switch(self, trainer: pl.Trainer) -> None:
        on = self.blocks.on
        trainer.callbacks = [*self._callbacks, self] if on else [self]  # type: ignore[attr-defined]
        trainer.loggers = self._loggers if on else []
        self._since = self._clock()


def rates(blocks: Quadruples, clock: int) -> Measurement:
    """Examples per second by a clock, with what watches a run and without, one number a quadruple."""
    return blocks.rates(clock, on=OURS, off=ALONE)


def cost(measured: Measurement) -> Estimate:
    """What callbacks and loggers take, in percent of the step."""
    kept = measured.estimate(OURS, ALONE)
    return Estimate(100 * (1 - kept.value), 100 * kept.standard_error)


def measure(root: Path, model: str, batch_size: int, *, most_seconds: float, quadruples: int) -> Quadruples:
    """Blocks with what ``recipes/train.py`` watches a run with by default, and without any of it.

    Ends when the standard error of the cost is at most :data:`ENOUGH`.

    Args:
        root: Prepared rows.
        model: What is trained.
        batch_size: Examples a step.
        most_seconds: When to end although the standard error is larger.
        quadruples: Of blocks, at least.
    """

    def is_enough(blocks: Quadruples, elapsed: float) -> bool:
        if len(blocks) < quadruples:
            return False
        return elapsed >= most_seconds or cost(rates(blocks, WALL)).standard_error <= ENOUGH

    steps = max(2, BLOCK // batch_size)
    switch = Switch(
        steps, batch_size, is_enough=is_enough, clock=lambda: np.array([time.perf_counter(), time.thread_time()])
    )
    data = PreparedDataModule(root=root, batch_size=batch_size, drop_last=True)
    data.setup()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as terminal:
        callbacks, loggers = watchers(folder, terminal)
        trainer = quiet_trainer(
            switch, callbacks=callbacks, logger=loggers, enable_checkpointing=True, enable_progress_bar=True
        )
        try:
            trainer.fit(make_task(Workload(), model), Endless(data.train_dataloader()))
        except Stopped:
            pass
        finally:
            rich.reconfigure()
    return switch.blocks


def watchers(folder: str, terminal: Any) -> tuple[list[pl.Callback], list[Any]]:
    """The callbacks and loggers of a recipe's run by default; the progress bar draws as in a terminal."""
    leaves: Any = load_yaml(_CONF / "callbacks" / "default.yaml")["defaults"]
    *files, bar = [leaf if isinstance(leaf, str) else "/".join(*leaf.items()) for leaf in leaves]
    config = OmegaConf.merge(*(OmegaConf.load(_CONF / "callbacks" / f"{file}.yaml") for file in files))
    config["progress_bar"] = OmegaConf.load(_CONF / "callbacks" / f"{bar}.yaml")
    loggers = OmegaConf.load(_CONF / "logger" / "csv.yaml")
    train = OmegaConf.load(_CONF / "train.yaml")
    named = {name: train[name] for name in ("monitor", "ckpt_path")}
    whole = OmegaConf.create({"paths": {"output_dir": folder}, **named, "callbacks": config, "loggers": loggers})
    plain: Any = OmegaConf.to_container(whole, resolve=True)
    bar = plain["callbacks"]["progress_bar"]
    bar["console_kwargs"] = {"file": terminal, "force_terminal": True, "width": 80}
    bar["refresh_rate"] //= 2  # it goes by the clock, and is there half of the time
    return build_all(plain["callbacks"]), build_all(plain["loggers"])
