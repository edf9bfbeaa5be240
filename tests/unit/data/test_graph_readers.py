"""Graphs in the files that people share them in: small folders of each layout."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict

import numpy as np
import pytest
from scipy import sparse

from lightning_recsys.data.graph import InteractionDataModule, NodeDataModule, read_nodes


def write_npz(path, **changes):
    arrays = {
        "adj_indptr": np.array([0, 2, 3, 3], np.int32),
        "adj_indices": np.array([2, 1, 0], np.int32),  # not sorted within the row
        "adj_shape": np.array([3, 3]),
        "attr_indptr": np.array([0, 2, 3, 3], np.int32),
        "attr_indices": np.array([4, 0, 1], np.int32),
        "attr_shape": np.array([3, 5]),
        "labels": np.array([1, 0, -1], np.int16),
    }
    np.savez(path, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})


def test_npz_when_read_then_has_edges_words_and_labels(tmp_path):
    write_npz(tmp_path / "a.npz")
    nodes = read_nodes(tmp_path / "a.npz", "npz")
    assert [nodes.graph.neighbors(node).tolist() for node in range(3)] == [[2, 1], [0], []]
    assert nodes.labels.tolist() == [1, 0, -1]
    assert nodes.bags["words"].ids.tolist() == [4, 0, 1]
    assert (nodes.bags["words"].num_embeddings, nodes.num_classes, nodes.dense) == (5, 2, None)


def test_npz_when_features_are_numbers_then_they_are_dense(tmp_path):
    write_npz(tmp_path / "a.npz", attr_data=np.array([0.5, 2.0, 1.0]))
    nodes = read_nodes(tmp_path / "a.npz", "npz")
    assert nodes.dense.tolist() == [[2, 0, 0, 0, 0.5], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "labels"),
        ({"adj_indices": np.array([2, 1, 3])}, "nodes 0 to 2, got node 3"),
        ({"adj_indptr": np.array([0, 3, 2, 3])}, "must not fall"),
        ({"labels": np.array([1, 0])}, r"3 nodes.*'labels': 2"),
        ({"adj_shape": np.array([3, 4])}, "must be square"),
        ({"adj_shape": np.array([4, 4])}, "adj_shape says 4 nodes"),
        ({"attr_indices": np.array([4, 0, 5])}, "ids of a node feature must be from 0 to 4, got 0 to 5"),
        ({"attr_indices": np.array([4, 0, (1 << 32) + 1])}, "must be from 0 to 4, got 0 to 4294967297"),
        ({"attr_indices": np.array([4.0, 0.0, 1.0])}, "indices must be integers"),
        ({"attr_indptr": np.array([0, 3])}, "has 3 rows, and indices of 1"),
        ({"labels": np.array([1.0, 0.7, 0])}, "labels must be classes, which are whole numbers, got 0.7"),
        ({"labels": np.array([1.0, 0, np.nan])}, "which are whole numbers, got nan"),
        ({"labels": np.array(["a", "b", "a"])}, "which are whole numbers, got <U1"),
        ({"labels": np.eye(3, 2)}, r"one class for each node, got an array of shape \[3, 2\].*argmax"),
        (
            {"labels": np.array([1, 10**9, 0])},
            "the label 1000000000 of node 1 makes 1000000001 classes of 3 nodes",
        ),
        ({"attr_data": np.array([1, 1])}, r"number for each of its 3 entries, got int64 of shape \[2\]"),
    ],
)
def test_npz_when_bad_then_says_what_is_wrong(tmp_path, changes, message):
    write_npz(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=message):
        read_nodes(tmp_path / "bad.npz", "npz")


def test_npz_when_labels_are_whole_floats_then_are_classes(tmp_path):
    write_npz(tmp_path / "a.npz", labels=np.array([1.0, 0, -1]))
    assert read_nodes(tmp_path / "a.npz", "npz").labels.tolist() == [1, 0, -1]


def test_npz_when_cut_off_or_no_file_then_is_named(tmp_path):
    write_npz(tmp_path / "a.npz")
    whole = (tmp_path / "a.npz").read_bytes()
    for size in (0, 100, len(whole) - 30):
        (tmp_path / "a.npz").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.npz cannot be read as data\.format=npz"):
            read_nodes(tmp_path / "a.npz", "npz")
    with pytest.raises(ValueError, match=r"cannot be read as data\.format=npz.*directory"):
        read_nodes(tmp_path, "npz")


@pytest.mark.parametrize("module", [NodeDataModule, InteractionDataModule])
def test_split_when_a_key_is_misspelt_then_is_named(module):
    with pytest.raises(ValueError, match=r"data\.split takes validation, test, seed and by, got validaton\."):
        module(file="a", split={"validaton": 0.2, "test": 0.2})


def test_format_when_unknown_then_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.format must be one of npz, planetoid"):
        read_nodes(tmp_path, "csv")


def write_planetoid(folder, graph):
    """Six nodes: 0 and 1 to train, 2 with a label; 3 and 5 to test, 4 is nowhere, as in Citeseer."""
    x = sparse.csr_matrix(np.array([[1, 0, 1], [0, 1, 0], [0, 0, 1]], np.float32))
    tx = sparse.csr_matrix(np.array([[1, 1, 0], [0, 0, 1]], np.float32))
    y, ty = np.eye(2)[[0, 1, 1]], np.eye(2)[[1, 0]]
    parts = {"x": x[:2], "allx": x, "tx": tx, "y": y[:2], "ally": y, "ty": ty, "graph": graph}
    for name, value in parts.items():
        (folder / f"ind.toy.{name}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.toy.test.index").write_text("5\n3\n")


def test_planetoid_when_read_then_test_nodes_stand_where_the_index_says(tmp_path):
    write_planetoid(tmp_path, defaultdict(list, {0: [1, 1], 1: [0], 2: [5], 3: [], 5: [2]}))
    nodes = read_nodes(tmp_path, "planetoid")
    assert nodes.labels.tolist() == [0, 1, 1, 0, -1, 1]
    words = nodes.bags["words"]
    assert [words.ids[words.offsets[i] : words.offsets[i + 1]].tolist() for i in range(6)] == [
        *([0, 2], [1], [2]),
        *([2], [], [0, 1]),
    ]
    assert [nodes.graph.neighbors(node).tolist() for node in range(6)] == [[1], [0], [5], [], [], [2]]
    assert {name: part.tolist() for name, part in nodes.splits.items()} == {
        "train": [0, 1],
        "validation": [2],
        "test": [3, 5],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (np.eye(3), "must be a matrix of SciPy's in compressed rows, got ndarray"),
        (sparse.csc_matrix(np.eye(3)), "csc_matrix is missing or of another kind"),
    ],
)
def test_planetoid_when_features_are_no_matrix_in_rows_then_says_so(tmp_path, words, message):
    write_planetoid(tmp_path, defaultdict(list))
    (tmp_path / "ind.toy.allx").write_bytes(pickle.dumps(words, protocol=2))
    with pytest.raises(ValueError, match=message):
        read_nodes(tmp_path, "planetoid")


def test_planetoid_when_features_are_numbers_then_they_stand_with_their_nodes(tmp_path):
    write_planetoid(tmp_path, defaultdict(list))
    words = sparse.csr_matrix(np.array([[0, 0.5, 0], [0, 0, 0], [3, 0, 2]]))
    (tmp_path / "ind.toy.allx").write_bytes(pickle.dumps(words, protocol=2))
    nodes = read_nodes(tmp_path, "planetoid")
    assert nodes.dense.tolist() == [[0, 0.5, 0], [0, 0, 0], [3, 0, 2], [0, 0, 1], [0, 0, 0], [1, 1, 0]]


class Harmful:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_planetoid_when_a_pickle_would_do_something_then_is_refused(tmp_path, capsys):
    write_planetoid(tmp_path, Harmful())
    with pytest.raises(ValueError, match=r"print is missing or of another kind"):
        read_nodes(tmp_path, "planetoid")
    assert capsys.readouterr().out == ""


def test_reddit_when_read_then_kinds_of_nodes_are_splits(tmp_path):
    adjacency = sparse.coo_matrix(([1, 1, 1], ([0, 1, 2], [1, 0, 0])), shape=(3, 3))
    sparse.save_npz(tmp_path / "reddit_graph.npz", adjacency)
    np.savez(
        tmp_path / "reddit_data.npz", feature=np.ones((3, 2)), label=np.array([4, 1, 0]), node_types=np.array([1, 3, 2])
    )
    nodes = read_nodes(tmp_path, "reddit")
    assert nodes.graph.edge_index().T.tolist() == [[1, 0], [2, 0], [0, 1]]
    assert {name: part.tolist() for name, part in nodes.splits.items()} == {
        "train": [0],
        "validation": [2],
        "test": [1],
    }
    assert (nodes.dense.dtype, nodes.num_classes) == (np.float32, 5)


def write_graphsaint(folder, classes):
    sparse.save_npz(folder / "adj_full.npz", sparse.csr_matrix(np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]])))
    np.save(folder / "feats.npy", np.zeros((3, 2)))
    (folder / "class_map.json").write_text(json.dumps(classes))
    (folder / "role.json").write_text(json.dumps({"tr": [2, 0], "va": [], "te": [1]}))


def test_graphsaint_when_read_then_roles_are_splits(tmp_path):
    write_graphsaint(tmp_path, {"0": 2, "2": 1, "1": 0})
    nodes = read_nodes(tmp_path, "graphsaint")
    assert nodes.labels.tolist() == [2, 0, 1]
    assert nodes.graph.neighbors(0).tolist() == [1, 2]
    assert (nodes.splits["train"].tolist(), nodes.splits["test"].tolist()) == ([0, 2], [1])


def test_graphsaint_when_nodes_have_several_classes_then_is_refused(tmp_path):
    write_graphsaint(tmp_path, {"0": [1, 0], "1": [1, 1], "2": [0, 0]})
    with pytest.raises(ValueError, match="several classes for a node"):
        read_nodes(tmp_path, "graphsaint")


def test_graphsaint_when_a_node_to_train_has_no_label_then_is_refused(tmp_path):
    write_graphsaint(tmp_path, {"0": 2, "1": 0})
    with pytest.raises(ValueError, match="train split has 1 nodes without a label, such as 2"):
        read_nodes(tmp_path, "graphsaint")


def gz(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{row}\n" for row in rows)


def test_ogb_when_of_one_node_type_then_is_read(tmp_path):
    gz(tmp_path / "raw/edge.csv.gz", "0,1", "2,1")
    gz(tmp_path / "raw/num-node-list.csv.gz", "4")
    gz(tmp_path / "raw/node-feat.csv.gz", "0.5,1", "0,0", "1,1", "2,2")
    gz(tmp_path / "raw/node-label.csv.gz", "3", "0", "nan", "1")
    for name, rows in (("train", ("3", "0")), ("valid", ("1",)), ("test", ("1",))):
        gz(tmp_path / f"split/time/{name}.csv.gz", *rows)
    nodes = read_nodes(tmp_path, "ogb")
    assert [nodes.graph.neighbors(node).tolist() for node in range(4)] == [[1], [0, 2], [1], []]
    assert nodes.labels.tolist() == [3, 0, -1, 1]
    assert nodes.dense[0].tolist() == [0.5, 1]
    assert nodes.splits["train"].tolist() == [0, 3]


def test_ogb_when_of_several_node_types_then_others_become_sparse_features(tmp_path):
    raw = tmp_path / "raw"
    gz(raw / "num-node-dict.csv.gz", "author,field_of_study,paper", "3,5,2")
    gz(raw / "relations/author___writes___paper/edge.csv.gz", "2,0", "0,1", "1,0")
    gz(raw / "relations/paper___has_topic___field_of_study/edge.csv.gz", "1,4", "1,0")
    gz(raw / "relations/paper___cites___paper/edge.csv.gz", "0,1")
    gz(raw / "node-label/paper/node-label.csv.gz", "1", "0")
    for name, row in (("train", "0"), ("valid", "1"), ("test", "1")):
        gz(tmp_path / f"split/time/paper/{name}.csv.gz", row)
    nodes = read_nodes(tmp_path, "ogb")
    assert [nodes.graph.neighbors(node).tolist() for node in range(2)] == [[1], [0]]
    author, topic = nodes.bags["author"], nodes.bags["field_of_study"]
    assert (author.offsets.tolist(), author.ids.tolist(), author.num_embeddings) == ([0, 2, 3], [2, 1, 0], 3)
    assert (topic.offsets.tolist(), topic.ids.tolist(), topic.num_embeddings) == ([0, 0, 2], [4, 0], 5)
    assert nodes.dense is None


@pytest.mark.parametrize(("name", "shape"), [("cora", (2708, 10556, 7)), ("amazon_computers", (13752, 491722, 10))])
def test_shared_graph_when_read_then_has_the_published_size(data_root, name, shape):
    nodes = read_nodes(data_root / f"graphs/{name}.npz", "npz")
    assert (nodes.graph.num_nodes, nodes.graph.num_edges, nodes.num_classes) == shape
