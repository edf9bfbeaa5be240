"""Users and items as one graph: which items will a user take next?"""

# Shape suffixes: B positive pairs of a batch, G users, P pairs.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.graph.batch import NODE_FIELD, GraphBatch, NodeFeatures, SampledRows
from lightning_recsys.data.graph.csr import CSRGraph, Ids
from lightning_recsys.data.graph.module import GraphDataModule
from lightning_recsys.data.graph.nodes import UNLABELED, NodeData, draw_splits
from lightning_recsys.data.graph.sampling import NeighborSampler
from lightning_recsys.data.hashing import key64
from lightning_recsys.data.module import Split


@dataclass(frozen=True)
class Interactions:
    """Who took what.

    Args:
        users: Int64 ``[E]``, from 0.
        items: Int64 ``[E]``, from 0.
        num_users: Users are below this.
        num_items: Items are below this.

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
        for name, ids, count in (("users", self.users, self.num_users), ("items", self.items, self.num_items)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < count:
                raise ValueError(f"{name} must be from 0 to {count - 1}, got {ids.min()} to {ids.max()}.")

    @classmethod
    def read(cls, path: str | Path, *, user: str, item: str, separator: str = ",") -> Interactions:
        """From a delimited file with a header; users and items may be called anything, and each pair counts once.

        Raises:
            ValueError: a column is not there.
        """
        table = pacsv.read_csv(path, parse_options=pacsv.ParseOptions(delimiter=separator))
        if missing := {user, item} - set(table.column_names):
            raise ValueError(f"{path} has no column {sorted(missing)}; it has {table.column_names}.")
        if empty := [name for name in (user, item) if table[name].null_count]:
            raise ValueError(f"{path} has rows without a value in the columns {empty}.")
        (_, users), (_, items) = (np.unique(table[name].to_numpy(), return_inverse=True) for name in (user, item))
        num_users, num_items = int(users.max(initial=-1)) + 1, int(items.max(initial=-1)) + 1
        users, items = np.divmod(np.unique(users * num_items + items), max(num_items, 1))
        return cls(users, items, num_users, num_items)

    def take(self, rows: Ids) -> Interactions:
        """Some of them."""
        return Interactions(self.users[rows], self.items[rows], self.num_users, self.num_items)

    def graph(self) -> CSRGraph:
        """Users and items as nodes, each interaction as an edge both ways."""
        edges = np.stack([self.users, self.items + self.num_users])
        return CSRGraph.from_edge_index(edges, num_nodes=self.num_users + self.num_items, undirected=True)


@dataclass(frozen=True)
class Ranking:
    """Draws items that a user has not taken, from all that are known of.

    Args:
        taken: All interactions, of every split.
        seed: Seed of the draws; with the key of a batch it says which items are drawn.
    """

    taken: Interactions
    seed: int

    @cached_property
    def _keys(self) -> Ids:
        return np.sort(self.taken.users * self.taken.num_items + self.taken.items)

    def negatives(self, users: Ids, key: int) -> Ids:
        """An item for each user that the user has not taken; of who has taken nearly all, perhaps one that was."""
        random = np.random.default_rng([self.seed, key])
        items = random.integers(0, self.taken.num_items, len(users))
        for _ in range(20):
            keys = users * self.taken.num_items + items
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            again = np.flatnonzero(self._keys[places] == keys)
            if not len(again):
                break
            items[again] = random.integers(0, self.taken.num_items, len(again))
        return items


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
        users = np.tile(some.users, 1 + self.num_negatives)
        drawn = self.ranking.negatives(users[len(some.users) :], key)
        labels_P = np.arange(len(users)) < len(some.users)
        return _batch(self, users, np.concatenate([some.items, drawn]), labels_P, size=len(rows), key=key)


@dataclass(frozen=True)
class RankedUsers(SampledRows):
    """Users with the items that they took later, among others."""

    held_out: Interactions
    known: Interactions
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
        """All candidates of these users, int64 ``[G]``."""
        chosen_G = self.users[rows.numpy()]
        some = self.held_out.take(np.flatnonzero(np.isin(self.held_out.users, chosen_G)))
        if self.num_candidates is None:
            users, items = (x.ravel() for x in np.meshgrid(chosen_G, np.arange(some.num_items), indexing="ij"))
            old = self.known.users * some.num_items + self.known.items
            pairs = users * some.num_items + items
            rest = ~np.isin(pairs, old)
            users, items = users[rest], items[rest]
            labels = np.isin(pairs[rest], some.users * some.num_items + some.items)
        else:
            others = np.repeat(chosen_G, self.num_candidates)
            users, items = np.concatenate([some.users, others]), self.ranking.negatives(others, key)
            items = np.concatenate([some.items, items])
            labels = np.arange(len(users)) < len(some.users)
        return _batch(self, users, items, labels, size=len(rows), key=key)


def _batch(
    rows: TrainingPairs | RankedUsers, users: Ids, items: Ids, labels_P: NDArray[np.bool_], *, size: int, key: int
) -> GraphBatch:
    """The pairs of users and items as nodes of a sample around all of them."""
    num_users = rows.ranking.taken.num_users
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
        root: Where ``file`` is looked for.
        user: Column of the users.
        item: Column of the items.
        separator: Between columns.
        split: Shares of the interactions that are held out, and the seed that they are drawn with.
        num_negatives: Items that the user has not taken, for each interaction of a training batch.
        num_candidates: Items among which those held out are ranked in evaluation, drawn for each user; ``None`` ranks
            all items that the user did not take in training, which is exact, and slow for many items.
        batch_size: Interactions (in evaluation, users) per batch and rank.
        num_neighbors: As in :class:`GraphDataModule`, like the three below.
        eval_num_neighbors: See there.
        replacement: See there.
        prefetch_batches: See there.
        seed: Seed of the order of the interactions, of negative items and of neighbours.
        drop_last: Leave out the interactions that do not fill a batch on every rank.

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
        eval_num_neighbors: Sequence[int] | None = None,
        replacement: bool = False,
        prefetch_batches: int = 2,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            num_neighbors=num_neighbors,
            eval_num_neighbors=eval_num_neighbors,
            replacement=replacement,
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            seed=seed,
            drop_last=drop_last,
        )
        if (interactions is None) == (not file):
            raise ValueError("data needs interactions, or data.file to read them from, and not both.")
        for name, value in (("num_negatives", num_negatives), ("num_candidates", num_candidates)):
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}.")
        self._given, self._path = interactions, Path(root).expanduser() / file
        self._columns = {"user": user, "item": item, "separator": separator}
        self._split = {"validation": 0.1, "test": 0.1, "seed": 0} | dict(split or {})
        self._num_negatives, self._num_candidates = num_negatives, num_candidates

    @cached_property
    def interactions(self) -> Interactions:
        """All of them."""
        return Interactions.read(self._path, **self._columns) if self._given is None else self._given

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
        ranking = Ranking(self.interactions, int(key64(self.seed, split)))
        common = (ranking, NodeFeatures(node_ids=True, bags={}, dense=None), self._sampler(split))
        if split == "train":
            return TrainingPairs(self.parts["train"], common[0], self._num_negatives, *common[1:])
        known = self.parts["train"]
        return RankedUsers(self.parts[split], known, common[0], self._num_candidates, *common[1:])
