"""Deep & Cross network, version 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import (
    CrossNetwork,
    DeepTower,
    EmbeddingDropout,
    InputWeights,
    Normalization,
    begin,
    check_dense,
    check_features,
    flatten_inputs,
    optional_embeddings,
    partition_parts,
    pooled_embeddings,
)


class DCN(nn.Module):
    r"""Explicit products of bounded degree beside a deep network, both over the same inputs.

    .. math::
        x_0 = [e, x], \qquad x_{l+1} = x_0\, (x_l^\top w_l) + b_l + x_l, \qquad
        \operatorname{logit} = w^\top [x_L, h] + b

    where :math:`h` is the last hidden layer of the deep network.

    Args:
        num_dense: Numeric features ``N``.
        fields: Field name -> number of ids.
        embedding_dim: Width ``D`` of the embeddings.
        num_cross_layers: ``L``; products reach degree ``L + 1``.
        hidden: Width of each hidden layer of the deep network.
        activation: ``relu``, ``gelu``, ``sigmoid``, ``silu`` or ``tanh``.
        dropout: Probability that an activation is zeroed in training, in ``[0, 1)``.
        embedding_dropout: Probability that a number of a pooled embedding is zeroed in training, in ``[0, 1)``.
        normalization: How the inputs of each activation are normalised: ``none``, ``batch``, or ``local``
            (:class:`~lightning_recsys.models.layers.LocalNormalization`).
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Shape:
        - dense: ``[B, N]``; sparse: ``B`` examples of the fields.
        - output: logits ``[B]``.

    Raises:
        ValueError: there is no feature, no cross layer or no hidden layer, or an option is not one of the above.

    Reference: Wang et al. 2017, Deep & Cross Network for Ad Click Predictions.
    Differs from the paper: all embeddings have one width.
    """

    def __init__(
        self,
        num_dense: int,
        fields: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        num_cross_layers: int = 3,
        hidden: Sequence[int] = (400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        normalization: Normalization = "none",
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        check_features(num_dense, fields)
        self.num_dense = num_dense
        self.embedding_dim = embedding_dim
        self.embeddings = optional_embeddings(fields, embedding_dim, **options)
        self.drop = EmbeddingDropout(embedding_dropout, len(fields)) if embedding_dropout else None
        in_features = len(fields) * embedding_dim + num_dense
        self.cross = CrossNetwork(in_features, num_cross_layers, embedding_dim=embedding_dim, num_dense=num_dense)
        # w^T [x_L, h] as two products, so that the halves are never copied together; the tower's has the bias.
        self.cross_output = InputWeights(in_features, embedding_dim=embedding_dim, num_dense=num_dense)
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
        check_dense(dense, self.num_dense)
        embeddings = pooled_embeddings(self.embeddings, dense, sparse, self.embedding_dim)
        if self.drop is not None:
            embeddings = self.drop(embeddings)
        deep = begin(self.deep, dense, embeddings)
        inputs = flatten_inputs(self.cross.own_dense(dense), embeddings)
        logits: Tensor = self.cross.project(inputs, self.cross_output) + deep()
        return logits
