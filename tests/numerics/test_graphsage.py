"""GraphSAGE against PyG's layer, against dense algebra, and a full sample against the whole graph."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.data.graph import Bags, CSRGraph, NeighborSampler, NodeData, NodeDataModule
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import GraphSAGE
from lightning_recsys.models.layers.sage import SAGELayer
from lightning_recsys.tasks import NodeClassificationTask

NODES = 40


@pytest.fixture
def graph():
    """Some nodes have no neighbour, some edges come twice, some lead to themselves."""
    edges = np.random.default_rng(0).integers(0, NODES, (2, 120))
    return CSRGraph.from_edge_index(edges[:, edges[1] % 5 > 0], num_nodes=NODES)


def full_sample(graph, seeds, hops):
    return NeighborSampler(graph, [-1] * hops).sample(np.asarray(seeds))


def dense_matrix(graph):
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes)
    sources, targets = graph.edge_index()
    return matrix.index_put_((targets, sources), torch.ones(len(sources)), accumulate=True)


def dense_layer(layer, x, matrix):
    """The layer's equation, row by row of the whole matrix."""
    if layer.aggregator == "mean":
        joined = matrix @ x / matrix.sum(1, keepdim=True).clamp(min=1)
    else:
        messages = (x @ layer.lin.weight.T + layer.lin.bias).relu()
        joined = torch.stack([messages[row > 0].amax(0) if row.any() else torch.zeros(x.shape[1]) for row in matrix])
    return joined @ layer.lin_l.weight.T + layer.lin_l.bias + x @ layer.lin_r.weight.T


@pytest.mark.parametrize("aggregator", ["mean", "max"])
def test_layer_when_given_the_whole_graph_then_equals_dense_algebra(graph, aggregator):
    torch.manual_seed(0)
    layer, x = SAGELayer(6, 3, aggregator=aggregator), torch.randn(NODES, 6, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    out = layer(x, torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices).long())
    expected = dense_layer(layer, other, dense_matrix(graph))
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("aggregator", ["mean", "max"])
def test_layer_when_it_has_the_weights_of_pygs_then_gives_the_same(graph, aggregator):
    SAGEConv = pytest.importorskip("torch_geometric.nn").SAGEConv
    torch.manual_seed(0)
    theirs = SAGEConv(6, 3, aggr=aggregator, project=aggregator == "max")
    ours = SAGELayer(6, 3, aggregator=aggregator)
    ours.load_state_dict(theirs.state_dict())
    sample = NeighborSampler(graph, [4]).sample(np.arange(9), key=5)
    x = torch.randn(len(sample.n_id), 6)
    expected = theirs((x, x[:9]), sample.edge_index)
    torch.testing.assert_close(ours(x, sample.offsets, sample.neighbors), expected)


def test_layer_when_edges_have_weights_then_is_pygs_graph_convolution_of_the_shares(graph):
    """PyG's SAGEConv takes no weights; its GraphConv sums messages times weights, which here are shares."""
    GraphConv = pytest.importorskip("torch_geometric.nn").GraphConv
    torch.manual_seed(0)
    weights = np.random.default_rng(0).random(graph.num_edges).astype(np.float32)
    weights[: graph.indptr[9]] *= np.arange(graph.indptr[9]) % 3 > 0
    weights[graph.indptr[7] : graph.indptr[8]] = 0  # node 7 hears nobody
    sample = NeighborSampler(CSRGraph(graph.indptr, graph.indices, weights), [4]).sample(np.arange(9), key=5)
    x = torch.randn(len(sample.n_id), 6)
    ours, theirs = SAGELayer(6, 3), GraphConv(6, 3, aggr="add")
    theirs.load_state_dict(
        {
            f"lin_{side}.{x}": y
            for side, name in (("rel", "l"), ("root", "r"))
            for x, y in getattr(ours, f"lin_{name}").state_dict().items()
        }
    )
    of_edge = {(int(u), int(v)): [] for u, v in graph.edge_index().T}
    for (u, v), weight in zip(graph.edge_index().T.tolist(), weights, strict=True):
        of_edge[u, v].append(weight)
    for (u, v), weight in zip(sample.n_id[sample.edge_index].T.tolist(), sample.weights, strict=True):
        assert weight in of_edge[u, v]
    sums = torch.zeros(9).index_add_(0, sample.edge_index[1], sample.weights)
    assert sums[7] == 0
    shares = sample.weights / sums.clamp(min=1e-9)[sample.edge_index[1]]
    (block,) = sample.blocks
    torch.testing.assert_close(block[2], shares)
    torch.testing.assert_close(ours(x, *block), theirs((x, x[:9]), sample.edge_index, shares))
    with pytest.raises(ValueError, match=r"model\.aggregator=max cannot weigh messages"):
        SAGELayer(6, 3, aggregator="max")(x, *block)


def test_model_when_all_weights_are_alike_then_is_that_without_weights(graph):
    weighted = CSRGraph(graph.indptr, graph.indices, np.full(graph.num_edges, 3.0, np.float32))
    model, found = make_model(), []
    for each in (graph, weighted):
        sample = NeighborSampler(each, [3, 3]).sample(np.arange(9), key=5)
        n = len(sample.n_id)
        nodes, words = SparseFeatures(("node",), sample.n_id), SparseFeatures(("words",), torch.arange(n) % 7)
        found.append(model(torch.ones(n, 2), nodes, words, sample.to("cpu").blocks))
    torch.testing.assert_close(*found)


def make_model(aggregator="mean", *, num_dense=2, num_layers=2):
    torch.manual_seed(1)
    fields = {"node": NODES, "words": 7}
    model = GraphSAGE(
        num_dense,
        fields,
        num_classes=4,
        embedding_dim=4,
        hidden=5,
        num_layers=num_layers,
        aggregator=aggregator,
        pooling="mean",
    )
    for collection in (model.node_embeddings, model.embeddings):
        collection.embedding_bags.rows.data.normal_()
    return model


@pytest.mark.parametrize("aggregator", ["mean", "max"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_model_when_all_neighbors_are_sampled_then_equals_the_whole_graph(graph, aggregator, num_layers):
    lengths = np.arange(NODES) % 3
    offsets = np.concatenate([[0], lengths.cumsum()])
    words, dense = np.arange(offsets[-1]) % 7, np.random.default_rng(2).random((NODES, 2), np.float32)
    nodes = NodeData(graph, np.zeros(NODES, np.int64), {"words": Bags(offsets, words, 7)}, dense)
    data = NodeDataModule(nodes, split={"test": 0.5}, num_neighbors=[-1] * num_layers, batch_size=20)
    model = make_model(aggregator, num_layers=num_layers).eval()

    own = model.node_embeddings(SparseFeatures(("node",), torch.arange(NODES))).flatten(1)
    bags = SparseFeatures(("words",), torch.from_numpy(words), offsets=torch.from_numpy(offsets))
    x = torch.cat([torch.from_numpy(dense), own, model.embeddings(bags).flatten(1)], 1)
    for number, layer in enumerate(model.layers):
        x = dense_layer(layer, x.relu() if number else x, dense_matrix(graph))

    batch = next(iter(data.test_dataloader()))
    seeds = batch.neighborhood.n_id[: len(batch)]
    out = model(batch.dense, batch.nodes, batch.sparse, batch.neighborhood.blocks)
    assert len(out) == 20
    torch.testing.assert_close(out, x[seeds])


def test_model_when_hops_and_layers_differ_then_says_so(graph):
    sample = full_sample(graph, [0, 1], 1)
    nodes = SparseFeatures(("node",), sample.n_id)
    words = SparseFeatures(("words",), sample.n_id % 7)
    with pytest.raises(ValueError, match=r"model\.num_layers=2 needs a neighbourhood of as many hops, got 1"):
        make_model()(torch.zeros(len(sample.n_id), 2), nodes, words, sample.blocks)


def test_model_when_arguments_are_wrong_then_says_which():
    with pytest.raises(ValueError, match="needs a numeric feature or a field"):
        GraphSAGE(0, {}, num_classes=2)
    with pytest.raises(ValueError, match=r"model\.aggregator must be mean or max, got 'lstm'"):
        GraphSAGE(3, {}, num_classes=2, aggregator="lstm")
    with pytest.raises(ValueError, match=r"model\.dropout in \[0, 1\)"):
        GraphSAGE(3, {}, num_classes=2, dropout=1.0)


class Losses(pl.Callback):
    """The losses of the batches."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())


@pytest.mark.slow
def test_power_law_graph_when_large_then_trains():
    """A million nodes and 20 million edges: steps on the rows of one batch."""
    random = np.random.default_rng(0)
    num_nodes = 1_000_000
    shares = (1 + np.arange(num_nodes)) ** -0.7
    degrees = np.maximum(20_000_000 * random.permutation(shares) / shares.sum(), 1).astype(np.int64)
    indptr = np.concatenate([[0], degrees.cumsum()])
    indices = (num_nodes * random.random(indptr[-1], np.float32) ** 3).astype(np.int32) % num_nodes
    graph = CSRGraph(indptr, indices)
    assert graph.num_edges > 19_000_000
    assert graph.degrees().max() > 10_000
    nodes = NodeData(graph, np.arange(num_nodes) % 5)
    data = NodeDataModule(nodes, split={"test": 0.1}, num_neighbors=[15, 10], batch_size=256)
    model = GraphSAGE(0, data.fields, num_classes=5, embedding_dim=16, hidden=16)
    rows = model.node_embeddings.embedding_bags.rows.data
    before = rows.clone()
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=8,
        overfit_batches=1,  # the same seeds in each epoch: a node has been seen when it comes again
        limit_val_batches=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(NodeClassificationTask(model, optimizer=partial(torch.optim.Adam, lr=0.05)), datamodule=data)
    assert trainer.global_step == len(losses.seen) == 8
    assert losses.seen[-1] < 0.8 * losses.seen[0]
    trained = (rows != before).any(1).sum()
    assert 256 < trained < 256 * (1 + 15 + 150)
