"""PyG's objects, taken and given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_recsys.data.graph import CSRGraph, NodeData, from_pyg, interactions_from_pyg, to_pyg
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig

pyg = pytest.importorskip("torch_geometric.data")


def test_data_when_taken_then_has_its_edges_features_labels_and_masks():
    edge_index = torch.tensor([[1, 2, 0], [0, 0, 3]])
    mask = torch.tensor([True, False, True, False])
    data = pyg.Data(x=torch.rand(4, 2), y=torch.tensor([0, 1, 2, 1]), edge_index=edge_index, train_mask=mask)
    nodes = from_pyg(data)
    assert nodes.graph.edge_index().T.tolist() == [[1, 0], [2, 0], [0, 3]]
    assert np.array_equal(nodes.dense, data.x.numpy())
    assert (nodes.labels.tolist(), nodes.splits["train"].tolist()) == ([0, 1, 2, 1], [0, 2])


def hetero():
    data = pyg.HeteroData()
    data["paper"].num_nodes, data["author"].num_nodes, data["field"].num_nodes = 3, 4, 2
    data["paper"].y = torch.tensor([1.0, float("nan"), 0.0])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 2]])
    data["author", "writes", "paper"].edge_index = torch.tensor([[3, 0, 2], [1, 0, 1]])
    data["paper", "rev_writes", "author"].edge_index = torch.tensor([[1, 0, 1], [3, 0, 2]])
    data["paper", "has", "field"].edge_index = torch.tensor([[2, 0], [1, 0]])
    data["author", "knows", "author"].edge_index = torch.tensor([[0], [1]])
    return data


def test_hetero_data_when_taken_then_other_types_are_sparse_features():
    nodes = from_pyg(hetero(), target="paper")
    assert nodes.graph.edge_index().T.tolist() == [[0, 1], [1, 2]]
    assert nodes.labels.tolist() == [1, -1, 0]
    assert (nodes.bags["author"].offsets.tolist(), nodes.bags["author"].ids.tolist()) == ([0, 1, 3, 3], [0, 3, 2])
    assert (nodes.bags["field"].offsets.tolist(), nodes.bags["field"].ids.tolist()) == ([0, 1, 1, 2], [0, 1])


def test_hetero_data_when_no_target_is_named_then_says_which_there_are():
    with pytest.raises(ValueError, match=r"node types \['paper', 'author', 'field'\]: name the target"):
        from_pyg(hetero())


def test_hetero_data_when_of_one_node_type_then_that_is_the_target():
    data = pyg.HeteroData()
    data["paper"].x, data["paper"].y = torch.rand(3, 2), torch.tensor([1, 0, 1])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 2]])
    nodes = from_pyg(data)
    assert (nodes.labels.tolist(), nodes.dense.shape) == ([1, 0, 1], (3, 2))
    assert nodes.graph.edge_index().T.tolist() == [[0, 1], [1, 2]]


def test_data_when_it_has_types_of_its_own_then_they_are_only_an_attribute():
    types = torch.tensor([0, 1, 1])
    data = pyg.Data(y=torch.tensor([0, 1, 0]), edge_index=torch.tensor([[1], [0]]), num_nodes=3, node_types=types)
    assert from_pyg(data).labels.tolist() == [0, 1, 0]


def test_interactions_when_taken_from_hetero_data_then_are_its_edges():
    taken = interactions_from_pyg(hetero(), ("author", "writes", "paper"))
    assert (taken.users.tolist(), taken.items.tolist()) == ([0, 2, 3], [0, 1, 1])
    assert (taken.num_users, taken.num_items) == (4, 3)


def test_stores_when_handed_to_pyg_then_give_edges_and_rows():
    edges = np.random.default_rng(0).integers(0, 10, (2, 30))
    graph = CSRGraph.from_edge_index(edges, num_nodes=10)
    nodes = NodeData(graph, np.arange(10) % 2, dense=np.random.default_rng(1).random((10, 3), np.float32))
    table = EmbeddingBagCollection([EmbeddingBagConfig("node", 10, 4, ("node",))])
    features, store = to_pyg(nodes, table)
    assert {attr.attr_name for attr in features.get_all_tensor_attrs()} == {"x", "y", "embedding"}
    index = torch.tensor([7, 2])
    rows = features.get_tensor("node", "embedding", index=index)
    assert torch.equal(rows, table.embedding_bags.read("node", "weight")[index])
    assert torch.equal(features.get_tensor("node", "x", index=None), torch.from_numpy(nodes.dense))
    assert features.get_tensor_size("node", "embedding") == (10, 4)
    row, colptr = store.get_edge_index(("node", "to", "node"), "csc")
    assert torch.equal(colptr, torch.from_numpy(graph.indptr))
    assert torch.equal(row, torch.from_numpy(graph.indices))
    sources, targets, _ = store.coo()
    edge = ("node", "to", "node")
    assert torch.equal(torch.stack([sources[edge].long(), targets[edge]]), graph.edge_index())
    with pytest.raises(KeyError):
        store.get_edge_index(("node", "other", "node"), "csc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.tensor([0.5, 1.7, 2.0])}, "labels must be classes, which are whole numbers, got 0.5"),
        (
            {"train_mask": torch.ones(3, 2, dtype=torch.bool)},
            r"train_mask must mark each of 3 nodes once, got .*\[3, 2\]",
        ),
    ],
)
def test_data_when_labels_or_masks_are_none_then_says_so(change, message):
    data = pyg.Data(y=torch.tensor([0, 1, 2]), edge_index=torch.tensor([[1], [0]]), num_nodes=3)
    data.update(change)
    with pytest.raises(ValueError, match=message):
        from_pyg(data)
