"""An open-addressing hash table from int64 keys to numbers, as compiled loops over one array.

A table is int64 ``[T, 2]``, ``T`` a power of two: a key and its value in each cell, so that a probe reads one cache
line. A value of :data:`EMPTY` marks a free cell; every key is allowed. Callers keep at least half of the cells free.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.optim.compiled import compile_loop

EMPTY = -1

_MULTIPLIERS = np.int64(-7046029254386353131), np.int64(-4658895280553007687)  # 2^64 / golden ratio; SplitMix64's


def make_table(num_keys: int) -> NDArray[np.int64]:
    """An empty table with room for that many keys."""
    table = np.zeros((1 << max(2 * num_keys - 1, 7).bit_length(), 2), dtype=np.int64)
    table[:, 1] = EMPTY
    return table


@compile_loop
def home(table, key):  # noqa: ANN001, ANN201
    """The cell where the search for a key begins."""
    mixed = key * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 32)) * _MULTIPLIERS[1]
    return (mixed ^ (mixed >> 29)) & (table.shape[0] - 1)


@compile_loop
def find(table, key):  # noqa: ANN001, ANN201
    """The cell of a key, or the free one where it belongs."""
    cell = home(table, key)
    while table[cell, 1] != EMPTY and table[cell, 0] != key:
        cell = (cell + 1) & (table.shape[0] - 1)
    return cell


@compile_loop
def erase(table, cell):  # noqa: ANN001, ANN201
    """Free a cell, and close the gap: what was pushed past it moves up, so that no search stops too early."""
    mask = table.shape[0] - 1
    gap, other = cell, (cell + 1) & mask
    while table[other, 1] != EMPTY:
        distance = (other - home(table, table[other, 0])) & mask
        if distance >= ((other - gap) & mask):
            table[gap, 0], table[gap, 1] = table[other, 0], table[other, 1]
            gap = other
        other = (other + 1) & mask
    table[gap, 1] = EMPTY


@compile_loop
def copy_into(table, bigger):  # noqa: ANN001, ANN201
    """Put every key of a table into another, empty one."""
    for cell in range(table.shape[0]):
        if table[cell, 1] != EMPTY:
            target = find(bigger, table[cell, 0])
            bigger[target, 0], bigger[target, 1] = table[cell, 0], table[cell, 1]
