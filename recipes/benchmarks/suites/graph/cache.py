"""HET's cache on the rows of nodes of suite ``graph``: what it misses against its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat

import numpy as np
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Columns
from benchmarks.suites.graph.sampling import power_law_graph
from benchmarks.suites.het.cache import replay

from lightning_recsys.data import Batch
from lightning_recsys.data.graph import CSRGraph, NodeData, NodeDataModule
from lightning_recsys.row_cache import CachePolicy


@dataclass(frozen=True)
class NodeTrace:
    """The rows of nodes that sampled batches look up, as the traces of suite ``het`` are asked for.

    Args:
        graph: Where to sample.
        num_neighbors: Of each hop.
        seeds: Of a batch.
        steps: Batches; two epochs of them, so that seeds come again as in training.
    """

    graph: CSRGraph
    num_neighbors: Sequence[int]
    seeds: int
    steps: int

    @property
    def fields(self) -> dict[str, int]:
        """A row for each node."""
        return {"node": self.graph.num_nodes}

    @cached_property
    def sampled(self) -> list[Batch]:
        """All batches."""
        nodes = NodeData(self.graph, np.zeros(self.graph.num_nodes, np.int64))
        share = min(self.steps * self.seeds / 2 / self.graph.num_nodes, 0.9)
        data = NodeDataModule(
            nodes,
            split={"test": 1 - share},
            num_neighbors=self.num_neighbors,
            batch_size=self.seeds,
            drop_last=True,
            prefetch_batches=0,
        )
        endless = chain.from_iterable(repeat(data.train_dataloader()))
        return [
            Batch(batch.dense, batch.nodes, torch.zeros(batch.nodes.batch_size))
            for batch in islice(endless, self.steps)
        ]

    @property
    def most_rows(self) -> int:
        """Rows of the largest batch."""
        return max(map(len, self.sampled))

    def batches(self, batch_size: int) -> list[Batch]:
        """All batches, each with the rows that it happens to have."""
        return self.sampled


def misses(
    *,
    num_nodes: int,
    num_edges: int,
    num_neighbors: Sequence[int],
    batch_size: int,
    steps: int,
    skip: int,
    fractions: Sequence[float],
    policies: Sequence[CachePolicy],
) -> Measured:
    """Miss rate of distinct rows against cache size, as in the paper's Figure 8.

    Args:
        num_nodes: Of the graph.
        num_edges: Of the graph.
        num_neighbors: Of each hop.
        batch_size: Seeds of a batch.
        steps: Batches.
        skip: First of them, while the cache fills.
        fractions: Of all rows that the cache holds.
        policies: Which rows go.
    """
    trace = NodeTrace(power_law_graph(num_nodes, num_edges), num_neighbors, batch_size, steps)
    lines, rates = [], {}
    for fraction in fractions:
        limit = int(fraction * num_nodes)
        for policy in policies:
            options = {"dim": 4, "cache_rows": limit, "staleness": 100, "policy": policy, "lookahead_batches": 0}
            rates[fraction, policy] = replay(trace, batch_size=trace.most_rows, skip=skip, **options).miss_rate  # type: ignore[arg-type]
        lines.append([f"{fraction:.0%}", *(f"{rates[fraction, policy]:.3f}" for policy in policies)])
    title = f"miss rate of nodes' rows, {num_nodes:,} nodes, {list(num_neighbors)}, B={batch_size}"
    ends = [rates[fractions[-1], policy] for policy in ("lfu", "lru") if policy in policies]
    bars = [Bar("misses of lfu / lru, largest cache", ends[0] / ends[1], "at most", 1.0)] if len(ends) == 2 else []
    return [Columns(title, ("cached", *policies), lines)], bars
