"""Checks of numbers that a store is given: learning rates, rows, ids and bags within their ranges."""

# Shape suffixes: F features, N ids of the batch.

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import are_below, as_int64


def check_rate(lr: float) -> None:
    """A learning rate is a finite number, at least 0."""
    if not math.isfinite(lr) or lr < 0:
        raise ValueError(f"a learning rate must be a finite number of at least 0, got {lr}")


def check_rows(rows: Tensor, num_rows: int) -> None:
    """Rows are those of the store."""
    if rows.numel() and not bool(are_below(rows, torch.tensor(as_int64(num_rows))).all()):
        low, high = (int(x) for x in rows.aminmax())
        raise IndexError(f"rows must be in [0, {num_rows}), got {low} to {high}")


def check_single(ids_N: Tensor, sizes_F: Tensor) -> None:
    """One id per bag: each is in its feature's table."""
    if ids_N.numel():
        ids_FB = ids_N.view(sizes_F.numel(), -1)
        if not bool(are_below(ids_FB, sizes_F.unsqueeze(1)).all()):
            low, high = int(ids_N.min()), ids_FB.amax(1).tolist()
            raise IndexError(f"ids must be in [0, {sizes_F.tolist()}) by feature, got {low} to {high}")


def check_bags(ids_N: Tensor, offsets: Tensor, sizes_F: Tensor) -> None:
    """Offsets rise from 0 to the number of ids, and each id is in its feature's table."""
    low, high = (int(x) for x in offsets.aminmax())
    lengths = offsets.diff()  # which cannot overflow where all offsets are in range
    if low or high > ids_N.numel() or offsets[0] or offsets[-1] != ids_N.numel() or bool((lengths < 0).any()):
        raise ValueError(f"offsets must rise from 0 to the number of ids, {ids_N.numel()}")
    if ids_N.numel():
        sizes_N = sizes_F.repeat_interleave(lengths.view(sizes_F.numel(), -1).sum(1))
        if not bool(are_below(ids_N, sizes_N).all()):
            raise IndexError(f"ids must be in [0, {sizes_F.tolist()}) by feature")
