"""Suite graph at the smallest size, and what its parts are made of."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from benchmarks.suites.graph.cache import NodeTrace, misses
from benchmarks.suites.graph.sampling import measure, power_law_graph, row_slices
from scipy.sparse import csr_array

SMALL = {"num_nodes": 2000, "num_edges": 20_000}


def test_graph_when_drawn_then_has_hubs_and_about_the_edges_asked_for():
    graph = power_law_graph(**SMALL)
    assert graph.num_edges == pytest.approx(20_000, rel=0.1)
    assert graph.degrees().max() > 20 * np.median(graph.degrees())
    as_neighbor = np.bincount(graph.indices, minlength=2000)
    assert np.array_equal(as_neighbor, graph.degrees())


def test_row_slices_when_all_are_wanted_then_are_all_edges_of_a_hop():
    graph = power_law_graph(**SMALL)
    matrix = csr_array((np.ones(graph.num_edges), graph.indices, graph.indptr), shape=(2000, 2000))
    random = np.random.default_rng(0)
    degrees = graph.degrees()[:50]
    assert row_slices(matrix, np.arange(50), [10**6], random) == degrees.sum()
    assert row_slices(matrix, np.arange(50), [3], random) == np.minimum(degrees, 3).sum()


def test_sampling_when_measured_then_has_a_row_and_a_bar_for_each_fan_out():
    (row, other), bars = measure(**SMALL, fan_outs=[[3, 2], [4]], batch_size=32, rounds=1, seconds=0.05, at_least=5.0)
    assert row.base == other.base == "SciPy"
    assert [bar.limit for bar in bars] == [5.0, 5.0]
    assert all(bar.value > 0 for bar in bars)


def test_trace_when_made_then_seeds_come_again_in_the_second_epoch():
    trace = NodeTrace(power_law_graph(**SMALL), [2, 2], seeds=10, steps=20)
    halves = trace.sampled[:10], trace.sampled[10:]
    first, second = ({node for batch in half for node in batch.sparse.values[:10].tolist()} for half in halves)
    assert first == second
    assert len(first) == 100


@pytest.mark.distributed
def test_misses_when_the_cache_is_larger_then_are_fewer():
    (table,), _ = misses(
        **SMALL, num_neighbors=[3, 2], batch_size=16, steps=30, skip=10, fractions=[0.02, 0.5], policies=["lfu"]
    )
    small, large = (float(row[1]) for row in table.rows)
    assert 0 <= large < small <= 1


@pytest.mark.slow
def test_quality_when_measured_then_both_learn(data_root):
    pytest.importorskip("torch_geometric.nn")
    quality = importlib.import_module("benchmarks.suites.graph.quality")
    (table,), bars = quality.measure(
        data=["cora"], seeds=[0], epochs=1, batch_size=512, hidden=8, dropout=0.0, root=str(data_root)
    )
    assert [row[:3] for row in table.rows] == [
        ["cora", inputs, model] for inputs in ("words", "rows of nodes") for model in ("GraphSAGE", "PyG")
    ]
    assert len(bars) == 2
