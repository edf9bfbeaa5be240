"""The base of the two stores of embedding rows in files: tables, rule and versions, and the counting of pushes."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of a request.

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import as_loop_array
from lightning_recsys.embeddings.backend import row_shapes
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.embeddings.kernels.numba_kernel import NumbaKernel
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.compiled import apply_update
from lightning_recsys.stores.checks import check_rows, check_values
from lightning_recsys.stores.digests import DIGEST
from lightning_recsys.stores.folders import counters
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays, Shapes, total_bytes
from lightning_recsys.stores.interfaces import EmbeddingStore, Rows
from lightning_recsys.stores.plain import rows_from_plain
from lightning_recsys.stores.versions import (
    CHANGE,
    VERSION,
    StalenessHistogram,
    advance,
    check_versions,
    count_staleness,
    dtype_of,
    tag_arrays,
)
from lightning_recsys.sync import StalenessNormalization

CLOCK = "clock"
STEP = 0  # the place of the number of updates among the counters


def row_arrays(
    num_rows: int, layout: TableLayout, optimizer: RowOptimizer, normalization: StalenessNormalization | None
) -> Shapes:
    """The files of so many rows, with their state, clocks and tags."""
    rows: Shapes = {
        name: (str(dtype_of(layout, name)).removeprefix("torch."), (num_rows, *shape))
        for name, shape in row_shapes(layout, optimizer).items()
    }
    return {**rows, CLOCK: ("int32", (num_rows,)), **tag_arrays(normalization, num_rows)}


def row_bytes(layout: TableLayout, optimizer: RowOptimizer, normalization: StalenessNormalization | None) -> int:
    """The bytes of a row in a store's files, with its state, clock and tags."""
    return total_bytes(row_arrays(1, layout, optimizer, normalization))


class RowFiles(EmbeddingStore):
    """Rows, optimizer state, clocks and tags in mapped files, updated by the local kernels.

    Attributes:
        arrays: The mapped files of the store.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        observed: The staleness of the pushes that this process has applied.
    """

    def _open(self, arrays: MappedArrays) -> None:
        self.arrays = arrays
        self.layout, self.optimizer, self.normalization = rows_from_plain(arrays.meta)
        self.row_shapes = row_shapes(self.layout, self.optimizer)
        self._states = tuple(name for name in self.row_shapes if name != "weight")
        self._tags = tuple(tag_arrays(self.normalization, 0))  # what rows have beside that, where they have versions
        self._observed = StalenessHistogram()

    def _choose_kernels(self, rows: TableLayout) -> None:
        """The kernels over the rows of the files: that of plain rows, and the one that sums for versioned rows."""
        self._kernel = choose_kernel("auto", rows, self.optimizer, torch.device("cpu"))
        self._summing = self._kernel if isinstance(self._kernel, NumbaKernel) else NumbaKernel(rows, self.optimizer)

    @property
    def _state(self) -> dict[str, Tensor]:
        return {name: self.arrays[name] for name in self._states}

    def _check_versioned(self) -> None:
        if self.normalization is None:
            raise ValueError(f"{self.arrays.folder.name!r} has no versions: create it with normalization=...")

    @property
    def observed(self) -> StalenessHistogram:  # noqa: D102 - inherited
        return self._observed

    # --- Updates -----------------------------------------------------------------------------------------------------

    def _train_bags(
        self, sparse: SparseFeatures, grad_BFD: Tensor, versions: Tensor | None, *, lr: float
    ) -> Tensor | None:
        """Train the rows that features name by their places; returns staleness and count of each, with versions."""
        return self._begin_bags(sparse, grad_BFD, versions, lr=lr)[1]()

    def _begin_bags(
        self, sparse: SparseFeatures, grad_BFD: Tensor, versions: Tensor | None, *, lr: float
    ) -> tuple[NDArray[np.int64], Callable[[], Tensor | None]]:
        """The rows that such an update will touch, and what makes it, before the next one begins."""
        if self.normalization is None and self._kernel is not self._summing:
            return self.layout.rows_of(sparse).numpy(), partial(self._train_by_kernel, sparse, grad_BFD, lr=lr)
        touched, sums, oldest = self._summing.sum_gradients(sparse, grad_BFD, versions)
        numbers = None if versions is None else torch.from_numpy(oldest)
        return touched, partial(self._train_places, touched, sums, numbers, lr=lr)

    def _train_by_kernel(self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float) -> None:
        weight, state, step = self._begin_update()
        self._kernel.apply_gradients(weight, state, sparse, grad_BFD, lr=lr, step=step)

    def _train_places(
        self, places: NDArray[np.int64], grads_UD: NDArray[np.float32], versions: Tensor | None, *, lr: float
    ) -> Tensor | None:
        """Train distinct rows by their places, with the gradients of each, as :meth:`_train_bags` does.

        Of versioned rows each gradient is multiplied by what its staleness leaves of it.
        """
        weight, state, step = self._begin_update()
        if self.normalization is None:
            apply_update(self.optimizer, places, grads_UD, weight, state, lr=lr, step=step)
            return None
        staleness, _ = advance(places, versions, self.arrays[VERSION])
        touched, changes = torch.from_numpy(places), None
        if self.normalization.uses_changes:
            changes, before = self.arrays[CHANGE], weight[touched].float()
        if self.normalization.rule != "identity":
            factors = self.normalization.factor(staleness, None if changes is None else changes[touched])
            grads_UD = grads_UD * factors.unsqueeze(1).numpy()
        apply_update(self.optimizer, places, grads_UD, weight, state, lr=lr, step=step)
        if changes is not None:
            changes[touched] = (weight[touched].float() - before).square().mean(1).sqrt()
        counts = count_staleness(staleness)
        self._observed.add(counts)
        return counts

    def _begin_update(self) -> tuple[Tensor, dict[str, Tensor], int]:
        return self.arrays["weight"], self._state, counters.add(self.arrays["counters"], STEP)

    def _check_row_gradients(self, rows_U: Tensor, grads_UD: Tensor, versions: Tensor | None) -> None:
        if grads_UD.shape != (rows_U.numel(), self.layout.embedding_dim):
            raise ValueError(
                f"gradients must have shape {[rows_U.numel(), self.layout.embedding_dim]}, got {list(grads_UD.shape)}."
            )
        check_rows(rows_U, self.layout.num_rows)
        check_versions(self.normalization, versions, rows_U.numel())

    def _array_of(self, name: str) -> str:
        """The array that is read for what rows have by this name."""
        names = ["weight", *self._states, *self._tags]
        if name not in (*names, DIGEST):
            raise ValueError(f"{self.arrays.folder} has {names}, got {name!r}.")
        return "weight" if name == DIGEST else name

    def _check_values(self, name: str, rows: Rows, values: Tensor) -> None:
        if self._array_of(name) != name:
            raise ValueError(f"{name!r} of rows follows from them and cannot be written.")
        size = rows.stop - rows.start if isinstance(rows, slice) else rows.numel()
        check_values(name, values, (size, *self.row_shapes.get(name, ())), dtype_of(self.layout, name))

    def _check_stretch(self, rows: slice) -> None:
        if not 0 <= rows.start <= rows.stop <= self.layout.num_rows:
            raise IndexError(f"rows {rows.start} to {rows.stop} are not within the store's {self.layout.num_rows}.")

    # --- Life --------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:  # noqa: D102 - inherited
        return int(self.arrays["counters"][STEP])

    @step.setter
    def step(self, value: int) -> None:
        self.arrays["counters"][STEP] = value

    def flush(self) -> None:
        """Every update is in the store when its call returns: nothing to wait for."""

    def close(self) -> None:  # noqa: D102 - inherited
        self.arrays.close()


def as_matrix(array: Tensor) -> np.ndarray:
    """``[X]`` as ``[X, 1]``, ``[X, W]`` as it is; bfloat16 as loops take it."""
    return as_loop_array((array if array.dim() > 1 else array.unsqueeze(1)).contiguous())
