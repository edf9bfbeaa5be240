"""Uniform sampling of neighbourhoods, hop by hop, in a compiled loop."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Shape suffixes: N nodes of the graph, S seeds, n nodes of the sample, T nodes whose neighbours were drawn, e edges.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.hashing import GOLDEN, mix
from lightning_recsys.compiled.loops import AHEAD, SOON, compile_rule, prefetch
from lightning_recsys.data.graph.csr import CSRGraph

_11, _TO_UNIT = np.uint64(11), 2.0**-53
ALL = -1
"""The fan-out that takes every neighbour."""


@compile_rule
def draw_positions(state, degree, fan_out, replacement, marks, chosen):  # noqa: ANN001, ANN201
    """Fill ``chosen`` with positions among ``degree`` neighbours: Floyd's algorithm, or each at its own. None twice.

    A mark is the number of whoever chose a position last: nobody need clear them. ``marks[-1]`` counts.
    """
    marks[-1] += 1
    for i in range(fan_out):
        state += GOLDEN
        bound = degree if replacement else degree - fan_out + i + 1
        position = np.int64((mix(state) >> _11) * _TO_UNIT * bound)
        if not replacement:
            if marks[position] == marks[-1]:
                position = bound - 1
            marks[position] = marks[-1]
        chosen[i] = position


@compile_rule
def _number(neighbors, start, stop, local, n_id, num_nodes):  # noqa: ANN001, ANN202
    """Turn neighbours from ``start`` to ``stop`` into numbers within the sample; returns how many nodes it has now."""
    for i in range(start, stop):
        source = neighbors[i]
        if local[source] < 0:
            local[source] = num_nodes
            n_id[num_nodes] = source
            num_nodes += 1
        neighbors[i] = local[source]
    return num_nodes


@compile_rule
def _sample_hop(first, stop, graph, draw, scratch, sample, num_edges):  # noqa: ANN001, ANN202
    """Draw for the nodes from ``first`` to ``stop``; returns nodes and edges of the sample, or -1 where room ends."""
    (indptr, indices, weights), (fan_out, replacement, key) = graph, draw
    (local, marks, chosen), (n_id, offsets, neighbors, drawn) = scratch, sample
    num_nodes = stop
    for target in range(first, stop):
        if target + AHEAD < stop:
            prefetch(indptr, n_id[target + AHEAD])
        if target + SOON < stop:
            prefetch(indices, indptr[n_id[target + SOON]])
        node = n_id[target]
        start, degree = indptr[node], indptr[node + 1] - indptr[node]
        draws = fan_out >= 0 and degree > (0 if replacement else fan_out)
        taken = fan_out if draws else degree
        if num_edges + taken > neighbors.shape[0] or num_nodes + taken > n_id.shape[0]:
            return np.int64(-1), num_edges
        if draws:
            draw_positions(mix(key ^ (np.uint64(node) * GOLDEN)), degree, taken, replacement, marks, chosen)
        for i in range(taken):
            place = start + (chosen[i] if draws else i)
            source = np.int64(indices[place])
            neighbors[num_edges + i] = source
            if weights.shape[0]:
                drawn[num_edges + i] = weights[place]
            prefetch(local, source)
        num_nodes = _number(neighbors, num_edges, num_edges + taken, local, n_id, num_nodes)
        num_edges += taken
        offsets[target + 1] = num_edges
    return num_nodes, num_edges


@compile_rule
def _sample(graph, seeds, fan_outs, replacement, key, local, marks, sample, counts):  # noqa: ANN001, ANN202
    """Draw all hops; ``local`` is -1 everywhere before and after. Returns whether there was room."""
    n_id, num_edges, first, stop = sample[0], np.int64(0), np.int64(0), np.int64(seeds.shape[0])
    n_id[:stop] = seeds
    local[seeds] = np.arange(stop)
    sample[1][0] = 0
    scratch = (local, marks, np.empty(max(np.int64(1), fan_outs.max()), np.int64))
    for hop in range(fan_outs.shape[0]):
        draw = (fan_outs[hop], replacement, key)
        num_nodes, num_edges = _sample_hop(first, stop, graph, draw, scratch, sample, num_edges)
        if num_nodes < 0:
            local[:] = -1
            return False
        counts[hop, 0], counts[hop, 1] = num_nodes, num_edges
        first, stop = stop, num_nodes
    for i in range(stop):
        local[n_id[i]] = -1
    return True


Block = tuple[Tensor, Tensor, Tensor | None]
"""Where the neighbours of each target begin, the neighbours, and the share of each (``None``: all alike)."""


@dataclass(frozen=True)
class Neighborhood:
    """Nodes around some seeds, and whose messages each of them gets; nodes are numbered within the sample.

    Args:
        n_id: The nodes in the graph, each once, int64 ``[n]``: seeds first, then those that each hop found.
        offsets: Where the neighbours of each of the first ``T`` nodes begin and the last one's end, int64 ``[T + 1]``.
        neighbors: The neighbours, int64 ``[e]``.
        num_sampled_nodes: New nodes of each hop; the seeds come first.
        num_sampled_edges: Edges of each hop.
        weights: The weight of each edge, float32 ``[e]``; ``None`` where all count alike.

    These are PyG's names, and its ``edge_index`` follows from them.
    """

    n_id: Tensor
    offsets: Tensor
    neighbors: Tensor
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]
    weights: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """The node that each edge ends in, int64 ``[e]``."""
        counts = self.offsets.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    @property
    def edge_index(self) -> Tensor:
        """Sources and targets, int64 ``[2, e]``, by target."""
        return torch.stack([self.neighbors, self.targets])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Offsets, neighbours and their shares for each layer of a model, the first layer's first.

        A layer makes new vectors for the nodes that later layers still need: all but the last hop's, at first. The
        share of a neighbour is its edge's part of the weights of all edges that were drawn for the node, and ``None``
        where all count alike. Where all of these weigh nothing, so do the shares.
        """
        found, shares = [], None
        if self.weights is not None:
            targets = self.targets
            sums = self.weights.new_zeros(len(self.offsets) - 1).index_add_(0, targets, self.weights)
            shares = self.weights / torch.where(sums > 0, sums, 1.0).index_select(0, targets)
        for hop in range(len(self.num_sampled_edges), 0, -1):
            num_targets, edges = sum(self.num_sampled_nodes[:hop]), sum(self.num_sampled_edges[:hop])
            own = None if shares is None else shares[:edges]
            found.append((self.offsets[: num_targets + 1], self.neighbors[:edges], own))
        return tuple(found)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Neighborhood:
        """The same on another device."""
        names = ("n_id", "offsets", "neighbors", *(() if self.weights is None else ("weights",)))
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})


_Room = tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]


class NeighborSampler:
    """Draws neighbourhoods, each node's once per sample; for one thread at a time.

    Which neighbours a node gets depends on the key, the node, its degree and the fan-out alone. So with one key and
    equal fan-outs several ranks draw, each around its own seeds, what one would draw around all of them. The weights of
    edges have no say in what is drawn: they weigh messages.

    Args:
        graph: The graph whose nodes' neighbours are drawn.
        num_neighbors: Neighbours to draw in each hop; -1 takes all.
        replacement: Draw each neighbour from all; by default no neighbour is drawn twice, and of few all are taken.

    Raises:
        ValueError: there is no hop, or a fan-out is 0 or below -1.

    Memory: 4 bytes for each node of the graph and of the largest degree, and twice the largest sample.

    >>> graph = CSRGraph.from_edge_index([[1, 2, 3], [0, 0, 1]], num_nodes=5)
    >>> sample = NeighborSampler(graph, [-1, -1]).sample(np.array([0, 4]))
    >>> sample.n_id.tolist(), sample.edge_index.tolist(), sample.num_sampled_nodes
    ([0, 4, 1, 2, 3], [[2, 3, 4], [0, 0, 2]], (2, 2, 1))
    """

    def __init__(self, graph: CSRGraph, num_neighbors: Sequence[int], *, replacement: bool = False) -> None:
        if not num_neighbors or any(fan_out == 0 or fan_out < ALL for fan_out in num_neighbors):
            raise ValueError(
                f"data.num_neighbors must hold a number for each hop, or -1 for all, got {list(num_neighbors)}."
            )
        self.graph = graph
        self.num_neighbors = tuple(num_neighbors)
        self.replacement = replacement
        # numba compiles once for plain arrays, however the graph's are mapped.
        self._indptr, self._indices = np.asarray(graph.indptr), np.asarray(graph.indices)
        self._weights = np.empty(0, np.float32) if graph.weights is None else np.asarray(graph.weights)
        self._fan_outs = np.array(num_neighbors, np.int64)
        self._local = np.full(graph.num_nodes, -1, np.int32)
        self._marks = np.zeros(int(graph.degrees().max(initial=0)) + 1, np.int64)
        self._room: _Room = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)

    def sample(self, seeds: NDArray[np.int64], *, key: int = 0) -> Neighborhood:
        """The neighbourhood of some distinct nodes.

        Args:
            seeds: Int64 ``[S]``, as they are to stand in ``n_id``.
            key: Key of the random numbers, 64 bits; the same key and seeds draw the same neighbours.

        Raises:
            ValueError: a seed is no node, or comes twice.
        """
        seeds = np.ascontiguousarray(seeds, np.int64)
        if len(seeds) and not 0 <= seeds.min() <= seeds.max() < self.graph.num_nodes:
            raise ValueError(
                f"seeds must be nodes from 0 to {self.graph.num_nodes - 1}, got {seeds.min()} to {seeds.max()}."
            )
        if len(np.unique(seeds)) < len(seeds):
            raise ValueError("seeds must be distinct: a node stands in a sample once.")
        counts = np.empty((len(self._fan_outs), 2), np.int64)
        drawn = False
        while not drawn:
            n_id, neighbors, weights = self._room
            offsets = np.empty(len(n_id) + 1, np.int64)
            drawn = len(n_id) >= len(seeds) and _sample(
                (self._indptr, self._indices, self._weights),
                seeds,
                self._fan_outs,
                self.replacement,
                np.uint64(key),
                self._local,
                self._marks,
                (n_id, offsets, neighbors, weights),
                counts,
            )
            if not drawn:
                self._grow(len(seeds))
        nodes, edges = (np.diff(counts[:, i], prepend=start) for i, start in ((0, len(seeds)), (1, 0)))
        targets = len(seeds) + int(nodes[:-1].sum())
        return Neighborhood(
            torch.from_numpy(n_id[: counts[-1, 0]].copy()),
            torch.from_numpy(offsets[: targets + 1]),
            torch.from_numpy(neighbors[: counts[-1, 1]].copy()),
            (len(seeds), *nodes.tolist()),
            tuple(edges.tolist()),
            None if self.graph.weights is None else torch.from_numpy(weights[: counts[-1, 1]].copy()),
        )

    def _grow(self, num_seeds: int) -> None:
        """Make room for more; a sample never has more nodes than the graph and one node's neighbours."""
        size = max(2 * len(self._room[1]), 64 * num_seeds, 1024)
        most = self.graph.num_nodes + len(self._marks)
        weights = np.empty(0 if self.graph.weights is None else size, np.float32)
        self._room = np.empty(min(size, most), np.int64), np.empty(size, np.int64), weights
