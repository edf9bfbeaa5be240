"""The kernel in plain torch: any device, any width, every rule. The readable one."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer


class TorchKernel(Kernel):
    """Index select and ``embedding_bag`` for the lookup; unique, index add and scatter for the update."""

    name: ClassVar[str] = "torch"

    @classmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:  # noqa: D102
        return None

    def _row_indices(self, sparse: SparseFeatures) -> Tensor:
        starts = torch.tensor(self.layout.feature_starts, device=sparse.device)
        if sparse.is_single_hot:
            return (sparse.values.view(len(starts), -1) + starts.unsqueeze(1)).view(-1)
        bag_starts = starts.repeat_interleave(sparse.batch_size)
        return sparse.values + bag_starts.repeat_interleave(sparse.bag_lengths())

    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        indices, shape_FBD = self._row_indices(sparse), (len(sparse.keys), -1, rows.shape[1])
        if sparse.is_single_hot and sparse.weights is None:
            indices_BF = indices.view(len(sparse.keys), -1).t()
            return rows.index_select(0, indices_BF.reshape(-1)).view(-1, len(sparse.keys), rows.shape[1])
        offsets = sparse.bag_offsets()[:-1]
        pooled = F.embedding_bag(indices, rows, offsets, mode="sum", per_sample_weights=sparse.weights)
        return pooled.view(shape_FBD).transpose(0, 1).contiguous()

    def apply_gradients(  # noqa: D102 - inherited
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        sparse: SparseFeatures,
        grad_BFD: Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        per_id = grad_BFD.transpose(0, 1).reshape(-1, rows.shape[1])
        if not sparse.is_single_hot:
            per_id = per_id.repeat_interleave(sparse.bag_lengths(), dim=0)
        if sparse.weights is not None:
            per_id = per_id * sparse.weights.unsqueeze(1)
        if self.optimizer.decay_all_rows:
            touched, slots = torch.arange(len(rows), device=rows.device), self._row_indices(sparse)
        else:
            touched, slots = torch.unique(self._row_indices(sparse), return_inverse=True)
        grads = per_id.new_zeros(touched.numel(), rows.shape[1]).index_add_(0, slots, per_id)
        touched_rows = rows.index_select(0, touched)
        touched_state = {name: tensor.index_select(0, touched) for name, tensor in state.items()}
        grads = self.optimizer.decayed(touched_rows, grads)
        self.optimizer.update_(touched_rows, grads, touched_state, lr=lr, step=step)
        rows.index_copy_(0, touched, touched_rows)
        for name, tensor in touched_state.items():
            state[name].index_copy_(0, touched, tensor)
