"""The batch that every data module yields and every task takes."""

from __future__ import annotations

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

    Lightning moves it between devices through :meth:`to`.
    """

    dense: Tensor
    sparse: SparseFeatures
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:  # noqa: D102 - see the class
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())
