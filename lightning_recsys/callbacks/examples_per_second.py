"""Training throughput."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.data import extract_batch_size

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks._logging import log_epoch, log_step, should_log
from lightning_recsys.data import Batch


class ExamplesPerSecond(LeanCallback):
    """Logs how many examples all workers together train on per second, as ``eps``.

    Every worker counts its own examples and its own time; the rates are summed at the end of each training epoch.
    That is right for workers that wait for each other and for workers that do not. Time is what training takes,
    waiting for data included; validation, checkpoints, the end of an epoch and the first steps are left out.

    Logged:

    - ``eps``: at the end of an epoch, examples per second of all workers since the warm-up.
    - ``examples``: at the end of an epoch, examples that all workers have trained on in this fit.
    - at log steps, the rate of the last ``window_size`` steps: ``eps`` with one worker, ``eps/rank_0`` with more,
      where it is the rate of rank 0 alone.

    A fit shorter than the warm-up reports the warm-up's rate. A checkpoint saved with ``save_weights_only`` goes
    unnoticed and counts as training.

    Args:
        window_size: Steps of the rate that is shown during an epoch.
        warmup_steps: First steps of a fit that do not count: the first ones compile and allocate.
        batch_size_fn: Number of examples in a batch. By default ``len(batch)``, and for a tuple, list or dict what
            Lightning extracts: the first dimension of its tensors.

    Attributes:
        examples: Examples that this worker has trained on in this fit, warm-up included.
        global_examples: Number of examples of all workers together, as of the last end of an epoch.

    Raises:
        ValueError: ``window_size`` is less than 1, or ``warmup_steps`` is negative.

    Communication: one all-reduce of two numbers per epoch.

    >>> from pytorch_lightning import Trainer
    >>> callback = ExamplesPerSecond(warmup_steps=20)
    >>> trainer = Trainer(callbacks=callback, accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        window_size: int = 100,
        *,
        warmup_steps: int = 10,
        batch_size_fn: Callable[[Any], int] | None = None,
    ) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1 step, got {window_size}. 100 is the usual choice.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}. Use 0 for no warm-up.")
        self.window_size = window_size
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn or batch_size_of
        self._reset()

    def _reset(self) -> None:
        self.examples = 0
        self.global_examples = 0
        self._steps = 0
        self._measured_examples = 0
        self._measured_seconds = 0.0
        self._window: deque[tuple[int, float]] = deque(maxlen=self.window_size)
        self._last_time: float | None = None  # None: what has happened since was not training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        self._reset()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock: waiting for the first batch is training time."""
        self._last_time = perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch and its time."""
        now = perf_counter()
        seconds = None if self._last_time is None else now - self._last_time
        self._count(self.batch_size_fn(batch), seconds)
        self._last_time = now
        if should_log(trainer) and self._window and trainer.is_global_zero:
            name = "eps" if trainer.world_size == 1 else "eps/rank_0"
            examples, seconds = map(sum, zip(*self._window, strict=True))
            log_step(trainer, {name: examples / seconds}, prog_bar=[name])

    def _count(self, examples: int, seconds: float | None) -> None:
        if self._steps == self.warmup_steps:
            self._measured_examples, self._measured_seconds = 0, 0.0
            self._window.clear()
        self._steps += 1
        self.examples += examples
        if seconds is not None:  # None: a checkpoint was saved within the step
            self._measured_examples += examples
            self._measured_seconds += seconds
            self._window.append((examples, seconds))

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        self._last_time = None
        self.on_train_batch_start = self._go_on  # a hook of one step: at all others it would find nothing to do

    def on_save_checkpoint(self, *_: Any) -> None:
        """Stop the clock."""
        self.on_validation_start()

    def _go_on(self, *_: Any) -> None:
        if self._last_time is None:
            self._last_time = perf_counter()
        self.on_train_batch_start = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum the workers' rates and counts."""
        rate = self._measured_examples / self._measured_seconds if self._measured_seconds else 0.0
        counters = torch.tensor([rate, self.examples], dtype=torch.float64, device=trainer.strategy.root_device)
        eps, examples = trainer.strategy.reduce(counters, reduce_op="sum").tolist()
        self.global_examples = int(examples)
        log_epoch(pl_module, {"eps": eps, "examples": examples}, prog_bar=["eps"])


def batch_size_of(batch: Any) -> int:
    """Number of examples in a batch: its length, or the first dimension of a collection's tensors."""
    if isinstance(batch, Batch):  # asked first, for it is asked at every step
        return len(batch)
    if hasattr(batch, "__len__") and not isinstance(batch, (tuple, list, Mapping)):
        return len(batch)
    return extract_batch_size(batch)
