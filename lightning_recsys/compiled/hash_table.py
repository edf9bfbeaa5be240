"""Tables from int64 keys to numbers, as compiled loops over one array: hashed, or one place for each key.

A hash table is int64 ``[T, 2]``, ``T`` a power of two: a key and its value in each cell, so that a probe reads one
cache line. Every key is allowed; callers keep at least a quarter of the cells free. Where keys are known to lie below a
bound, and enough of them are used, int32 ``[K]`` is smaller, and a key is its cell. The loops take either. A value of
:data:`EMPTY` marks a free cell.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.hashing import mix
from lightning_recsys.compiled.loops import compile_inline, compile_loop, prefetch

KeyTable: TypeAlias = NDArray[np.int64] | NDArray[np.int32]

EMPTY = -1


def make_table(num_keys: int) -> NDArray[np.int64]:
    """An empty hash table with room for that many keys."""
    table = np.zeros((1 << max(2 * num_keys - 1, 7).bit_length(), 2), dtype=np.int64)
    table[:, 1] = EMPTY
    return table


def make_array(bound: int) -> NDArray[np.int32]:
    """An empty table for the keys from 0 to below ``bound``; no other may be looked up in it."""
    return np.full(bound, EMPTY, dtype=np.int32)


def make_like(table: KeyTable) -> KeyTable:
    """An empty table of the same kind and size."""
    return make_array(len(table)) if table.ndim == 1 else make_table(len(table) // 2)


def values(table: KeyTable) -> KeyTable:
    """The value in each cell; a view."""
    return table if table.ndim == 1 else table[:, 1]


@compile_inline
def home(table, key):  # noqa: ANN001, ANN201
    """The cell where the search for a key begins."""
    if table.ndim == 1:
        return key
    return np.int64(mix(np.uint64(key))) & (table.shape[0] - 1)


@compile_inline
def find(table, key):  # noqa: ANN001, ANN201
    """The cell of a key, or the free one where it belongs."""
    cell = home(table, key)
    if table.ndim == 1:
        return cell
    while table[cell, 1] != EMPTY and table[cell, 0] != key:
        cell = (cell + 1) & (table.shape[0] - 1)
    return cell


@compile_inline
def value_at(table, cell):  # noqa: ANN001, ANN201
    """The value in a cell."""
    return np.int64(table[cell]) if table.ndim == 1 else table[cell, 1]


@compile_inline
def key_at(table, cell):  # noqa: ANN001, ANN201
    """The key of a cell that is not free."""
    return cell if table.ndim == 1 else table[cell, 0]


@compile_inline
def put(table, cell, key, value):  # noqa: ANN001, ANN201
    """Fill the cell that was found for a key."""
    if table.ndim == 1:
        table[cell] = value
    else:
        table[cell, 0], table[cell, 1] = key, value


@compile_inline
def erase(table, cell):  # noqa: ANN001, ANN201
    """Free a cell; in a hash table close the gap: what was pushed past it moves up, so that no search stops early."""
    if table.ndim == 1:
        table[cell] = EMPTY
        return
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
def copy_into(table, other):  # noqa: ANN001, ANN201
    """Put every key of a table into another, empty one."""
    for cell in range(table.shape[0]):
        if value_at(table, cell) != EMPTY:
            key = key_at(table, cell)
            put(other, find(other, key), key, value_at(table, cell))


@compile_inline
def prefetch_cell(table, cell):  # noqa: ANN001, ANN201
    """Ask for a cell ahead of time; any number is allowed."""
    prefetch(table, cell if table.ndim == 1 else cell * 2)
