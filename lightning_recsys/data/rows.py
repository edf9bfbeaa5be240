"""Encoded rows in memory, gathered into batches by whole-array operations."""

# Shape suffixes: N rows in memory, B rows of a batch, S single-hot features.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import RowSource
from lightning_recsys.embeddings import SparseFeatures


@dataclass(frozen=True)
class InMemoryRows:
    """Rows of a split.

    Args:
        dense: float32, shape ``[N, num_dense]``.
        single_hot: Names of the features with one id per row.
        ids: Their ids, int32 (int64 where they do not fit), shape ``[N, S]``: a row's ids lie side by side, so that
            gathering a row touches one or two cache lines instead of ``S``.
        bags: Features with a bag of ids per row: where each bag starts and the last one ends, int64 ``[N + 1]``, and
            all ids one after the other, int32 or int64.
        labels: float32, shape ``[N]``.

    >>> bags = {"genres": (torch.tensor([0, 2, 2]), torch.tensor([7, 8]))}
    >>> rows = InMemoryRows(torch.zeros(2, 0), ("user",), torch.tensor([[4], [5]]), bags, torch.tensor([1.0, 0.0]))
    >>> batch = rows.take(torch.tensor([1, 0]))
    >>> batch.sparse.values.tolist(), batch.sparse.lengths.tolist(), batch.labels.tolist()
    ([5, 4, 7, 8], [1, 1, 0, 2], [0.0, 1.0])
    """

    dense: Tensor
    single_hot: tuple[str, ...]
    ids: Tensor
    bags: Mapping[str, tuple[Tensor, Tensor]]
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    def select(self, features: Sequence[str]) -> InMemoryRows:
        """The same rows with some of the features only; their ids are copied."""
        single_hot = tuple(name for name in features if name in self.single_hot)
        columns = [self.single_hot.index(name) for name in single_hot]
        bags = {name: self.bags[name] for name in features if name in self.bags}
        return InMemoryRows(self.dense, single_hot, self.ids[:, columns].contiguous(), bags, self.labels)

    def take(self, rows: Tensor) -> Batch:
        """The rows with these numbers, int64 ``[B]``; single-hot features come first."""
        values = [self.ids.index_select(0, rows).t().reshape(-1).long()]
        lengths = None
        if self.bags:
            taken = [_take_bags(offsets, ids, rows) for offsets, ids in self.bags.values()]
            values += [ids for _, ids in taken]
            ones = torch.ones(len(self.single_hot) * len(rows), dtype=torch.int64)
            lengths = torch.cat([ones, *(bag_lengths for bag_lengths, _ in taken)])
        return Batch(
            dense=self.dense.index_select(0, rows),
            sparse=SparseFeatures((*self.single_hot, *self.bags), torch.cat(values), lengths=lengths),
            labels=self.labels.index_select(0, rows),
        )


@dataclass(frozen=True)
class SelectedRows:
    """Rows of which only some features are passed on."""

    rows: RowSource
    features: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor) -> Batch:
        """The rows with these numbers, int64 ``[B]``."""
        return self.rows.take(rows).select(self.features)


def select_features(rows: RowSource, features: Sequence[str] | None) -> RowSource:
    """The same rows with some of the categorical features; ``None`` for all.

    In memory the others' ids are not touched. Other rows are taken whole first: synthetic ones must be, as a label
    depends on all features.
    """
    if features is None:
        return rows
    return rows.select(features) if isinstance(rows, InMemoryRows) else SelectedRows(rows, tuple(features))


def _take_bags(offsets: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths ``[B]`` and ids of some rows' bags."""
    starts = offsets.index_select(0, rows)
    lengths = offsets.index_select(0, rows + 1) - starts
    ends = lengths.cumsum(0)
    places = torch.arange(int(ends[-1]) if len(rows) else 0) + (starts - ends + lengths).repeat_interleave(lengths)
    return lengths, ids.index_select(0, places).long()
