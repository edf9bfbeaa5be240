"""Edges in any order into compressed rows, held against SciPy's matrices."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.sparse import coo_array

from lightning_recsys.data.graph import CSRGraph


def edges_of(num_nodes: int, num_edges: int, kind: type = np.int64) -> np.ndarray:
    """Some come twice, some both ways, some end where they begin; the last nodes have none."""
    edges = np.random.default_rng(0).integers(0, max(1, num_nodes - 3), (2, num_edges)).astype(kind)
    edges[:, : num_edges // 10] = edges[::-1, -(num_edges // 10) or num_edges :]
    return edges


def matrix_of(edges, weights, num_nodes):
    """A row for each target; SciPy adds up what comes again."""
    return coo_array((weights, (edges[1], edges[0])), shape=(num_nodes, num_nodes)).tocsr()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint32])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(40, 700), (5, 1), (500, 90), (3, 0)])
def test_rows_when_undirected_then_are_those_of_the_symmetric_matrix(num_nodes, num_edges, kind):
    edges = edges_of(num_nodes, num_edges, kind)
    graph = CSRGraph.from_edge_index(edges, num_nodes=num_nodes, undirected=True)
    both = np.concatenate([edges, edges[::-1]], 1)
    matrix = matrix_of(both, np.ones(both.shape[1]), num_nodes)
    matrix.sort_indices()
    assert graph.indptr.tolist() == matrix.indptr.tolist()
    assert graph.indices.tolist() == matrix.indices.tolist()
    assert graph.weights is None


@pytest.mark.parametrize("num_edges", [700, 1, 0])
def test_weights_when_an_edge_comes_again_then_add_up_each_way(num_edges):
    edges, random = edges_of(40, num_edges), np.random.default_rng(1)
    weights = random.random(num_edges).astype(np.float32)
    graph = CSRGraph.from_edge_index(edges, num_nodes=40, undirected=True, weights=weights)
    loops = edges[0] == edges[1]
    both = np.concatenate([edges, edges[::-1][:, ~loops]], 1)
    matrix = matrix_of(both, np.concatenate([weights, weights[~loops]]), 40)
    matrix.sort_indices()
    assert graph.indices.tolist() == matrix.indices.tolist()
    np.testing.assert_allclose(graph.weights, matrix.data, rtol=1e-5)


def test_rows_when_directed_then_each_edge_counts_as_often_as_it_is_there():
    edges = edges_of(40, 700)[:, ::-1]  # not as they lie in memory
    weights = np.arange(700, dtype=np.float64)
    graph = CSRGraph.from_edge_index(edges, num_nodes=40, weights=weights)
    order = np.lexsort((edges[0], edges[1]))
    assert graph.indices.tolist() == edges[0][order].tolist()
    assert graph.weights.tolist() == weights[order].tolist()
    assert graph.degrees().tolist() == np.bincount(edges[1], minlength=40).tolist()


@pytest.mark.parametrize("undirected", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_memory_when_built_then_is_twice_that_of_the_graph(undirected, weighted):
    edges = np.random.default_rng(0).integers(0, 20_000, (2, 300_000))
    weights = np.ones(300_000, np.float32) if weighted else None

    def build() -> CSRGraph:
        return CSRGraph.from_edge_index(edges, num_nodes=20_000, undirected=undirected, weights=weights)

    build()  # the compiler's memory is no part of it
    tracemalloc.start()
    try:
        graph = build()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(x.nbytes for x in (graph.indptr, graph.indices, graph.weights) if x is not None)
    assert size < peak < 2.1 * size


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -2.0], r"finite and from 0 on, got -2\.0 of edge 1"),
        ([np.nan, 1.0], "got nan of edge 0"),
        ([1.0, np.inf], "got inf of edge 1"),
        ([1.0], r"a number for each of 2 edges, got float64 of \[1\]"),
        (["a", "b"], "a number for each of 2 edges"),
    ],
)
def test_weights_when_bad_then_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        CSRGraph.from_edge_index([[0, 1], [1, 2]], num_nodes=3, weights=weights)
    with pytest.raises(ValueError, match=message):
        CSRGraph(np.array([0, 1, 2]), np.array([1, 0]), np.array(weights))


def test_weights_when_saved_then_are_mapped_and_none_stay_behind(tmp_path):
    graph = CSRGraph.from_edge_index([[0, 1], [1, 2]], num_nodes=3, weights=[1.5, 0.0])
    graph.save(tmp_path)
    opened = CSRGraph.open(tmp_path)
    assert isinstance(opened.weights, np.memmap)
    assert opened.weights.tolist() == [1.5, 0.0]
    CSRGraph.from_edge_index([[0, 1], [1, 2]], num_nodes=3).save(tmp_path)
    assert CSRGraph.open(tmp_path).weights is None
