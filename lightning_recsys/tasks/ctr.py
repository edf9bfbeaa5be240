"""Click-through-rate training as a LightningModule."""

# Shape suffixes: B batch.

from __future__ import annotations

from typing import TypedDict

import pytorch_lightning as pl
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_recsys.callbacks import NormalizedEntropyMonitor
from lightning_recsys.data import Batch
from lightning_recsys.metrics import Calibration, LogLoss, StreamingAUROC
from lightning_recsys.tasks.base import Task


class StepOutput(TypedDict):
    """The result of a step: the loss, and the logits ``[B]`` that callbacks judge."""

    loss: Tensor
    logits: Tensor


class CTRTask(Task):
    """Trains any model ``(dense, sparse) -> logits`` on :class:`Batch` with binary cross entropy.

    Logs ``val/auc``, ``val/logloss`` and ``val/calibration``, and the same under ``test/``; adds
    :class:`NormalizedEntropyMonitor` for the normalized entropy unless the trainer has one.

    Args:
        model: ``forward(dense [B, num_dense], sparse) -> logits [B]``, as all of :mod:`lightning_recsys.models`.
        optimizer: Makes the dense optimizer from parameters. Prefer fused ones: they are 2 to 6 times as fast.
        scheduler: Makes a learning-rate scheduler from the optimizer; none by default.
        scheduler_config: Lightning's scheduler settings, such as ``{"interval": "epoch"}``; every step by default.
        config: Plain containers to keep in the checkpoint's hyperparameters, such as the run's configuration.

    A checkpoint holds no model class; hand in the model that it was trained with:
    ``CTRTask.load_from_checkpoint(path, model=model)``. The path may be that of a folder, here and in any trainer.

    Raises:
        ValueError: the model returns something else than a logit for each example.

    >>> from lightning_recsys.models import DLRM
    >>> task = CTRTask(DLRM(13, {"user": 1000, "movie": 500}, embedding_dim=8))
    >>> optimizer = task.configure_optimizers()
    >>> [group["lr"] for group in optimizer.param_groups]  # dense, rows
    [0.01, 0.01]
    """

    shown_metric = "auc"

    def make_metrics(self) -> dict[str, Metric]:  # noqa: D102 - inherited
        return {
            "auc": StreamingAUROC(from_logits=True),
            "logloss": LogLoss(from_logits=True),
            "calibration": Calibration(from_logits=True),
        }

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B]``, float32 under mixed precision too."""
        logits: Tensor = self.model(batch.dense, batch.sparse)
        return logits.float()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:  # noqa: D102 - inherited
        return self._step(batch)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Click probabilities, float32 ``[B]``."""
        logits_B: Tensor = self(batch)
        return logits_B.sigmoid()

    def _step(self, batch: Batch) -> StepOutput:
        logits_B: Tensor = self(batch)
        if logits_B.shape != batch.labels.shape:
            raise ValueError(
                f"{type(self.model).__name__}.forward must return one logit for each example, of shape "
                f"{list(batch.labels.shape)}, got {list(logits_B.shape)}."
                + (" End it with .squeeze(1)." if logits_B.shape == (*batch.labels.shape, 1) else "")
            )
        return {"loss": F.binary_cross_entropy_with_logits(logits_B, batch.labels), "logits": logits_B.detach()}

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> StepOutput:  # noqa: D102 - inherited
        output = self._step(batch)
        metrics.update(output["logits"], batch.labels)
        return output

    def configure_callbacks(self) -> list[pl.Callback]:
        """The normalized-entropy monitor, where the trainer has none."""
        given = any(isinstance(callback, NormalizedEntropyMonitor) for callback in self._trainer_callbacks())
        return [] if given else [NormalizedEntropyMonitor()]

    def _trainer_callbacks(self) -> list[pl.Callback]:
        return [] if self._trainer is None else list(self.trainer.callbacks)  # type: ignore[attr-defined]
