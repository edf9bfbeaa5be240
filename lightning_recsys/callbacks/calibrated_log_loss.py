"""Log loss after Platt scaling."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks._logging import log_epoch
from lightning_recsys.metrics import LogLoss
from lightning_recsys.metrics.functional import platt_scaling


class CalibratedLogLoss(LeanCallback):
    """Logs ``test/calibrated_logloss``: the log loss on test rows after Platt scaling by the validation rows.

    A model that ranks well but predicts too many or too few clicks has a log loss that says little of its ranking.
    Two numbers that are learned on validation rows take that away (Platt 1999; see
    :func:`~lightning_recsys.metrics.functional.platt_scaling`). Validate, then test, with one trainer on one device:

        trainer = Trainer(callbacks=[CalibratedLogLoss()], devices=1)
        trainer.validate(task, datamodule=data, ckpt_path=best)
        trainer.test(task, datamodule=data, ckpt_path=best)

    Steps return a dict with ``logits`` ``[B]``, and batches have ``labels``, as those of
    :class:`~lightning_recsys.tasks.CTRTask`.

    Raises:
        RuntimeError: test rows come before validation rows, or several processes have a part of the rows each.
    """

    def __init__(self) -> None:
        self._collected: list[tuple[Tensor, Tensor]] = []  # logits and labels of the validation so far
        self._scaling: tuple[float, float] | None = None  # of the last validation
        self._log_loss = LogLoss(from_logits=True)  # of the test so far

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse several processes."""
        if trainer.world_size > 1:
            raise RuntimeError("CalibratedLogLoss needs all rows in one process: validate and test with devices=1.")

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start over."""
        self._collected = []

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Keep the batch's logits and labels."""
        if not trainer.sanity_checking:
            self._collected.append((outputs["logits"].cpu(), batch.labels.cpu()))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the two numbers."""
        if self._collected:
            logits, labels = zip(*self._collected, strict=True)
            with torch.inference_mode(False):
                self._scaling = platt_scaling(torch.cat(logits).clone(), torch.cat(labels).clone())
            self._collected = []

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start over."""
        if self._scaling is None:
            raise RuntimeError("CalibratedLogLoss learns from validation rows: call trainer.validate before test.")
        self._log_loss.reset()

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add the batch."""
        assert self._scaling is not None
        a, b = self._scaling
        self._log_loss.update(a * outputs["logits"].cpu().double() + b, batch.labels.cpu())

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the value."""
        log_epoch(pl_module, {"test/calibrated_logloss": self._log_loss.compute().item()})
