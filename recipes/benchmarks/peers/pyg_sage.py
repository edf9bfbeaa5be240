"""GraphSAGE of PyTorch Geometric's layers, on our batches: PyG itself has no sampler in pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from lightning_recsys.embeddings import SparseFeatures


class PyGSAGE(nn.Module):
    """As most people write it: words as a dense matrix of zeros and ones, rows of nodes in ``nn.Embedding``.

    Args:
        fields: As for our model: the words, and perhaps ``node``.
        num_classes: Scores.
        hidden: Width of hidden layers and of nodes' rows.
        dropout: Before each layer but the first.
    """

    def __init__(self, fields: Mapping[str, int], *, num_classes: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.words = sum(count for name, count in fields.items() if name != "node")
        self.rows = nn.Embedding(fields["node"], hidden) if "node" in fields else None
        if self.rows is not None:
            nn.init.normal_(self.rows.weight, std=0.01)  # as ours; from N(0, 1) it is worse
        widths = [self.words + (hidden if self.rows is not None else 0), hidden, num_classes]
        self.layers = nn.ModuleList(SAGEConv(widths[i], widths[i + 1]) for i in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, dense: Tensor, nodes: SparseFeatures, sparse: SparseFeatures, blocks: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        parts = [] if self.rows is None else [self.rows(nodes.values)]
        if self.words:
            lengths = sparse.bag_lengths()
            x = torch.zeros(len(lengths), self.words)
            x[torch.arange(len(lengths)).repeat_interleave(lengths), sparse.values] = 1
            parts.append(x / lengths.clamp(min=1)[:, None])
        x = torch.cat(parts, 1)
        for number, (layer, (offsets, neighbors)) in enumerate(zip(self.layers, blocks, strict=True)):
            targets = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
            x = self.dropout(x.relu()) if number else x
            x = layer((x, x[: len(offsets) - 1]), torch.stack([neighbors, targets]))
        return x
