"""Graphs in compressed rows, and neighbourhoods sampled from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lightning_recsys.data.graph import Bags, CSRGraph, NeighborSampler, NodeData, NodeDataModule


def random_graph(num_nodes: int = 60, num_edges: int = 300, seed: int = 0) -> CSRGraph:
    edges = np.random.default_rng(seed).integers(0, num_nodes, (2, num_edges))
    return CSRGraph.from_edge_index(edges, num_nodes=num_nodes)


def star(leaves: int) -> CSRGraph:
    """Node 0 gets messages of all others."""
    return CSRGraph.from_edge_index([range(1, leaves + 1), [0] * leaves], num_nodes=leaves + 1)


def labelled(num_nodes: int = 60, **features) -> NodeData:
    return NodeData(random_graph(num_nodes), np.arange(num_nodes) % 3, **features)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], "must not fall, as it does behind node 1"),
        ([0, 1, 2], [0, 1, 1], "rise from 0 to the number of edges, 3, got 0 to 2"),
        ([0, 1, 2], [0, 2], r"between nodes 0 to 1, got node 2"),
        ([0, 1, 2], [-1, 1], r"between nodes 0 to 1, got node -1"),
        ([], [], "got nothing"),
    ],
)
def test_graph_when_bad_then_says_what_is_wrong(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        CSRGraph(np.array(indptr, np.int64), np.array(indices, np.int64))


def test_graph_when_of_floats_then_is_refused():
    with pytest.raises(TypeError, match=r"graph\.indices must be flat and of integers"):
        CSRGraph(np.array([0, 1]), np.array([0.0]))


def test_edges_when_out_of_range_or_shape_then_are_refused():
    with pytest.raises(ValueError, match=r"nodes 0 to 2, got node 3"):
        CSRGraph.from_edge_index([[0, 3], [1, 1]], num_nodes=3)
    with pytest.raises(ValueError, match=r"shape \[2, E\]"):
        CSRGraph.from_edge_index([[0, 1, 2]], num_nodes=3)


def test_edges_when_unsorted_then_rows_are_the_dense_matrix():
    edges = np.random.default_rng(1).integers(0, 9, (2, 40))
    graph = CSRGraph.from_edge_index(edges, num_nodes=9)
    dense = np.zeros((9, 9))
    np.add.at(dense, (edges[1], edges[0]), 1)
    for node in range(9):
        assert np.bincount(graph.neighbors(node), minlength=9).tolist() == dense[node].tolist()
    assert torch.equal(CSRGraph.from_edge_index(graph.edge_index(), num_nodes=9).edge_index(), graph.edge_index())


def test_edges_when_undirected_then_each_goes_both_ways_once():
    graph = CSRGraph.from_edge_index([[0, 1, 0, 2], [1, 0, 1, 2]], num_nodes=4, undirected=True)
    assert [graph.neighbors(node).tolist() for node in range(4)] == [[1], [0], [2], []]


def test_nodes_when_saved_then_are_mapped_and_equal(tmp_path):
    offsets = np.arange(61)
    nodes = labelled(bags={"words": Bags(offsets, np.arange(60) % 7, 7)}, dense=np.ones((60, 2), np.float32)).split(
        validation=0.2, test=0.2
    )
    nodes.save(tmp_path)
    opened = NodeData.open(tmp_path)
    assert isinstance(opened.graph.indices, np.memmap)
    assert np.array_equal(opened.graph.indices, nodes.graph.indices)
    assert np.array_equal(opened.bags["words"].ids, nodes.bags["words"].ids)
    assert {name: part.tolist() for name, part in opened.splits.items()} == {
        name: part.tolist() for name, part in nodes.splits.items()
    }
    drawn, again = (NeighborSampler(x.graph, [3, 3]).sample(np.arange(5), key=1) for x in (nodes, opened))
    assert torch.equal(drawn.n_id, again.n_id)


def test_nodes_when_bad_then_say_what_is_wrong():
    graph = random_graph(5, 9)
    with pytest.raises(ValueError, match=r"5 nodes.*got \{'labels': 4\}"):
        NodeData(graph, np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="labels must be classes from 0"):
        NodeData(graph, np.array([0, 1, -2, 0, 0]))
    with pytest.raises(ValueError, match="train split has 1 nodes without a label, such as 3"):
        NodeData(graph, np.array([0, 1, 2, -1, 0]), splits={"train": np.array([2, 3])})
    with pytest.raises(ValueError, match="names nodes outside 0 to 4"):
        NodeData(graph, np.zeros(5, np.int64), splits={"test": np.array([5])})
    with pytest.raises(ValueError, match="must be finite"):
        NodeData(graph, np.zeros(5, np.int64), dense=np.full((5, 1), np.nan, np.float32))
    with pytest.raises(ValueError, match="from 0 to 2, got 0 to 3"):
        Bags(np.array([0, 2]), np.array([0, 3]), 3)


def test_split_when_some_nodes_have_no_label_then_they_are_in_none():
    nodes = NodeData(random_graph(), np.where(np.arange(60) % 2, 1, -1)).split(validation=0.2, test=0.1, seed=3)
    drawn = np.concatenate(list(nodes.splits.values()))
    assert sorted(drawn) == list(range(1, 60, 2))
    assert [len(nodes.splits[name]) for name in ("train", "validation", "test")] == [21, 6, 3]
    with pytest.raises(ValueError, match=r"data\.split must leave something for training"):
        nodes.split(validation=0.5, test=0.5)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("fan_outs", [[4], [3, 2], [2, 3, 2]])
def test_sample_when_drawn_then_edges_are_of_the_graph_and_hops_in_order(fan_outs, replacement):
    graph = random_graph()
    edges = set(map(tuple, graph.edge_index().T.tolist()))
    seeds = np.array([5, 0, 17, 40])
    sample = NeighborSampler(graph, fan_outs, replacement=replacement).sample(seeds, key=2)
    assert sample.n_id[:4].tolist() == seeds.tolist()
    assert len(sample.n_id.unique()) == len(sample.n_id) == sum(sample.num_sampled_nodes)
    assert sum(sample.num_sampled_edges) == len(sample.neighbors) == sample.offsets[-1]
    assert set(map(tuple, sample.n_id[sample.edge_index].T.tolist())) <= edges
    bounds = np.cumsum((0, *sample.num_sampled_nodes))
    edge = 0
    for hop, fan_out in enumerate(fan_outs):
        for target in range(bounds[hop], bounds[hop + 1]):
            degree, taken = len(graph.neighbors(int(sample.n_id[target]))), int(sample.offsets.diff()[target])
            wanted = fan_out if replacement else min(fan_out, degree)
            assert taken == (wanted if degree else 0)
            edge += taken
        assert edge == sum(sample.num_sampled_edges[: hop + 1])


def test_sample_without_replacement_then_no_edge_comes_twice():
    graph = star(50)
    for key in range(50):
        drawn = NeighborSampler(graph, [40]).sample(np.array([0]), key=key).neighbors
        assert len(drawn.unique()) == 40


@pytest.mark.parametrize(("replacement", "fan_out"), [(False, 5), (True, 5), (False, 19)])
def test_neighbors_when_drawn_often_then_all_come_equally_often(replacement, fan_out):
    sampler = NeighborSampler(star(20), [fan_out], replacement=replacement)
    counts = np.zeros(21)
    for key in range(4000):
        sample = sampler.sample(np.array([0]), key=key)
        np.add.at(counts, sample.n_id[sample.neighbors].numpy(), 1)
    assert counts.sum() == 4000 * fan_out
    # Without replacement counts vary less than those of independent draws: the test is then on the safe side.
    assert chisquare(counts[1:]).pvalue > 1e-3


def test_pairs_when_drawn_without_replacement_then_all_come_equally_often():
    sampler = NeighborSampler(star(6), [2])
    counts = np.zeros((7, 7))
    for key in range(6000):
        sample = sampler.sample(np.array([0]), key=key)
        first, second = sorted(sample.n_id[sample.neighbors].tolist())
        counts[first, second] += 1
    assert chisquare(counts[np.triu_indices(7, 1)][6:]).pvalue > 1e-3


def test_sample_when_key_is_the_same_then_is_the_same_in_any_sampler():
    graph, seeds = random_graph(500, 8000), np.arange(30)
    samplers = [NeighborSampler(graph, [4, 4]) for _ in range(2)]
    samplers[1].sample(np.arange(100), key=99)
    first, second = (sampler.sample(seeds, key=7) for sampler in samplers)
    assert torch.equal(first.edge_index, second.edge_index)
    assert torch.equal(first.n_id, second.n_id)
    assert not torch.equal(first.n_id, samplers[0].sample(seeds, key=8).n_id)


def test_sample_when_fan_outs_are_equal_then_two_ranks_draw_what_one_does():
    graph, seeds = random_graph(500, 8000), np.arange(40)
    whole, *halves = (NeighborSampler(graph, [4, 4]).sample(x, key=3) for x in (seeds, seeds[:20], seeds[20:]))

    def drawn(sample, hops):
        targets = sum(sample.num_sampled_nodes[:hops])
        edges = sample.n_id[sample.edge_index[:, : int(sample.offsets[targets])]]
        return set(map(tuple, edges.T.tolist()))

    assert drawn(halves[0], 2) | drawn(halves[1], 2) == drawn(whole, 2)


def test_sample_when_nodes_are_isolated_then_they_have_no_neighbors():
    graph = CSRGraph(np.zeros(6, np.int64), np.empty(0, np.int32))
    for replacement in (False, True):
        sample = NeighborSampler(graph, [3, 3], replacement=replacement).sample(np.array([4, 1]))
        assert (sample.n_id.tolist(), sample.offsets.tolist(), len(sample.neighbors)) == ([4, 1], [0, 0, 0], 0)


def test_sample_when_larger_than_any_before_then_room_is_made():
    sampler = NeighborSampler(star(100_000), [-1])
    assert len(sampler.sample(np.array([3])).n_id) == 1
    assert len(sampler.sample(np.array([0])).neighbors) == 100_000
    assert sampler.sample(np.array([0, 5])).n_id[:2].tolist() == [0, 5]


@pytest.mark.parametrize("fan_outs", [[], [0], [3, -2]])
def test_fan_outs_when_wrong_then_are_refused(fan_outs):
    with pytest.raises(ValueError, match=r"data\.num_neighbors"):
        NeighborSampler(random_graph(), fan_outs)


def test_seeds_when_wrong_then_are_refused():
    sampler = NeighborSampler(random_graph(), [2])
    with pytest.raises(ValueError, match="seeds must be nodes from 0 to 59, got 3 to 60"):
        sampler.sample(np.array([3, 60]))
    with pytest.raises(ValueError, match="distinct"):
        sampler.sample(np.array([3, 3]))


def make_module(**options) -> NodeDataModule:
    settings = {"split": {"validation": 0.2, "test": 0.2}, "batch_size": 8, "num_neighbors": [3, 3], **options}
    return NodeDataModule(labelled(), **settings)


def contents(batch):
    return batch.neighborhood.n_id.tolist(), batch.neighborhood.edge_index.tolist(), batch.labels.tolist()


def test_loader_when_it_prefetches_then_batches_are_the_same():
    ahead, plain = ([contents(x) for x in make_module(prefetch_batches=n).train_dataloader()] for n in (3, 0))
    assert ahead == plain
    assert len(ahead) == 5


def test_loader_when_epochs_pass_then_seeds_and_neighbors_are_drawn_anew_but_those_of_evaluation_stay():
    module = make_module()
    train, test = module.train_dataloader(), module.test_dataloader()
    assert [contents(x) for x in train] != [contents(x) for x in train]
    assert [contents(x) for x in test] == [contents(x) for x in test]
    seeds = [node for batch in train for node in batch.neighborhood.n_id[: len(batch)].tolist()]
    assert sorted(seeds) == module.nodes.splits["train"].tolist()


def test_loader_when_resumed_then_the_very_next_batch_comes():
    loader, again = (make_module().train_dataloader() for _ in range(2))
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    again.load_state_dict(loader.state_dict())
    assert [contents(x) for x in again] == [contents(x) for x in batches]


def test_batch_when_taken_then_has_each_node_once_with_its_own_features():
    bags = {"words": Bags(np.arange(61), (np.arange(60) * 3) % 11, 11)}
    dense = np.arange(120, dtype=np.float32).reshape(60, 2)
    module = NodeDataModule(labelled(bags=bags, dense=dense), split={"test": 0.5}, num_neighbors=[2, 2], batch_size=9)
    batch = next(iter(module.train_dataloader()))
    n_id = batch.neighborhood.n_id
    assert batch.nodes.is_single_hot
    assert torch.equal(batch.nodes.values, n_id)
    assert torch.equal(batch.sparse.values, n_id * 3 % 11)
    assert torch.equal(batch.dense, torch.from_numpy(dense)[n_id])
    assert batch.labels.tolist() == (n_id[:9] % 3).tolist()
    assert module.fields == {"node": 60, "words": 11}
    assert (module.num_dense, module.num_classes) == (2, 3)


def write_npz(path, num_nodes):
    graph = random_graph(num_nodes, 50)
    labels, shape = np.arange(num_nodes) % 4, [num_nodes, num_nodes]
    np.savez(path, adj_indptr=graph.indptr, adj_indices=graph.indices, adj_shape=shape, labels=labels)


def mapped_module(folder, file="tiny.npz", **options):
    return NodeDataModule(file=file, root=str(folder), mapped=str(folder / "arrays"), split={"test": 0.1}, **options)


def test_module_when_mapped_then_reads_its_file_once(tmp_path):
    write_npz(tmp_path / "tiny.npz", 20)
    for _ in range(2):
        module = mapped_module(tmp_path)
        module.prepare_data()
        assert isinstance(module.nodes.graph.indptr, np.memmap)
        (tmp_path / "tiny.npz").unlink(missing_ok=True)
    assert "nodes" not in module.__getstate__()
    assert [path.name for path in tmp_path.iterdir()] == ["arrays"]


def test_module_when_its_folder_is_of_other_files_then_is_refused(tmp_path):
    write_npz(tmp_path / "tiny.npz", 20)
    write_npz(tmp_path / "other.npz", 20)
    mapped_module(tmp_path).prepare_data()
    with pytest.raises(
        ValueError, match=r"data\.mapped=.*arrays holds arrays of .*tiny\.npz .*, and not of .*other\.npz"
    ):
        mapped_module(tmp_path, "other.npz").setup()
    with pytest.raises(ValueError, match=r"as data\.format=npz, and not .* as data\.format=reddit"):
        mapped_module(tmp_path, format="reddit").setup()
    assert mapped_module(tmp_path).nodes.graph.num_nodes == 20
    write_npz(tmp_path / "tiny.npz", 21)
    with pytest.raises(ValueError, match="remove this one, and it is made anew"):
        mapped_module(tmp_path).setup()
    (tmp_path / "arrays" / "origin.json").unlink()
    with pytest.raises(ValueError, match="does not say what its arrays were made from"):
        mapped_module(tmp_path).setup()


def test_module_when_two_runs_write_at_once_then_the_first_ones_arrays_stay(tmp_path, monkeypatch):
    write_npz(tmp_path / "tiny.npz", 20)
    first, second = mapped_module(tmp_path), mapped_module(tmp_path)
    read = second._read

    def read_slowly():
        first.prepare_data()
        return read()

    monkeypatch.setattr(second, "_read", read_slowly)
    second.prepare_data()
    assert second.nodes.graph.num_nodes == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays", "tiny.npz"]


def test_module_when_arguments_are_wrong_then_says_which():
    with pytest.raises(ValueError, match="says of no node that it is for training"):
        NodeDataModule(labelled()).setup()
    with pytest.raises(ValueError, match=r"nodes have no features: set data\.node_ids=true"):
        make_module(node_ids=False).setup()
    with pytest.raises(ValueError, match=r"eval_num_neighbors must have a number for each hop"):
        make_module(eval_num_neighbors=[-1])
    with pytest.raises(ValueError, match="and not both"):
        NodeDataModule()
    with pytest.raises(ValueError, match=r"data\.mapped is for data\.file"):
        make_module(mapped="arrays")
    with pytest.raises(ValueError, match=r"data\.mapped=graphs/arrays lies in .*graphs, which is read"):
        NodeDataModule(file="graphs", mapped="graphs/arrays")
