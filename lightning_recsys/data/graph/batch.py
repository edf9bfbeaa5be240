"""Batches of seeds and of the nodes around them."""

# Shape suffixes: S seeds, n nodes of the sample, C dense features, P pairs.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.graph.nodes import Bags
from lightning_recsys.data.graph.sampling import Neighborhood
from lightning_recsys.data.hashing import key64
from lightning_recsys.data.loader import Request
from lightning_recsys.data.prepared.stream import prefetched
from lightning_recsys.embeddings import SparseFeatures

NODE_FIELD = "node"
"""The feature that every node has: its own number."""


@dataclass(frozen=True)
class GraphBatch:
    """Seeds, and the nodes whose features their vectors are made of.

    Args:
        neighborhood: The sampled neighbourhood: ``n`` nodes, of which the first are the seeds.
        dense: Numeric features of those ``n`` nodes, float32 ``[n, C]``.
        nodes: The nodes' numbers as the feature ``node``, each number once; no feature where the model has no rows for
            nodes.
        sparse: The other categorical features of the ``n`` nodes.
        labels: Classes of the seeds, int64 ``[S]``, or whether each pair is an edge, float32 ``[P]``.
        size: Number of examples that the batch counts for: seeds, interactions or users.
        pairs: Pairs of nodes to score, numbered within the sample, int64 ``[2, P]``.
        groups: Number of the user among whose candidates each pair is ranked, int64 ``[P]``.
    """

    neighborhood: Neighborhood
    dense: Tensor
    nodes: SparseFeatures
    sparse: SparseFeatures
    labels: Tensor
    size: int
    pairs: Tensor | None = None
    groups: Tensor | None = None

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GraphBatch:  # noqa: D102 - as a tensor's
        parts = {name: getattr(self, name) for name in ("neighborhood", "dense", "nodes", "sparse", "labels")}
        parts |= {name: x for name in ("pairs", "groups") if (x := getattr(self, name)) is not None}
        return replace(self, **{name: part.to(device, non_blocking=non_blocking) for name, part in parts.items()})


@dataclass(frozen=True)
class NodeFeatures:
    """The features of a batch's nodes.

    Args:
        node_ids: Whether the feature ``node`` is among them.
        bags: Sparse features, by name.
        dense: Numeric features, float32 ``[N, C]``.
    """

    node_ids: bool
    bags: Mapping[str, Bags]
    dense: NDArray[np.float32] | None

    def take(self, n_id: Tensor) -> dict[str, Any]:
        """The features of some nodes, by the names that :class:`GraphBatch` has for them."""
        taken = [
            take_bags(torch.from_numpy(np.asarray(bags.offsets)), torch.from_numpy(np.asarray(bags.ids)), n_id)
            for bags in self.bags.values()
        ]
        empty = torch.empty(0, dtype=torch.int64)
        return {
            "dense": torch.empty(len(n_id), 0) if self.dense is None else torch.from_numpy(self.dense[n_id.numpy()]),
            "nodes": SparseFeatures((NODE_FIELD,), n_id) if self.node_ids else SparseFeatures((), empty),
            "sparse": SparseFeatures(
                tuple(self.bags),
                torch.cat([ids for _, ids in taken]) if taken else empty,
                lengths=torch.cat([lengths for lengths, _ in taken]) if taken else None,
            ),
        }


class SampledRows(Protocol):
    """Rows around which a batch is sampled."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor, *, key: int = 0) -> GraphBatch:
        """A batch of the rows with these numbers, int64 ``[B]``; ``key`` is that of its random numbers."""
        ...


@dataclass(frozen=True)
class SampledBatches:
    """Batches that are sampled ahead, in a thread; the :class:`~lightning_recsys.data.loader.BatchSource` of graphs.

    What is drawn depends on the seed, the epoch and the position: it is the same after a resume, and one key serves all
    ranks in a step. Without ``shuffle`` every epoch draws the same.

    Args:
        rows: The examples, which know how to sample a batch of themselves.
        shuffle: Draw a new permutation of the rows for each epoch.
        prefetch_batches: Batches that are made ahead; 0 for none.
    """

    rows: SampledRows
    shuffle: bool
    prefetch_batches: int

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, request: Request) -> Iterator[Any]:
        """The batches of one rank, from a position of the epoch on."""
        made = self._sample(request)
        return prefetched(made, depth=self.prefetch_batches) if self.prefetch_batches else made

    def _sample(self, request: Request) -> Iterator[GraphBatch]:
        epoch, steps = request.epoch if self.shuffle else 0, request.steps(len(self))
        generator = torch.Generator().manual_seed(int(key64(request.seed, epoch) >> 1))
        order = torch.randperm(len(self), generator=generator) if self.shuffle else torch.arange(len(self))
        for step in range(len(steps)):
            start, stop = steps.slice(step, rank=request.rank)
            key = int(key64(request.seed, "sample", epoch, steps.bounds(step)[0]))
            yield self.rows.take(order[start:stop], key=key)

    def order(self, request: Request) -> dict[str, int | str | None]:
        """The key that a position depends on beside the seed."""
        return {"shuffle": "rows" if self.shuffle else None}


def take_bags(offsets: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths ``[n]`` and ids of some rows' bags."""
    starts = offsets.index_select(0, rows)
    lengths = offsets.index_select(0, rows + 1) - starts
    ends = lengths.cumsum(0)
    places = torch.arange(int(ends[-1]) if len(rows) else 0) + (starts - ends + lengths).repeat_interleave(lengths)
    return lengths, ids.index_select(0, places).long()
