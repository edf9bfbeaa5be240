"""Tables that are looked up only, from wherever somebody fetches their rows."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of the batch.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_recsys.embeddings.backend import TableBackend
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.kernels.torch_kernel import pool_rows
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.embeddings.ticket import Ticket
from lightning_recsys.optim import RowOptimizer


class ReadOnlyRows(TableBackend):
    """Looks rows up for evaluation and prediction: each row of a batch is fetched once, and none is kept.

    Args:
        layout: The tables, and where each feature's rows lie in them.
        optimizer: The update rule of the collection that this is bound to, which is never used.
        fetch: For each table a function that returns the rows with the given numbers (int64 ``[U]``, rising): float32
            ``[U, D]``.
    """

    has_rows_in_state_dict = False
    step = 0

    def __init__(
        self, layout: TableLayout, optimizer: RowOptimizer, fetch: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> None:
        super().__init__(layout, optimizer)
        self._fetch = dict(fetch)

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:
        """Not for training.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("these rows are read from a checkpoint and cannot be trained: load the whole checkpoint.")

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:  # noqa: D102
        raise AssertionError("no lookup was for training")

    def lookup_frozen(self, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        rows_U, place_N = torch.unique(self.layout.rows_of(sparse).cpu(), return_inverse=True)
        values_UD = torch.cat([self._rows_of(table.name, rows_U) for table in self.layout.tables])
        return pool_rows(values_UD.to(sparse.device), place_N.to(sparse.device), sparse)

    def _rows_of(self, table: str, rows_U: Tensor) -> Tensor:
        first, stop = self.layout.row_range(table)
        low, high = torch.searchsorted(rows_U, torch.tensor([first, stop])).tolist()
        return self._fetch[table](rows_U[low:high] - first) if low < high else torch.empty(0, self.layout.embedding_dim)

    def read(self, table: str, name: str) -> Tensor:  # noqa: D102 - inherited
        raise KeyError(f"{table}.{name}")

    def write(self, table: str, name: str, values: Tensor) -> None:  # noqa: D102 - inherited
        raise KeyError(f"{table}.{name}")
