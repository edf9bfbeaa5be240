"""The base class of data modules: loaders over rows, sharded for the trainer they are attached to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import BatchLoader, BatchSource, RowSource, Shuffle, ShuffledRows
from lightning_recsys.data.options import Split


class CTRDataModule(pl.LightningDataModule, ABC):
    """Base of the data modules: everything but the rows.

    Where there are no validation rows, or no test rows, a trainer skips them as if ``limit_val_batches=0`` (or
    ``limit_test_batches``, ``limit_predict_batches``) had been asked for, from ``setup`` until ``teardown``.

    Args:
        batch_size: Rows per batch and rank.
        seed: Seed of the order in which training rows come; a new order each epoch. ``None`` counts as 0, because ranks
            that draw seeds of their own would not share out the same order.
        drop_last: Leave out the training rows that do not fill a batch on every rank. Evaluation never drops a row.
    """

    _shuffle: Shuffle = "rows"

    def __init__(self, *, batch_size: int, seed: int | None = 0, drop_last: bool = False) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1, got {batch_size}.")
        self.batch_size = batch_size
        self.seed = seed or 0
        self.drop_last = drop_last
        self.selected_fields: tuple[str, ...] | None = None
        self._limits: dict[str, int | float] = {}
        self._train_loader: BatchLoader | None = None
        self._position: dict[str, Any] | None = None  # where the next training loader begins, after a resume

    def setup(self, stage: str | None = None) -> None:
        """Make the trainer skip the splits that are not there; a subclass that overrides this calls it."""
        limits: dict[str, Split] = {
            "limit_val_batches": "validation",
            "limit_test_batches": "test",
            "limit_predict_batches": self.predicted_split,
        }
        for limit, split in limits.items():
            if self.trainer is not None and getattr(self.trainer, limit) and not self.has(split):
                self._limits[limit] = getattr(self.trainer, limit)
                setattr(self.trainer, limit, 0)

    def teardown(self, stage: str | None = None) -> None:
        """Undo what :meth:`setup` did to the trainer; a subclass that overrides this calls it."""
        for limit, value in self._limits.items():
            setattr(self.trainer, limit, value)
        self._limits.clear()

    @property
    @abstractmethod
    def num_dense(self) -> int:
        """Number of dense features."""

    @property
    @abstractmethod
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""

    @property
    def predicted_split(self) -> Split:
        """Whose rows :meth:`predict_dataloader` gives."""
        return "test"

    @property
    def model_arguments(self) -> dict[str, Any]:
        """The arguments that a model for these data needs."""
        return {"num_dense": self.num_dense, "fields": self.fields}

    def select_fields(self, names: Sequence[str] | None) -> None:
        """Let the batches of loaders that are made from now on have some of the categorical features only.

        Args:
            names: Their names, at least one; ``None`` for all.

        Raises:
            ValueError: no name, or one of no feature.
        """
        if names is not None and (not names or not set(names) <= set(self.fields)):
            raise ValueError(
                f"the data has the fields {list(self.fields)}: select one or more of them, got {list(names)}."
            )
        self.selected_fields = None if names is None else tuple(names)

    @property
    def best_normalized_entropy(self) -> float | None:
        """The lowest normalized entropy that any model can reach, where that is known."""
        return None

    def has(self, split: Split) -> bool:
        """Whether there is such a split: a subclass that has to read rows for :meth:`rows` says it without."""
        return self.rows(split) is not None

    @abstractmethod
    def rows(self, split: Split) -> RowSource | None:
        """The rows of a split; ``None`` where there is no such split."""

    def sample_batches(self, count: int) -> list[Batch]:
        """A few batches of training rows to measure with: no order is drawn, and no loader's position moves."""
        rows = self.rows("train")
        if rows is None:
            return []
        end = min(count * self.batch_size, len(rows))
        starts = range(0, end, self.batch_size)
        return [rows.take(torch.arange(start, min(start + self.batch_size, end))) for start in starts]

    def train_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Batches of the training rows in a new order each epoch (always the same one under ``overfit_batches``)."""
        fixed = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        loader = self._loader("train", shuffle=None if fixed else self._shuffle, drop_last=self.drop_last)
        self._train_loader = loader if isinstance(loader, BatchLoader) else None
        if self._position is not None and self._train_loader is not None:
            usual = len(loader)
            self._train_loader.load_state_dict(self._position)
            if self.trainer is not None and len(loader) != usual:
                # The epoch being resumed has another number of batches than those to come, and Lightning asks for the
                # number only where it asks for the loader.
                self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._position = None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The position in the training rows."""
        return {} if self._train_loader is None else {"position": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next training loader begin at a position: before Lightning asks it for its number of batches."""
        self._position = state_dict.get("position")

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Batches of the validation rows, in order."""
        return self._loader("validation")

    def test_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Batches of the test rows, in order."""
        return self._loader("test")

    def predict_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Batches of the rows to predict, in order: those of the test, unless the data have others."""
        return self._loader(self.predicted_split)

    def _loader(
        self, split: Split, *, shuffle: Shuffle | None = None, drop_last: bool = False
    ) -> BatchLoader | list[BatchLoader]:
        source = self._source(split, shuffle)
        if source is None:
            return []
        # The strategy knows how many ranks get rows of their own; Lightning's samplers ask it the same question.
        share = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
        return BatchLoader(
            source,
            batch_size=self.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
            rank=share["rank"],
            world_size=share["num_replicas"],
        )

    def _source(self, split: Split, shuffle: Shuffle | None) -> BatchSource | None:
        """The rows of a split, in an order."""
        rows = self.rows(split)
        return None if rows is None else ShuffledRows(rows, shuffle, self.selected_fields)
