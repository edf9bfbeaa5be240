"""Ids and row numbers that use all of int64: as unsigned numbers they count from 0 to 2**64 - 2.

So a raw 64-bit hash can be an id. What is stored and sent is int64, in which the numbers from 2**63 on are negative;
sums and differences wrap around and stay right, and comparisons are those of unsigned numbers. One value is reserved,
-1, which is 2**64 - 1: a key index marks free places with it, and so a table has at most ``NUM_IDS`` ids.
"""

# Shape suffix: N ids.

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NUM_IDS = 2**64 - 1
"""How many ids, or rows, there can be; none of them is -1."""

_SIGN = -(2**63)


def as_int64(number: int) -> int:
    """The int64 that stands for a number from 0 to 2**64 - 1.

    >>> as_int64(5), as_int64(2**64 - 2)
    (5, -2)
    """
    return number - 2**64 if number >= 2**63 else number


def as_int64s(numbers: Iterable[int]) -> NDArray[np.int64]:
    """The same for many, modulo 2**64."""
    return np.array([number % 2**64 for number in numbers], dtype=np.uint64).view(np.int64)


def are_below(ids_N: Tensor, limits: Tensor) -> Tensor:
    """Which ids are below their limits, as unsigned numbers; bool ``[N]``.

    >>> import torch
    >>> are_below(torch.tensor([3, -2, -1]), torch.tensor(as_int64(NUM_IDS))).tolist()
    [True, True, False]
    """
    return (ids_N ^ _SIGN) < (limits ^ _SIGN)


def in_order(ids_N: Tensor) -> Tensor:
    """Ids in rising order, as unsigned numbers.

    >>> import torch
    >>> in_order(torch.tensor([-2, 7, 0])).tolist()
    [0, 7, -2]
    """
    return (ids_N ^ _SIGN).sort().values ^ _SIGN
