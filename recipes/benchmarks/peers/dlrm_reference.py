"""DLRM as its reference code trains it: one sparse-gradient ``EmbeddingBag`` per field, rowwise Adagrad, a plain loop.

Written anew after the public description of facebookresearch/dlrm (``--optimizer=rwsadagrad``): the sparse gradient
of each table is coalesced, one accumulator per row grows by the mean of its squares, the rows move by an index add.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from benchmarks.harness.turns import Turn
from benchmarks.harness.workload import Workload
from benchmarks.peers.floor import DLRMDense
from torch import Tensor, nn


class RowwiseSparseAdagrad(torch.optim.Optimizer):
    """Rowwise Adagrad on sparse gradients, Adagrad on dense ones, one parameter at a time."""

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, eps: float = 1e-10) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if parameter.grad.is_sparse:
                    self._sparse_step(parameter, state, group)
                    continue
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"].addcmul_(parameter.grad, parameter.grad)
                parameter.addcdiv_(parameter.grad, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])

    @staticmethod
    def _sparse_step(parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, float]) -> None:
        if not state:
            state["sum"] = parameter.new_zeros(parameter.shape[0])
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        state["sum"].index_add_(0, rows, values.square().mean(1))
        scale = state["sum"][rows].sqrt_().add_(group["eps"])
        parameter.index_add_(0, rows, values / scale.unsqueeze(1), alpha=-group["lr"])


def variant(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """The reference as a variant of :func:`benchmarks.harness.turns.in_turns`; it has DLRM only."""
    assert model == "dlrm"

    def run(turn: Turn) -> None:
        tables = nn.ModuleList(
            nn.EmbeddingBag(rows, work.dim, mode="sum", sparse=True) for rows in work.fields.values()
        )
        for table in tables:
            nn.init.uniform_(table.weight, -0.01, 0.01)
        dense_part = DLRMDense(work)
        optimizer = RowwiseSparseAdagrad([*tables.parameters(), *dense_part.parameters()], lr=0.01)
        offsets = torch.arange(batch_size)
        for batch in cycle(work.batches(batch_size)):
            ids = batch.sparse.values.view(work.num_fields, -1)
            optimizer.zero_grad()
            embedded = torch.stack([table(ids[f], offsets) for f, table in enumerate(tables)], 1)
            F.binary_cross_entropy_with_logits(dense_part(batch.dense, embedded), batch.labels).backward()
            optimizer.step()
            turn.step_done(batch_size)

    return run
