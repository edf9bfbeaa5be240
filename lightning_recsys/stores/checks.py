"""Checks of what a store is given: learning rates, rows, ids and bags within their ranges, shapes of values."""

# Shape suffixes: F features.

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import are_below, as_int64
from lightning_recsys.embeddings.sparse_features import SparseFeatures, bags_cover_ids, ids_are_inside


def check_rate(lr: float) -> None:
    """A learning rate is a finite number, at least 0."""
    if not math.isfinite(lr) or lr < 0:
        raise ValueError(f"a learning rate must be a finite number of at least 0, got {lr}")


def check_rows(rows: Tensor, num_rows: int) -> None:
    """Rows are those of the store."""
    if rows.numel() and not bool(are_below(rows, torch.tensor(as_int64(num_rows))).all()):
        low, high = (int(x) for x in rows.aminmax())
        raise IndexError(f"rows must be in [0, {num_rows}), got {low} to {high}")


def check_features(sparse: SparseFeatures, sizes_F: Tensor) -> None:
    """Bags cover the ids, and each id is in its feature's table."""
    if not sparse.is_single_hot and not bags_cover_ids(sparse):
        raise ValueError(f"offsets must rise from 0 to the number of ids, {sparse.values.numel()}")
    if not ids_are_inside(sparse, sizes_F):
        low, high = (int(x) for x in sparse.values.aminmax())
        raise IndexError(f"ids must be in [0, {sizes_F.tolist()}) by feature, got {low} to {high}")


def check_values(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that a value written to an array has its shape and its dtype."""
    if values.shape != shape or values.dtype != dtype:
        got = f"{values.dtype} of shape {list(values.shape)}"
        raise ValueError(f"{name!r} takes {dtype} of shape {list(shape)}, got {got}.")
