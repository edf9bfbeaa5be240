"""Wide & Deep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import (
    DeepTower,
    EmbeddingDropout,
    FirstOrder,
    Normalization,
    begin,
    optional_embeddings,
    partition_parts,
    pooled_embeddings,
)


class WideDeep(nn.Module):
    r"""A linear model that remembers and a deep one that generalises, trained together.

    .. math:: \operatorname{logit} = \sum_f w_f[\text{id}_f] + \sum_n u_n\, x_n + \text{MLP}([e, x])

    Args:
        num_dense: Numeric features ``N``.
        fields: Field name -> number of ids.
        embedding_dim: Width ``D`` of the embeddings.
        hidden: Width of each hidden layer.
        activation: ``relu``, ``gelu``, ``sigmoid``, ``silu`` or ``tanh``.
        dropout: Probability that an activation is zeroed in training, in ``[0, 1)``.
        embedding_dropout: Probability that a number of a pooled embedding is zeroed in training, in ``[0, 1)``.
        normalization: How the inputs of each activation are normalised: ``none``, ``batch``, or ``local``
            (:class:`~lightning_recsys.models.layers.LocalNormalization`).
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`. The paper trains the wide part by
            FTRL with L1: ``first_order_optimizer=RowFTRL(l1=...)``.

    Shape:
        - dense: ``[B, N]``; sparse: ``B`` examples of the fields.
        - output: logits ``[B]``.

    Raises:
        ValueError: there is no feature or no hidden layer, or an option is not one of the above.

    Reference: Cheng et al. 2016, Wide & Deep Learning for Recommender Systems.
    Differs from the paper: the wide part sees the features themselves; products of features that a person thought of
    belong into the data as fields of their own.
    """

    def __init__(
        self,
        num_dense: int,
        fields: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        normalization: Normalization = "none",
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, fields, bias=False, **options)
        self.embedding_dim = embedding_dim
        self.embeddings = optional_embeddings(fields, embedding_dim, **options)
        self.drop = EmbeddingDropout(embedding_dropout, len(fields)) if embedding_dropout else None
        self.deep = DeepTower(
            num_dense,
            num_fields=len(fields),
            embedding_dim=embedding_dim,
            hidden=hidden,
            activation=activation,
            dropout=dropout,
            normalization=normalization,
        )

    partition = partition_parts

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits; see the class for shapes."""
        embeddings = pooled_embeddings(self.embeddings, dense, sparse, self.embedding_dim)
        if self.drop is not None:
            embeddings = self.drop(embeddings)
        deep = begin(self.deep, dense, embeddings)
        logits: Tensor = self.first_order(dense, sparse) + deep()
        return logits
