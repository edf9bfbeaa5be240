"""The kernel in compiled loops: every rule and every width on the CPU, one pass over the unique rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.compiled import apply_update, compile_loop

_NO_WEIGHTS = np.empty(0, dtype=np.float32)
_NO_OFFSETS = np.empty(0, dtype=np.int64)


@compile_loop
def _lookup_single(ids, starts, rows, out):  # noqa: ANN001, ANN202
    num_features, batch_size = starts.shape[0], out.shape[0]
    for f in range(num_features):
        for b in range(batch_size):
            row = ids[f * batch_size + b] + starts[f]
            for d in range(rows.shape[1]):
                out[b, f, d] = rows[row, d]


@compile_loop
def _lookup_bags(ids, offsets, weights, starts, rows, out):  # noqa: ANN001, ANN202
    num_features, batch_size = starts.shape[0], out.shape[0]
    dim = rows.shape[1]
    for f in range(num_features):
        for b in range(batch_size):
            bag = f * batch_size + b
            for d in range(dim):
                out[b, f, d] = np.float32(0)
            for position in range(offsets[bag], offsets[bag + 1]):
                row = ids[position] + starts[f]
                weight = weights[position] if weights.shape[0] else np.float32(1)
                for d in range(dim):
                    out[b, f, d] += weight * rows[row, d]


@compile_loop
def _sum_by_row(ids, offsets, weights, starts, grads, slots, slot_rows, touched, sums):  # noqa: ANN001, ANN202
    """Sum the gradients of each row with an open-addressing hash table; returns how many rows were touched.

    ``offsets`` is empty where each bag holds one id, ``weights`` where all are 1. ``slots`` (-1 everywhere on entry)
    and ``slot_rows`` are the hash table, a power of two in size and at least twice the number of ids.
    """
    num_features, batch_size = starts.shape[0], grads.shape[0]
    dim = grads.shape[2]
    mask = slots.shape[0] - 1
    count = 0
    for f in range(num_features):
        for b in range(batch_size):
            bag = f * batch_size + b
            first, last = bag, bag + 1
            if offsets.shape[0]:
                first, last = offsets[bag], offsets[bag + 1]
            for position in range(first, last):
                row = ids[position] + starts[f]
                mixed = row * np.int64(-7046029254386353131)  # 2^64 / golden ratio: spreads consecutive rows
                slot = ((mixed >> 32) ^ mixed) & mask
                while slots[slot] >= 0 and slot_rows[slot] != row:
                    slot = (slot + 1) & mask
                target = slots[slot]
                if target < 0:
                    target = count
                    slots[slot] = count
                    slot_rows[slot] = row
                    touched[count] = row
                    for d in range(dim):
                        sums[count, d] = np.float32(0)
                    count += 1
                weight = weights[position] if weights.shape[0] else np.float32(1)
                for d in range(dim):
                    sums[target, d] += weight * grads[b, f, d]
    return count


class NumbaKernel(Kernel):
    """Hash the batch's rows, sum their gradients, update each touched row once."""

    name: ClassVar[str] = "numba"

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__(layout, optimizer)
        self._starts = np.array(layout.feature_starts, dtype=np.int64)
        self._scratch: tuple[np.ndarray, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_scratch": ()}

    @classmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:  # noqa: D102
        return None if device.type == "cpu" else f"it runs on the CPU only, and the rows are on {device}"

    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        out = torch.empty(sparse.batch_size, len(sparse.keys), rows.shape[1])
        if sparse.is_single_hot and sparse.weights is None:
            _lookup_single(sparse.values.numpy(), self._starts, rows.numpy(), out.numpy())
        else:
            offsets, weights = sparse.bag_offsets().numpy(), _weights(sparse)
            _lookup_bags(sparse.values.numpy(), offsets, weights, self._starts, rows.numpy(), out.numpy())
        return out

    def apply_gradients(  # noqa: D102 - inherited
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        sparse: SparseFeatures,
        grad_BFD: Tensor,
        *,
        learning_rate: float,
        step: int,
    ) -> None:
        slots, slot_rows, touched, sums = self._buffers(sparse.values.numel())
        offsets = _NO_OFFSETS if sparse.is_single_hot else sparse.bag_offsets().numpy()
        grads = grad_BFD.contiguous().numpy()
        count = _sum_by_row(
            sparse.values.numpy(), offsets, _weights(sparse), self._starts, grads, slots, slot_rows, touched, sums
        )
        apply_update(self.optimizer, touched[:count], sums[:count], rows, state, learning_rate=learning_rate, step=step)

    def _buffers(self, num_ids: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Scratch memory for one batch, kept between batches: fresh pages would cost more than the sums."""
        if not self._scratch or self._scratch[2].shape[0] < num_ids:
            capacity = 1 << (2 * max(num_ids, 1) - 1).bit_length()
            self._scratch = (
                np.empty(capacity, dtype=np.int32),
                np.empty(capacity, dtype=np.int64),
                np.empty(num_ids, dtype=np.int64),
                np.empty((num_ids, self.layout.embedding_dim), dtype=np.float32),
            )
        slots, slot_rows, touched, sums = self._scratch
        slots.fill(-1)
        return slots, slot_rows, touched, sums


def _weights(sparse: SparseFeatures) -> np.ndarray:
    return _NO_WEIGHTS if sparse.weights is None else sparse.weights.numpy()
