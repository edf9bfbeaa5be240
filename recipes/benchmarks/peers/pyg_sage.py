"""GraphSAGE of PyTorch Geometric's layers, on our batches: PyG itself has no sampler in pure Python."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models.graphsage import Block


class PyGSAGE(nn.Module):
    """As most people write it: words as a dense matrix of their shares, rows of nodes in ``nn.Embedding``.

    Neighbours are given as a sparse matrix, with which PyG's layers multiply: the same result as from an
    ``edge_index``, in a tenth of its time on a CPU.

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
            nn.init.normal_(self.rows.weight, std=0.01)  # as ours
        widths = [self.words + (hidden if self.rows is not None else 0), hidden, num_classes]
        self.layers = nn.ModuleList(SAGEConv(widths[i], widths[i + 1]) for i in range(2))
        self.dropout = nn.Dropout(dropout)

    @property
    def inputs(self) -> list[nn.Parameter]:
        """What inputs meet first, and our model has in tables: rows of nodes, or the first layer's column of a word."""
        return [self.layers[0].lin_l.weight, self.layers[0].lin_r.weight] if self.rows is None else [self.rows.weight]

    def forward(self, dense: Tensor, nodes: SparseFeatures, sparse: SparseFeatures, blocks: Sequence[Block]) -> Tensor:
        parts = [] if self.rows is None else [self.rows(nodes.values)]
        if self.words:
            lengths = sparse.bag_lengths()
            x = torch.zeros(len(lengths), self.words)
            x[torch.arange(len(lengths)).repeat_interleave(lengths), sparse.values] = 1
            parts.append(x / lengths.clamp(min=1)[:, None])
        x = torch.cat(parts, 1)
        for number, (layer, (offsets, neighbors, weights)) in enumerate(zip(self.layers, blocks, strict=True)):
            assert weights is None, "this benchmark's edges have no weights"
            x = self.dropout(x.relu()) if number else x
            size = (len(offsets) - 1, len(x))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
                ones = torch.ones(len(neighbors))
                matrix = torch.sparse_csr_tensor(offsets, neighbors, ones, size=size, check_invariants=False)
            x = layer((x, x[: size[0]]), matrix)
        return x
