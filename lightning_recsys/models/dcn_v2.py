"""Deep & Cross network, version 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Unpack, get_args

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import (
    CrossNetworkV2,
    DeepTower,
    EmbeddingDropout,
    FieldGather,
    InputWeights,
    Normalization,
    check_dense,
    check_features,
    flatten_inputs,
    optional_embeddings,
    pooled_embeddings,
)

Structure = Literal["parallel", "stacked"]


class DCNv2(nn.Module):
    r"""Cross layers with a matrix each, beside or below a deep network.

    .. math::
        x_0 = [e, x], \qquad x_{l+1} = x_0 \odot (W_l x_l + b_l) + x_l, \qquad W_l = U_l V_l^\top \text{ if low rank}

    Parallel: :math:`\operatorname{logit} = w^\top [x_L, h(x_0)] + b`. Stacked:
    :math:`\operatorname{logit} = w^\top h(x_L) + b`. :math:`h` is the last hidden layer of the deep network.

    Args:
        num_dense: Numeric features ``N``.
        fields: Field name -> number of ids.
        embedding_dim: Width ``D`` of the embeddings.
        num_cross_layers: ``L``; products reach degree ``L + 1``.
        rank: Rank of the cross matrices; ``None`` for full ones. Cheaper below half of ``F D + N``.
        structure: ``parallel`` or ``stacked``.
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

    Reference: Wang et al. 2021, DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
    Rank Systems.
    Differs from the paper: all embeddings have one width; no mixture of low-rank experts.
    """

    def __init__(
        self,
        num_dense: int,
        fields: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        num_cross_layers: int = 3,
        rank: int | None = None,
        structure: Structure = "parallel",
        hidden: Sequence[int] = (400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        normalization: Normalization = "none",
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        if structure not in get_args(Structure):
            raise ValueError(f"model.structure must be one of {list(get_args(Structure))}, got {structure!r}.")
        check_features(num_dense, fields)
        self.num_dense = num_dense
        self.is_low_rank = rank is not None
        self.embedding_dim = embedding_dim
        self.embeddings = optional_embeddings(fields, embedding_dim, **options)
        self.drop = EmbeddingDropout(embedding_dropout, len(fields)) if embedding_dropout else None
        self.gather = FieldGather(len(fields), embedding_dim)
        in_features = len(fields) * embedding_dim + num_dense
        self.cross = CrossNetworkV2(
            in_features, num_cross_layers, rank=rank, embedding_dim=embedding_dim, num_dense=num_dense
        )
        self.cross_output: InputWeights | None = None
        if structure == "parallel":
            # As in DCN: w^T [x_L, h] as two products, the tower's with the bias.
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

    def partition(self, fields: Sequence[int], group: ProcessGroup) -> None:
        """Keep the weights of some fields only; as :meth:`FieldLayer.partition`.

        With full cross matrices these are the embeddings alone, which each process then gathers from all others.
        """
        if self.embeddings is not None:
            self.embeddings.partition(fields)
        if self.drop is not None:
            self.drop.partition(fields, group)
        if not self.is_low_rank:
            self.gather.partition(fields, group)
            return
        self.cross.partition(fields, group)
        if self.cross_output is not None:
            self.cross_output.partition(fields, group)
        self.deep.partition(fields, group, cut_dense=self.cross_output is None)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits; see the class for shapes."""
        check_dense(dense, self.num_dense)
        embeddings = pooled_embeddings(self.embeddings, dense, sparse, self.embedding_dim)
        if self.drop is not None:
            embeddings = self.drop(embeddings)
        embeddings = self.gather(embeddings)
        crossed = self.cross(flatten_inputs(self.deep.first.own_dense(dense), embeddings))
        logits: Tensor
        if self.cross_output is not None:
            logits = self.cross_output(crossed) + self.deep(dense, embeddings)
        else:
            # Crossed inputs keep their columns, so the tower's first layer stays one block of weights per field.
            width = embeddings.shape[1] * embeddings.shape[2]
            fields, numeric = crossed.split([width, crossed.shape[1] - width], 1)
            logits = self.deep(numeric, fields.view_as(embeddings))
        return logits
