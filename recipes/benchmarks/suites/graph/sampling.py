"""Sampled edges per second of suite ``graph``, one thread each: this package's loop, PyG's in C++, SciPy's row slices.

Then whether training ever waits for batches: how many there are a second without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Row
from benchmarks.harness.trainer import StepsToTurn, quiet_trainer
from benchmarks.harness.turns import Turn, in_turns
from benchmarks.peers.torch_sparse import make_sampler
from numpy.typing import NDArray
from scipy.sparse import csr_array

from lightning_recsys.data.graph import CSRGraph, NeighborSampler, NodeData, NodeDataModule
from lightning_recsys.models import GraphSAGE
from lightning_recsys.tasks import NodeClassificationTask

Draw = Callable[[NDArray[np.int64], int], int]
"""Samples around seeds, by the number of the step; returns how many edges there are."""


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
    torch_sparse: str | None,
) -> Measured:
    """Edges per second, in turns.

    Args:
        num_nodes: Of the graph.
        num_edges: Of the graph.
        fan_outs: Neighbours of each hop, for each row of the result.
        batch_size: Seeds of a sample.
        rounds: Turns of each.
        seconds: Of a turn.
        at_least: Bar: million sampled edges a second.
        torch_sparse: As in :func:`benchmarks.peers.torch_sparse.make_sampler`; ``None`` leaves that sampler out.
    """
    graph = power_law_graph(num_nodes, num_edges)
    matrix = csr_array((np.ones(graph.num_edges, np.int8), graph.indices, graph.indptr), shape=(num_nodes, num_nodes))
    results, bars = [], []
    for hops in fan_outs:
        sampler = NeighborSampler(graph, hops)
        draws: dict[str, Draw] = {
            "SciPy": lambda seeds, step, hops=hops: row_slices(matrix, seeds, hops, np.random.default_rng(step)),  # type: ignore[misc]
            "compiled": lambda seeds, step, sampler=sampler: len(sampler.sample(seeds, key=step).neighbors),  # type: ignore[misc]
        }
        if torch_sparse is not None:
            pygs = make_sampler(graph, source=torch_sparse)
            draws["torch-sparse"] = lambda seeds, _, hops=hops, pygs=pygs: pygs(seeds, hops)  # type: ignore[misc]
        variants = {name: _variant(draw, num_nodes, batch_size) for name, draw in draws.items()}
        measured = in_turns(variants, rounds=rounds, seconds=seconds)
        results.append(Row(f"sampled edges, {list(hops)}, B={batch_size}", measured, base="SciPy"))
        name = f"million edges sampled a second, {list(hops)}"
        bars.append(Bar(name, measured.median("compiled") / 1e6, "at least", at_least))
        if torch_sparse is not None:
            ratio = measured.ratio("compiled", "torch-sparse")
            bars.append(Bar(f"compiled / torch-sparse, {list(hops)}", ratio, "at least", 1.0, " x"))
    return list(results), bars


def _variant(draw: Draw, num_nodes: int, batch_size: int) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        for step in count():
            seeds = np.random.default_rng(step).choice(num_nodes, batch_size, replace=False)
            turn.step_done(draw(seeds, step))

    return run


def starving(
    *,
    num_nodes: int,
    num_edges: int,
    num_neighbors: Sequence[int],
    batch_size: int,
    dim: int,
    rounds: int,
    seconds: float,
    at_least: float,
) -> Measured:
    """Batches made without anybody who trains on them, beside training, in turns.

    Args:
        num_nodes: Of the graph.
        num_edges: Of the graph.
        num_neighbors: Of each hop.
        batch_size: Seeds of a batch.
        dim: Width of nodes' rows and of layers.
        rounds: Turns of each.
        seconds: Of a turn.
        at_least: Bar: how many times as many seeds a second there are without training.
    """
    nodes = NodeData(power_law_graph(num_nodes, num_edges), np.arange(num_nodes) % 2)
    data = NodeDataModule(nodes, split={"test": 0.1}, num_neighbors=num_neighbors, batch_size=batch_size)
    data.setup()

    def train(turn: Turn) -> None:
        model = GraphSAGE(0, data.fields, num_classes=2, embedding_dim=dim, hidden=dim)
        task = NodeClassificationTask(model, optimizer=partial(torch.optim.Adam, lr=0.001, fused=True))
        quiet_trainer(StepsToTurn(turn, batch_size)).fit(task, data.train_dataloader())

    def batches(turn: Turn) -> None:
        loader: Any = data.train_dataloader()
        while True:
            for batch in loader:
                turn.step_done(len(batch))

    measured = in_turns({"training": train, "batches alone": batches}, rounds=rounds, seconds=seconds)
    row = Row(f"seeds, {list(num_neighbors)}, B={batch_size}, D={dim}", measured, base="training")
    ratio = measured.ratio("batches alone", "training")
    return [row], [Bar("batches alone / training", ratio, "at least", at_least, " x")]
