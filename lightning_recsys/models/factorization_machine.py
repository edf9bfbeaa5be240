"""Factorization machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import (
    FirstOrder,
    FMSecondOrder,
    optional_embeddings,
    partition_parts,
    pooled_embeddings,
)


class FactorizationMachine(nn.Module):
    r"""Logistic regression plus the inner products of all pairs of features.

    .. math:: \operatorname{logit} = b + \sum_i w_i\, x_i + \sum_{i<j} \langle v_i, v_j \rangle\, x_i x_j

    over all ids of the example (:math:`x_i = 1`) and all numeric features. With multi-hot fields, ids of one field
    are pooled first and do not interact with each other.

    Args:
        num_dense: Numeric features ``N``.
        fields: Field name -> number of ids.
        embedding_dim: Width of the vectors :math:`v_i`.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Shape:
        - dense: ``[B, N]``; sparse: ``B`` examples of the fields.
        - output: logits ``[B]``.

    Raises:
        ValueError: there is neither a field nor a numeric feature.

    Reference: Rendle 2010, Factorization Machines.
    Differs from the paper: the pooling of multi-hot fields.
    """

    def __init__(
        self, num_dense: int, fields: Mapping[str, int], *, embedding_dim: int = 16, **options: Unpack[EmbeddingOptions]
    ) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, fields, **options)
        self.embedding_dim = embedding_dim
        self.embeddings = optional_embeddings(fields, embedding_dim, **options)
        self.second_order = FMSecondOrder(num_dense, embedding_dim=embedding_dim)

    partition = partition_parts

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits; see the class for shapes."""
        logits: Tensor = self.first_order(dense, sparse) + self.second_order(
            dense, pooled_embeddings(self.embeddings, dense, sparse, self.embedding_dim)
        )
        return logits
