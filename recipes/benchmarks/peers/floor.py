"""The kernel floor: what a training step costs when nothing but arithmetic is left.

FBGEMM's own embedding module, the dense networks as a plain loop over preloaded batches, fused Adagrad. No Lightning,
no reader, no metrics, no checks. Written from the models' formulas and without this package's layers.
"""

# Shape suffixes: B batch, F fields, D embedding dim, I dense features.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise

import torch
import torch.nn.functional as F
from benchmarks.harness.turns import Turn
from benchmarks.harness.workload import Workload
from torch import Tensor, nn

from lightning_recsys.embeddings.kernels.fbgemm_kernel import without_chatter


def mlp(sizes: Sequence[int], *, relu_last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))


class DLRMDense(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        points = work.num_fields + 1
        self.bottom = mlp([work.num_dense, 512, 256, 64, work.dim], relu_last=True)
        self.top = mlp([work.dim + points * (points - 1) // 2, 512, 256, 1])
        row, column = torch.tril_indices(points, points, -1)
        self.register_buffer("pairs", row * points + column)

    def forward(self, dense_BI: Tensor, embedded_BFD: Tensor) -> Tensor:
        bottom = self.bottom(dense_BI)
        points = torch.cat([bottom.unsqueeze(1), embedded_BFD], 1)
        dots = torch.bmm(points, points.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([bottom, dots], 1)).squeeze(1)


class DeepFMDense(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.deep = mlp([work.num_fields * work.dim + work.num_dense, 400, 400, 400, 1])
        self.linear = nn.Linear(work.num_dense, 1)

    def forward(self, dense_BI: Tensor, embedded_BFD: Tensor, weights_BF: Tensor) -> Tensor:
        squares = embedded_BFD.sum(1).square() - embedded_BFD.square().sum(1)
        deep = self.deep(torch.cat([embedded_BFD.flatten(1), dense_BI], 1)).squeeze(1)
        return deep + 0.5 * squares.sum(1) + weights_BF.sum(1) + self.linear(dense_BI).squeeze(1)


class WideDeepDense(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.deep = mlp([work.num_fields * work.dim + work.num_dense, 400, 400, 1])
        self.linear = nn.Linear(work.num_dense, 1)

    def forward(self, dense_BI: Tensor, embedded_BFD: Tensor, weights_BF: Tensor) -> Tensor:
        deep = self.deep(torch.cat([embedded_BFD.flatten(1), dense_BI], 1)).squeeze(1)
        return deep + weights_BF.sum(1) + self.linear(dense_BI).squeeze(1)


class DCNDense(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        width = work.num_fields * work.dim + work.num_dense
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width) * 0.01) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(3))
        self.deep = mlp([width, 400, 400], relu_last=True)
        self.last = nn.Linear(width + 400, 1)

    def forward(self, dense_BI: Tensor, embedded_BFD: Tensor) -> Tensor:
        first = crossed = torch.cat([embedded_BFD.flatten(1), dense_BI], 1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            crossed = first * (crossed @ weight).unsqueeze(1) + bias + crossed
        return self.last(torch.cat([crossed, self.deep(first)], 1)).squeeze(1)


DENSE: dict[str, Callable[[Workload], nn.Module]] = {
    "dlrm": DLRMDense,
    "deepfm": DeepFMDense,
    "wide_deep": WideDeepDense,
    "dcn": DCNDense,
}
WITH_FIRST_ORDER = ("deepfm", "wide_deep")


def table_batched_embeddings(work: Workload, dim: int) -> nn.Module:
    """FBGEMM's module with rowwise Adagrad on the CPU; it takes widths that are a multiple of 4 only."""
    with without_chatter():
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            OptimType,
            PoolingMode,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in work.fields.values()],
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
        )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    return module


def steps(work: Workload, model: str, batch_size: int) -> Iterator[Callable[[], None]]:
    """An endless row of training steps."""
    tables = table_batched_embeddings(work, work.dim)
    first_order = table_batched_embeddings(work, 4) if model in WITH_FIRST_ORDER else None
    dense_part = DENSE[model](work)
    optimizer = torch.optim.Adagrad(dense_part.parameters(), lr=0.01, fused=True)
    offsets = torch.arange(work.num_fields * batch_size + 1)
    batches = [(batch.dense, batch.sparse.values, batch.labels) for batch in work.batches(batch_size)]

    def step(dense_BI: Tensor, ids: Tensor, labels_B: Tensor) -> None:
        inputs = [dense_BI, tables(ids, offsets).view(batch_size, work.num_fields, work.dim)]
        if first_order is not None:
            inputs.append(first_order(ids, offsets).view(batch_size, work.num_fields, 4)[..., 0])
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(dense_part(*inputs), labels_B).backward()
        optimizer.step()

    for batch in cycle(batches):
        yield lambda batch=batch: step(*batch)


def variant(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """The floor as a variant of :func:`benchmarks.harness.turns.in_turns`."""

    def run(turn: Turn) -> None:
        for step in steps(work, model, batch_size):
            step()
            turn.step_done(batch_size)

    return run
