"""What the two stores of embedding rows in files share: their tables, rule and versions, and the counting of pushes."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of a request.

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings.backend import row_shapes
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.embeddings.kernels.numba_kernel import NumbaKernel
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.compiled import apply_update
from lightning_recsys.stores import counters
from lightning_recsys.stores.checks import check_rows
from lightning_recsys.stores.interfaces import EmbeddingStore
from lightning_recsys.stores.mapped_arrays import MappedArrays, Shapes
from lightning_recsys.stores.plain import rows_from_plain
from lightning_recsys.stores.versions import RowVersions, StalenessHistogram, check_versions, row_versions, tag_arrays
from lightning_recsys.sync import StalenessNormalization

CLOCK = "clock"
STEP = 0  # the place of the number of updates among the counters


def row_arrays(
    num_rows: int, layout: TableLayout, optimizer: RowOptimizer, normalization: StalenessNormalization | None
) -> Shapes:
    """The files of so many rows, with their state, clocks and tags."""
    rows: Shapes = {name: ("float32", (num_rows, *shape)) for name, shape in row_shapes(layout, optimizer).items()}
    return {**rows, CLOCK: ("int32", (num_rows,)), **tag_arrays(normalization, num_rows)}


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
        self._versions = row_versions(self.normalization, arrays)
        self._observed = StalenessHistogram()

    def _choose_kernels(self, rows: TableLayout) -> None:
        """The kernels over the rows of the files: that of plain rows, and the one that sums for versioned rows."""
        self._kernel = choose_kernel("auto", rows, self.optimizer, torch.device("cpu"))
        self._summing = NumbaKernel(rows, self.optimizer)

    @property
    def _state(self) -> dict[str, Tensor]:
        return {name: self.arrays[name] for name in self._states}

    def _versioned(self) -> RowVersions:
        if self._versions is None:
            raise ValueError(f"{self.arrays.folder.name!r} has no versions: create it with normalization=...")
        return self._versions

    @property
    def observed(self) -> StalenessHistogram:  # noqa: D102 - inherited
        return self._observed

    @abstractmethod
    def update(
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        """As :meth:`apply_gradients`; tells the staleness of versioned rows, as ``count_staleness`` has it."""

    @abstractmethod
    def update_rows(
        self, rows_U: Tensor, grads_UD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        """As :meth:`apply_row_gradients`; tells what :meth:`update` does."""

    def apply_gradients(  # noqa: D102 - inherited
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> None:
        self._observe(self.update(sparse, grad_BFD, lr=lr, versions=versions))

    def apply_row_gradients(  # noqa: D102 - inherited
        self, rows_U: Tensor, grads_UD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> None:
        self._observe(self.update_rows(rows_U, grads_UD, lr=lr, versions=versions))

    def _observe(self, counts: Tensor | None) -> None:
        if counts is not None:
            self._observed.add(counts)

    # --- Checks ------------------------------------------------------------------------------------------------------

    def _train_bags(
        self, sparse: SparseFeatures, grad_BFD: Tensor, versions: Tensor | None, *, lr: float
    ) -> Tensor | None:
        """Train the rows that features name by their places; returns staleness and count of each, with versions."""
        weight, state, step = self._begin_update()
        if self._versions is None:
            self._kernel.apply_gradients(weight, state, sparse, grad_BFD, lr=lr, step=step)
            return None
        touched, sums, oldest = self._summing.sum_gradients(sparse, grad_BFD, versions)
        pulled = None if versions is None else torch.from_numpy(oldest)
        return self._versions.update(self.optimizer, touched, sums, pulled, weight, state, lr=lr, step=step)

    def _train_places(
        self, places: NDArray[np.int64], grads_UD: NDArray[np.float32], versions: Tensor | None, *, lr: float
    ) -> Tensor | None:
        """As :meth:`_train_bags`, of rows by their places, with the gradients of each."""
        weight, state, step = self._begin_update()
        if self._versions is None:
            apply_update(self.optimizer, places, grads_UD, weight, state, lr=lr, step=step)
            return None
        return self._versions.update(self.optimizer, places, grads_UD, versions, weight, state, lr=lr, step=step)

    def _begin_update(self) -> tuple[Tensor, dict[str, Tensor], int]:
        return self.arrays["weight"], self._state, counters.add(self.arrays["counters"], STEP)

    def _check_row_gradients(self, rows_U: Tensor, grads_UD: Tensor, versions: Tensor | None) -> None:
        if grads_UD.shape != (rows_U.numel(), self.layout.embedding_dim):
            raise ValueError(
                f"gradients must have shape {[rows_U.numel(), self.layout.embedding_dim]}, got {list(grads_UD.shape)}."
            )
        check_rows(rows_U, self.layout.num_rows)
        check_versions(self.normalization, versions, rows_U.numel())

    def _check_name(self, name: str) -> None:
        names = ["weight", *self._states, *self._tags]
        if name not in names:
            raise ValueError(f"{self.arrays.folder} has {names}, got {name!r}.")

    def _check_stretch(self, first_row: int, num_rows: int) -> None:
        if first_row < 0 or num_rows < 0 or first_row + num_rows > self.layout.num_rows:
            raise IndexError(
                f"rows {first_row} to {first_row + num_rows} are not within the store's {self.layout.num_rows}."
            )

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
    """``[X]`` as ``[X, 1]``, ``[X, W]`` as it is."""
    return (array if array.dim() > 1 else array.unsqueeze(1)).contiguous().numpy()
