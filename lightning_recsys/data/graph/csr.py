"""A graph in compressed rows: of every node, whose messages it gets."""

# Shape suffixes: N nodes, E edges.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.graph.building import compress_rows

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class CSRGraph:
    """Neighbours of each node, perhaps in files that are mapped (:meth:`open`).

    Row ``v`` holds the sources of the edges that end in ``v``, which is whom PyG samples for ``v``. An edge that comes
    twice counts twice.

    Args:
        indptr: Where each node's neighbours begin and the last one's end, int64 ``[N + 1]``.
        indices: The neighbours, int32 or int64 ``[E]``.
        weights: How much each neighbour's message counts, from 0 on, float32 ``[E]``; ``None`` where all count alike.

    Raises:
        ValueError: ``indptr`` does not rise from 0 to the number of edges, a neighbour is no node, or a weight is
            negative or not finite.
        TypeError: the arrays are not flat and of integers.

    >>> graph = CSRGraph.from_edge_index([[1, 2, 0], [0, 0, 1]], num_nodes=4)
    >>> graph.num_nodes, graph.num_edges, graph.neighbors(0).tolist(), graph.degrees().tolist()
    (4, 3, [1, 2], [2, 1, 0, 0])
    """

    indptr: Ids
    indices: NDArray[Any]
    weights: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        for name, array in (("indptr", self.indptr), ("indices", self.indices)):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise TypeError(f"graph.{name} must be flat and of integers, got {array.dtype} of {list(array.shape)}.")
        num_edges = len(self.indices)
        if not len(self.indptr) or self.indptr[0] != 0 or self.indptr[-1] != num_edges:
            raise ValueError(
                f"graph.indptr must rise from 0 to the number of edges, {num_edges}, got "
                f"{'nothing' if not len(self.indptr) else f'{self.indptr[0]} to {self.indptr[-1]}'}."
            )
        if len(fall := np.flatnonzero(np.diff(self.indptr) < 0)):
            raise ValueError(
                f"graph.indptr must not fall, as it does behind node {fall[0]}: the rows are not in order."
            )
        _check_nodes(self.indices, self.num_nodes)
        if self.weights is not None:
            _check_weights(self.weights, num_edges)

    @property
    def num_nodes(self) -> int:
        """``N``, nodes without an edge included."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """``E``; an edge that goes both ways is two."""
        return len(self.indices)

    def neighbors(self, node: int) -> NDArray[Any]:
        """Whose messages a node gets."""
        return self.indices[self.indptr[node] : self.indptr[node + 1]]

    def degrees(self) -> Ids:
        """Number of neighbours of each node, int64 ``[N]``."""
        return np.diff(self.indptr).astype(np.int64, copy=False)

    @classmethod
    def from_edge_index(
        cls, edge_index: Any, *, num_nodes: int, undirected: bool = False, weights: Any = None
    ) -> CSRGraph:
        """From edges in PyG's layout, in any order.

        Args:
            edge_index: Sources and targets, integers ``[2, E]``.
            num_nodes: Number of nodes ``N`` of the graph; nodes without edges count as well.
            undirected: Let every edge go both ways; one that is there both ways already, or more than once, counts
                once each way, with the sum of its weights.
            weights: A weight for each edge, numbers from 0 on ``[E]``; ``None`` where all count alike.

        Raises:
            ValueError: the shape is another one, an edge names a node that is not there, or a weight is negative or not
                finite.

        Memory: that of the arguments, and twice that of the graph.
        """
        edges = np.asarray(edge_index)
        if edges.ndim != 2 or edges.shape[0] != 2 or (edges.size and edges.dtype.kind not in "iu"):
            raise ValueError(f"edge_index must be integers of shape [2, E], got {edges.dtype} of {list(edges.shape)}.")
        _check_nodes(edges, num_nodes)
        if weights is not None:
            weights = np.asarray(weights)
            _check_weights(weights, edges.shape[1])
        return cls(*compress_rows(edges, weights, num_nodes=num_nodes, undirected=undirected))

    def edge_index(self) -> Tensor:
        """Sources and targets, int64 ``[2, E]``, by target."""
        target = np.repeat(np.arange(self.num_nodes), self.degrees())
        return torch.from_numpy(np.stack([np.asarray(self.indices, np.int64), target]))

    def save(self, folder: str | Path) -> None:
        """Write the arrays, for :meth:`open`."""
        weights = {} if self.weights is None else {"weights": self.weights}
        (Path(folder) / "weights.npy").unlink(missing_ok=True)  # of a graph that was there before
        save_arrays(folder, {"indptr": self.indptr, "indices": self.indices, **weights})

    @classmethod
    def open(cls, folder: str | Path) -> CSRGraph:
        """A graph that was saved; its arrays are mapped, so that processes of a machine share them.

        Raises:
            FileNotFoundError: there is no saved graph.
        """
        path = Path(folder)
        weights = np.load(path / "weights.npy", mmap_mode="r") if (path / "weights.npy").exists() else None
        return cls(np.load(path / "indptr.npy", mmap_mode="c"), np.load(path / "indices.npy", mmap_mode="r"), weights)


def _check_nodes(ends: NDArray[Any], num_nodes: int) -> None:
    """Raise ``ValueError`` if an end of an edge is no node."""
    if ends.size and not 0 <= (low := int(ends.min())) <= (high := int(ends.max())) < num_nodes:
        raise ValueError(f"edges must be between nodes 0 to {num_nodes - 1}, got node {low if low < 0 else high}.")


def _check_weights(weights: NDArray[Any], num_edges: int) -> None:
    """Raise ``ValueError`` unless there is a weight from 0 on for each edge."""
    if weights.shape != (num_edges,) or weights.dtype.kind not in "fiub":
        raise ValueError(
            f"weights must be a number for each of {num_edges} edges, got {weights.dtype} of {list(weights.shape)}."
        )
    if num_edges and not (weights.min() >= 0 and weights.max() < np.inf):  # not a number is no minimum
        wrong = int(np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))[0])
        raise ValueError(f"weights of edges must be finite and from 0 on, got {weights[wrong]} of edge {wrong}.")


def save_arrays(folder: str | Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write each array to a file of its name, in a folder that is made."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
