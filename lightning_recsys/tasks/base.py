"""The base class of tasks: whom the optimizer trains, and how metrics are logged."""

from __future__ import annotations

import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from lightning_recsys.checkpoints import ReadsFolders
from lightning_recsys.embeddings import EmbeddingBagCollection

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[..., LRScheduler]


class Task(ReadsFolders):
    """A model, its optimizer, which the embedding rows follow, and its evaluation metrics.

    The dense part is trained by the optimizer given here. The embedding rows are trained by their collections' fused
    row optimizers, which follow this one: a scheduler drives both learning rates, gradient accumulation holds for
    both, and the rows' rate stands in the optimizer's last parameter groups, one for each collection.

    Args:
        model: The model to train.
        optimizer: Makes the dense optimizer from parameters. Prefer fused ones: they are 2 to 6 times as fast.
        scheduler: Makes a learning-rate scheduler from the optimizer; none by default. One that has to have a keyword
            ``total_steps``, as those of :mod:`lightning_recsys.optim.schedules`, gets the steps of the run.
        scheduler_config: Lightning's scheduler settings, such as ``{"interval": "epoch"}``; every step by default.
        config: Plain containers to keep in the checkpoint's hyperparameters, such as the run's configuration.

    A checkpoint holds no model class; hand in the model that it was trained with:
    ``load_from_checkpoint(path, model=model)``. The path may be that of a folder, here and in any trainer.

    Attributes:
        total_steps: Optimizer steps of a run that has no trainer to tell them, for a ``scheduler`` that asks; a
            simulated cluster says how many it makes
            (:meth:`~lightning_recsys.simulation.VirtualCluster.num_updates`).
    """

    shown_metric = ""  # on the progress bar
    total_steps: int | None = None
    joins_examples = False  # whether an output is made of other examples' rows as well, as in graphs

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
        self.val_metrics = MetricCollection({**self.make_metrics()}, compute_groups=False)
        self.test_metrics = self.val_metrics.clone()

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

    @abstractmethod
    def evaluate(self, batch: Any, metrics: MetricCollection) -> Any:
        """Add a batch to the metrics of an evaluation; what a step of it returns."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # noqa: D102 - inherited
        return self.evaluate(batch, self.val_metrics)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # noqa: D102 - inherited
        return self.evaluate(batch, self.test_metrics)

    def on_validation_epoch_end(self) -> None:  # noqa: D102 - inherited
        if self.trainer.sanity_checking:  # a few batches of a model that has learned nothing: no figure to warn about
            self.val_metrics.reset()
        else:
            self._log_all("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:  # noqa: D102 - inherited
        self._log_all("test", self.test_metrics)

    def _log_all(self, stage: str, metrics: MetricCollection) -> None:
        for name, metric in metrics.items():
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
        if self._trainer is not None and self.trainer.gradient_clip_val:
            _say_rows_are_not_clipped(self.trainer.gradient_clip_val)
        optimizer = self._make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        for module in self.modules():
            if isinstance(module, EmbeddingBagCollection):
                module.attach_to(optimizer)
        if self._make_scheduler is None:
            return optimizer
        needs_steps = _requires(self._make_scheduler, "total_steps")
        known: dict[str, Any] = {"total_steps": self._count_steps()} if needs_steps else {}
        scheduler: Any = {"scheduler": self._make_scheduler(optimizer, **known), **self._scheduler_config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _count_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self._trainer is None:
            steps: float = math.inf if self.total_steps is None else self.total_steps
        else:
            steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise ValueError(
                "the learning-rate schedule (optim.scheduler) goes over the whole run, and nobody knows how many steps"
                " that has: set trainer.max_epochs, or trainer.max_steps where the loader has no length. Without a"
                " trainer, as in a simulation, set the task's total_steps: task.total_steps ="
                " cluster.num_updates(num_batches)."
            )
        return int(steps)


def _requires(function: Callable[..., Any], name: str) -> bool:
    found = inspect.signature(function).parameters.get(name)
    return found is not None and found.default is found.empty


@rank_zero_only
def _say_rows_are_not_clipped(value: float) -> None:
    log.warning(
        "trainer.gradient_clip_val=%s clips the gradients of the dense part; embedding rows are trained by their own"
        " update rule, whose gradients it does not reach.",
        value,
    )
