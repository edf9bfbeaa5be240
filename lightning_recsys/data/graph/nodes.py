"""A graph whose nodes have features and labels."""

# Shape suffixes: N nodes, C dense features.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import feather

from lightning_recsys.data.graph.csr import CSRGraph, Ids, save_arrays
from lightning_recsys.data.options import Split
from lightning_recsys.data.raw.kernels import hash_values

SplitBy = Literal["share", "time"]

UNLABELED = -1
"""The label of a node that has none: it is in no split, and its neighbours see it like any other."""


_MANY_CLASSES = 1 << 16  # that a graph with fewer nodes can have: some of a large graph's labels


@dataclass(frozen=True)
class Bags:
    """A sparse feature: some ids for each node, such as the words of its text.

    Args:
        offsets: Where each node's ids begin and the last one's end, int64 ``[N + 1]``.
        ids: The ids of all nodes one after the other, int32 or int64.
        num_embeddings: Number of different ids; every id is smaller.

    Raises:
        ValueError: the offsets do not cover the ids, or an id is outside.
    """

    offsets: Ids
    ids: NDArray[Any]
    num_embeddings: int

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"offsets of a node feature must rise from 0 to the number of its ids, {len(self.ids)}.")
        if len(self.ids) and not 0 <= self.ids.min() <= self.ids.max() < self.num_embeddings:
            raise ValueError(
                f"ids of a node feature must be from 0 to {self.num_embeddings - 1}, got {self.ids.min()} to "
                f"{self.ids.max()}."
            )

    @classmethod
    def of_pairs(cls, nodes: Ids, ids: NDArray[Any], num_nodes: int, num_embeddings: int) -> Bags:
        """From pairs of a node and one of its ids, in any order."""
        offsets = np.concatenate([[0], np.bincount(nodes, minlength=num_nodes).cumsum()])
        return cls(offsets, ids[np.argsort(nodes, kind="stable")], num_embeddings)


@dataclass(frozen=True)
class NodeData:
    """Nodes of a graph, in memory or mapped (:meth:`open`).

    Args:
        graph: The edges between the nodes.
        labels: Classes, int64 ``[N]``, :data:`UNLABELED` where there is none.
        bags: The sparse features by name.
        dense: Numeric features, float32 ``[N, C]``; ``None`` where the nodes have none.
        splits: Labelled nodes for training, validation and test, where the data say so.
        ids: What the nodes are called in their table, Arrow integers or strings ``[N]``, where they come from one.
        classes: What the classes are called there.
        times: The time of each node, float64 ``[N]``, where their table has one.

    Raises:
        ValueError: something has not ``N`` nodes, a dense feature is no number, a split names a node without a label.
    """

    graph: CSRGraph
    labels: Ids
    bags: Mapping[str, Bags] = field(default_factory=dict)
    dense: NDArray[np.float32] | None = None
    splits: Mapping[Split, Ids] = field(default_factory=dict)
    ids: pa.Array | None = None
    classes: tuple[str, ...] | None = None
    times: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        num_nodes = self.graph.num_nodes
        counts = {"labels": len(self.labels)} | {name: len(bags.offsets) - 1 for name, bags in self.bags.items()}
        others = {name: getattr(self, name) for name in ("dense", "ids", "times")}
        counts |= {name: len(array) for name, array in others.items() if array is not None}
        if wrong := {name: count for name, count in counts.items() if count != num_nodes}:
            raise ValueError(f"the graph has {num_nodes} nodes, and so must its features and labels, got {wrong}.")
        if self.dense is not None and not np.isfinite(self.dense).all():
            raise ValueError("dense features of nodes must be finite numbers: fill or leave out what is missing.")
        if len(self.labels) and self.labels.min() < UNLABELED:
            raise ValueError(f"labels must be classes from 0, or {UNLABELED} for none, got {self.labels.min()}.")
        if self.num_classes > max(num_nodes, _MANY_CLASSES):
            raise ValueError(
                f"the label {self.num_classes - 1} of node {self.labels.argmax()} makes {self.num_classes} classes "
                f"of {num_nodes} nodes. Classes are numbered from 0; nodes that have none have the label {UNLABELED}."
            )
        for split, nodes in self.splits.items():
            if len(nodes) and not 0 <= nodes.min() <= nodes.max() < num_nodes:
                raise ValueError(f"the {split} split names nodes outside 0 to {num_nodes - 1}.")
            if len(missing := nodes[self.labels[nodes] == UNLABELED]):
                raise ValueError(f"the {split} split has {len(missing)} nodes without a label, such as {missing[0]}.")

    @property
    def num_classes(self) -> int:
        """One more than the highest label."""
        return int(self.labels.max(initial=-1)) + 1

    def split(self, *, validation: float, test: float, seed: int = 0, by: SplitBy = "share") -> NodeData:
        """The same nodes with other splits of the labelled ones: these shares, and the rest to train.

        Args:
            validation: Share of the nodes to choose by.
            test: Share of the nodes to test on.
            seed: Seed of the draw.
            by: ``share`` draws them at random; ``time`` takes the latest, test nodes last. Nodes of one time stay
                together, in the later split.

        Raises:
            ValueError: nothing is left to train on, or the nodes have no times to split by.
        """
        nodes = np.flatnonzero(self.labels != UNLABELED)
        if by == "time":
            if self.times is None:
                raise ValueError("data.split.by is time, and the nodes have none: name its column as data.nodes.time.")
            parts = split_by_time(self.times[nodes], validation=validation, test=test)
        else:
            parts = draw_splits(len(nodes), validation=validation, test=test, seed=seed)
        return replace(self, splits={name: nodes[part] for name, part in parts.items() if len(part)})

    def digest(self, *ids: pa.Array) -> str:
        """A checksum of ids, classes and features: another one where a model would take some of them for others.

        Args:
            ids: What the nodes are called, in one array or several.
        """
        digest = hashlib.blake2b(repr((self.classes, list(self.bags))).encode(), digest_size=16)
        arrays = [array for bags in self.bags.values() for array in (bags.offsets, bags.ids)]
        arrays += [] if self.dense is None else [self.dense]
        arrays += [hash_values(names.cast(pa.string()).cast(pa.binary())) for names in ids]
        for array in arrays:
            digest.update(f"{len(array)} ".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write everything, for :meth:`open`."""
        path = Path(folder)
        self.graph.save(path)
        arrays: dict[str, NDArray[Any]] = {
            "labels": self.labels,
            **({} if self.dense is None else {"dense": self.dense}),
        }
        arrays |= {f"split_{name}": nodes for name, nodes in self.splits.items()}
        arrays |= {} if self.times is None else {"times": self.times}
        for name, bags in self.bags.items():
            arrays |= {f"bag_{name}_offsets": bags.offsets, f"bag_{name}_ids": bags.ids}
        save_arrays(path, arrays)
        bags_of = {name: bags.num_embeddings for name, bags in self.bags.items()}
        if self.ids is not None:
            feather.write_feather(pa.table({"id": self.ids}), path / "ids.arrow", compression="uncompressed")
        about = {"bags": bags_of, "splits": list(self.splits), "classes": self.classes}
        (path / "nodes.json").write_text(json.dumps(about))

    @classmethod
    def open(cls, folder: str | Path) -> NodeData:
        """Nodes that were saved; arrays are mapped, so that processes of a machine share them.

        Raises:
            FileNotFoundError: there are no saved nodes.
        """
        path = Path(folder)
        about = json.loads((path / "nodes.json").read_text())

        def load(name: str) -> NDArray[Any]:
            array: NDArray[Any] = np.load(path / f"{name}.npy", mmap_mode="c")
            return array

        return cls(
            CSRGraph.open(path),
            load("labels"),
            {name: Bags(load(f"bag_{name}_offsets"), load(f"bag_{name}_ids"), n) for name, n in about["bags"].items()},
            load("dense") if (path / "dense.npy").exists() else None,
            {split: load(f"split_{split}") for split in about["splits"]},
            ids=feather.read_table(path / "ids.arrow")["id"].combine_chunks()
            if (path / "ids.arrow").exists()
            else None,
            classes=None if (classes := about.get("classes")) is None else tuple(classes),
            times=load("times") if (path / "times.npy").exists() else None,
        )


def check_split(split: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` about a key or a value of ``data.split`` that nothing would read."""
    if unknown := set(split) - {"validation", "test", "seed", "by"}:
        raise ValueError(f"data.split takes validation, test, seed and by, got {', '.join(sorted(unknown))}.")
    if split.get("by", "share") not in get_args(SplitBy):
        raise ValueError(f"data.split.by must be share or time, got {split['by']!r}.")


def split_by_time(times: NDArray[np.float64], *, validation: float, test: float) -> dict[Split, Ids]:
    """Which rows are in each split: the latest are for test, those before them for validation, the others to train.

    Rows of one time stay together, in the later split.

    Raises:
        ValueError: a split that has a share gets no row.
    """
    _check_shares(validation, test)
    count, ordered = len(times), np.sort(times)
    held_out, tested = (round(share * count) for share in (validation + test, test))
    first = ordered[count - held_out] if held_out else np.inf
    last = ordered[count - tested] if tested else np.inf
    parts: dict[Split, Ids] = {
        "test": np.flatnonzero(times >= last),
        "validation": np.flatnonzero((times >= first) & (times < last)),
        "train": np.flatnonzero(times < first),
    }
    for name, share in (("train", 1.0), ("validation", validation), ("test", test)):
        if share and not len(parts[name]):  # type: ignore[index]
            raise ValueError(
                f"data.split leaves no {name} rows of {count} by time: too many have the same time. Use other shares."
            )
    return parts


def draw_splits(count: int, *, validation: float, test: float, seed: int) -> dict[Split, Ids]:
    """Which of ``count`` rows are in each split, drawn at random, in rising order.

    Raises:
        ValueError: nothing is left to train on.
    """
    _check_shares(validation, test)
    order = np.random.default_rng(seed).permutation(count)
    first, second = (round(share * count) for share in (test, test + validation))
    return {
        "test": np.sort(order[:first]),
        "validation": np.sort(order[first:second]),
        "train": np.sort(order[second:]),
    }


def _check_shares(validation: float, test: float) -> None:
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise ValueError(f"data.split must leave something for training, got validation={validation} and test={test}.")
