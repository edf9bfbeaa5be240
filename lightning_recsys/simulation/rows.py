"""Embedding rows of a virtual cluster: read when a batch begins, trained when it ends, with a version each."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of the batch, R all rows.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import LocalBackend, SparseFeatures, Ticket
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.sync import StalenessNormalization

_ID_BYTES = _VERSION_BYTES = 8


class KeptGradient(Protocol):
    """The effect of one batch on the rows of one collection."""

    @property
    def rows(self) -> Any:
        """The backend that has kept it."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes that reading its rows moved, and training them will move."""
        ...

    def push(self, normalization: StalenessNormalization | None, *, lr: float) -> NDArray[np.int32]:
        """Train the rows; returns the staleness of each of them, int32 ``[U]``, or nothing where it is not counted."""
        ...


@runtime_checkable
class KeepsGradients(Protocol):
    """A backend of a collection whose gradients wait until their worker's push."""

    def take(self) -> Sequence[KeptGradient]:
        """The gradients since the last call."""
        ...


@dataclass(frozen=True)
class RowGradient:
    """The effect of one batch on the rows of one collection.

    Args:
        rows: The rows of the collection.
        sparse: The features of the batch.
        grad_BFD: Gradient of the pooled rows.
        row_N: Number of the row of each id.
        pulled_N: Version of that row when it was read.
        first_N: Whether the id is the one that stands for its row.
    """

    rows: VersionedRows
    sparse: SparseFeatures
    grad_BFD: Tensor
    row_N: NDArray[np.int64]
    pulled_N: NDArray[np.int32]
    first_N: NDArray[np.bool_]

    @property
    def num_bytes(self) -> int:
        """The bytes of reading the distinct rows, and of training them again: number, version, and as many floats."""
        row_bytes = _ID_BYTES + _VERSION_BYTES + self.grad_BFD.element_size() * self.grad_BFD.shape[2]
        return row_bytes * int(np.count_nonzero(self.first_N))

    def push(self, normalization: StalenessNormalization | None, *, lr: float) -> NDArray[np.int32]:
        """Train the rows; returns the staleness of each of them, int32 ``[U]``."""
        return self.rows.push(self, normalization, lr=lr)


class VersionedRows(LocalBackend):
    """All rows of a collection. What a batch does to them is kept (:meth:`take`) until its worker pushes it.

    Args:
        layout: The tables of the collection.
        optimizer: The update rule.

    Attributes:
        versions: Updates that each row has had, int32 ``[R]``.
    """

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__(layout, optimizer, kernel="auto")
        self.versions = np.zeros(layout.num_rows, dtype=np.int32)
        self._changes: Tensor | None = (
            None  # of each row, root mean square of its last update; where a rule asks for it
        )
        self._taken: list[RowGradient] = []
        self._marks = np.zeros(layout.num_rows, dtype=np.int32)
        self._free: dict[torch.Size, list[Tensor]] = defaultdict(list)  # memory of trained gradients, as a replica's

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        """Keep the gradient; it is computed within one event with the lookup, so the versions are those of then."""
        sparse = Ticket.joined(tickets).sparse
        row_N = self.layout.rows_of(sparse).numpy()
        numbers = np.arange(len(row_N), dtype=np.int32)
        self._marks[row_N] = numbers  # of several ids of the same row the last one stays
        first_N = self._marks[row_N] == numbers
        free = self._free[grad_BFD.shape]
        kept_BFD = (free.pop() if free else torch.empty_like(grad_BFD)).copy_(grad_BFD)
        self._taken.append(RowGradient(self, sparse, kept_BFD, row_N, self.versions[row_N], first_N))

    def take(self) -> list[RowGradient]:
        """The gradients since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def push(
        self, gradient: RowGradient, normalization: StalenessNormalization | None, *, lr: float
    ) -> NDArray[np.int32]:
        """Train the rows of a gradient; as :meth:`RowGradient.push`."""
        row_N = gradient.row_N
        version_N = self.versions[row_N] + np.int32(1)
        self.versions[row_N] = version_N
        staleness_N = version_N - gradient.pulled_N
        sparse = gradient.sparse
        if normalization is not None:
            change_N = self._last_changes(row_N) if normalization.uses_changes else None
            factor_N = normalization.factor(torch.from_numpy(staleness_N), change_N)
            if bool((factor_N < 1).any()):  # a weight multiplies an id's part of the gradient
                weights = factor_N if sparse.weights is None else factor_N * sparse.weights
                sparse = replace(sparse, weights=weights)
        row_U = torch.from_numpy(row_N[gradient.first_N]) if self._changes is not None else None
        before_UD = None if row_U is None else self.rows.data[row_U].float()
        super().apply_gradients([Ticket(sparse)], gradient.grad_BFD, lr=lr)
        self._free[gradient.grad_BFD.shape].append(gradient.grad_BFD)
        if self._changes is not None and row_U is not None and before_UD is not None:
            self._changes[row_U] = (self.rows.data[row_U].float() - before_UD).square_().mean(1).sqrt_()
        stale_U: NDArray[np.int32] = staleness_N[gradient.first_N]
        return stale_U

    def _last_changes(self, row_N: NDArray[np.int64]) -> Tensor:
        if self._changes is None:
            self._changes = torch.zeros(len(self.versions))
        return self._changes[torch.from_numpy(row_N)]
