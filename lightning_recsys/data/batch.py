"""The batch that every data module yields and every task takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recsys.embeddings import SparseFeatures


@dataclass(frozen=True)
class Batch:
    """A batch of click-through-rate examples.

    Args:
        dense: Numeric features, float32, shape ``[B, num_dense]``; ``[B, 0]`` where there are none.
        sparse: Categorical features of the same ``B`` examples.
        labels: Click or no click, float32, shape ``[B]``, each 0 or 1.

    Raises:
        TypeError: ``dense`` is not a float32 matrix, or ``labels`` not a float32 vector.
        ValueError: the three do not have the same number of examples.

    Lightning moves it between devices through :meth:`to`.
    """

    dense: Tensor
    sparse: SparseFeatures
    labels: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dims in (("dense", self.dense, 2), ("labels", self.labels, 1)):
            if tensor.dtype != torch.float32 or tensor.dim() != dims:
                raise TypeError(
                    f"Batch.{name} must be float32 of {dims} dimension(s), got {tensor.dtype} of shape "
                    f"{list(tensor.shape)}."
                )
        sizes = {"dense": self.dense.shape[0], "sparse": self.sparse.batch_size, "labels": self.labels.shape[0]}
        if self.sparse.keys and len(set(sizes.values())) > 1:
            raise ValueError(f"the parts of a Batch must have the same number of examples, got {sizes}.")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:  # noqa: D102 - see the class
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def select(self, features: Sequence[str]) -> Batch:
        """The same examples with some of the categorical features only.

        Raises:
            KeyError: a feature is not in the batch.
        """
        return Batch(self.dense, self.sparse.select(features), self.labels)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())
