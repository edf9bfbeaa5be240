"""Counters in mapped memory that many processes add to, and no addition is lost."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from torch import Tensor

from lightning_recsys.compiled.atomics import atomic_add
from lightning_recsys.compiled.loops import compile_loop


@compile_loop
def _add(counters, position, amount):  # noqa: ANN001, ANN202
    return atomic_add(counters, position, amount) + amount


def add(counters: Tensor, position: int, amount: int = 1) -> int:
    """Add to one of many counters (int64 ``[K]``, perhaps mapped by other processes too); returns the new value.

    >>> import torch
    >>> counters = torch.zeros(2, dtype=torch.int64)
    >>> add(counters, 1), add(counters, 1, 5), counters.tolist()
    (1, 6, [0, 6])
    """
    return int(_add(counters.numpy(), position, amount))
