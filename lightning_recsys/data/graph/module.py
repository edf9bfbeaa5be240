"""Data modules of graphs: nodes to classify."""

# Shape suffixes: B seeds of a batch.

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.data.files import file_identities
from lightning_recsys.data.graph.batch import NODE_FIELD, GraphBatch, NodeFeatures, SampledBatches, SampledRows
from lightning_recsys.data.graph.csr import Ids
from lightning_recsys.data.graph.nodes import NodeData, check_split
from lightning_recsys.data.graph.readers import Format, read_nodes
from lightning_recsys.data.graph.sampling import NeighborSampler
from lightning_recsys.data.loader import Shuffle
from lightning_recsys.data.module import CTRDataModule, Split

_ORIGIN = "origin.json"
"""In a folder of arrays, what they were made from."""


class GraphDataModule(CTRDataModule):
    """What data modules of graphs share: sampled batches of the seeds that a subclass names.

    Args:
        num_neighbors: Neighbours that a node gets messages of, for each hop; -1 is all of them.
        eval_num_neighbors: The same for validation and test; ``None`` for as many as in training.
        replacement: Draw each neighbour from all of them, so that one may come twice.
        prefetch_batches: Training and evaluation batches that are sampled ahead, in a thread; 0 for none.
        **options: Further arguments of :class:`~lightning_recsys.data.CTRDataModule`.
    """

    _path: Path  # what a subclass reads

    def __init__(
        self,
        *,
        num_neighbors: Sequence[int],
        eval_num_neighbors: Sequence[int] | None = None,
        replacement: bool = False,
        prefetch_batches: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if prefetch_batches < 0:
            raise ValueError(f"data.prefetch_batches must be at least 0, got {prefetch_batches}.")
        if eval_num_neighbors is not None and len(eval_num_neighbors) != len(num_neighbors):
            raise ValueError(
                f"data.eval_num_neighbors must have a number for each hop of data.num_neighbors={list(num_neighbors)}, "
                f"got {list(eval_num_neighbors)}."
            )
        self.num_neighbors = tuple(num_neighbors)
        self.eval_num_neighbors = self.num_neighbors if eval_num_neighbors is None else tuple(eval_num_neighbors)
        self.replacement = replacement
        self.prefetch_batches = prefetch_batches

    @property
    @abstractmethod
    def nodes(self) -> NodeData:
        """The graph with its nodes, read when it is first asked for."""

    def _existing(self) -> Path:
        """What is read, which must be there."""
        if not self._path.exists():
            raise FileNotFoundError(
                f"data.file: there is no file or folder {self._path}. Relative paths start from data.root."
            )
        return self._path

    def setup(self, stage: str | None = None) -> None:
        """Read the nodes."""
        _ = self.nodes
        super().setup(stage)

    @property
    @abstractmethod
    def num_classes(self) -> int | None:
        """Classes of nodes; ``None`` where pairs of nodes are scored."""

    @property
    def model_arguments(self) -> dict[str, Any]:  # noqa: D102 - inherited
        return {**super().model_arguments, "num_classes": self.num_classes}

    def _sampler(self, split: Split) -> NeighborSampler:
        fan_outs = self.num_neighbors if split == "train" else self.eval_num_neighbors
        return NeighborSampler(self.nodes.graph, fan_outs, replacement=self.replacement)

    def _source(self, split: Split, shuffle: Shuffle | None) -> Any:
        rows: Any = self.rows(split)
        return None if rows is None else SampledBatches(rows, shuffle is not None, self.prefetch_batches)


@dataclass(frozen=True)
class SeedNodes(SampledRows):
    """The labelled nodes of a split."""

    nodes: NodeData
    seeds: Ids
    features: NodeFeatures
    sampler: NeighborSampler

    def __len__(self) -> int:
        return len(self.seeds)

    def take(self, rows: Tensor, *, key: int = 0) -> GraphBatch:
        """The seeds with these numbers, int64 ``[B]``, first among the nodes around them."""
        seeds_B = self.seeds[rows.numpy()]
        neighborhood = self.sampler.sample(seeds_B, key=key)
        labels_B = torch.from_numpy(self.nodes.labels[seeds_B])
        return GraphBatch(neighborhood, **self.features.take(neighborhood.n_id), labels=labels_B, size=len(seeds_B))


class NodeDataModule(GraphDataModule):
    """Nodes of one graph, to be classified from their own and their neighbours' features.

    Args:
        nodes: The nodes, or ``None`` to read ``file``.
        file: A file or folder to read, relative to ``root``.
        root: Folder in which ``file`` is looked for.
        format: Format of the file; see :func:`~lightning_recsys.data.graph.read_nodes`.
        mapped: A folder that gets the graph as plain arrays when it is first read; later runs, and all processes of
            this machine, map those. It must not lie in the folder that is read. ``None`` reads ``file`` into memory.
        split: ``{"validation": 0.1, "test": 0.1, "seed": 0}``: shares of the labelled nodes that are drawn; ``None``
            takes the file's own splits.
        node_ids: Give every node a row to train, as the feature ``node``.
        features: Whether the features in the file are used.
        batch_size: Number of seeds in the batch of one rank.
        num_neighbors: Neighbours that are sampled for each node, hop by hop; see :class:`GraphDataModule`.
        **options: ``eval_num_neighbors``, ``replacement`` and ``prefetch_batches`` as for :class:`GraphDataModule`;
            ``seed`` of the order of the training seeds and of their neighbours; ``drop_last`` to leave out the
            training seeds that do not fill a batch on every rank.

    Raises:
        ValueError: an argument is out of its range, the graph is bad, there are no splits, nodes have no feature, or
            ``mapped`` holds another graph.
    """

    def __init__(
        self,
        nodes: NodeData | None = None,
        *,
        file: str = "",
        root: str = ".",
        format: Format = "npz",
        mapped: str | None = None,
        split: Mapping[str, float] | None = None,
        node_ids: bool = True,
        features: bool = True,
        batch_size: int = 128,
        num_neighbors: Sequence[int] = (25, 10),
        **options: Any,
    ) -> None:
        super().__init__(num_neighbors=num_neighbors, batch_size=batch_size, **options)
        if (nodes is None) == (not file):
            raise ValueError("data needs nodes, or data.file to read them from, and not both.")
        if nodes is not None and mapped is not None:
            raise ValueError(
                "data.mapped is for data.file: save nodes with NodeData.save and give NodeData.open(folder)."
            )
        self._given, self._format = nodes, format
        self._path, self._mapped = Path(root).expanduser() / file, None if mapped is None else Path(mapped).expanduser()
        if self._mapped is not None and self._mapped.resolve().is_relative_to(self._path.resolve()):
            raise ValueError(f"data.mapped={mapped} lies in {self._path}, which is read: name a folder outside it.")
        check_split(split or {})
        self._split = None if split is None else dict(split)
        self._node_ids, self._features = node_ids, features

    def prepare_data(self) -> None:
        """Write the arrays that are to be mapped, unless they are there."""
        if self._mapped is not None and not self._mapped.exists():
            self._mapped.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=f"{self._mapped.name}.", dir=self._mapped.parent) as unfinished:
                folder, source = Path(unfinished) / "arrays", self._origin()
                self._read().save(folder)
                (folder / _ORIGIN).write_text(json.dumps(source))
                try:
                    folder.rename(self._mapped)  # whole, or not there
                except OSError:
                    if not self._mapped.exists():
                        raise  # else another run was first

    def _read(self) -> NodeData:
        return read_nodes(self._existing(), self._format) if self._given is None else self._given

    def _origin(self) -> dict[str, Any]:
        """What the arrays are made from; no files where they are gone."""
        path = self._path.resolve()
        found = (x for x in path.rglob("*") if x.is_file() and not x.name.startswith("."))
        files = sorted(found) if path.is_dir() else [path] * path.exists()
        return {"path": str(path), "format": self._format, "files": file_identities(files)}

    def _open(self, folder: Path) -> NodeData:
        """The arrays that were written, if they are of these files as these are now, or were when they were removed."""
        written = json.loads((folder / _ORIGIN).read_text()) if (folder / _ORIGIN).exists() else {}
        if not written:
            raise ValueError(
                f"data.mapped={folder} does not say what its arrays were made from, as folders of earlier versions: "
                "name another folder, or remove this one, and it is made anew."
            )
        source = self._origin()
        if not source["files"]:
            source["files"] = written.get("files")
        if source != written:
            raise ValueError(
                f"data.mapped={folder} holds arrays of {written.get('path', 'other files')} as data.format="
                f"{written.get('format')}, and not of {source['path']} as it is now, as data.format={self._format}: "
                "name another folder, or remove this one, and it is made anew."
            )
        return NodeData.open(folder)

    @cached_property
    def nodes(self) -> NodeData:
        """The nodes, with splits."""
        nodes = self._open(self._mapped) if self._mapped is not None and self._mapped.exists() else self._read()
        if self._split is not None:
            shares = {"validation": 0.0, "test": 0.0, "seed": 0} | self._split
            nodes = nodes.split(**shares)  # type: ignore[arg-type]
        if not len(nodes.splits.get("train", ())):
            raise ValueError(f"{self._path} says of no node that it is for training: draw some with data.split.")
        if not self._node_ids and not (self._features and (nodes.bags or nodes.dense is not None)):
            raise ValueError("nodes have no features: set data.node_ids=true, so that each has a row to train.")
        return nodes

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps or reads the nodes itself."""
        state = dict(self.__dict__)
        state.pop("nodes", None)
        return state

    @cached_property
    def _chosen(self) -> NodeFeatures:
        nodes = self.nodes
        return NodeFeatures(
            self._node_ids, nodes.bags if self._features else {}, nodes.dense if self._features else None
        )

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return 0 if self._chosen.dense is None else self._chosen.dense.shape[1]

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each sparse feature; ``node`` is the nodes' own numbers."""
        own = {NODE_FIELD: self.nodes.graph.num_nodes} if self._node_ids else {}
        return own | {name: bags.num_embeddings for name, bags in self._chosen.bags.items()}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.nodes.num_classes

    def has(self, split: Split) -> bool:
        """Whether the split has nodes."""
        return len(self.nodes.splits.get(split, ())) > 0

    def rows(self, split: Split) -> Any:
        """The nodes of a split; ``None`` if it has none."""
        if not self.has(split):
            return None
        nodes = self.nodes
        return SeedNodes(nodes, nodes.splits[split], self._chosen, self._sampler(split))
