"""Pairwise dot products of DLRM."""

# Shape suffixes: B batch, V vectors, D width, P pairs.

from __future__ import annotations

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    r"""Dot products of all pairs of distinct vectors.

    .. math:: z_{(i,j)} = \langle t_i, t_j \rangle, \qquad 0 \le j < i < V

    Not a cut point: a dot product needs both of its vectors, so no partial result is smaller than the vectors.

    Args:
        num_vectors: ``V``, at least 2.

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

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        if num_vectors < 2:
            raise ValueError(
                f"dot interactions need at least two vectors, got {num_vectors}: give the model a second "
                f"categorical field or a numeric feature."
            )
        rows, columns = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("flat_pairs", rows * num_vectors + columns, persistent=False)

    @property
    def out_features(self) -> int:
        """Number of pairs."""
        return self.flat_pairs.numel()

    def forward(self, vectors_BVD: Tensor) -> Tensor:
        """All pairs; see the class for shapes."""
        return torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2)).flatten(1).index_select(1, self.flat_pairs)
