"""GraphSAGE."""

# Shape suffixes: n nodes of the sample, S seeds, C numeric features, D embedding dim, H width of hidden layers.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import field_embeddings
from lightning_recsys.models.layers.sage import Aggregator, SAGELayer

Block = tuple[Tensor, Tensor, Tensor | None]
"""The inputs of a layer beside vectors: offsets, neighbours, and the share of each neighbour where they differ."""

NODE_FIELD = "node"
"""The field of the nodes' own numbers, of which a sample has each once."""


class GraphSAGE(nn.Module):
    r"""Vectors of nodes, made of their own features and of those of nodes around them.

    What a node begins with is its row of the field ``node``, the pooled rows of its other sparse features, and its
    numeric features, side by side. Each layer then joins it with its neighbours; ReLU and dropout stand between
    layers.

    Args:
        num_dense: Numeric features ``C``.
        fields: Field name -> number of ids. The rows of ``node`` are a collection of their own, ``node_embeddings``.
        num_classes: Length of the last vectors, one score for each class; ``None`` for vectors of length ``hidden``.
        embedding_dim: Width ``D`` of the rows.
        hidden: Width ``H`` of the hidden layers.
        num_layers: Layers; as many as the batches have hops.
        aggregator: ``mean``, or ``max``: the largest of what a layer makes of the neighbours, number by number.
        dropout: Probability that a number is zeroed in training before each layer but the first, in ``[0, 1)``.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Shape:
        - dense: ``[n, C]``; nodes, sparse: ``n`` examples; blocks: offsets ``[T + 1]``, neighbours and
          their shares (or ``None``) for each layer.
        - output: ``[S, num_classes]`` or ``[S, H]``.

    Raises:
        ValueError: nodes have nothing to begin with, or a number is out of its range.

    Reference: Hamilton, Ying, Leskovec 2017, Inductive Representation Learning on Large Graphs; widths as in Miao et
    al. 2022 (HET), Table 3. Differs from the former: no vector is scaled to length 1, as in most of today's code.
    """

    def __init__(
        self,
        num_dense: int,
        fields: Mapping[str, int],
        *,
        num_classes: int | None,
        embedding_dim: int = 128,
        hidden: int = 128,
        num_layers: int = 2,
        aggregator: Aggregator = "mean",
        dropout: float = 0.0,
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        if num_layers < 1 or not 0 <= dropout < 1:
            raise ValueError(
                f"model.num_layers must be at least 1 and model.dropout in [0, 1), got {num_layers} and {dropout}."
            )
        if not num_dense and not fields:
            raise ValueError(
                "GraphSAGE needs a numeric feature or a field to begin with: give nodes rows of their own."
            )
        self.num_classes = num_classes
        own = {name: count for name, count in fields.items() if name == NODE_FIELD}
        others = {name: count for name, count in fields.items() if name != NODE_FIELD}
        self.node_embeddings = field_embeddings(own, embedding_dim, **options) if own else None
        self.embeddings = field_embeddings(others, embedding_dim, **options) if others else None
        ends = hidden if num_classes is None else num_classes
        widths = [num_dense + len(fields) * embedding_dim, *(hidden for _ in range(num_layers - 1)), ends]
        self.layers = nn.ModuleList(
            SAGELayer(before, after, aggregator=aggregator) for before, after in pairwise(widths)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, dense: Tensor, nodes: SparseFeatures, sparse: SparseFeatures, blocks: Sequence[Block]) -> Tensor:
        """Scores or vectors of the seeds; see the class for shapes.

        Raises:
            ValueError: the batch has another number of hops than the model has layers.
        """
        return self.embed(dense, nodes, sparse, blocks)[1]

    def embed(
        self, dense: Tensor, nodes: SparseFeatures, sparse: SparseFeatures, blocks: Sequence[Block]
    ) -> tuple[Tensor, Tensor]:
        """The input of the last layer at the seeds, ``[S, H]`` (of a single layer, their own vectors), and its output.

        Raises:
            ValueError: as for :meth:`forward`.
        """
        if len(blocks) != len(self.layers):
            raise ValueError(
                f"model.num_layers={len(self.layers)} needs a neighbourhood of as many hops, got {len(blocks)}: "
                "data.num_neighbors must have a number for each layer."
            )
        parts = [dense] if dense.shape[1] else []
        for collection, features in ((self.node_embeddings, nodes), (self.embeddings, sparse)):
            if collection is not None:
                parts.append(collection(features).flatten(1))
        x = before = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            before = self.dropout(x.relu()) if number else x
            x = layer(before, *block)
        return before[: len(x)], x
