"""The rows that the benchmarks train on: Criteo's shape, drawn once and held in memory for every variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_recsys.data import Batch, BatchLoader, SyntheticDataModule


@dataclass(frozen=True)
class Workload:
    """Rows of Criteo's shape.

    Args:
        cardinalities: Ids of each single-hot field.
        num_dense: Numeric features.
        dim: Embedding width ``D``.
        rows: Rows held in memory; variants go round and round.
        zipf_exponent: Skew of the ids.
    """

    cardinalities: Sequence[int] = (200_000,) * 6 + (20_000,) * 10 + (1_000,) * 10
    num_dense: int = 13
    dim: int = 16
    rows: int = 131_072
    zipf_exponent: float = 1.1

    @property
    def num_fields(self) -> int:
        """``F``."""
        return len(self.cardinalities)

    @property
    def fields(self) -> dict[str, int]:
        """Field name -> number of ids."""
        return self._data(1).fields

    def loader(self, batch_size: int) -> BatchLoader:
        """The package's reader over the rows."""
        return self._data(batch_size).train_dataloader()

    def batches(self, batch_size: int) -> list[Batch]:
        """All rows as ready batches, for variants that read nothing."""
        return list(self.loader(batch_size))

    def _data(self, batch_size: int) -> SyntheticDataModule:
        return SyntheticDataModule(
            batch_size=batch_size,
            train_rows=self.rows,
            val_rows=0,
            test_rows=0,
            cardinalities=self.cardinalities,
            num_dense=self.num_dense,
            zipf_exponent=self.zipf_exponent,
        )
