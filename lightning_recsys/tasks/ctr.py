"""Click-through-rate training as a LightningModule."""

# Shape suffixes: B batch.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypedDict

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lightning_recsys.callbacks import NormalizedEntropyMonitor
from lightning_recsys.checkpoints import ReadsFolders
from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.metrics import Calibration, LogLoss, StreamingAUROC

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class StepOutput(TypedDict):
    """What a step returns: the loss, and the logits ``[B]`` that callbacks judge."""

    loss: Tensor
    logits: Tensor


class CTRTask(ReadsFolders):
    """Trains any model ``(dense, sparse) -> logits`` on :class:`Batch` with binary cross entropy.

    The dense part is trained by the optimizer given here. The embedding rows are trained by their collections' fused
    row optimizers, which follow this one: a scheduler drives both learning rates, gradient accumulation holds for
    both, and the rows' rate stands in the optimizer's last parameter groups, one for each collection.

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

    >>> from lightning_recsys.models import DLRM
    >>> task = CTRTask(DLRM(13, {"user": 1000, "movie": 500}, embedding_dim=8))
    >>> optimizer = task.configure_optimizers()
    >>> [group["lr"] for group in optimizer.param_groups]  # dense, rows
    [0.01, 0.01]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_config: Mapping[str, Any] | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("config")
        self.model = model
        self._make_optimizer = optimizer or partial(torch.optim.Adagrad, lr=0.01, fused=True)
        self._make_scheduler = scheduler
        self._scheduler_config = {"interval": "step", **(scheduler_config or {})}
        self.val_metrics, self.test_metrics = _evaluation_metrics(), _evaluation_metrics()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the name of Lightning's current hook, which changes 40 times a step, in a plain way.

        A module asks first of each value whether it is a parameter: 2 % of a step of 5 milliseconds.
        """
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B]``, float32 under mixed precision too."""
        logits: Tensor = self.model(batch.dense, batch.sparse)
        return logits.float()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:  # noqa: D102 - inherited
        return self._step(batch)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> StepOutput:  # noqa: D102
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> StepOutput:  # noqa: D102
        return self._evaluate(batch, self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Click probabilities, float32 ``[B]``."""
        logits_B: Tensor = self(batch)
        return logits_B.sigmoid()

    def _step(self, batch: Batch) -> StepOutput:
        logits_B: Tensor = self(batch)
        return {"loss": F.binary_cross_entropy_with_logits(logits_B, batch.labels), "logits": logits_B.detach()}

    def _evaluate(self, batch: Batch, metrics: nn.ModuleDict) -> StepOutput:
        output = self._step(batch)
        for metric in metrics.values():
            assert isinstance(metric, Metric)
            metric.update(output["logits"], batch.labels)
        return output

    def on_validation_epoch_end(self) -> None:  # noqa: D102 - inherited
        self._log_all("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:  # noqa: D102 - inherited
        self._log_all("test", self.test_metrics)

    def _log_all(self, stage: str, metrics: nn.ModuleDict) -> None:
        for name, metric in metrics.items():
            assert isinstance(metric, Metric)
            self.log(f"{stage}/{name}", metric, prog_bar=name == "auc")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The dense optimizer, which the embedding rows follow, and its scheduler.

        Raises:
            ValueError: the trainer scales the loss, as ``16-mixed`` does on a GPU: the rows would train with gradients
                that were never scaled back.
        """
        if self._trainer is not None and getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"trainer.precision={self.trainer.precision!r} scales the loss, which embedding rows do not undo. "
                "Use 'bf16-mixed' or '32'."
            )
        optimizer = self._make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        for module in self.modules():
            if isinstance(module, EmbeddingBagCollection):
                module.attach_to(optimizer)
        if self._make_scheduler is None:
            return optimizer
        scheduler: Any = {"scheduler": self._make_scheduler(optimizer), **self._scheduler_config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_callbacks(self) -> list[pl.Callback]:
        """The normalized-entropy monitor, where the trainer has none."""
        given = any(isinstance(callback, NormalizedEntropyMonitor) for callback in self._trainer_callbacks())
        return [] if given else [NormalizedEntropyMonitor()]

    def _trainer_callbacks(self) -> list[pl.Callback]:
        return [] if self._trainer is None else list(self.trainer.callbacks)  # type: ignore[attr-defined]


def _evaluation_metrics() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "auc": StreamingAUROC(from_logits=True),
            "logloss": LogLoss(from_logits=True),
            "calibration": Calibration(from_logits=True),
        }
    )
