"""The interface of kernels: pooled lookup, and one fused update of the rows that a batch touched."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, R rows of all tables.

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from lightning_recsys.embeddings.config import EmbeddingBagConfig, RowDtype
from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer


@dataclass(frozen=True)
class TableLayout:
    """The layout of tables of one width and dtype, behind each other in one tensor of rows ``[R, D]``.

    Args:
        tables: The tables, in storage order.
    """

    tables: tuple[EmbeddingBagConfig, ...]

    @cached_property
    def embedding_dim(self) -> int:
        """``D``."""
        return self.tables[0].embedding_dim

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which rows are kept."""
        return torch.bfloat16 if self.tables[0].dtype is RowDtype.BFLOAT16 else torch.float32

    @cached_property
    def num_rows(self) -> int:
        """``R``, the rows of all tables together."""
        return sum(table.num_embeddings for table in self.tables)

    @cached_property
    def table_starts(self) -> dict[str, int]:
        """First row of each table, by name."""
        starts = accumulate((table.num_embeddings for table in self.tables), initial=0)
        return {table.name: start for table, start in zip(self.tables, starts, strict=False)}

    def row_range(self, table: str) -> tuple[int, int]:
        """First row of a table, and the one after its last."""
        first = self.table_starts[table]
        return first, first + next(x.num_embeddings for x in self.tables if x.name == table)

    @cached_property
    def feature_tables(self) -> list[EmbeddingBagConfig]:
        """The table of each feature, in feature order."""
        return [table for table in self.tables for _ in table.feature_names]

    @cached_property
    def feature_starts(self) -> list[int]:
        """First row of each feature's table, in feature order."""
        starts = self.table_starts
        return [starts[table.name] for table in self.feature_tables]

    @cached_property
    def feature_starts_F(self) -> Tensor:
        """The same as a tensor, int64 ``[F]``."""
        return torch.from_numpy(as_int64s(self.feature_starts))

    def rows_of(self, sparse: SparseFeatures) -> Tensor:
        """The row of each id of resolved features, int64 ``[N]``; one that occurs twice is named twice."""
        return sparse.rows_from(self.feature_starts_F)


class Kernel(ABC):
    """Pooled lookup and fused update over one tensor of rows. Holds no rows itself.

    The features that it gets are resolved: in the layout's feature order, ids checked, mean pooling folded into the
    per-sample weights (:meth:`EmbeddingBagCollection.resolve`).

    Args:
        layout: The tables, and where each feature's rows lie in them.
        optimizer: The update rule of the rows.
    """

    name: ClassVar[str]

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        self.layout = layout
        self.optimizer = optimizer

    @classmethod
    @abstractmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:
        """Why this kernel cannot serve these tables on this machine, or ``None`` where it can."""

    @abstractmethod
    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:
        """Sum each bag's (weighted) rows.

        Args:
            rows: All rows, ``[R, D]``, in the layout's dtype.
            sparse: Resolved features.

        Returns:
            Float32 ``[B, F, D]``, contiguous, zeros for empty bags; carries no graph.
        """

    @abstractmethod
    def apply_gradients(
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        sparse: SparseFeatures,
        grad_BFD: Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Sum the gradient of each touched row over the batch, then update row and state in place, once per row.

        Args:
            rows: All rows, ``[R, D]``, in the layout's dtype.
            state: All rows' optimizer state, as :meth:`RowOptimizer.initial_state` makes it.
            sparse: The resolved features that :meth:`lookup` got.
            grad_BFD: Gradient of the loss for the lookup's result, float32 ``[B, F, D]``.
            lr: Step size of this update.
            step: Updates that the tables have seen, this one included; how bfloat16 rows are rounded follows from it.
        """
