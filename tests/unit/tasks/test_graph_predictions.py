"""Classes of nodes and items for users as tables, held against the model's scores one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from lightning_recsys.data.graph import CSRGraph, InteractionDataModule, Interactions, NodeData, NodeDataModule
from lightning_recsys.models import GraphSAGE
from lightning_recsys.tasks import (
    LinkPredictionTask,
    NodeClassificationTask,
    embed_users_and_items,
    predict_nodes,
    recommend,
)


@pytest.fixture
def nodes():
    """30 nodes in three classes with names, a third of them without a label."""
    random = np.random.default_rng(0)
    graph = CSRGraph.from_edge_index(random.integers(0, 30, (2, 80)), num_nodes=30, undirected=True)
    labels = np.where(np.arange(30) % 3, np.arange(30) % 4 % 3, -1)
    ids = pa.array([f"n{i}" for i in range(30)])
    found = NodeData(graph, labels, dense=random.random((30, 5), np.float32), ids=ids, classes=("x", "y", "z"))
    data = NodeDataModule(found.split(validation=0.1, test=0.2), num_neighbors=[2, 2], eval_num_neighbors=[-1, -1])
    data.setup()
    return data


def make_node_task(data) -> NodeClassificationTask:
    torch.manual_seed(0)
    model = GraphSAGE(5, data.fields, num_classes=3, embedding_dim=4, hidden=6, dropout=0.5)
    return NodeClassificationTask(model)


@pytest.mark.parametrize("batch_size", [7, 1024])
def test_nodes_when_predicted_then_all_have_the_classes_of_the_highest_scores(nodes, batch_size):
    task = make_node_task(nodes)
    table = pa.concat_tables(predict_nodes(task, nodes, embeddings=True, batch_size=batch_size))
    assert table.column_names == ["id", "prediction", "p_x", "p_y", "p_z", "embedding"]
    assert table["id"].to_pylist() == [f"n{i}" for i in range(30)]
    batch = nodes.around(np.arange(30)).take(torch.arange(30))
    with torch.no_grad():
        expected = task.eval()(batch).softmax(1)
    found = np.stack([table[f"p_{name}"].to_numpy() for name in "xyz"], 1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    assert table["prediction"].to_pylist() == ["xyz"[k] for k in found.argmax(1)]
    last = task.model.layers[-1]
    with torch.no_grad():  # the last layer makes the scores of the vectors and of those of the neighbours
        vectors = torch.tensor(table["embedding"].to_pylist())
        graph = nodes.nodes.graph
        scores = last(vectors, torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices).long())
    np.testing.assert_allclose(scores.softmax(1).numpy(), found, rtol=1e-4)


def test_nodes_when_their_classes_and_ids_have_no_names_then_are_numbers():
    graph = CSRGraph.from_edge_index([[0, 1], [1, 2]], num_nodes=3)
    data = NodeDataModule(NodeData(graph, np.array([0, 1, 2]), splits={"train": np.array([0])}), num_neighbors=[1, 1])
    data.setup()
    torch.manual_seed(0)
    task = NodeClassificationTask(GraphSAGE(0, data.fields, num_classes=3, embedding_dim=2, hidden=2))
    (table,) = predict_nodes(task, data)
    assert table["id"].to_pylist() == [0, 1, 2]
    assert set(table["prediction"].to_pylist()) <= {0, 1, 2}
    assert not torch.is_inference_mode_enabled()


@pytest.fixture
def shop():
    """25 users, of whom the last took nothing and the first all but two, and 40 items with ids of their own."""
    pairs = np.unique(np.random.default_rng(0).integers(0, 24 * 40, 200))
    pairs = np.union1d(pairs[pairs >= 40], np.arange(38))
    ids = {"user_ids": pa.array([f"u{i}" for i in range(25)]), "item_ids": pa.array(np.arange(40) + (1 << 40))}
    data = InteractionDataModule(
        Interactions(pairs // 40, pairs % 40, 25, 40, **ids), num_neighbors=[2, 2], eval_num_neighbors=[-1, -1]
    )
    data.setup()
    torch.manual_seed(0)
    task = LinkPredictionTask(GraphSAGE(0, data.fields, num_classes=None, embedding_dim=4, hidden=6))
    task.model.node_embeddings.embedding_bags.rows.data.normal_()
    return task, data


def expected_items(task, data, top_k, *, taken):
    """The best items of each user, by the scores that the task gives all pairs at once."""
    batch = data.around(np.arange(65)).take(torch.arange(65))
    with torch.no_grad():
        vectors = task.eval().vectors(batch)
    scores = (vectors[:25] @ vectors[25:].T).numpy()
    every, found = data.interactions, []
    for user in range(25):
        known = set() if taken else set(every.items[every.users == user].tolist())
        best = [item for item in np.argsort(-scores[user]).tolist() if item not in known][:top_k]
        found += [(f"u{user}", (1 << 40) + x, rank, scores[user, x]) for rank, x in enumerate(best, 1)]
    return found


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_items_when_recommended_then_are_those_with_the_highest_scores(shop, taken, batch_size):
    task, data = shop
    table = pa.concat_tables(recommend(task, data, top_k=5, taken=taken, batch_size=batch_size))
    expected = expected_items(task, data, 5, taken=taken)
    assert len(expected) == (125 if taken else 122), "the first user has two items left"
    for name, column in zip(("user", "item", "rank"), zip(*expected, strict=True), strict=False):
        assert table[name].to_pylist() == list(column)
    np.testing.assert_allclose(table["score"].to_numpy(), [x[-1] for x in expected], rtol=1e-4, atol=1e-6)
    users, items = embed_users_and_items(task, data)
    assert (users.shape, items.shape) == ((25, 6), (40, 6))


def test_items_when_searched_by_faiss_then_are_mostly_the_best_and_none_that_is_known(shop):
    pytest.importorskip("faiss")
    task, data = shop
    table = pa.concat_tables(recommend(task, data, top_k=5, search="faiss"))
    found = set(zip(table["user"].to_pylist(), table["item"].to_pylist(), strict=True))
    best = {row[:2] for row in expected_items(task, data, 5, taken=False)}
    assert len(found & best) > 0.9 * len(best)
    every = data.interactions
    known = {(f"u{u}", (1 << 40) + i) for u, i in zip(every.users.tolist(), every.items.tolist(), strict=True)}
    assert not found & known
    ranks = table["rank"].to_numpy()
    assert (np.diff(ranks)[ranks[1:] > 1] == 1).all()


def test_items_when_asked_for_badly_then_says_what_is_allowed(shop):
    task, data = shop
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        next(recommend(task, data, top_k=0))
    with pytest.raises(ValueError, match="search exact or faiss, got 5 and 'fast'"):
        next(recommend(task, data, top_k=5, search="fast"))
    (table,) = recommend(task, data, top_k=1000, batch_size=1000)
    assert len(table) == 25 * 40 - len(data.interactions.users)
