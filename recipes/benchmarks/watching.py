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
from benchmarks.ours import make_task
from benchmarks.trainer import quiet_trainer
from benchmarks.turns import Measurement, Stopped
from benchmarks.workload import Workload
from omegaconf import OmegaConf
from recipe_tools.build import build_all

from lightning_recsys.data import Batch
from lightning_recsys.data.prepared import PreparedDataModule
from lightning_recsys.data.typed_yaml import load_yaml

BLOCK = 100
"""Steps of a block: whatever is put off is done within it. Every 50 steps values are logged, every 100 written."""

_CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Endless:
    """Epoch after epoch as one, so that no block has an epoch's end in it, with its checkpoint."""

    loader: Any

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.loader


class Switch(pl.Callback):
    """Gives a trainer other callbacks and loggers, or none, for a block at a time, and takes the time of each block.

    Pairs of blocks, one with and one without, in random order; the first pair warms up.

    Args:
        is_enough: Asked after each pair with the seconds since the first one; ends the training by
            :class:`benchmarks.turns.Stopped`.
        clock: Seconds.
    """

    def __init__(
        self, is_enough: Callable[[int, float], bool], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._is_enough, self._clock = is_enough, clock
        self._order = np.random.default_rng(0)
        self._steps, self._coming = 0, [True, False]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what there is to switch."""
        self._callbacks = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        self._loggers = list(trainer.loggers)
        self._began = self._since = self._clock()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Last of all callbacks: at the end of a block, note its time and switch."""
        self._steps += 1
        if self._steps % BLOCK:
            return
        self.seconds[self._coming.pop(0)].append(self._clock() - self._since)
        if not self._coming:
            pairs = len(self.seconds[True]) - 1
            if pairs and self._is_enough(pairs, self._clock() - self._began):
                raise Stopped
            if not pairs:
                self._began = self._clock()
            self._coming = self._order.permutation([True, False]).tolist()
        on = self._coming[0]
        trainer.callbacks = [*self._callbacks, self] if on else [self]  # type: ignore[attr-defined]
        trainer.loggers = self._loggers if on else []
        self._since = self._clock()


def measure(root: Path, model: str, batch_size: int, *, seconds: float, pairs: int) -> Measurement:
    """Examples per second with what ``recipes/train.py`` watches a run with by default, and without any of it.

    Args:
        root: Prepared rows.
        model: What is trained.
        batch_size: Examples a step.
        seconds: How long to go on.
        pairs: Of blocks, at least.
    """
    switch = Switch(lambda done, elapsed: done >= pairs and elapsed >= seconds)
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
    return Measurement(
        {
            name: [BLOCK * batch_size / each for each in switch.seconds[on][1:]]
            for name, on in (("ours", True), ("no metrics", False))
        }
    )


def watchers(folder: str, terminal: Any) -> tuple[list[pl.Callback], list[Any]]:
    """The callbacks and loggers of a recipe's run by default; the progress bar draws as in a terminal."""
    leaves: Any = load_yaml(_CONF / "callbacks" / "default.yaml")["defaults"]
    *files, bar = [leaf if isinstance(leaf, str) else "/".join(*leaf.items()) for leaf in leaves]
    config = OmegaConf.merge(*(OmegaConf.load(_CONF / "callbacks" / f"{file}.yaml") for file in files))
    config["progress_bar"] = OmegaConf.load(_CONF / "callbacks" / f"{bar}.yaml")
    loggers = OmegaConf.load(_CONF / "logger" / "csv.yaml")
    whole = OmegaConf.create({"paths": {"output_dir": folder}, "callbacks": config, "loggers": loggers})
    plain: Any = OmegaConf.to_container(whole, resolve=True)
    plain["callbacks"]["progress_bar"]["console_kwargs"] = {"file": terminal, "force_terminal": True, "width": 80}
    return build_all(plain["callbacks"]), build_all(plain["loggers"])
