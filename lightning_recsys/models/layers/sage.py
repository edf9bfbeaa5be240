"""A layer that joins each node with what its neighbours say."""

# Shape suffixes: n nodes, T nodes that get new vectors, e edges, I inputs, O outputs.

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Aggregator = Literal["mean", "max"]


class SAGELayer(nn.Module):
    r"""GraphSAGE's layer for a sampled neighbourhood.

    .. math:: h_v' = W_l\, \operatorname{aggregate}_{u \in N(v)} m_u + b + W_r\, h_v

    with :math:`m_u = h_u` for the mean and :math:`m_u = \operatorname{ReLU}(W h_u + b')`, elementwise, for the maximum.
    A node without neighbours gets zeros from them. With shares the mean is :math:`\sum_u s_{vu} h_u`.

    Args:
        in_features: Width ``I`` of a node's input.
        out_features: Width ``O`` of its output.
        aggregator: ``mean`` or ``max``.

    Shape:
        - x: ``[n, I]``; offsets: int64 ``[T + 1]``; neighbors: int64 ``[e]``, positions in ``x``; shares:
          float ``[e]``, which sum to 1 for each of the ``T`` nodes, or ``None`` where all neighbours count alike.
        - output: ``[T, O]``, for the first ``T`` nodes of ``x``.

    Raises:
        ValueError: the aggregator is unknown; or, of ``forward``, there are shares and it is the maximum.

    Reference: Hamilton, Ying, Leskovec 2017, Inductive Representation Learning on Large Graphs, Algorithm 1 and
    equation (3). Parameters are those of PyG's ``SAGEConv``, with ``project=True`` for the maximum.
    """

    def __init__(self, in_features: int, out_features: int, *, aggregator: Aggregator = "mean") -> None:
        super().__init__()
        if aggregator not in ("mean", "max"):
            raise ValueError(f"model.aggregator must be mean or max, got {aggregator!r}.")
        self.aggregator = aggregator
        self.lin = nn.Linear(in_features, in_features) if aggregator == "max" else None
        self.lin_l = nn.Linear(in_features, out_features)
        self.lin_r = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor, offsets: Tensor, neighbors: Tensor, shares: Tensor | None = None) -> Tensor:
        """New vectors; see the class for shapes."""
        if shares is not None and self.aggregator != "mean":
            raise ValueError(
                f"model.aggregator={self.aggregator} cannot weigh messages, and the edges have weights: use "
                "model.aggregator=mean, or leave the weights out."
            )
        messages = x if self.lin is None else self.lin(x).relu()
        # Sums bags of rows as they lie, where a gather would first write a row for each edge.
        joined = F.embedding_bag(
            neighbors,
            messages,
            offsets,
            mode=self.aggregator if shares is None else "sum",
            per_sample_weights=None if shares is None else shares.to(messages.dtype),
            include_last_offset=True,
        )
        new: Tensor = self.lin_l(joined) + self.lin_r(x[: len(offsets) - 1])
        return new
