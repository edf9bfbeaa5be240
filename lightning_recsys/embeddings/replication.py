"""Sparse gradients of all ranks, for rows that every rank holds a replica of."""

# Shape suffixes: B batch, F features, D embedding dim, W ranks.

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures


def num_replicas(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of a process group, by default of the default one; 1 where there is none."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def gather_over_ranks(
    sparse: SparseFeatures, grad_BFD: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[SparseFeatures, Tensor]:
    """Join the batches of all ranks in rank order; every rank gets the same result.

    Args:
        sparse: This rank's resolved features; ranks may differ in batch size and in bag lengths.
        grad_BFD: This rank's gradient, ``[B, F, D]``.
        group: The ranks; by default all.

    Returns:
        The features of all ranks' examples, and their gradients divided by the number of ranks: the mean, as
        ``DistributedDataParallel`` takes it for dense parameters.

    Communication: all-gathers of four numbers, of the ids, of the gradients, and of bag lengths and weights where
    some rank has them; each padded to the largest rank's.
    """
    bags = 0 if sparse.is_single_hot else sparse.batch_size * len(sparse.keys)
    sizes = torch.tensor([sparse.batch_size, sparse.values.numel(), bags, int(sparse.weights is not None)])
    sizes_W = [tuple(row) for row in _all_gather(sizes.to(sparse.device), group).tolist()]
    has_bags = any(size[2] for size in sizes_W)
    has_weights = any(size[3] for size in sizes_W)

    num_features = len(sparse.keys)
    ids = _gather_uneven(sparse.values, [size[1] for size in sizes_W], group)
    grads = _gather_uneven(grad_BFD, [size[0] for size in sizes_W], group)
    lengths: list[Tensor] = []
    if has_bags:
        lengths = _gather_uneven(sparse.bag_lengths(), [size[0] * num_features for size in sizes_W], group)
    weights: list[Tensor] = []
    if has_weights:
        own = grad_BFD.new_ones(sparse.values.shape) if sparse.weights is None else sparse.weights
        weights = _gather_uneven(own, [size[1] for size in sizes_W], group)
    parts = [
        SparseFeatures(
            sparse.keys,
            ids[rank],
            lengths=lengths[rank] if has_bags else None,
            weights=weights[rank] if has_weights else None,
        )
        for rank in range(len(sizes_W))
    ]
    return SparseFeatures.cat(parts), torch.cat(grads).div_(len(parts))


def no_gradients(layout: TableLayout, device: torch.device) -> tuple[SparseFeatures, Tensor]:
    """The features and the gradient of no examples, by which a rank takes part in an update of the others."""
    keys = tuple(feature for table in layout.tables for feature in table.feature_names)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    return SparseFeatures(keys, ids), torch.zeros(0, len(keys), layout.embedding_dim, device=device)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The ranks' tensors of one shape, one behind the other: ``[W, *shape]``."""
    gathered = tensor.new_empty((num_replicas(group) * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_single(gathered, tensor.contiguous(), group=group)
    return gathered.view(num_replicas(group), *tensor.shape)


def _gather_uneven(tensor: Tensor, lengths: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """All-gather tensors that differ in their first dimension only."""
    longest = max(lengths)
    if tensor.shape[0] < longest:
        tensor = torch.cat([tensor, tensor.new_zeros(longest - tensor.shape[0], *tensor.shape[1:])])
    return [part[:length] for part, length in zip(_all_gather(tensor, group), lengths, strict=True)]
