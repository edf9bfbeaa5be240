"""What the tasks share: whom the optimizer trains, and how metrics are logged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lightning_recsys.checkpoints import ReadsFolders
from lightning_recsys.embeddings import EmbeddingBagCollection

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class Task(ReadsFolders):
    """A model, its optimizer, which the embedding rows follow, and its evaluation metrics.

    The dense part is trained by the optimizer given here. The embedding rows are trained by their collections' fused
    row optimizers, which follow this one: a scheduler drives both learning rates, gradient accumulation holds for
    both, and the rows' rate stands in the optimizer's last parameter groups, one for each collection.

    Args:
        model: What to train.
        optimizer: Makes the dense optimizer from parameters. Prefer fused ones: they are 2 to 6 times as fast.
        scheduler: Makes a learning-rate scheduler from the optimizer; none by default.
        scheduler_config: Lightning's scheduler settings, such as ``{"interval": "epoch"}``; every step by default.
        config: Plain containers to keep in the checkpoint's hyperparameters, such as the run's configuration.

    A checkpoint holds no model class; hand in the model that it was trained with:
    ``load_from_checkpoint(path, model=model)``. The path may be that of a folder, here and in any trainer.
    """

    shown_metric = ""  # on the progress bar

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
        self.val_metrics, self.test_metrics = nn.ModuleDict(self.make_metrics()), nn.ModuleDict(self.make_metrics())

    @abstractmethod
    def make_metrics(self) -> dict[str, Metric]:
        """The metrics of one evaluation, by name; they are logged under ``val/`` and ``test/``."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the name of Lightning's current hook, which changes 40 times a step, in a plain way.

        A module asks first of each value whether it is a parameter: 2 % of a step of 5 milliseconds.
        """
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def on_validation_epoch_end(self) -> None:  # noqa: D102 - inherited
        self._log_all("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:  # noqa: D102 - inherited
        self._log_all("test", self.test_metrics)

    def _log_all(self, stage: str, metrics: nn.ModuleDict) -> None:
        for name, metric in metrics.items():
            assert isinstance(metric, Metric)
            self.log(f"{stage}/{name}", metric, prog_bar=name == self.shown_metric)

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
