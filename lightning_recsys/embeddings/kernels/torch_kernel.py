"""The kernel in plain torch: any device, any width, every rule. The readable one."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import round_stochastically
from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer


def pool_rows(rows: Tensor, rows_N: Tensor, sparse: SparseFeatures) -> Tensor:
    """Sum each bag's (weighted) rows: float32 ``[B, F, D]``.

    Args:
        rows: Rows to look up in, float32 or bfloat16 ``[R, D]``.
        rows_N: Which of them each id has, int64 ``[N]``.
        sparse: Resolved features, whose bags and weights say what is summed.
    """
    num_features, dim = len(sparse.keys), rows.shape[1]
    if rows.dtype != torch.float32:
        rows, rows_N = rows.index_select(0, rows_N).float(), torch.arange(rows_N.numel(), device=rows.device)
    if sparse.is_single_hot and sparse.weights is None:
        return rows.index_select(0, rows_N.view(num_features, -1).t().reshape(-1)).view(-1, num_features, dim)
    offsets = sparse.bag_offsets()[:-1]
    pooled = F.embedding_bag(rows_N, rows, offsets, mode="sum", per_sample_weights=sparse.weights)
    return pooled.view(num_features, -1, dim).transpose(0, 1).contiguous()


class TorchKernel(Kernel):
    """Index select and ``embedding_bag`` for the lookup; unique, index add and scatter for the update."""

    name: ClassVar[str] = "torch"

    @classmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:  # noqa: D102
        return None

    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        return pool_rows(rows, self.layout.rows_of(sparse), sparse)

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
            touched, slots = torch.arange(len(rows), device=rows.device), self.layout.rows_of(sparse)
        else:
            touched, slots = torch.unique(self.layout.rows_of(sparse), return_inverse=True)
        grads = per_id.new_zeros(touched.numel(), rows.shape[1]).index_add_(0, slots, per_id)
        touched_rows = rows.index_select(0, touched).float()
        touched_state = {name: tensor.index_select(0, touched) for name, tensor in state.items()}
        grads = self.optimizer.decayed(touched_rows, grads)
        self.optimizer.update_(touched_rows, grads, touched_state, lr=lr, step=step)
        if rows.dtype != torch.float32:
            touched_rows = round_stochastically(touched_rows, touched, step)
        rows.index_copy_(0, touched, touched_rows)
        for name, tensor in touched_state.items():
            state[name].index_copy_(0, touched, tensor)
