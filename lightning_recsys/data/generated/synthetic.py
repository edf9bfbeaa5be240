"""Synthetic click data of any size, from a teacher whose own score is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.generated.teacher import SyntheticClicks
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.options import Split, check_option
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

    def take_many(self, rows_KB: Tensor) -> list[Batch]:
        """The same as ``K`` batches, int64 ``[K, B]``."""
        return self.clicks.take_many(self.split, rows_KB.numpy())

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
        batch_size: Number of rows in the batch of one rank.
        train_rows: Rows of the training split; 0 for none, as with the others.
        val_rows: Number of rows of the validation split.
        test_rows: Number of rows of the test split.
        cardinalities: Number of ids of each categorical feature; the features are named ``c0``, ``c1``, ...
        multi_hot: Largest bag of each multi-hot feature, by name; bags have 0 to that many ids, all equally likely.
            Features that are not named have one id per row.
        num_dense: Number of dense features: near normal with variance 1.
        zipf_exponent: Skew: id ``k`` has probability proportional to ``(k + 1) ** -zipf_exponent``. At least 0.
        base_rate: Mean click probability, between 0 and 1.
        signal: Standard deviation of the teacher's logit: how predictable clicks are.
        interaction_share: Share of the logit's variance that comes from pairs of features, from 0 (where a logistic
            regression is the right model) to 1.
        world_seed: Seed of the features, the teacher and the labels: another one makes another data set.
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
        self._fields = {f"c{i}": int(cardinality) for i, cardinality in enumerate(cardinalities)}
        self._num_rows: dict[Split, int] = {"train": train_rows, "validation": val_rows, "test": test_rows}
        self._world: dict[str, Any] = {
            "cardinalities": list(self._fields.values()),
            "multi_hot": dict(multi_hot or {}),
            "num_dense": num_dense,
            "zipf_exponent": zipf_exponent,
            "base_rate": base_rate,
            "signal": signal,
            "interaction_share": interaction_share,
            "seed": world_seed,
        }
        self._check_arguments()

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        num_dense: int = self._world["num_dense"]
        return num_dense

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
        return SyntheticClicks(**self._world)

    @cached_property
    def best_normalized_entropy(self) -> float | None:
        """Normalized entropy that the teacher's own probabilities score on the test rows (else the validation rows).

        Found by generating those rows once, at first use.
        """
        rows = self.rows("test") or self.rows("validation")
        return None if rows is None else rows.teacher_normalized_entropy()

    def _check_arguments(self) -> None:
        world, cardinalities = self._world, self._world["cardinalities"]
        for name, num_rows in zip(("train_rows", "val_rows", "test_rows"), self._num_rows.values(), strict=True):
            check_option(f"data.{name}", num_rows, "at least 0", ok=num_rows >= 0)
        positive = bool(cardinalities) and all(n > 0 for n in cardinalities)
        check_option("data.cardinalities", cardinalities, "one or more positive numbers", ok=positive)
        for name, size in world["multi_hot"].items():
            check_option(
                "data.multi_hot", name, f"about features among {', '.join(self.fields)}", ok=name in self.fields
            )
            check_option(f"data.multi_hot.{name}", size, "at least 1", ok=size >= 1)
        for name in ("num_dense", "zipf_exponent", "signal"):
            check_option(f"data.{name}", world[name], "at least 0", ok=world[name] >= 0)
        check_option("data.base_rate", world["base_rate"], "between 0 and 1", ok=0 < world["base_rate"] < 1)
        share = world["interaction_share"]
        check_option("data.interaction_share", share, "from 0 to 1", ok=0 <= share <= 1)
