"""Edges in any order into compressed rows: two counting sorts in a compiled loop."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Shape suffixes: N nodes, E edges.

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.loops import AHEAD, SOON, compile_rule, prefetch


@compile_rule
def _count(ends, others, both, starts):  # noqa: ANN001, ANN202
    """Make ``starts[v + 1]`` the place of the first edge of ``v``, where ``starts`` is zeros ``[N + 2]``."""
    for e in range(ends.shape[0]):
        if e + AHEAD < ends.shape[0]:
            prefetch(starts, np.int64(ends[e + AHEAD]) + 2)
            if both:
                prefetch(starts, np.int64(others[e + AHEAD]) + 2)
        starts[ends[e] + 2] += 1
        if both and ends[e] != others[e]:
            starts[others[e] + 2] += 1
    for v in range(2, starts.shape[0]):
        starts[v] += starts[v - 1]


@compile_rule
def _put(node, other, weight, starts, row, row_weights):  # noqa: ANN001, ANN202
    """Put an edge behind those that the node's row has. In the end ``starts[v]`` is where the row of ``v`` begins."""
    place = starts[node + 1]
    starts[node + 1] = place + 1
    row[place] = other
    if row_weights.shape[0]:
        row_weights[place] = weight


@compile_rule
def _by_source(sources, targets, weights, both, starts, row, row_weights):  # noqa: ANN001, ANN202
    """The targets of each node, in the order in which the edges came; with ``both`` an edge is its target's, too."""
    for e in range(sources.shape[0]):
        if e + AHEAD < sources.shape[0]:
            prefetch(starts, np.int64(sources[e + AHEAD]) + 1)
            if both:
                prefetch(starts, np.int64(targets[e + AHEAD]) + 1)
        if e + SOON < sources.shape[0]:
            prefetch(row, starts[np.int64(sources[e + SOON]) + 1])
            if both:
                prefetch(row, starts[np.int64(targets[e + SOON]) + 1])
        source, target = np.int64(sources[e]), np.int64(targets[e])
        weight = weights[e] if weights.shape[0] else np.float32(1)
        _put(source, target, weight, starts, row, row_weights)
        if both and source != target:
            _put(target, source, weight, starts, row, row_weights)


@compile_rule
def _by_target(first, row, row_weights, once, starts, indices, weights):  # noqa: ANN001, ANN202
    """The sources of each node in rising order; with ``once`` an edge that comes again adds its weight to the first."""
    num_nodes, num_edges = first.shape[0] - 2, row.shape[0]
    for source in range(num_nodes):
        for place in range(first[source], first[source + 1]):
            if place + AHEAD < num_edges:
                prefetch(starts, np.int64(row[place + AHEAD]) + 1)
            if place + SOON < num_edges:
                prefetch(indices, starts[np.int64(row[place + SOON]) + 1])
            target = np.int64(row[place])
            weight = row_weights[place] if row_weights.shape[0] else np.float32(1)
            last = starts[target + 1] - 1
            if once and last >= first[target] and indices[last] == source:
                if weights.shape[0]:
                    weights[last] += weight
            else:
                _put(target, source, weight, starts, indices, weights)


@compile_rule
def _close_gaps(first, starts, indices, weights):  # noqa: ANN001, ANN202
    """Move rows to where the one before them ends; ``starts[v + 1]`` is where the row of ``v`` has ended so far."""
    filled = np.int64(0)
    for v in range(first.shape[0] - 2):
        begin, end = first[v], starts[v + 1]
        starts[v] = filled
        for place in range(begin, end):
            indices[filled] = indices[place]
            if weights.shape[0]:
                weights[filled] = weights[place]
            filled += 1
    starts[first.shape[0] - 2] = filled


def compress_rows(
    edges: NDArray[Any], weights: NDArray[np.float32] | None, *, num_nodes: int, undirected: bool
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32] | None]:
    """The sources of the edges of each target, in rising order.

    Args:
        edges: Sources and targets, integers ``[2, E]``, each a node.
        weights: A weight for each edge ``[E]``, or ``None``.
        num_nodes: Number of nodes ``N``.
        undirected: Let every edge go both ways, and count once each way however often it is there.

    Returns:
        Where each row begins, int64 ``[N + 1]``; the sources; and their weights, if there are any.

    Memory: twice that of the result, beside the edges.
    """
    sources, targets = (np.ascontiguousarray(x if x.dtype.kind == "i" else x.astype(np.int64)) for x in edges)
    given = np.empty(0, np.float32) if weights is None else np.ascontiguousarray(weights, np.float32)
    first = np.zeros(num_nodes + 2, np.int64)
    _count(sources, targets, undirected, first)
    num_edges = int(first[-1])
    kind = np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64

    def room() -> tuple[NDArray[Any], NDArray[np.float32]]:
        return np.empty(num_edges, kind), np.empty(0 if weights is None else num_edges, np.float32)

    row, row_weights = room()
    _by_source(sources, targets, given, undirected, first, row, row_weights)
    starts = np.zeros(num_nodes + 2, np.int64)
    if undirected:
        starts[1:] = first[:-1]  # each edge is there both ways
    else:
        _count(targets, sources, False, starts)
    indices, row_indices_weights = room()
    _by_target(first, row, row_weights, undirected, starts, indices, row_indices_weights)
    del row, row_weights
    if undirected:
        _close_gaps(first, starts, indices, row_indices_weights)
        for array in (indices, row_indices_weights):
            array.resize(min(len(array), int(starts[num_nodes])), refcheck=False)
    return starts[: num_nodes + 1], indices, None if weights is None else row_indices_weights
