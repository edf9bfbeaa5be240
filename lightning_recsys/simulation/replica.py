"""Replicas of a module in one process: a dense part each, rows that all of them share, gradients that wait."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.simulation.rows import KeepsGradients, KeptGradient, VersionedRows
from lightning_recsys.sync import StalenessNormalization

_LINE = 16  # floats of a cache line, at which tensors start as torch's own do: some kernels round otherwise elsewhere


@dataclass(frozen=True)
class Gradient:
    """What a worker has computed of a batch, and has not pushed yet.

    Args:
        batch: The batch.
        logits: Predictions from before it was trained on, ``[B]``.
        dense: Gradients of the dense parameters; ``None`` of those that had no part in the loss.
        rows: Gradients of the rows of each collection.
        version: Version of the dense part when it was read.
    """

    batch: Batch
    logits: Tensor
    dense: list[Tensor | None]
    rows: Sequence[KeptGradient]
    version: int

    @property
    def row_bytes(self) -> int:
        """What reading its rows moves, and pushing them again."""
        return sum(rows.num_bytes for rows in self.rows)


class Replica:
    """One copy of a module's dense part, with its optimizer and schedule, over rows that may be shared with others.

    Args:
        module: Computes ``{"loss", "logits"}`` of a :class:`Batch`, as :class:`~lightning_recsys.tasks.CTRTask`; its
            collections are bound to :class:`VersionedRows`, or to other rows that keep gradients.

    Attributes:
        flat: The trained dense parameters as one vector, float32.
        version: Number of updates that the parameters have had.

    Raises:
        TypeError: the module's optimizers are not one optimizer, with or without a schedule by the step.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.version = 0
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        starts = [0]
        for parameter in self._parameters:
            starts.append(starts[-1] + -(-parameter.numel() // _LINE) * _LINE)
        self.flat = torch.zeros(starts[-1])
        for parameter, start in zip(self._parameters, starts, strict=False):
            view = self.flat[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self.dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)
        self._collections = [part for part in module.modules() if isinstance(part, EmbeddingBagCollection)]
        self._rows = [_rows(collection) for collection in self._collections]
        self._optimizer, self._scheduler = _optimizer_of(module)
        self._changes = [0.0] * len(self._parameters)  # root mean square of each one's last update

    def gradient(self, batch: Batch) -> Gradient:
        """What a worker would push that reads all parameters now."""
        output: Any = self.module.training_step(batch, self.version)
        output["loss"].backward()
        for collection in self._collections:
            collection.apply_pending()
        dense = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        rows = [gradient for part in self._rows for gradient in part.take()]
        return Gradient(batch, output["logits"], dense, rows, self.version)

    def apply(self, gradient: Gradient, normalization: StalenessNormalization | None) -> tuple[int, list[Any]]:
        """Train with a gradient that a worker has pushed.

        Args:
            gradient: As :meth:`gradient` made it; of no use afterwards.
            normalization: What stale gradients count; ``None``: as fresh ones.

        Returns:
            The staleness of the dense part, and those of the rows of each collection.
        """
        staleness = self.version + 1 - gradient.version
        for parameter, grad, change in zip(self._parameters, gradient.dense, self._changes, strict=True):
            if normalization is not None and grad is not None:
                factor = normalization.factor(staleness, change)
                parameter.grad = grad if factor == 1 else grad.mul_(factor)
            else:
                parameter.grad = grad
        before = self.flat.clone() if normalization is not None and normalization.uses_changes else None
        self._optimizer.step()
        if before is not None:
            self._note_changes(before)
        for parameter in self._parameters:
            parameter.grad = None
        rates = {rows: collection.lr for rows, collection in zip(self._rows, self._collections, strict=True)}
        rows = [part.push(normalization, lr=rates[part.rows]) for part in gradient.rows]
        if self._scheduler is not None:
            self._scheduler.step()
        self.version += 1
        return staleness, rows

    def _note_changes(self, before: Tensor) -> None:
        offset = self.flat.storage_offset()
        for i, parameter in enumerate(self._parameters):
            start = parameter.data.storage_offset() - offset
            old = before[start : start + parameter.numel()].view(parameter.shape)
            self._changes[i] = float((parameter.data - old).square_().mean().sqrt_())


def make_replicas(module: pl.LightningModule, count: int) -> list[Replica]:
    """Replicas that start alike and share their rows; the first of them is the module itself.

    :func:`end_replicas` gives the module its rows back.
    """
    shared: dict[int, Any] = {}
    for collection in module.modules():
        if isinstance(collection, EmbeddingBagCollection):
            own = collection.embedding_bags
            collection.bind(VersionedRows(collection.layout, collection.optimizer))
            shared |= {id(part): part for part in (own, collection.embedding_bags)}
    modules = [module, *(copy.deepcopy(module, dict(shared)) for _ in range(count - 1))]
    return [Replica(each) for each in modules]


def end_replicas(module: pl.LightningModule) -> None:
    """Give a module the rows that its replicas have trained, and its parameters memory of their own again."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.clone()
    for collection in module.modules():
        if isinstance(collection, EmbeddingBagCollection):
            collection.unbind()


def _rows(collection: EmbeddingBagCollection) -> KeepsGradients:
    assert isinstance(collection.embedding_bags, KeepsGradients)
    return collection.embedding_bags


def _optimizer_of(module: pl.LightningModule) -> tuple[Optimizer, Any]:
    configured: Any = module.configure_optimizers()
    if isinstance(configured, Optimizer):
        return configured, None
    if isinstance(configured, dict) and isinstance(configured.get("optimizer"), Optimizer):
        schedule = configured.get("lr_scheduler")
        if schedule is None:
            return configured["optimizer"], None
        if isinstance(schedule, dict) and schedule.get("interval") == "step":
            return configured["optimizer"], schedule["scheduler"]
        raise TypeError("a virtual cluster has no epochs: set the schedule's interval to 'step', which counts updates.")
    raise TypeError(
        f"a virtual cluster trains with one optimizer, and {type(module).__name__}.configure_optimizers returned"
        f" {type(configured).__name__}."
    )
