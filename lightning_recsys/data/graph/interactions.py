"""Users and items as one graph: which items will a user take next?"""

# Shape suffixes: B positive pairs of a batch, G users, I items, P pairs.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.graph.batch import NODE_FIELD, GraphBatch, NodeFeatures, SampledRows
from lightning_recsys.data.graph.csr import CSRGraph, Ids
from lightning_recsys.data.graph.module import GraphDataModule
from lightning_recsys.data.graph.nodes import UNLABELED, NodeData, check_split, draw_splits
from lightning_recsys.data.graph.ranking import Ranking
from lightning_recsys.data.graph.sampling import NeighborSampler
from lightning_recsys.data.hashing import key64
from lightning_recsys.data.module import Split
from lightning_recsys.data.tables.columns import as_categories

_WHOLE_NUMBER = r"^(0|-?[1-9]\d{0,17})$"  # as integers of 64 bits are written


@dataclass(frozen=True)
class Interactions:
    """Interactions of users with items.

    Args:
        users: The user of each interaction, int64 ``[E]``, numbered from 0.
        items: The item of each interaction, int64 ``[E]``, numbered from 0.
        num_users: Number of users; every number in ``users`` is smaller.
        num_items: Number of items; every number in ``items`` is smaller.

    Raises:
        ValueError: a user or an item is outside, or the two have different lengths.

    In the graph items stand behind users: item ``i`` is node ``num_users + i``.
    """

    users: Ids
    items: Ids
    num_users: int
    num_items: int

    def __post_init__(self) -> None:
        if len(self.users) != len(self.items):
            raise ValueError(f"interactions need a user and an item each, got {len(self.users)} and {len(self.items)}.")
        for name in ("users", "items"):  # products of narrower numbers would overflow
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))
        for name, ids, count in (("users", self.users, self.num_users), ("items", self.items, self.num_items)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < count:
                raise ValueError(f"{name} must be from 0 to {count - 1}, got {ids.min()} to {ids.max()}.")

    @classmethod
    def read(cls, path: str | Path, *, user: str, item: str, separator: str = ",") -> Interactions:
        """From a delimited file with a header; users and items may be called anything, and each pair counts once.

        Each word is a user or an item of its own, as in a categorical column of a table: ``007`` is not ``7``, and
        ``7.0`` is. They are numbered in the order of their numbers where all are whole ones, else of their words.

        Raises:
            ValueError: a column is not there or stands twice, a row has no value, or a line is damaged.
        """
        style = pacsv.ParseOptions(delimiter=separator)
        try:
            with pacsv.open_csv(path, parse_options=style) as header:
                columns = header.schema.names
            if missing := {user, item} - set(columns):
                raise ValueError(f"it has no column {sorted(missing)}; it has {columns}.")
            if twice := [name for name in (user, item) if columns.count(name) > 1]:
                raise ValueError(f"its header has the columns {twice} more than once.")
            words = {name: pa.string() for name in (user, item)}
            table = pacsv.read_csv(
                path,
                parse_options=style,
                convert_options=pacsv.ConvertOptions(column_types=words, include_columns=list(words)),
            )
            (users, num_users), (items, num_items) = (_numbered(table[name], name) for name in (user, item))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        order = np.lexsort((items, users))
        return cls(users[order], items[order], num_users, num_items).distinct()

    def distinct(self) -> Interactions:
        """Each pair once, in the order in which they first come."""
        _, first = np.unique(self.users * self.num_items + self.items, return_index=True)
        return self.take(np.sort(first))

    def take(self, rows: Ids) -> Interactions:
        """Some of them."""
        return Interactions(self.users[rows], self.items[rows], self.num_users, self.num_items)

    def graph(self) -> CSRGraph:
        """Users and items as nodes, each interaction as an edge both ways."""
        edges = np.stack([self.users, self.items + self.num_users])
        return CSRGraph.from_edge_index(edges, num_nodes=self.num_users + self.num_items, undirected=True)


def _numbered(column: pa.ChunkedArray, name: str) -> tuple[Ids, int]:
    """The number of each word of a column, and how many there are."""
    words = as_categories(column, strip=True, missing=("",))
    if words.null_count:
        raise ValueError(f"{words.null_count} rows have no value in the column {name!r}.")
    distinct = words.dictionary
    are_whole = pc.all(pc.match_substring_regex(distinct, _WHOLE_NUMBER), min_count=0).as_py()
    order = pc.sort_indices(distinct.cast(pa.int64()) if are_whole else distinct).to_numpy()
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    return numbers[words.indices.to_numpy()], len(order)


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
    """Users and the items that they took, some of which are held out; every user and item has a row to train.

    The graph that messages go along has the training interactions only.

    Args:
        interactions: Who took what, or ``None`` to read ``file``.
        file: A delimited file to read, relative to ``root``.
        root: Folder in which ``file`` is looked for.
        user: Name of the column with the users.
        item: Name of the column with the items.
        separator: What stands between two columns of the file.
        split: Shares of the interactions that are held out, and the seed that they are drawn with.
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
        separator: str = ",",
        split: Mapping[str, float] | None = None,
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
        self._given, self._path = interactions, Path(root).expanduser() / file
        self._columns = {"user": user, "item": item, "separator": separator}
        check_split(split or {})
        self._split = {"validation": 0.1, "test": 0.1, "seed": 0} | dict(split or {})
        self._num_negatives, self._num_candidates = num_negatives, num_candidates

    @cached_property
    def interactions(self) -> Interactions:
        """All of them, each pair once: one that came twice might be trained and held out."""
        given = self._given
        return Interactions.read(self._existing(), **self._columns) if given is None else given.distinct()

    @cached_property
    def parts(self) -> dict[Split, Interactions]:
        """The interactions of each split."""
        every = self.interactions
        shares = {name: self._split[name] for name in ("validation", "test")}
        parts = draw_splits(len(every.users), **shares, seed=int(self._split["seed"]))
        return {name: every.take(rows) for name, rows in parts.items()}

    @cached_property
    def nodes(self) -> NodeData:
        """Users and items, joined by the training interactions."""
        graph = self.parts["train"].graph()
        return NodeData(graph, np.full(graph.num_nodes, UNLABELED))

    @property
    def num_dense(self) -> int:
        """None."""
        return 0

    @property
    def fields(self) -> dict[str, int]:
        """A row for each user and item."""
        return {NODE_FIELD: self.nodes.graph.num_nodes}

    @property
    def num_classes(self) -> None:
        """There are none."""
        return

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
        features, sampler = NodeFeatures(node_ids=True, bags={}, dense=None), self._sampler(split)
        if split == "train":
            return TrainingPairs(part, ranking, self._num_negatives, features, sampler)
        return RankedUsers(part, ranking, self._num_candidates, features, sampler)
