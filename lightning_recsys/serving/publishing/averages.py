"""The average of a model that a callback keeps while the model is trained."""

from __future__ import annotations

from dataclasses import dataclass

import pytorch_lightning as pl
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_recsys.embeddings import EmbeddingBagCollection


@dataclass(frozen=True)
class Average:
    """The average that is published in place of the weights as they are trained.

    Args:
        name: Name of the callback's class.
        tensors: The averaged parameters of the published part, and its buffers where the callback keeps those.
        collections: The collections of the averaged copy by their paths: with averaged rows, or with those in training
            where rows are on servers.
    """

    name: str
    tensors: dict[str, Tensor]
    collections: dict[str, EmbeddingBagCollection]


def averaged_copy(trainer: pl.Trainer, module: str) -> Average | None:
    """The average of a callback of Lightning's; ``None`` without such a callback, and until its average has begun.

    ``StochasticWeightAveraging`` averages parameters and no buffers. A model with batch norms gets its statistics in a
    pass over the data at the end, and its average is worth nothing before.

    Args:
        trainer: The trainer, which has the callbacks.
        module: Name of the LightningModule's part that is published.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if not isinstance(callback, WeightAveraging | StochasticWeightAveraging) or callback._average_model is None:
            continue
        copy = callback._average_model
        counted = getattr(callback if isinstance(callback, StochasticWeightAveraging) else copy, "n_averaged", None)
        if counted is None or not int(counted):
            continue
        if isinstance(callback, StochasticWeightAveraging):
            if any(isinstance(x, _BatchNorm) for x in copy.modules()):
                continue
            part: nn.Module = getattr(copy, module)
            tensors: dict[str, Tensor] = dict(part.named_parameters(remove_duplicate=False))
        else:
            part = getattr(copy.module, module)
            tensors = dict(part.named_parameters(remove_duplicate=False))
            tensors |= dict(part.named_buffers(remove_duplicate=False))
        collections = {path: x for path, x in part.named_modules() if isinstance(x, EmbeddingBagCollection)}
        return Average(type(callback).__name__, tensors, collections)
    return None
