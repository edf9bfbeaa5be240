"""Batches that all variants of suite ``des`` train on: one of the paper's shape, one of Criteo's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import torch
from benchmarks.harness.workload import Workload
from numpy.typing import NDArray

from lightning_recsys.data import Batch
from lightning_recsys.data.loader import RowSource
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.options import Split
from lightning_recsys.embeddings import SparseFeatures


@dataclass(frozen=True)
class PaperRows:
    """Multi-hot rows such as the paper counts: 950 features each, and 147 664 distinct ones in 512 of them.

    Every field has as many ids, drawn from one Zipf law; a bag's ids are distinct. The two numbers that the paper does
    not give, ``exponent`` and ``mean_draws``, are chosen so that those that it gives come out.

    Args:
        num_fields: ``F``.
        ids: Of each field.
        exponent: Of the Zipf law.
        mean_draws: Mean number of ids drawn for a bag, from 1 to 3, before those that are drawn twice are left out.
        dim: Embedding width ``D``.
        hidden: Of deep models.
        num_dense: Numeric features.
    """

    num_fields: int = 600
    ids: int = 4000
    exponent: float = 1.206
    mean_draws: float = 1.628
    dim: int = 8
    hidden: tuple[int, ...] = (256, 128)
    num_dense: int = 0

    @property
    def fields(self) -> dict[str, int]:
        """Field name -> number of ids."""
        return {f"c{i}": self.ids for i in range(self.num_fields)}

    def pieces(self, num_batches: int, size: int) -> list[Batch]:
        """Batches of ``size`` examples, always the same ones."""
        return [self._batch(size, np.random.default_rng(number)) for number in range(num_batches)]

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        weights: NDArray[np.float64] = np.arange(1.0, self.ids + 1) ** -self.exponent
        return np.cumsum(weights / weights.sum())

    def _batch(self, size: int, random: np.random.Generator) -> Batch:
        bags = self.num_fields * size
        three = 3  # draws for each bag, of which it uses 1, 2 or 3
        drawn = np.searchsorted(self._cumulative, random.random((bags, three))).clip(max=self.ids - 1)
        used = np.arange(three) < 1 + random.binomial(two := three - 1, (self.mean_draws - 1) / two, (bags, 1))
        for late in range(1, three):
            used[:, late] &= (drawn[:, :late] != drawn[:, late, None]).all(1)
        lengths = torch.from_numpy(used.sum(1))
        sparse = SparseFeatures(tuple(self.fields), torch.from_numpy(drawn[used]), lengths=lengths)
        labels = torch.from_numpy(random.random(size) < 0.25).float()
        return Batch(torch.zeros(size, 0), sparse, labels)


@dataclass(frozen=True)
class CriteoRows:
    """Single-hot rows of Criteo's shape, as in the other suites.

    Args:
        dim: Embedding width ``D``.
        hidden: Of deep models.
    """

    dim: int = 16
    hidden: tuple[int, ...] = (1024, 128)

    @property
    def num_dense(self) -> int:
        """Numeric features."""
        return Workload().num_dense

    @property
    def fields(self) -> dict[str, int]:
        """Field name -> number of ids."""
        return Workload().fields

    def pieces(self, num_batches: int, size: int) -> list[Batch]:
        """Batches of ``size`` examples, always the same ones."""
        return Workload(rows=num_batches * size).batches(size)


Rows = PaperRows | CriteoRows
ROWS: Mapping[str, Rows] = {"paper": PaperRows(), "Criteo": CriteoRows()}


def distinct(batch: Batch) -> int:
    """Distinct features of a batch, over all its fields."""
    bounds = batch.sparse.feature_bounds()
    values = batch.sparse.values.numpy()
    return sum(len(np.unique(values[low:high])) for low, high in pairwise(bounds))


def join(parts: Sequence[Batch]) -> Batch:
    """One batch of several."""
    return Batch(
        torch.cat([part.dense for part in parts]),
        SparseFeatures.cat([part.sparse for part in parts]),
        torch.cat([part.labels for part in parts]),
    )


class HeldRows(CTRDataModule):
    """Batches in memory, without end. A global batch is the same whoever takes it, as a whole or a share of it.

    Args:
        rows: What they are made of.
        batch_size: Examples of a global batch.
        num_batches: Batches in memory.
        shares: Processes that a batch may be dealt out to.
    """

    def __init__(self, rows: Rows, *, batch_size: int, num_batches: int = 8, shares: int = 2) -> None:
        super().__init__(batch_size=batch_size, seed=0, drop_last=False)
        self._rows, self._shares = rows, shares
        self._pieces = rows.pieces(num_batches * shares, batch_size // shares)

    @property
    def num_dense(self) -> int:
        return self._rows.num_dense

    @property
    def fields(self) -> dict[str, int]:
        return self._rows.fields

    def rows(self, split: Split) -> RowSource | None:
        """None but those of :meth:`train_dataloader`."""
        return None

    def train_dataloader(self) -> Any:
        """As many pieces of each global batch as the strategy wants."""
        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        per_batch = self._shares // share["num_replicas"]
        first = share["rank"] * per_batch
        batches = [
            join(self._pieces[start + first : start + first + per_batch])
            for start in range(0, len(self._pieces), self._shares)
        ]
        if self.selected_fields is not None:
            batches = [batch.select(self.selected_fields) for batch in batches]
        return Endless([_with_offsets(batch) for batch in batches])


def _with_offsets(batch: Batch) -> Batch:
    """The bags' offsets beside their lengths, as a reader would bring them."""
    if batch.sparse.is_single_hot:
        return batch
    return replace(batch, sparse=replace(batch.sparse, offsets=batch.sparse.bag_offsets()))


@dataclass(frozen=True)
class Endless:
    """Batches again and again.

    Args:
        batches: All of them.
    """

    batches: list[Batch]

    def __iter__(self) -> Iterator[Batch]:
        return cycle(self.batches)
