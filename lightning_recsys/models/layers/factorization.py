"""Second-order interactions of a factorization machine."""

# Shape suffixes: B batch, F fields, N numeric features, D embedding dim.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_recsys.partition.field_layer import FieldLayer
from lightning_recsys.partition.pieces import Sends


class FMSecondOrder(FieldLayer):
    r"""Inner products of all pairs of feature vectors, in linear time.

    .. math::
        y = \sum_{i<j} \langle z_i, z_j \rangle = \tfrac12 \Big( |A|^2 - q \Big), \qquad
        A = \sum_i z_i, \qquad q = \sum_i |z_i|^2

    where :math:`z_i` is the pooled embedding of a field, or :math:`x_n v_n` for numeric feature ``n``, whose vector
    :math:`v_n` is a parameter here.

    Cut point: :meth:`partial` of the fields, ``A`` and ``q``, is additive over disjoint sets of fields;
    :meth:`combine` then counts the numeric features once.

    Args:
        num_dense: Numeric features ``N``; 0 is fine.
        embedding_dim: Width ``D``.

    Shape:
        - dense: ``[B, N]``; embeddings: ``[B, F, D]``.
        - output: ``[B]``, float32 also under autocast, for the difference of two close sums has no digits to spare.

    The vectors start from N(0, 0.01), as embeddings do.

    Reference: Rendle 2010, Factorization Machines.

    >>> ones = torch.ones(1, 3, 4)  # three equal vectors: three pairs, each with inner product 4
    >>> FMSecondOrder(0, embedding_dim=4)(torch.empty(1, 0), ones)
    tensor([12.])
    """

    vectors: nn.Parameter | None

    def __init__(self, num_dense: int, *, embedding_dim: int) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        vectors = nn.Parameter(torch.empty(num_dense, embedding_dim).normal_(0.0, 0.01)) if num_dense else None
        self.register_parameter("vectors", vectors)

    @property
    def sends(self) -> Sends:  # noqa: D102 - inherited
        return Sends("all-reduce", self.embedding_dim + 1)

    def partial(self, embeddings_BFD: Tensor) -> tuple[Tensor, Tensor]:
        """The fields' shares of ``A``, ``[B, D]``, and of ``q``, ``[B]``."""
        sums: tuple[Tensor, Tensor] = _Sums.apply(embeddings_BFD)  # type: ignore[no-untyped-call]
        return sums

    def combine(self, dense: Tensor, sum_BD: Tensor, square_B: Tensor) -> Tensor:
        """Add the numeric features to both sums and return half of the difference, ``[B]``."""
        if self.vectors is not None:
            with torch.autocast(dense.device.type, enabled=False):
                sum_BD = torch.addmm(sum_BD, dense, self.vectors)
                square_B = torch.addmv(square_B, dense.square(), self.vectors.square().sum(1))
        return 0.5 * (sum_BD.square().sum(1) - square_B)

    def forward(self, dense: Tensor, embeddings_BFD: Tensor) -> Tensor:
        """The sum over all pairs; see the class for shapes."""
        return self.combine(dense, *self.sum_partials(*self.partial(embeddings_BFD)))


class _Sums(torch.autograd.Function):
    """``(z.sum(1), z.square().sum((1, 2)))`` with the gradient of both in one pass over ``z``.

    Left to autograd, squares and three intermediate gradients of the size of ``z`` would go through memory, which was
    a fifth of a DeepFM step.
    """

    @staticmethod
    def forward(ctx: Any, embeddings_BFD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(embeddings_BFD)
        return embeddings_BFD.sum(1), torch.linalg.vector_norm(embeddings_BFD, dim=(1, 2)).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum_BD: Tensor, grad_square_B: Tensor) -> Tensor:
        (embeddings_BFD,) = ctx.saved_tensors
        return torch.addcmul(grad_sum_BD.unsqueeze(1), embeddings_BFD, 2 * grad_square_B.view(-1, 1, 1))
