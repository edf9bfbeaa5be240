"""Replicas of a module in one process: a dense part each, rows that all of them share, gradients that wait."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.optim import RowOptimizer, RowSWAP
from lightning_recsys.optim.swap import discount_of
from lightning_recsys.simulation.rows import KeepsGradients, KeptGradient, VersionedRows
from lightning_recsys.sync import StalenessNormalization

_LINE = 16  # floats of a cache line, at which tensors start as torch's own do: some kernels round otherwise elsewhere


@dataclass(frozen=True)
class Gradient:
    """The gradient of a batch that a worker has computed and not pushed yet.

    Args:
        batch: The batch.
        logits: Predictions from before it was trained on, ``[B]``.
        dense: Gradients of the dense parameters; ``None`` of those that had no part in the loss.
        rows: Gradients of the rows of each collection.
        version: Version of the dense part when it was read.
        memory: The places of all parameters, where the gradients of ``dense`` lie, if their replica may write another
            gradient there once they are applied.
    """

    batch: Batch
    logits: Tensor
    dense: list[Tensor | None]
    rows: Sequence[KeptGradient]
    version: int
    memory: list[Tensor] | None = None

    @property
    def row_bytes(self) -> int:
        """The bytes that reading its rows moves, and pushing them again."""
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
        ValueError: SWAP's periods are a time.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.version = 0
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        *self._starts, size = accumulate((-(-p.numel() // _LINE) * _LINE for p in self._parameters), initial=0)
        self.flat = torch.zeros(size)
        for parameter, place in zip(self._parameters, self._views(self.flat), strict=True):
            parameter.data = place.copy_(parameter.data)
        self.dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)
        self._collections = [part for part in module.modules() if isinstance(part, EmbeddingBagCollection)]
        self._rows = [_rows(collection) for collection in self._collections]
        self._optimizer, self._scheduler = _optimizer_of(module)
        _refuse_real_time(self._optimizer, [collection.optimizer for collection in self._collections])
        self._changes = [0.0] * len(self._parameters)  # root mean square of each one's last update
        # Gradients that wait are copied out of the allocator's memory: holes that thousands of them leave there, in no
        # order, are where the next batch's activations would lie, and those are then in no cache.
        self._free: list[list[Tensor]] = []  # memory of applied gradients

    def gradient(self, batch: Batch) -> Gradient:
        """The gradient that a worker would push if it read all parameters now."""
        output: Any = self.module.training_step(batch, self.version)
        output["loss"].backward()
        for collection in self._collections:
            collection.apply_pending()
        memory = self._free.pop() if self._free else list(self._views(torch.empty_like(self.flat)))
        dense: list[Tensor | None] = []
        for parameter, place in zip(self._parameters, memory, strict=True):
            dense.append(None if parameter.grad is None else place.copy_(parameter.grad))
            parameter.grad = None
        rows = [gradient for part in self._rows for gradient in part.take()]
        return Gradient(batch, output["logits"], dense, rows, self.version, memory)

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
        if gradient.memory is not None:
            self._free.append(gradient.memory)
        rates = {rows: collection.lr for rows, collection in zip(self._rows, self._collections, strict=True)}
        rows = [part.push(normalization, lr=rates[part.rows]) for part in gradient.rows]
        # Of several replicas the fast ones make more updates than each one's part, and OneCycleLR refuses more steps.
        if self._scheduler is not None and self.version < getattr(self._scheduler, "total_steps", math.inf):
            self._scheduler.step()
        self.version += 1
        return staleness, rows

    def _note_changes(self, before: Tensor) -> None:
        for i, (parameter, old) in enumerate(zip(self._parameters, self._views(before), strict=True)):
            self._changes[i] = float((parameter.data - old).square_().mean().sqrt_())

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        """The part of each parameter in a vector like :attr:`flat`."""
        for parameter, start in zip(self._parameters, self._starts, strict=True):
            yield flat[start : start + parameter.numel()].view(parameter.shape)


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


def _refuse_real_time(optimizer: Optimizer, rules: Sequence[RowOptimizer]) -> None:
    """SWAP would look at this machine's clock, so the same seed would not give the same result."""
    discount = discount_of(optimizer)
    periods = [*([] if discount is None else [discount.periods]), *(x.periods for x in rules if isinstance(x, RowSWAP))]
    if any(x.seconds is not None for x in periods):
        raise ValueError(
            "SWAP's seconds are those of this machine's clock, and a virtual cluster has a time of its own: choose"
            " optim.dense.period, a number of updates (optim.dense.seconds=null), or optim.dense.day."
        )


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
        raise TypeError(
            "a virtual cluster has no epochs: set the schedule's interval to 'step', which counts updates, as those of"
            " optim/scheduler=warmup, cosine and one_cycle do."
        )
    raise TypeError(
        f"a virtual cluster trains with one optimizer, and {type(module).__name__}.configure_optimizers returned"
        f" {type(configured).__name__}."
    )
