"""Deep learning recommendation model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import (
    MLP,
    DotInteraction,
    EmbeddingDropout,
    FieldGather,
    Normalization,
    check_dense,
    check_features,
    optional_embeddings,
    partition_parts,
    pooled_embeddings,
)

Interaction = Literal["dot", "concatenation"]


class DLRM(nn.Module):
    r"""Dot products of the embeddings and a dense vector, or the vectors themselves, between two perceptrons.

    .. math::
        t_0 = \text{bottom}(x), \quad t_f = e_f, \quad z = \{\langle t_i, t_j \rangle\}_{i > j}, \quad
        \operatorname{logit} = \text{top}([t_0, z])

    With ``interaction="concatenation"`` the top network gets :math:`[t_0, e_1, \dots, e_F]`. Without numeric features
    there is no bottom network and no :math:`t_0`.

    Args:
        num_dense: Numeric features ``N``.
        fields: Field name -> number of ids.
        embedding_dim: Width ``D`` of the embeddings, and of the bottom network's last layer, which is added.
        bottom_hidden: Width of the bottom network's layers before that; may be empty.
        top_hidden: Width of the top network's layers before the logit, which is added; may be empty.
        interaction: ``dot`` or ``concatenation``.
        activation: ``relu``, ``gelu``, ``sigmoid``, ``silu`` or ``tanh``.
        dropout: Probability that an activation is zeroed in training, in ``[0, 1)``; top network only, for a zero in
            :math:`t_0` would remove dot products.
        embedding_dropout: Probability that a number of a pooled embedding is zeroed in training, in ``[0, 1)``.
        normalization: How the inputs of each activation are normalised, in both networks: ``none``, ``batch``, or
            ``local`` (:class:`~lightning_recsys.models.layers.LocalNormalization`).
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Shape:
        - dense: ``[B, N]``; sparse: ``B`` examples of the fields.
        - output: logits ``[B]``.

    Raises:
        ValueError: there is no feature, or for dot products fewer than two vectors, or an option is not one of
            the above.

    Reference: Naumov et al. 2019, Deep Learning Recommendation Model for Personalization and Recommendation
    Systems; weights of the networks start as in its public code, biases at 0.
    """

    def __init__(
        self,
        num_dense: int,
        fields: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        bottom_hidden: Sequence[int] = (512, 256, 64),
        top_hidden: Sequence[int] = (512, 256),
        interaction: Interaction = "dot",
        activation: str = "relu",
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        normalization: Normalization = "none",
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        if interaction not in get_args(Interaction):
            raise ValueError(f"model.interaction must be one of {list(get_args(Interaction))}, got {interaction!r}.")
        check_features(num_dense, fields)
        if not fields and interaction == "dot":
            raise ValueError(
                "model=dlrm takes dot products of embeddings, and there is no categorical field. For numeric features "
                "alone use model=lr, fm, wide_deep, deepfm, dcn or dcn_v2, or model.interaction=concatenation."
            )
        self.num_dense = num_dense
        self.embedding_dim = embedding_dim
        self.embeddings = optional_embeddings(fields, embedding_dim, **options)
        self.drop = EmbeddingDropout(embedding_dropout, len(fields)) if embedding_dropout else None
        self.gather = FieldGather(len(fields), embedding_dim)
        self.bottom = (
            MLP(num_dense, (*bottom_hidden, embedding_dim), activation=activation, normalization=normalization)
            if num_dense
            else None
        )
        num_vectors = len(fields) + bool(num_dense)
        self.interaction = DotInteraction(num_vectors) if interaction == "dot" else None
        top_features = num_vectors * embedding_dim
        if self.interaction is not None:
            top_features = self.interaction.out_features + (embedding_dim if num_dense else 0)
        self.top = MLP(
            top_features,
            top_hidden,
            out_features=1,
            activation=activation,
            dropout=dropout,
            normalization=normalization,
        )

    # Each process gathers the pooled embeddings of all fields: dot products have no partial result that is smaller.
    partition = partition_parts

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits; see the class for shapes."""
        check_dense(dense, self.num_dense)
        embeddings = pooled_embeddings(self.embeddings, dense, sparse, self.embedding_dim)
        if self.drop is not None:
            embeddings = self.drop(embeddings)
        embeddings = self.gather(embeddings)
        bottom = None if self.bottom is None else self.bottom(dense)
        vectors = embeddings if bottom is None else torch.cat([bottom.unsqueeze(1), embeddings], 1)
        if self.interaction is None:
            features = vectors.flatten(1)
        else:
            pairs = self.interaction(vectors)
            features = pairs if bottom is None else torch.cat([bottom, pairs], 1)
        logits: Tensor = self.top(features)
        return logits.squeeze(1)
