"""Pairwise dot products of DLRM."""

# Shape suffixes: B batch, V vectors, D width, P pairs.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_EXAMPLES_AT_ONCE = 256  # all products of so many, three quarters of a megabyte for 27 vectors, stay in a core's cache


class DotInteraction(nn.Module):
    r"""Dot products of all pairs of distinct vectors.

    .. math:: z_{(i,j)} = \langle t_i, t_j \rangle, \qquad 0 \le j < i < V

    Not a cut point: a dot product needs both of its vectors, so no partial result is smaller than the vectors.

    Args:
        num_vectors: Number of vectors ``V`` of an example, at least 2.

    Shape:
        - input: ``[B, V, D]``.
        - output: ``[B, V (V - 1) / 2]``, the lower triangle row by row: (1, 0), (2, 0), (2, 1), ...

    Raises:
        ValueError: there is no pair.

    Reference: Naumov et al. 2019, Deep Learning Recommendation Model for Personalization and Recommendation Systems.

    >>> DotInteraction(3)(torch.tensor([[[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]]))
    tensor([[ 2.,  4., 23.]])
    """

    flat_pairs: Tensor
    pair_of: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        if num_vectors < 2:
            raise ValueError(
                f"dot interactions need at least two vectors, got {num_vectors}: give the model a second "
                f"categorical field or a numeric feature."
            )
        rows, columns = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("flat_pairs", rows * num_vectors + columns, persistent=False)
        pair_of_VV = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        pair_of_VV[rows, columns] = pair_of_VV[columns, rows] = torch.arange(len(rows))
        self.register_buffer("pair_of", pair_of_VV.flatten(), persistent=False)

    @property
    def out_features(self) -> int:
        """Number of pairs."""
        return self.flat_pairs.numel()

    def forward(self, vectors_BVD: Tensor) -> Tensor:
        """All pairs; see the class for shapes."""
        if vectors_BVD.device.type != "cpu" or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return _all_products(vectors_BVD).index_select(1, self.flat_pairs)
        pairs: Tensor = _Pairs.apply(vectors_BVD, self.flat_pairs, self.pair_of)  # type: ignore[no-untyped-call]
        return pairs


def _all_products(vectors_BVD: Tensor) -> Tensor:
    return torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2)).flatten(1)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.split(_EXAMPLES_AT_ONCE)  # type: ignore[no-any-return,no-untyped-call]


class _Pairs(torch.autograd.Function):
    """The products of all pairs, a few examples at a time, and their gradient by one product instead of two.

    Left to autograd, all products and twice their gradient would go through memory: half the time of both passes at
    2048 x 27 x 16, and 10 MiB.
    """

    @staticmethod
    def forward(ctx: Any, vectors_BVD: Tensor, flat_pairs: Tensor, pair_of: Tensor) -> Tensor:
        ctx.save_for_backward(vectors_BVD, pair_of)
        pairs_BP = vectors_BVD.new_empty(len(vectors_BVD), len(flat_pairs))
        for vectors, pairs in zip(_parts(vectors_BVD), _parts(pairs_BP), strict=True):
            torch.index_select(_all_products(vectors), 1, flat_pairs, out=pairs)
        return pairs_BP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BP: Tensor) -> tuple[Tensor, None, None]:
        vectors_BVD, pair_of = ctx.saved_tensors
        num_vectors = vectors_BVD.shape[1]
        grad_BVD = torch.empty_like(vectors_BVD)
        for vectors, grad_pairs, grad in zip(_parts(vectors_BVD), _parts(grad_BP), _parts(grad_BVD), strict=True):
            grad_products = grad_pairs.index_select(1, pair_of).view(-1, num_vectors, num_vectors)
            grad_products.diagonal(dim1=1, dim2=2).zero_()
            torch.bmm(grad_products, vectors, out=grad)
        return grad_BVD, None, None
