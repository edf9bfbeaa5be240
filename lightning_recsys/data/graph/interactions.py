"""Users and items as one graph: which items will a user take next?"""

# Shape suffixes: B positive pairs of a batch, G users, I items, P pairs.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.graph.batch import NODE_FIELD, GraphBatch, NodeFeatures, SampledRows
from lightning_recsys.data.graph.csr import CSRGraph, Ids
from lightning_recsys.data.graph.module import GraphDataModule
from lightning_recsys.data.graph.node_tables import NodeTable, read_node_table
from lightning_recsys.data.graph.nodes import (
    UNLABELED,
    Bags,
    NodeData,
    check_split,
    draw_splits,
    split_by_time,
)
from lightning_recsys.data.graph.ranking import Ranking
from lightning_recsys.data.graph.sampling import NeighborSampler
from lightning_recsys.data.graph.tables import (
    TableOptions,
    edge_weights,
    look_up,
    named_table,
    own_ids,
    read_table,
    used_words,
)
from lightning_recsys.data.hashing import key64
from lightning_recsys.data.options import Split


@dataclass(frozen=True)
class Interactions:
    """Interactions of users with items.

    Args:
        users: The user of each interaction, int64 ``[E]``, numbered from 0.
        items: The item of each interaction, int64 ``[E]``, numbered from 0.
        num_users: Number of users; every number in ``users`` is smaller.
        num_items: Number of items; every number in ``items`` is smaller.
        weights: How much each counts as a message, from 0 on, float32 ``[E]``; ``None`` where all count alike.
        times: When each was, float64 ``[E]``; ``None`` where that is not known.
        user_ids: What the users are called, Arrow integers or strings, where they come from a table.
        item_ids: What the items are called.

    Raises:
        ValueError: a user or an item is outside, or arrays have different lengths.

    In the graph items stand behind users: item ``i`` is node ``num_users + i``.
    """

    users: Ids
    items: Ids
    num_users: int
    num_items: int
    weights: NDArray[np.float32] | None = None
    times: NDArray[np.float64] | None = None
    user_ids: pa.Array | None = None
    item_ids: pa.Array | None = None

    def __post_init__(self) -> None:
        if len(self.users) != len(self.items):
            raise ValueError(f"interactions need a user and an item each, got {len(self.users)} and {len(self.items)}.")
        for name in ("weights", "times"):
            if (array := getattr(self, name)) is not None and len(array) != len(self.users):
                raise ValueError(f"{name} must be one for each of {len(self.users)} interactions, got {len(array)}.")
        for name in ("users", "items"):  # products of narrower numbers would overflow
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))
        for name, ids, count in (("users", self.users, self.num_users), ("items", self.items, self.num_items)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < count:
                raise ValueError(f"{name} must be from 0 to {count - 1}, got {ids.min()} to {ids.max()}.")

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        user: str,
        item: str,
        weight: str | None = None,
        time: str | None = None,
        separator: str | None = None,
        users: NodeTable | None = None,
        items: NodeTable | None = None,
    ) -> Interactions:
        """From a table, CSV or the like or Parquet; users and items may be called anything, and each row is one.

        Each word is a user or an item of its own, as in a categorical column of a table: ``007`` is not ``7``, and
        ``7.0`` is. They are numbered in the order of their numbers where all are whole ones, else of their words; or as
        their own tables have them.

        Args:
            path: The table, with a row for each interaction.
            user: Name of the column with the users.
            item: Name of the column with the items.
            weight: Name of the column with the weights, if there is one.
            time: Name of the column with the times, if there is one.
            separator: What stands between two columns of a text file; by its suffix if absent.
            users: The table of the users, if there is one.
            items: The table of the items, if there is one.

        Raises:
            ValueError: a column is not there or stands twice, a row has no value or one that is not in the table of
                users or items, a weight is missing or negative, or a line is damaged; the message names file, row and
                column.
        """
        options = {"files": str(path), "separator": separator}
        keys = list(dict.fromkeys([user, item]))
        rows = read_table(options, where="data.file", root=Path(), keys=keys, number=weight, time=time)
        ends: list[Ids] = []
        names: list[pa.Array] = []
        for column, table in ((user, users), (item, items)):
            if table is not None:
                ends.append(look_up(rows, column, table.ids, table.name))
                names.append(table.own_ids)
                continue
            words = rows.words(column)
            rows.refuse(np.asarray(words.is_null()), column, "the value is missing, which must be there in every row")
            numbers, distinct = used_words(words)
            ends.append(numbers)
            names.append(own_ids(distinct, rows.kinds.get(column)))
        order = np.lexsort((ends[1], ends[0]))  # whatever the order of the file, the same rows are held out
        weights, times = edge_weights(rows, weight), None if time is None else rows.times(time)
        return cls(
            ends[0][order],
            ends[1][order],
            len(names[0]),
            len(names[1]),
            weights=None if weights is None else weights[order],
            times=None if times is None else times[order],
            user_ids=names[0],
            item_ids=names[1],
        )

    def distinct(self) -> Interactions:
        """Each pair once, in the order in which they first come, by their times if there are some.

        A pair that comes again adds its weight to the first.
        """
        come = np.arange(len(self.users)) if self.times is None else np.argsort(self.times, kind="stable")
        keys = (self.users * self.num_items + self.items)[come]
        _, first, pair = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)
        found = self.take(come[first[order]])
        if self.weights is None:
            return found
        sums = np.bincount(pair, self.weights[come], len(first))[order].astype(np.float32)
        return replace(found, weights=sums)

    def without(self, others: Interactions) -> Interactions:
        """Those whose pair is not among others'."""
        keys, known = (x.users * self.num_items + x.items for x in (self, others))
        return self.take(np.flatnonzero(~np.isin(keys, known)))

    def take(self, rows: Ids) -> Interactions:
        """Some of them."""
        parts = {name: x[rows] for name in ("weights", "times") if (x := getattr(self, name)) is not None}
        return replace(self, users=self.users[rows], items=self.items[rows], **parts)

    def graph(self) -> CSRGraph:
        """Users and items as nodes, each interaction as an edge both ways."""
        edges = np.stack([self.users, self.items + self.num_users])
        num_nodes = self.num_users + self.num_items
        return CSRGraph.from_edge_index(edges, num_nodes=num_nodes, undirected=True, weights=self.weights)


@dataclass(frozen=True)
class TrainingPairs(SampledRows):
    """Interactions to learn from, each beside items that the user has not taken."""

    positives: Interactions
    ranking: Ranking
    num_negatives: int
    features: NodeFeatures
    sampler: NeighborSampler

    def __len__(self) -> int:
        return len(self.positives.users)

    def take(self, rows: Tensor, *, key: int = 0) -> GraphBatch:
        """These interactions, int64 ``[B]``, then as many pairs for each of ``num_negatives`` draws."""
        some = self.positives.take(rows.numpy())
        drawn = self.ranking.negatives(some.users, rows.numpy(), self.num_negatives, key=key)
        users = np.tile(some.users, 1 + self.num_negatives)
        labels_P = np.arange(len(users)) < len(some.users)
        return _batch(self, users, np.concatenate([some.items, drawn.T.ravel()]), labels_P, size=len(rows), key=key)


@dataclass(frozen=True)
class RankedUsers(SampledRows):
    """Users with the items that they took later, among others."""

    held_out: Interactions
    ranking: Ranking
    num_candidates: int | None
    features: NodeFeatures
    sampler: NeighborSampler

    @cached_property
    def users(self) -> Ids:
        """Those with something held out."""
        return np.unique(self.held_out.users)

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: Tensor, *, key: int = 0) -> GraphBatch:
        """All candidates of these users, int64 ``[G]``; which they are, ``key`` has no say in."""
        chosen_G = self.users[rows.numpy()]
        if self.num_candidates is None:
            known_GI, held_out_GI = (self._marked(x.users, x.items, chosen_G) for x in (self.ranking, self.held_out))
            groups, items = np.nonzero(~known_GI | held_out_GI)
            users, labels = chosen_G[groups], held_out_GI[groups, items]
        else:
            some = self.held_out.take(np.flatnonzero(np.isin(self.held_out.users, chosen_G)))
            others, drawn = self.ranking.candidates(chosen_G, self.num_candidates)
            users, items = np.concatenate([some.users, others]), np.concatenate([some.items, drawn])
            labels = np.arange(len(users)) < len(some.users)
        return _batch(self, users, items, labels, size=len(rows), key=key)

    def _marked(self, users: Ids, items: Ids, chosen_G: Ids) -> NDArray[np.bool_]:
        """Which items each chosen user has among some pairs, ``[G, I]``."""
        places = np.full(self.ranking.num_users, -1)
        places[chosen_G] = np.arange(len(chosen_G))
        marked_GI = np.zeros((len(chosen_G), self.ranking.num_items), np.bool_)
        groups = places[users]
        marked_GI[groups[groups >= 0], items[groups >= 0]] = True
        return marked_GI


def _batch(
    rows: TrainingPairs | RankedUsers, users: Ids, items: Ids, labels_P: NDArray[np.bool_], *, size: int, key: int
) -> GraphBatch:
    """The pairs of users and items as nodes of a sample around all of them."""
    num_users = rows.ranking.num_users
    seeds, places = np.unique(np.concatenate([users, items + num_users]), return_inverse=True)
    neighborhood = rows.sampler.sample(seeds, key=key)
    return GraphBatch(
        neighborhood,
        **rows.features.take(neighborhood.n_id),
        labels=torch.from_numpy(labels_P.astype(np.float32)),
        size=size,
        pairs=torch.from_numpy(places.reshape(2, -1)),
        groups=torch.from_numpy(users.copy()),
    )


class InteractionDataModule(GraphDataModule):
    """Users and the items that they took, some of which are held out.

    The graph that messages go along has the training interactions only.

    Args:
        interactions: Who took what, or ``None`` to read ``file``.
        file: A table to read, CSV or the like or Parquet, relative to ``root``.
        root: Folder in which files are looked for.
        user: Name of the column with the users.
        item: Name of the column with the items.
        weight: Name of the column that says how much an interaction counts as a message, if there is one.
        time: Name of the column with the times, if there is one.
        separator: What stands between two columns of a text file; by its suffix if absent.
        users: The table of the users: the path of its file, or a mapping with ``files``, ``id`` and features, as
            ``nodes`` of :class:`NodeDataModule` has them. Each user must have a row there, and those who took nothing
            are nodes as well. The features are called ``user_<name>``.
        items: The table of the items, likewise.
        node_ids: Give every user and item a row to train, as the feature ``node``.
        split: ``{"validation": 0.1, "test": 0.1, "seed": 0}``: shares of the interactions that are held out, drawn at
            random; with ``"by": "time"`` the latest ones, without the pairs that came before.
        num_negatives: Items for each interaction of a training batch that the user has not taken in training; those
            that are held out are among them, as training knows nothing of these.
        num_candidates: Distinct items among which those held out are ranked in evaluation, drawn for each user from
            those that the user took in no split, or all of them where there are fewer; always the same ones. ``None``
            ranks all such items, which is exact, and slow for many items.
        batch_size: Interactions (in evaluation, users) per batch and rank.
        num_neighbors: Neighbours that are sampled for each node, hop by hop; see :class:`GraphDataModule`.
        **options: ``eval_num_neighbors``, ``replacement`` and ``prefetch_batches`` as for :class:`GraphDataModule`;
            ``seed`` of the order of the interactions, of negative items and of neighbours; ``drop_last`` to leave out
            the interactions that do not fill a batch on every rank.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        interactions: Interactions | None = None,
        *,
        file: str = "",
        root: str = ".",
        user: str = "user",
        item: str = "item",
        weight: str | None = None,
        time: str | None = None,
        separator: str | None = None,
        users: TableOptions | None = None,
        items: TableOptions | None = None,
        node_ids: bool = True,
        split: Mapping[str, Any] | None = None,
        num_negatives: int = 1,
        num_candidates: int | None = None,
        batch_size: int = 1024,
        num_neighbors: Sequence[int] = (15, 10),
        **options: Any,
    ) -> None:
        super().__init__(num_neighbors=num_neighbors, batch_size=batch_size, **options)
        if (interactions is None) == (not file):
            raise ValueError("data needs interactions, or data.file to read them from, and not both.")
        for name, value in (("num_negatives", num_negatives), ("num_candidates", num_candidates)):
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}.")
        tables = {"users": named_table(users), "items": named_table(items)}
        self._tables = {name: table for name, table in tables.items() if table is not None}
        if interactions is not None and self._tables:
            raise ValueError("data.users and data.items are tables beside data.file: interactions have none.")
        self._given, self._path, self._root = interactions, Path(root).expanduser() / file, Path(root).expanduser()
        self._columns = {"user": user, "item": item, "weight": weight, "time": time, "separator": separator}
        check_split(split or {})
        self._split: dict[str, Any] = {"validation": 0.1, "test": 0.1, "seed": 0, "by": "share"} | dict(split or {})
        if self._split["by"] == "time" and time is None and (interactions is None or interactions.times is None):
            raise ValueError("data.split.by is time: name the column with the times as data.time.")
        if not node_ids and not self._tables:
            raise ValueError(
                "users and items have no features: set data.node_ids=true, so that each has a row to train."
            )
        self._node_ids = node_ids
        self._num_negatives, self._num_candidates = num_negatives, num_candidates

    @cached_property
    def _node_tables(self) -> dict[str, NodeTable]:
        """The tables of users and items that there are."""
        return {
            name: read_node_table(
                table, where=f"data.{name}", root=self._root, id_names=[str(self._columns[name[:-1]])]
            )
            for name, table in self._tables.items()
        }

    @cached_property
    def _every(self) -> Interactions:
        """All of them as they come."""
        if self._given is not None:
            return self._given
        return Interactions.read(self._existing(), **self._columns, **self._node_tables)  # type: ignore[arg-type]

    @cached_property
    def interactions(self) -> Interactions:
        """All of them, each pair once: one that came twice might be trained and held out."""
        return self._every.distinct()

    @cached_property
    def parts(self) -> dict[Split, Interactions]:
        """The interactions of each split."""
        shares = {name: self._split[name] for name in ("validation", "test")}
        if self._split["by"] == "share":
            every = self.interactions
            parts = draw_splits(len(every.users), **shares, seed=int(self._split["seed"]))
            return {name: every.take(rows) for name, rows in parts.items()}
        every = self._every
        assert every.times is not None
        parts = split_by_time(every.times, **shares)
        train, *later = (every.take(parts[name]).distinct() for name in ("train", "validation", "test"))
        return {
            "train": train,
            "validation": later[0].without(train),
            "test": later[1].without(train).without(later[0]),
        }

    @cached_property
    def nodes(self) -> NodeData:
        """Users and items with their features, joined by the training interactions."""
        graph, counts = self.parts["train"].graph(), (self.interactions.num_users, self.interactions.num_items)
        bags, dense = {}, []
        for kind, name in enumerate(("users", "items")):
            if (table := self._node_tables.get(name)) is not None:
                before, behind = (0, counts[1]) if kind == 0 else (counts[0], 0)
                for feature, own in table.bags.items():
                    offsets = np.pad(own.offsets, (before, behind), "edge")  # nodes of the other kind have no ids
                    bags[f"{name[:-1]}_{feature}"] = Bags(offsets, own.ids, own.num_embeddings)
                if table.dense is not None:
                    dense.append(np.pad(table.dense, ((before, behind), (0, 0))))
        numbers = np.concatenate(dense, 1) if dense else None
        return NodeData(graph, np.full(graph.num_nodes, UNLABELED), bags, numbers)

    @cached_property
    def digest(self) -> str | None:
        """See the base class."""
        users, items = self.interactions.user_ids, self.interactions.item_ids
        return None if users is None or items is None else self.nodes.digest(users, items)

    @property
    def num_dense(self) -> int:
        """Numeric features of users and items together; those of the other kind are 0."""
        return 0 if self.nodes.dense is None else self.nodes.dense.shape[1]

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each sparse feature; ``node`` is a row for each user and item."""
        own = {NODE_FIELD: self.nodes.graph.num_nodes} if self._node_ids else {}
        return own | {name: bags.num_embeddings for name, bags in self.nodes.bags.items()}

    @property
    def num_classes(self) -> None:
        """There are none."""
        return

    @property
    def node_features(self) -> NodeFeatures:
        """See the base class."""
        return NodeFeatures(self._node_ids, self.nodes.bags, self.nodes.dense)

    def has(self, split: Split) -> bool:
        """Whether interactions are held out for it."""
        return len(self.parts[split].users) > 0

    def rows(self, split: Split) -> Any:
        """Interactions to learn from, or users to rank items for; ``None`` where there are none."""
        if not self.has(split):
            return None
        part = self.parts[split]
        # Training knows of no pair that is held out: never to draw those as negatives would teach them.
        known = part if split == "train" else self.interactions
        seed = int(key64(self.seed, split))
        ranking = Ranking(known.users, known.items, known.num_users, known.num_items, seed)
        features, sampler = self.node_features, self._sampler(split)
        if split == "train":
            return TrainingPairs(part, ranking, self._num_negatives, features, sampler)
        return RankedUsers(part, ranking, self._num_candidates, features, sampler)
