"""Synthetic click data of any size, from a teacher whose own score is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.generated.teacher import SyntheticClicks
from lightning_recsys.data.module import CTRDataModule, Split
from lightning_recsys.metrics import NormalizedEntropy

# Like many click logs: mostly small fields, a few of thousands of ids; a million rows are enough to learn them.
DEFAULT_CARDINALITIES = (10_000,) * 2 + (5_000,) * 2 + (2_000,) * 2 + (1_000,) * 4 + (300,) * 4 + (100,) * 6 + (20,) * 6

_BLOCK_ROWS = 8_192


@dataclass(frozen=True)
class SyntheticRows:
    """The rows of one split, generated when they are taken."""

    clicks: SyntheticClicks
    split: Split
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def take(self, rows: Tensor) -> Batch:
        """The rows with these numbers, int64 ``[B]``."""
        return self.clicks.take(self.split, rows.numpy())

    def teacher_normalized_entropy(self) -> float:
        """Normalized entropy of the teacher's own probabilities: no model scores lower, up to the labels' luck."""
        metric = NormalizedEntropy(sync_on_compute=False)  # every rank may ask for it, or one alone
        for rows in np.array_split(np.arange(self.num_rows), -(-self.num_rows // _BLOCK_ROWS)):
            probabilities = self.clicks.probabilities(self.split, rows)
            metric.update(torch.from_numpy(probabilities), self.clicks.take(self.split, rows).labels)
        return float(metric.compute())


class SyntheticDataModule(CTRDataModule):
    """Clicks drawn from a random teacher: streamed, seeded, of any size and skew, with a known best score.

    Rows are generated batch by batch; nothing is stored, so a billion rows or ids cost no memory. A row depends on the
    world's seed, its split and its number only: however many ranks share the rows, and wherever training resumes, they
    are the same. See :class:`~lightning_recsys.data.generated.teacher.SyntheticClicks` for the teacher.

    Args:
        batch_size: Rows per batch and rank.
        train_rows: Rows of the training split; 0 for none, as with the others.
        val_rows: Rows of the validation split.
        test_rows: Rows of the test split.
        cardinalities: Number of ids of each categorical feature; the features are named ``c0``, ``c1``, ...
        multi_hot: Largest bag of each multi-hot feature, by name; bags have 0 to that many ids, all equally likely.
            Features that are not named have one id per row.
        num_dense: Number of dense features: near normal with variance 1.
        zipf_exponent: Skew: id ``k`` has probability proportional to ``(k + 1) ** -zipf_exponent``. At least 0.
        base_rate: Mean click probability, between 0 and 1.
        signal: Standard deviation of the teacher's logit: how predictable clicks are.
        interaction_share: Share of the logit's variance that comes from pairs of features, from 0 (where a logistic
            regression is the right model) to 1.
        world_seed: Which world: features, teacher and labels.
        seed: Order of the training batches; a new order each epoch. ``None`` counts as 0.
        drop_last: Leave out the training rows that do not fill a batch on every rank.

    Raises:
        ValueError: an argument is out of its range, or ``multi_hot`` names an unknown feature.

    >>> data = SyntheticDataModule(train_rows=100, batch_size=64, cardinalities=(10, 1_000_000_000), num_dense=2)
    >>> [len(batch) for batch in data.train_dataloader()], data.fields
    ([64, 36], {'c0': 10, 'c1': 1000000000})
    """

    _shuffle: Literal["rows", "batches"] = "batches"  # rows are independent by construction

    def __init__(
        self,
        *,
        batch_size: int = 2048,
        train_rows: int = 1_000_000,
        val_rows: int = 100_000,
        test_rows: int = 100_000,
        cardinalities: Sequence[int] = DEFAULT_CARDINALITIES,
        multi_hot: Mapping[str, int] | None = None,
        num_dense: int = 13,
        zipf_exponent: float = 1.1,
        base_rate: float = 0.25,
        signal: float = 1.5,
        interaction_share: float = 0.4,
        world_seed: int = 0,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, drop_last=drop_last)
        self._num_dense = num_dense
        self._fields = {f"c{i}": int(cardinality) for i, cardinality in enumerate(cardinalities)}
        self._num_rows: dict[Split, int] = {"train": train_rows, "validation": val_rows, "test": test_rows}
        self._multi_hot = dict(multi_hot or {})
        self._zipf_exponent = zipf_exponent
        self._base_rate = base_rate
        self._signal = signal
        self._interaction_share = interaction_share
        self._world_seed = world_seed
        self._check_arguments()

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return self._num_dense

    @property
    def fields(self) -> dict[str, int]:
        """Number of ids of each categorical feature."""
        return self._fields

    def rows(self, split: Split) -> SyntheticRows | None:
        """The rows of a split; ``None`` if it was given none."""
        num_rows = self._num_rows[split]
        return SyntheticRows(self.clicks, split, num_rows) if num_rows else None

    @cached_property
    def clicks(self) -> SyntheticClicks:
        """The world that the rows come from."""
        return SyntheticClicks(
            cardinalities=list(self.fields.values()),
            multi_hot=self._multi_hot,
            num_dense=self.num_dense,
            zipf_exponent=self._zipf_exponent,
            base_rate=self._base_rate,
            signal=self._signal,
            interaction_share=self._interaction_share,
            seed=self._world_seed,
        )

    @cached_property
    def best_normalized_entropy(self) -> float | None:
        """Normalized entropy that the teacher's own probabilities score on the test rows (else the validation rows).

        Found by generating those rows once, at first use.
        """
        rows = self.rows("test") or self.rows("validation")
        return None if rows is None else rows.teacher_normalized_entropy()

    def _check_arguments(self) -> None:
        def check(name: str, value: object, allowed: str, *, ok: bool) -> None:
            if not ok:
                raise ValueError(f"data.{name} must be {allowed}, got {value}.")

        for name, num_rows in zip(("train_rows", "val_rows", "test_rows"), self._num_rows.values(), strict=True):
            check(name, num_rows, "at least 0", ok=num_rows >= 0)
        cardinalities = list(self.fields.values())
        positive = bool(cardinalities) and all(n > 0 for n in cardinalities)
        check("cardinalities", cardinalities, "one or more positive numbers", ok=positive)
        for name, size in self._multi_hot.items():
            check("multi_hot", name, f"about features among {', '.join(self.fields)}", ok=name in self.fields)
            check(f"multi_hot.{name}", size, "at least 1", ok=size >= 1)
        check("num_dense", self.num_dense, "at least 0", ok=self.num_dense >= 0)
        check("zipf_exponent", self._zipf_exponent, "at least 0", ok=self._zipf_exponent >= 0)
        check("base_rate", self._base_rate, "between 0 and 1", ok=0 < self._base_rate < 1)
        check("signal", self._signal, "at least 0", ok=self._signal >= 0)
        check("interaction_share", self._interaction_share, "from 0 to 1", ok=0 <= self._interaction_share <= 1)
