"""Data modules of graphs: nodes to classify."""

# Shape suffixes: B seeds of a batch.

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from lightning_recsys.data.graph.node_tables import node_table_files, read_node_tables
from lightning_recsys.data.graph.nodes import NodeData, check_split
from lightning_recsys.data.graph.readers import Format, read_nodes
from lightning_recsys.data.graph.sampling import NeighborSampler
from lightning_recsys.data.graph.tables import TableOptions, named_table
from lightning_recsys.data.loader import Shuffle
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.options import Split

_ORIGIN = "origin.json"
"""In a folder of arrays, what they were made from."""


class GraphDataModule(CTRDataModule):
    """The base class of data modules of graphs: sampled batches of the seeds that a subclass names.

    Args:
        num_neighbors: Neighbours that a node gets messages of, for each hop; -1 is all of them.
        eval_num_neighbors: The same for validation and test; ``None`` for as many as in training.
        replacement: Draw each neighbour from all of them, so that one may come twice.
        prefetch_batches: Training and evaluation batches that are sampled ahead, in a thread; 0 for none.
        **options: Further arguments of :class:`~lightning_recsys.data.CTRDataModule`.
    """

    _path: Path  # what a subclass reads
    _trained_digest: str | None = None  # of the checkpoint that was loaded

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
        """The files that are read, which must be there."""
        if not self._path.exists():
            raise FileNotFoundError(
                f"data.file: there is no file or folder {self._path}. Relative paths start from data.root."
            )
        return self._path

    def setup(self, stage: str | None = None) -> None:
        """Read the nodes.

        Raises:
            ValueError: they are not those that the checkpoint was trained on.
        """
        _ = self.nodes
        if self._trained_digest is not None and self._trained_digest != self.digest:
            raise ValueError(
                f"data: the tables in {self._path} are not those that the checkpoint was trained on: nodes, their "
                "order, classes or features differ. The model would take some for others: use the tables of that run."
            )
        super().setup(stage)

    @property
    @abstractmethod
    def digest(self) -> str | None:
        """A checksum of how tables number nodes, classes and features; ``None`` where no table does."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the training rows, and the checksum of the nodes."""
        return {**({} if self.digest is None else {"nodes": self.digest}), **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the position; :meth:`setup` compares the nodes."""
        super().load_state_dict(state_dict)
        self._trained_digest = state_dict.get("nodes")

    @property
    @abstractmethod
    def node_features(self) -> NodeFeatures:
        """The node features that batches have."""

    @property
    @abstractmethod
    def num_classes(self) -> int | None:
        """Classes of nodes; ``None`` where pairs of nodes are scored."""

    @property
    def model_arguments(self) -> dict[str, Any]:  # noqa: D102 - inherited
        return {**super().model_arguments, "num_classes": self.num_classes}

    def around(self, seeds: Ids) -> SampledRows:
        """Rows with these nodes as seeds, int64, and neighbours as in evaluation: for predictions."""
        return SeedNodes(self.nodes, seeds, self.node_features, self._sampler("predict"))

    def _sampler(self, split: Split) -> NeighborSampler:
        fan_outs = self.num_neighbors if split == "train" else self.eval_num_neighbors
        return NeighborSampler(self.nodes.graph, fan_outs, replacement=self.replacement)

    def _source(self, split: Split, shuffle: Shuffle | None) -> Any:
        rows: Any = self.rows(split)
        return None if rows is None else SampledBatches(rows, shuffle is not None, self.prefetch_batches)


@dataclass(frozen=True)
class SeedNodes(SampledRows):
    """Some nodes, such as the labelled ones of a split."""

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
        nodes: The nodes; or the table that they are read from together with ``edges``; or ``None`` to read ``file``. A
            table is the path of its file (CSV, TSV or the like, Parquet), or a mapping: ``files``; ``id``, the column
            that names each node once; ``label``, that of its class; perhaps ``split`` (train, validation, test or
            nothing) and ``time``; its features, by the keys of a schema (``dense``, ``categorical``, ``multi_valued``,
            ``vectors``, ``ignore``; docs/data.md), which are guessed if there are none; and how it is written.
        edges: The table of the edges: its path, or a mapping with ``files``, ``source`` and ``target`` (the columns
            that hold ids of nodes), perhaps ``weight``, and ``undirected`` (true if absent).
        file: A file or folder to read, relative to ``root``, in place of tables.
        root: Folder in which files are looked for.
        format: Format of the file; see :func:`~lightning_recsys.data.graph.read_nodes`.
        mapped: A folder that gets the graph as plain arrays when it is first read; later runs, and all processes of
            this machine, map those. It must not lie in the folder that is read. ``None`` reads ``file`` into memory.
        split: ``{"validation": 0.1, "test": 0.1, "seed": 0}``: shares of the labelled nodes that are drawn; with
            ``"by": "time"`` the latest ones; ``None`` takes the file's own splits, or draws a tenth each where a table
            has none.
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
        nodes: NodeData | TableOptions | None = None,
        *,
        edges: TableOptions | None = None,
        file: str = "",
        root: str = ".",
        format: Format = "npz",
        mapped: str | None = None,
        split: Mapping[str, Any] | None = None,
        node_ids: bool = True,
        features: bool = True,
        batch_size: int = 128,
        num_neighbors: Sequence[int] = (25, 10),
        **options: Any,
    ) -> None:
        super().__init__(num_neighbors=num_neighbors, batch_size=batch_size, **options)
        nodes, edges = named_table(nodes), named_table(edges)
        is_table = nodes is not None and not isinstance(nodes, NodeData)
        if (nodes is None) == (not file):
            raise ValueError(
                "data needs nodes, or data.file to read them from, and not both: name data.nodes and data.edges, which "
                "are tables, or data.file and data.format."
            )
        if is_table != (edges is not None):
            raise ValueError("data.nodes and data.edges are two tables of one graph: name both.")
        if isinstance(nodes, NodeData) and mapped is not None:
            raise ValueError(
                "data.mapped is for data.file: save nodes with NodeData.save and give NodeData.open(folder)."
            )
        self._given = nodes if isinstance(nodes, NodeData) else None
        self._root = Path(root).expanduser()
        self._tables = (nodes, edges) if is_table else None
        self._format, self._path = format, self._root / file
        self._mapped = None if mapped is None else Path(mapped).expanduser()
        if file and self._mapped is not None and self._mapped.resolve().is_relative_to(self._path.resolve()):
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
        if self._tables is not None:
            return read_node_tables(*self._tables, root=self._root)  # type: ignore[arg-type]
        return read_nodes(self._existing(), self._format) if self._given is None else self._given

    def _origin(self) -> dict[str, Any]:
        """The files that the arrays are made from; none where they are gone."""
        path = self._path.resolve()
        if self._tables is not None:
            with suppress(FileNotFoundError):  # what was read may be gone, once it was written
                files = node_table_files(*self._tables, self._root)  # type: ignore[arg-type]
                return {"path": str(path), "format": list(self._tables), "files": file_identities(files)}
            return {"path": str(path), "format": list(self._tables), "files": []}
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
        shares = self._split
        if shares is None and self._tables is not None and not nodes.splits:
            shares = {"validation": 0.1, "test": 0.1}
        if shares is not None:
            nodes = nodes.split(**({"validation": 0.0, "test": 0.0} | shares))
        if not len(nodes.splits.get("train", ())):
            raise ValueError(f"{self._path} says of no node that it is for training: draw some with data.split.")
        if not self._node_ids and not (self._features and (nodes.bags or nodes.dense is not None)):
            raise ValueError("nodes have no features: set data.node_ids=true, so that each has a row to train.")
        return nodes

    @cached_property
    def digest(self) -> str | None:
        """See the base class."""
        nodes = self.nodes
        return None if nodes.ids is None else nodes.digest(nodes.ids)

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps or reads the nodes itself."""
        state = dict(self.__dict__)
        state.pop("nodes", None)
        return state

    @cached_property
    def node_features(self) -> NodeFeatures:
        """See the base class."""
        nodes = self.nodes
        return NodeFeatures(
            self._node_ids, nodes.bags if self._features else {}, nodes.dense if self._features else None
        )

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return 0 if self.node_features.dense is None else self.node_features.dense.shape[1]

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each sparse feature; ``node`` is the nodes' own numbers."""
        own = {NODE_FIELD: self.nodes.graph.num_nodes} if self._node_ids else {}
        return own | {name: bags.num_embeddings for name, bags in self.node_features.bags.items()}

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
        return SeedNodes(nodes, nodes.splits[split], self.node_features, self._sampler(split))
