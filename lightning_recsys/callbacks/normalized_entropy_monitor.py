"""Normalized entropy while training and evaluating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks._collected import CollectedEntropy
from lightning_recsys.callbacks._logging import log_epoch, log_step, should_log
from lightning_recsys.metrics import NormalizedEntropy


class NormalizedEntropyMonitor(LeanCallback):
    """Logs normalized entropy (NE): progressive on the training examples, plain on validation and test examples.

    Progressive means that a prediction is scored that was made before the model trained on its example: the logits
    which the training step computed its loss from. Over the first epoch that is an honest estimate of the error
    on unseen examples; later epochs predict examples again that the model has already trained on.

    Logged:

    - ``train/ne``: over the whole run, that is over all epochs and, after a resume, over the run before it.
    - ``train/window_ne``: over the last ``window_size`` training examples.
    - ``val/ne``, ``test/ne``: over one evaluation, all its dataloaders together. Lightning's sanity check is left out.

    At log steps the training values are those of the process that logs, and are left out while they are undefined;
    at the end of an epoch they are those of all processes, as evaluation values always are. All of them can be
    monitored by ``ModelCheckpoint`` and ``EarlyStopping``.

    Logits and labels are collected and scored many batches at a time, before any value is read; a label that is not 0
    or 1 is therefore refused up to 64 steps late.

    Args:
        window_size: Examples in the window, over all processes.
        labels_fn: Takes a batch and returns its labels, 0 or 1, in the shape of the logits. By default
            ``batch.labels``.

    Raises:
        ValueError: ``window_size`` is less than 1, logits and labels differ in shape, or a label is not 0 or 1.
        TypeError: a step does not return a dict with ``logits``, or the batch has no ``labels``.

    Communication: a gather of the sums at the end of each epoch or evaluation and whenever a checkpoint is saved, which
    all processes do together; none per batch.

    >>> from pytorch_lightning import Trainer
    >>> from pytorch_lightning.callbacks import EarlyStopping
    >>> callbacks = [NormalizedEntropyMonitor(window_size=10_000), EarlyStopping(monitor="val/ne")]
    >>> trainer = Trainer(callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    def __init__(self, window_size: int = 100_000, *, labels_fn: Callable[[Any], Tensor] | None = None) -> None:
        self.labels_fn = labels_fn
        self._train = CollectedEntropy(NormalizedEntropy(window_size, from_logits=True))
        self._evaluation = CollectedEntropy(NormalizedEntropy(from_logits=True))
        self._is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """The training sums of all processes."""
        metric = self._train.metric()
        with metric.sync_context():
            return {"train": dict(metric.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from saved sums."""
        self._train.forget()
        self._train.metric().load_state_dict(state_dict["train"])
        self._is_restored = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave restored sums to rank 0: they are those of all processes, and will be added up again."""
        if self._is_restored and not trainer.is_global_zero:
            self._train.metric().reset()
        self._is_restored = False
        self._train.metric().to(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch."""
        if not outputs:
            return  # training_step returned None, which skips the batch
        self._update(self._train, pl_module, outputs, batch, "training_step")
        if should_log(trainer):
            metric = self._train.metric()
            values = {"train/ne": metric.lifetime().item(), "train/window_ne": metric.window().item()}
            log_step(trainer, {k: v for k, v in values.items() if not isnan(v)}, prog_bar=["train/ne"])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the values of all processes."""
        metric = self._train.metric()
        lifetime = metric.compute().item()
        with metric.sync_context():
            window = metric.window().item()
        log_epoch(pl_module, {"train/ne": lifetime, "train/window_ne": window}, prog_bar=["train/ne"])

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start over."""
        self._evaluation.forget()
        self._evaluation.metric().to(pl_module.device).reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add the batch."""
        if not trainer.sanity_checking:
            self._update(self._evaluation, pl_module, outputs, batch, "validation_step")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the value of all processes."""
        if not trainer.sanity_checking:
            log_epoch(pl_module, {"val/ne": self._evaluation.metric().compute().item()}, prog_bar=["val/ne"])

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add the batch."""
        self._update(self._evaluation, pl_module, outputs, batch, "test_step")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the value of all processes."""
        log_epoch(pl_module, {"test/ne": self._evaluation.metric().compute().item()})

    def _update(
        self, entropy: CollectedEntropy, pl_module: pl.LightningModule, outputs: Any, batch: Any, step: str
    ) -> None:
        if not isinstance(outputs, Mapping) or "logits" not in outputs:
            got = f"a dict with {sorted(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
            raise TypeError(
                f"NormalizedEntropyMonitor reads outputs['logits'], but {type(pl_module).__name__}.{step} returned "
                f"{got}. Return {{'loss': loss, 'logits': logits.detach()}}."
            )
        entropy.add(outputs["logits"], self._labels(batch))

    def _labels(self, batch: Any) -> Tensor:
        if self.labels_fn is not None:
            return self.labels_fn(batch)
        labels = getattr(batch, "labels", None)
        if not isinstance(labels, Tensor):
            raise TypeError(
                f"NormalizedEntropyMonitor reads batch.labels, but a {type(batch).__name__} has no such tensor. "
                "Say where the labels are, for example labels_fn=lambda batch: batch[1]."
            )
        return labels
