"""PyTorch Geometric's objects: taken by duck type, and our graphs and tables handed over as its stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.data.graph.batch import NODE_FIELD
from lightning_recsys.data.graph.csr import CSRGraph, Ids
from lightning_recsys.data.graph.interactions import Interactions
from lightning_recsys.data.graph.nodes import UNLABELED, Bags, NodeData
from lightning_recsys.data.graph.readers import as_classes
from lightning_recsys.data.options import Split
from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures

_MASKS: dict[Split, str] = {"train": "train_mask", "validation": "val_mask", "test": "test_mask"}


def from_pyg(data: Any, *, target: str | None = None) -> NodeData:
    """Nodes of a ``Data`` object, or of one type of a ``HeteroData`` object.

    Args:
        data: Anything with ``edge_index``, ``num_nodes`` and perhaps ``x``, ``y`` and masks; or with such a part for
            each node and edge type.
        target: The node type of a ``HeteroData`` object; may be left out where there is only one. Edges within the type
            are the graph; nodes of other types become sparse features, as authors of papers.

    Raises:
        ValueError: a heterogeneous object without such a type, or a bad graph.
    """
    if target is None and not hasattr(data, "edge_index"):
        types = list(getattr(data, "node_types", ()))
        if len(types) != 1:
            raise ValueError(f"the object has the node types {types}: name the target among them.")
        (target,) = types
    nodes = data if target is None else data[target]
    num_nodes = int(nodes.num_nodes)
    edges: list[Any] = []
    bags: dict[str, Bags] = {}
    for source, end, edge_index in _edges(data, target):
        if source == end:
            edges += [edge_index] if source == target else []
        elif target in (source, end):
            other, row = (source, 1) if end == target else (end, 0)
            own, ids = edge_index[row], edge_index[1 - row]
            if str(other) not in bags:  # a relation and its reverse are one
                bags[str(other)] = Bags.of_pairs(own, ids, num_nodes, int(data[other].num_nodes))
    graph = CSRGraph.from_edge_index(np.concatenate(edges or [np.empty((2, 0), int)], 1), num_nodes=num_nodes)
    y, x = getattr(nodes, "y", None), getattr(nodes, "x", None)
    given: Any = np.full(num_nodes, UNLABELED) if y is None else _array(y)
    if given.size != num_nodes:
        raise ValueError(f"y must have one label for each of {num_nodes} nodes, got the shape {list(given.shape)}.")
    labels = as_classes(np.where(np.isnan(given), UNLABELED, given).reshape(-1))
    return NodeData(graph, labels, bags, None if x is None else _array(x).astype(np.float32), _splits(nodes, labels))


def _splits(nodes: Any, labels: Ids) -> dict[Split, Ids]:
    """The labelled nodes that masks mark."""
    splits: dict[Split, Ids] = {}
    for split, name in _MASKS.items():
        if (mask := getattr(nodes, name, None)) is not None:
            marked = _array(mask)
            if marked.shape != labels.shape:
                raise ValueError(
                    f"{name} must mark each of {len(labels)} nodes once, got the shape {list(marked.shape)}."
                )
            splits[split] = np.flatnonzero(marked & (labels != UNLABELED))
    return splits


def interactions_from_pyg(data: Any, edge_type: tuple[str, str, str]) -> Interactions:
    """Edges of one type of a ``HeteroData`` object, from users to items.

    Args:
        data: Anything with ``data[node_type].num_nodes`` and ``data[edge_type].edge_index``.
        edge_type: Type of the users, name of the edges, type of the items.
    """
    pairs = np.unique(_array(data[edge_type].edge_index), axis=1)
    users, _, items = edge_type
    return Interactions(pairs[0], pairs[1], int(data[users].num_nodes), int(data[items].num_nodes))


def to_pyg(nodes: NodeData, embeddings: EmbeddingBagCollection | None = None) -> tuple[Any, Any]:
    """The pair ``(FeatureStore, GraphStore)`` that PyG's loaders take.

    The feature store has ``x`` (dense features), ``y`` (labels) and ``embedding``: the nodes' rows, looked up when they
    are asked for, wherever a strategy keeps them. Nothing is copied before, and nothing can be put in.

    Args:
        nodes: Their only node type is ``node``, their only edge type ``("node", "to", "node")``.
        embeddings: A collection with the feature ``node``, such as ``GraphSAGE.node_embeddings``.

    Raises:
        ImportError: PyG is not installed.
    """
    return _feature_store(nodes, embeddings), _graph_store(nodes.graph)


def _feature_store(nodes: NodeData, embeddings: EmbeddingBagCollection | None) -> Any:
    from torch_geometric.data import FeatureStore, TensorAttr

    there = {"x": nodes.dense is not None, "y": True, "embedding": embeddings is not None}
    names = [name for name, has in there.items() if has]

    def take(name: str, index: Tensor) -> Tensor:
        if name == "embedding":
            assert embeddings is not None
            with torch.no_grad():
                rows: Tensor = embeddings(SparseFeatures((NODE_FIELD,), index))[:, 0]
            return rows
        array: Any = nodes.labels if name == "y" else nodes.dense
        return torch.from_numpy(array[index.numpy()])

    class Features(FeatureStore):  # type: ignore[misc]
        def _get_tensor(self, attr: Any) -> Tensor | None:
            if attr.attr_name not in names or attr.group_name != NODE_FIELD:
                return None
            whole = slice(None) if attr.index is None else attr.index
            return take(attr.attr_name, torch.arange(nodes.graph.num_nodes)[whole])

        def _get_tensor_size(self, attr: Any) -> tuple[int, ...]:
            return nodes.graph.num_nodes, *take(attr.attr_name, torch.arange(1)).shape[1:]

        def get_all_tensor_attrs(self) -> list[Any]:
            return [TensorAttr(NODE_FIELD, name) for name in names]

        def _put_tensor(self, tensor: Any, attr: Any) -> bool:
            return False

        def _remove_tensor(self, attr: Any) -> bool:
            return False

    return Features()


def _graph_store(graph: CSRGraph) -> Any:
    from torch_geometric.data import EdgeAttr, GraphStore
    from torch_geometric.data.graph_store import EdgeLayout

    edge_type, size = (NODE_FIELD, "to", NODE_FIELD), (graph.num_nodes, graph.num_nodes)

    class Edges(GraphStore):  # type: ignore[misc]
        def _get_edge_index(self, attr: Any) -> tuple[Tensor, Tensor] | None:
            if tuple(attr.edge_type) != edge_type or attr.layout != EdgeLayout.CSC:
                return None
            return torch.from_numpy(np.asarray(graph.indices)), torch.from_numpy(np.asarray(graph.indptr))

        def get_all_edge_attrs(self) -> list[Any]:
            return [EdgeAttr(edge_type, EdgeLayout.CSC, size=size)]

        def _put_edge_index(self, edge_index: Any, attr: Any) -> bool:
            return False

        def _remove_edge_index(self, attr: Any) -> bool:
            return False

    return Edges()


def _edges(data: Any, target: str | None) -> list[tuple[str | None, str | None, Any]]:
    if target is None:
        return [(None, None, _array(data.edge_index))]
    return [(kind[0], kind[2], _array(data[kind].edge_index)) for kind in data.edge_types]


def _array(tensor: Any) -> Any:
    return tensor.numpy() if isinstance(tensor, Tensor) else np.asarray(tensor)
