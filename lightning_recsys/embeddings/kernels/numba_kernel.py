"""The kernel in compiled loops: every rule and every width on the CPU, one pass over the unique rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import as_loop_array
from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch_row
from lightning_recsys.compiled.vectors import add_floats, copy_floats, scale_floats, vector_width
from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.compiled import COMPILED_RULES, apply_update

_NO_WEIGHTS = np.empty(0, dtype=np.float32)
_NO_OFFSETS = np.empty(0, dtype=np.int64)


# Loops are made for a width that the compiler knows, when they are first called: rows then pass through vector
# registers, without an innermost loop where they are narrow.

_FAR_AHEAD = 2 * AHEAD  # a narrow row is copied within a few cycles


@cache
def lookup_single_for(dim: int) -> Callable[..., None]:
    """Rows of width ``dim`` for bags of one id each."""
    ahead = _FAR_AHEAD if dim <= _FAR_AHEAD else AHEAD

    @compile_loop
    def lookup_single(ids, starts, rows, out):  # noqa: ANN001, ANN202
        num_features, batch_size = starts.shape[0], out.shape[0]
        for f in range(num_features):
            last = (f + 1) * batch_size - 1
            for b in range(batch_size):
                position = f * batch_size + b
                prefetch_row(rows, ids[min(position + ahead, last)] + starts[f])
                copy_floats(out, (b * num_features + f) * dim, rows, (ids[position] + starts[f]) * dim, dim)

    return cast(Callable[..., None], lookup_single)


@cache
def gather_for(dim: int) -> Callable[..., bool]:
    """Rows of width ``dim``, one below the other; ``False``, and nothing is done, where one is not in the table."""

    @compile_loop
    def gather(wanted, rows, out):  # noqa: ANN001, ANN202
        low, high = np.int64(0), np.int64(0)
        for row in wanted:
            low, high = min(low, row), max(high, row)
        if low < 0 or high >= rows.shape[0]:
            return wanted.shape[0] == 0
        last = wanted.shape[0] - 1
        for i in range(wanted.shape[0]):
            prefetch_row(rows, wanted[min(i + AHEAD, last)])
            copy_floats(out, i * dim, rows, wanted[i] * dim, dim)
        return True

    return cast(Callable[..., bool], gather)


@cache
def lookup_bags_for(dim: int) -> Callable[..., None]:
    """Weighted sums of rows of width ``dim``."""
    width = vector_width(dim)

    @compile_loop
    def lookup_bags(ids, offsets, weights, starts, rows, out):  # noqa: ANN001, ANN202
        num_features, batch_size = starts.shape[0], out.shape[0]
        for f in range(num_features):
            last = offsets[(f + 1) * batch_size] - 1
            for b in range(batch_size):
                bag = f * batch_size + b
                target = (b * num_features + f) * dim
                for d in range(dim):
                    out[b, f, d] = np.float32(0)
                for position in range(offsets[bag], offsets[bag + 1]):
                    prefetch_row(rows, ids[min(position + AHEAD, last)] + starts[f])
                    source = (ids[position] + starts[f]) * dim
                    weight = weights[position] if weights.shape[0] else np.float32(1)
                    for d in range(0, dim, width):
                        add_floats(out, target + d, rows, source + d, weight, width)

    return cast(Callable[..., None], lookup_bags)


@cache
def sum_by_row_for(dim: int) -> Callable[..., int]:  # noqa: C901 - nested loops, inlined by hand
    """A loop that sums the gradients of each row, of width ``dim``, and returns how many rows were touched.

    With one hash table after the other, one for each table of rows: it fits a cache where one for all would not.
    Where a table has hardly more rows than that would have places, each row has a place of its own, and nothing is
    hashed.

    Its arguments:
        ids: Of the whole batch, feature-major.
        offsets: Of the bags; empty where each holds one id.
        weights: Of the ids; empty where all are 1.
        starts: First row of each feature's table.
        tables: First feature of each table, and the number of features.
        num_rows: Of each table.
        grads: ``[B, F, D]``.
        slots: Scratch memory for the hash table, twice the least power of two that is twice the number of ids.
        touched: Result, the rows.
        sums: Result, their gradients.
        versions: A number for each id; empty where there is none.
        oldest: Result, the least number of each row's ids, where there are numbers.
    """
    width = vector_width(dim)

    @compile_loop
    def sum_by_row(ids, offsets, weights, starts, tables, num_rows, grads, slots, touched, sums, versions, oldest):  # noqa: ANN001, ANN202
        batch_size, num_features = grads.shape[0], grads.shape[1]
        count = 0
        for table in range(tables.shape[0] - 1):
            first_bag, last_bag = tables[table] * batch_size, tables[table + 1] * batch_size
            num_ids = offsets[last_bag] - offsets[first_bag] if offsets.shape[0] else last_bag - first_bag
            capacity = _capacity(num_ids)
            has_places = num_rows[table] <= 2 * capacity
            slots[: num_rows[table] if has_places else capacity] = -1
            mask = capacity - 1
            for f in range(tables[table], tables[table + 1]):
                for b in range(batch_size):
                    bag = f * batch_size + b
                    first, last = bag, bag + 1
                    if offsets.shape[0]:
                        first, last = offsets[bag], offsets[bag + 1]
                    for position in range(first, last):
                        row = ids[position] + starts[f]
                        slot = np.uint64(ids[position] if has_places else _find_slot(row, slots, touched, mask))
                        weight = weights[position] if weights.shape[0] else np.float32(1)
                        source = (b * num_features + f) * dim
                        target = slots[slot]
                        if versions.shape[0]:
                            seen = target >= 0
                            number = versions[position]
                            oldest[target if seen else count] = min(number, oldest[target]) if seen else number
                        if target < 0:
                            slots[slot] = count
                            touched[count] = row
                            for d in range(0, dim, width):
                                scale_floats(sums, count * dim + d, grads, source + d, weight, width)
                            count += 1
                        else:
                            for d in range(0, dim, width):
                                add_floats(sums, target * dim + d, grads, source + d, weight, width)
        return count

    return cast(Callable[..., int], sum_by_row)


@compile_loop
def _capacity(num_ids):  # noqa: ANN001, ANN202
    """The least power of two that leaves half of the places free."""
    capacity = 2
    while capacity < 2 * num_ids:
        capacity *= 2
    return capacity


@compile_loop
def _find_slot(row, slots, touched, mask):  # noqa: ANN001, ANN202
    """Where an open-addressing hash table holds the place of ``row`` in ``touched``, or -1 for one that is new."""
    mixed = row * np.int64(-7046029254386353131)  # 2^64 / golden ratio: spreads consecutive rows
    slot = ((mixed >> 32) ^ mixed) & mask
    while slots[slot] >= 0 and touched[slots[slot]] != row:
        slot = (slot + 1) & mask
    return slot


class NumbaKernel(Kernel):
    """Hash the batch's rows, sum their gradients, update each touched row once."""

    name: ClassVar[str] = "numba"

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__(layout, optimizer)
        self._starts = np.array(layout.feature_starts, dtype=np.int64)
        features = (len(table.feature_names) for table in layout.tables)
        self._table_bounds = np.array([*accumulate(features, initial=0)], dtype=np.int64)
        self._num_rows = np.array([table.num_embeddings for table in layout.tables], dtype=np.int64)
        self._scratch: tuple[np.ndarray, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_scratch": ()}

    @classmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:  # noqa: D102
        if type(optimizer) not in COMPILED_RULES:
            names = ", ".join(sorted(rule.__name__ for rule in COMPILED_RULES))
            return f"it has no compiled {type(optimizer).__name__}, only {names}, and no subclass of theirs"
        return None if device.type == "cpu" else f"it runs on the CPU only, and the rows are on {device}"

    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        out = torch.empty(sparse.batch_size, len(sparse.keys), rows.shape[1])
        array = rows.numpy() if rows.dtype == torch.float32 else as_loop_array(rows)
        if sparse.is_single_hot and sparse.weights is None:
            lookup_single_for(self.layout.embedding_dim)(sparse.values.numpy(), self._starts, array, out.numpy())
        else:
            offsets, weights = sparse.bag_offsets().numpy(), _weights(sparse)
            lookup_bags_for(self.layout.embedding_dim)(
                sparse.values.numpy(), offsets, weights, self._starts, array, out.numpy()
            )
        return out

    def apply_gradients(  # noqa: D102 - inherited
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        sparse: SparseFeatures,
        grad_BFD: Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        touched, sums, _ = self.sum_gradients(sparse, grad_BFD)
        apply_update(self.optimizer, touched, sums, rows, state, lr=lr, step=step)

    def sum_gradients(
        self, sparse: SparseFeatures, grad_BFD: Tensor, versions_N: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first half of an update: the rows of a batch and their gradients, which the next call overwrites.

        Args:
            sparse: Resolved features.
            grad_BFD: The gradient of the pooled rows.
            versions_N: A number for each id, int64.

        Returns:
            The rows, int64 ``[U]``; their gradients, float32 ``[U, D]``; the least number of each row's ids, int64
            ``[U]``, or nothing without numbers.
        """
        slots, touched, sums = self._buffers(sparse.values.numel())
        versions = _NO_OFFSETS if versions_N is None else versions_N.contiguous().numpy()
        oldest = np.empty_like(versions)
        count = sum_by_row_for(self.layout.embedding_dim)(
            sparse.values.numpy(),
            _NO_OFFSETS if sparse.is_single_hot else sparse.bag_offsets().numpy(),
            _weights(sparse),
            self._starts,
            self._table_bounds,
            self._num_rows,
            grad_BFD.contiguous().numpy(),
            slots,
            touched,
            sums,
            versions,
            oldest,
        )
        return touched[:count], sums[:count], oldest[:count]

    def _buffers(self, num_ids: int) -> tuple[np.ndarray, ...]:
        """Scratch memory for one batch, kept between batches: fresh pages would cost more than the sums."""
        if not self._scratch or self._scratch[1].shape[0] < num_ids:
            self._scratch = (
                np.empty(2 << (2 * max(num_ids, 1) - 1).bit_length(), dtype=np.int32),
                np.empty(num_ids, dtype=np.int64),
                np.empty((num_ids, self.layout.embedding_dim), dtype=np.float32),
            )
        return self._scratch


def _weights(sparse: SparseFeatures) -> np.ndarray:
    return _NO_WEIGHTS if sparse.weights is None else sparse.weights.numpy()
