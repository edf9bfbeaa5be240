"""Sampled edges per second of suite ``graph``: this package's loop, and row slicing as in SciPy, one thread each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import numpy as np
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Row
from benchmarks.harness.turns import Turn, in_turns
from numpy.typing import NDArray
from scipy.sparse import csr_array

from lightning_recsys.data.graph import CSRGraph, NeighborSampler


@cache
def power_law_graph(num_nodes: int, num_edges: int, *, exponent: float = 0.7, seed: int = 0) -> CSRGraph:
    """Degrees fall with the rank of a node, and busy nodes are drawn as neighbours as often as they have some.

    Args:
        num_nodes: Nodes.
        num_edges: Edges, about.
        exponent: Of the degree's fall; 0.7 is near that of co-purchase graphs.
        seed: Of the draws.
    """
    random = np.random.default_rng(seed)
    shares = (1.0 + random.permutation(num_nodes)) ** -exponent
    degrees = np.maximum(num_edges * shares / shares.sum(), 1).astype(np.int64)
    indptr = np.concatenate([[0], degrees.cumsum()])
    ends = np.repeat(np.arange(num_nodes, dtype=np.int32), degrees)
    return CSRGraph(indptr, random.permutation(ends))


def row_slices(matrix: Any, seeds: NDArray[np.int64], fan_outs: Sequence[int], random: np.random.Generator) -> int:
    """What people write with SciPy: slice the rows of a hop, keep the first of each in a random order; edges drawn."""
    edges, known, frontier = 0, seeds, seeds
    for fan_out in fan_outs:
        rows = matrix[frontier]
        lengths = np.diff(rows.indptr)
        order = np.lexsort((random.random(len(rows.indices)), np.repeat(np.arange(len(lengths)), lengths)))
        place = np.arange(len(order)) - np.repeat(rows.indptr[:-1], lengths)
        drawn = rows.indices[order[place < fan_out]]
        edges += len(drawn)
        frontier = np.setdiff1d(drawn, known)
        known = np.union1d(known, frontier)
    return edges


def measure(
    *,
    num_nodes: int,
    num_edges: int,
    fan_outs: Sequence[Sequence[int]],
    batch_size: int,
    rounds: int,
    seconds: float,
    at_least: float,
) -> Measured:
    """Edges per second, in turns.

    Args:
        num_nodes: Of the graph.
        num_edges: Of the graph.
        fan_outs: Neighbours of each hop, for each row of the result.
        batch_size: Seeds of a sample.
        rounds: Turns of each.
        seconds: Of a turn.
        at_least: Bar: sampled edges a second.
    """
    graph = power_law_graph(num_nodes, num_edges)
    matrix = csr_array((np.ones(graph.num_edges, np.int8), graph.indices, graph.indptr), shape=(num_nodes, num_nodes))
    results, bars = [], []
    for hops in fan_outs:
        sampler = NeighborSampler(graph, hops)

        def seeds(step: int) -> NDArray[np.int64]:
            return np.random.default_rng(step).choice(num_nodes, batch_size, replace=False)

        def compiled(turn: Turn, sampler: NeighborSampler = sampler) -> None:
            for step in count():
                turn.step_done(len(sampler.sample(seeds(step), key=step).neighbors))

        def sliced(turn: Turn, hops: Sequence[int] = hops) -> None:
            for step in count():
                turn.step_done(row_slices(matrix, seeds(step), hops, np.random.default_rng(step)))

        measured = in_turns({"SciPy": sliced, "compiled": compiled}, rounds=rounds, seconds=seconds)
        results.append(Row(f"sampled edges, {list(hops)}, B={batch_size}", measured, base="SciPy"))
        name = f"million edges sampled a second, {list(hops)}"
        bars.append(Bar(name, measured.median("compiled") / 1e6, "at least", at_least))
    return list(results), bars
