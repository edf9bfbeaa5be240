"""Graphs in the files that people share them in."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from lightning_recsys.data.files import DAMAGED
from lightning_recsys.data.graph.csr import CSRGraph, Ids
from lightning_recsys.data.graph.nodes import UNLABELED, Bags, NodeData
from lightning_recsys.data.options import Split

WORDS = "words"
"""The name of a sparse feature that has none in its file."""

Format = Literal["npz", "planetoid", "reddit", "graphsaint", "ogb"]


def read_nodes(path: str | Path, format: Format) -> NodeData:
    """Nodes with labels, and splits where the files have them.

    Args:
        path: A file (``npz``) or a folder.
        format: ``npz``: arrays ``adj_indptr, adj_indices, adj_shape`` and ``labels``, features in ``attr_*`` likewise.
            ``planetoid``: ``ind.<name>.{x,tx,allx,y,ty,ally,graph,test.index}`` of one graph. ``reddit``:
            ``reddit_graph.npz`` and ``reddit_data.npz``. ``graphsaint``: ``adj_full.npz``, ``feats.npy``,
            ``class_map.json``, ``role.json``. ``ogb``: the folder of a node property prediction set, with ``raw`` and
            ``split``; of several node types the labelled one is read, edges to others become sparse features.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the format is unknown, or the graph is bad (:class:`NodeData`, :class:`CSRGraph`).
    """
    if format not in READERS:
        raise ValueError(f"data.format must be one of {', '.join(READERS)}, got {format!r}.")
    try:
        return READERS[format](Path(path))
    except (IsADirectoryError, NotADirectoryError, *DAMAGED) as error:
        raise ValueError(
            f"{path} cannot be read as data.format={format}: it is damaged, cut off or of another kind ({error})."
        ) from error
    except (KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not in the format {format!r}: {error} is missing or of another kind.") from error
    except ValueError as error:
        error.add_note(f"Raised while reading {path} as data.format={format}.")
        raise


def read_npz(path: Path) -> NodeData:
    """A file of the shared sets; rows of neighbours need not be sorted."""
    with path.open("rb") as file, np.load(file) as arrays:  # NumPy leaves a damaged file open
        graph = _graph(arrays, "adj_")
        if "attr_indptr" not in arrays:
            return NodeData(graph, as_classes(arrays["labels"]))
        numbers = arrays.get("attr_data", np.ones(len(arrays["attr_indices"]), np.float32))
        entries = _entries(arrays["attr_indptr"], arrays["attr_indices"], arrays["attr_shape"], numbers)
        return NodeData(graph, as_classes(arrays["labels"]), **_features(*entries))


def read_planetoid(folder: Path) -> NodeData:
    """Cora, Citeseer and Pubmed as published; only arrays, lists and matrices are taken out of their pickles."""
    names = sorted({path.name.split(".")[1] for path in folder.glob("ind.*.graph")})
    if len(names) != 1:
        raise FileNotFoundError(f"{folder} must have the files ind.<name>.graph and so on of one graph, got {names}.")

    def load(what: str) -> Any:
        with (folder / f"ind.{names[0]}.{what}").open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()

    test = np.loadtxt(folder / f"ind.{names[0]}.test.index", dtype=np.int64, ndmin=1)
    train_labels, known, tested = (np.asarray(load(what)) for what in ("y", "ally", "ty"))
    num_nodes = max(len(known) + len(test), int(test.max()) + 1)
    one_hot = np.zeros((num_nodes, known.shape[1]), known.dtype)
    one_hot[: len(known)], one_hot[test] = known, tested
    labels = np.where(one_hot.any(1), one_hot.argmax(1), UNLABELED)
    neighbors: Mapping[int, list[int]] = load("graph")
    targets = np.repeat(np.array(list(neighbors)), [len(x) for x in neighbors.values()])
    sources = np.array([node for nodes in neighbors.values() for node in nodes])
    graph = CSRGraph.from_edge_index(np.stack([sources, targets]), num_nodes=num_nodes, undirected=True)
    splits: dict[Split, Ids] = {
        "train": np.arange(len(train_labels)),
        "validation": np.arange(len(train_labels), min(len(train_labels) + 500, len(known))),
        "test": np.sort(test[labels[test] != UNLABELED]),
    }
    given = [_matrix(load(what)) for what in ("allx", "tx")]
    (known_words, _), (test_words, _) = given
    rows = np.concatenate([np.arange(len(known)), test])  # some nodes between them may have no features at all
    lengths = np.concatenate([np.diff(known_words.offsets), np.diff(test_words.offsets)])
    nodes, ids = np.repeat(rows, lengths), np.concatenate([known_words.ids, test_words.ids])
    numbers = np.concatenate([numbers for _, numbers in given])[np.argsort(nodes, kind="stable")]
    words = Bags.of_pairs(nodes, ids, num_nodes, max(known_words.num_embeddings, test_words.num_embeddings))
    return NodeData(graph, labels, splits=splits, **_features(words, numbers))


def read_reddit(folder: Path) -> NodeData:
    """Posts of Reddit, as GraphSAGE's authors prepared them."""
    with np.load(folder / "reddit_graph.npz") as adjacency, np.load(folder / "reddit_data.npz") as data:
        num_nodes = _square(adjacency["shape"])
        graph = CSRGraph.from_edge_index(np.stack([adjacency["row"], adjacency["col"]]), num_nodes=num_nodes)
        kinds: dict[Split, int] = {"train": 1, "validation": 2, "test": 3}
        splits = {split: np.flatnonzero(data["node_types"] == kind) for split, kind in kinds.items()}
        dense = data["feature"].astype(np.float32)
        return NodeData(graph, as_classes(data["label"]), dense=dense, splits=splits)


def read_graphsaint(folder: Path) -> NodeData:
    """A folder of GraphSAINT, with the edges of all nodes (``adj_full.npz``) in training, too."""
    with np.load(folder / "adj_full.npz") as adjacency:
        graph = _graph(adjacency)
    classes = json.loads((folder / "class_map.json").read_text())
    if any(isinstance(label, list) for label in classes.values()):
        raise ValueError("class_map.json has several classes for a node; NodeClassificationTask learns one.")
    labels = np.full(graph.num_nodes, UNLABELED)
    labels[np.array(list(classes), np.int64)] = as_classes(np.array(list(classes.values())))
    role = json.loads((folder / "role.json").read_text())
    keys: dict[Split, str] = {"train": "tr", "validation": "va", "test": "te"}
    splits = {split: np.sort(np.array(role[key], np.int64)) for split, key in keys.items()}
    return NodeData(graph, labels, dense=np.load(folder / "feats.npy").astype(np.float32), splits=splits)


def read_ogb(folder: Path) -> NodeData:
    """A set of the Open Graph Benchmark, for node property prediction, as its CSV files; edges go both ways."""
    raw = folder / "raw"
    target = _labelled_type(raw)
    counts = raw / ("num-node-list.csv.gz" if target is None else "num-node-dict.csv.gz")
    table = pacsv.read_csv(counts, read_options=pacsv.ReadOptions(autogenerate_column_names=target is None))
    num_nodes = {target if name == "f0" else name: int(table[name][0].as_py()) for name in table.column_names}
    edges, bags = [], {}
    if target is None:
        edges.append(_csv(raw / "edge.csv.gz").T)
    for relation in sorted((raw / "relations").glob("*___*___*")):
        (source, _, end), (sources, targets) = relation.name.split("___"), _csv(relation / "edge.csv.gz").T
        if source == end == target:
            edges.append(np.stack([sources, targets]))
        elif target in (source, end):
            other, nodes, ids = (end, sources, targets) if source == target else (source, targets, sources)
            bags[other] = Bags.of_pairs(nodes, ids, num_nodes[target], num_nodes[other])
    if not edges:
        raise ValueError(f"{raw} has no edges between nodes of the type {target!r}, which has the labels.")
    graph = CSRGraph.from_edge_index(np.concatenate(edges, 1), num_nodes=num_nodes[target], undirected=True)
    own = () if target is None else (target,)
    labels = _csv(raw.joinpath(*(() if target is None else ("node-label", target)), "node-label.csv.gz"))
    if labels.shape[1] != 1:
        raise ValueError(
            f"node-label.csv.gz has {labels.shape[1]} labels for a node; NodeClassificationTask learns one."
        )
    features = raw.joinpath(*(() if target is None else ("node-feat", target)), "node-feat.csv.gz")
    dense = _csv(features).astype(np.float32) if features.exists() else None
    (scheme,) = (path for path in (folder / "split").iterdir() if path.is_dir())
    names: dict[Split, str] = {"train": "train", "validation": "valid", "test": "test"}
    splits = {split: np.sort(_csv(scheme.joinpath(*own, f"{name}.csv.gz"))[:, 0]) for split, name in names.items()}
    classes = np.where(np.isnan(labels[:, 0]), UNLABELED, labels[:, 0])
    return NodeData(graph, as_classes(classes), bags, dense, splits)


def _labelled_type(raw: Path) -> str | None:
    if not (raw / "relations").is_dir():
        return None
    types = sorted(path.name for path in (raw / "node-label").iterdir() if path.is_dir())
    if len(types) != 1:
        raise ValueError(f"{raw / 'node-label'} must have the labels of one type of node, got {types}.")
    return types[0]


def _csv(path: Path) -> NDArray[Any]:
    table = pacsv.read_csv(path, read_options=pacsv.ReadOptions(autogenerate_column_names=True))
    return np.stack([column.to_numpy() for column in table.columns], 1)


def as_classes(labels: NDArray[Any]) -> Ids:
    """The labels of a file as classes, one for each node."""
    if labels.ndim != 1:
        raise ValueError(
            f"labels must be one class for each node, got an array of shape {list(labels.shape)}. Of rows that mark "
            "the class by a 1, save labels.argmax(1)."
        )
    if labels.dtype.kind == "f" and len(wrong := labels[~(np.isfinite(labels) & (np.trunc(labels) == labels))]):
        raise ValueError(f"labels must be classes, which are whole numbers, got {wrong[0]}.")
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"labels must be classes, which are whole numbers, got {labels.dtype}.")
    return labels.astype(np.int64)


def _graph(arrays: Any, prefix: str = "") -> CSRGraph:
    """The graph of a matrix that a file has in compressed rows."""
    graph = CSRGraph(arrays[f"{prefix}indptr"].astype(np.int64), arrays[f"{prefix}indices"])
    if graph.num_nodes != (num_nodes := _square(arrays[f"{prefix}shape"])):
        raise ValueError(f"{prefix}shape says {num_nodes} nodes, {prefix}indptr {graph.num_nodes}.")
    return graph


def _square(shape: NDArray[Any]) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"the matrix of a graph must be square, got {list(shape)}.")
    return int(shape[0])


def _entries(indptr: Any, indices: Any, shape: Any, numbers: NDArray[Any]) -> tuple[Bags, NDArray[Any]]:
    """The columns of each row of a matrix in compressed rows, as files have them, and the numbers there."""
    starts, columns = np.asarray(indptr), np.asarray(indices)
    if len(shape) != 2 or any(x.ndim != 1 or x.dtype.kind not in "iu" for x in (starts, columns)):
        raise ValueError("a matrix of features must have two dimensions, and its indices must be integers.")
    num_rows, num_columns = map(int, shape)
    if len(starts) != num_rows + 1:
        raise ValueError(f"a matrix of features has {num_rows} rows, and indices of {len(starts) - 1}.")
    bags = Bags(starts.astype(np.int64), columns, num_columns)  # before a column that is too large could be cut to fit
    if numbers.shape != columns.shape or numbers.dtype.kind not in "biuf":
        raise ValueError(
            f"a matrix of features must have a number for each of its {len(columns)} entries, got {numbers.dtype} of "
            f"shape {list(numbers.shape)}."
        )
    return replace(bags, ids=columns.astype(np.int32 if num_columns <= 1 << 31 else np.int64, copy=False)), numbers


def _features(entries: Bags, numbers: NDArray[Any]) -> dict[str, Any]:
    """From a matrix with a row for each node: sparse features where every number is 1, else dense ones."""
    if (numbers == 1).all():
        return {"bags": {WORDS: entries}}
    dense = np.zeros((len(entries.offsets) - 1, entries.num_embeddings), np.float32)
    rows = np.repeat(np.arange(len(dense)), np.diff(entries.offsets))
    np.add.at(dense, (rows, entries.ids), numbers)
    return {"dense": dense}


class _Matrix:
    """Takes the state of a pickled matrix of SciPy's in compressed rows, which is not imported for it."""


def _matrix(found: Any) -> tuple[Bags, NDArray[Any]]:
    """The columns of each row, and the numbers there."""
    if not isinstance(found, _Matrix):
        raise ValueError(f"features must be a matrix of SciPy's in compressed rows, got {type(found).__name__}.")
    state = vars(found)
    return _entries(state["indptr"], state["indices"], state["_shape"], np.asarray(state["data"]))


class _ArraysOnly(pickle.Unpickler):
    """Unpickles lists, dictionaries, arrays and the state of SciPy's matrices, and nothing that could do something."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ("csr_matrix", "csr_array") and module.startswith("scipy.sparse"):
            return _Matrix
        if (module, name) == ("collections", "defaultdict"):
            return defaultdict
        if name in ("list", "int", "object") and module in ("builtins", "__builtin__"):
            return {"list": list, "int": int, "object": object}[name]
        if (module, name) in (("copy_reg", "_reconstructor"), ("copyreg", "_reconstructor"), ("_codecs", "encode")):
            return super().find_class(module, name)
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


READERS: dict[str, Callable[[Path], NodeData]] = {
    "npz": read_npz,
    "planetoid": read_planetoid,
    "reddit": read_reddit,
    "graphsaint": read_graphsaint,
    "ogb": read_ogb,
}
