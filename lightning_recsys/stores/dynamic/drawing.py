"""First values of rows as a function of seed, key and column: the same whoever draws them, and in whatever order.

A counter-based generator (SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators") gives each
column 32 random bits; Acklam's rational approximation of the normal quantile (relative error below 1.2e-9) makes them
normal. Compiled without fast mathematics, so that every machine gets the same bits.
"""

# Shape suffixes: U rows, T tables, D embedding dim.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.hashing import mix
from lightning_recsys.compiled.loops import compile_rule
from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.kernels import TableLayout

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_TAIL = 0.02425  # of each side: beyond it the quantile is another rational function


@compile_rule
def _quantile(p):  # noqa: ANN001, ANN202
    """Where the standard normal distribution function is ``p``, for ``p`` in (0, 1)."""
    if _TAIL <= p <= 1 - _TAIL:
        q = p - 0.5
        r = q * q
        above = -3.969683028665376e01 * r + 2.209460984245205e02
        above = ((above * r - 2.759285104469687e02) * r + 1.383577518672690e02) * r - 3.066479806614716e01
        below = -5.447609879822406e01 * r + 1.615858368580409e02
        below = ((below * r - 1.556989798598866e02) * r + 6.680131188771972e01) * r - 1.328068155288572e01
        return (above * r + 2.506628277459239e00) * q / (below * r + 1.0)
    q = math.sqrt(-2.0 * math.log(min(p, 1 - p)))
    above = (-7.784894002430293e-03 * q - 3.223964580411365e-01) * q - 2.400758277161838e00
    above = ((above * q - 2.549732539343734e00) * q + 4.374664141464968e00) * q + 2.938163982698783e00
    below = (7.784695709041462e-03 * q + 3.224671290700398e-01) * q + 2.445134137142996e00
    z = above / ((below * q + 3.754408661907416e00) * q + 1.0)
    return z if p < 0.5 else -z


@compile_rule
def _draw_rows(rows, places, starts, first_keys, key_steps, stds, seed, out):  # noqa: ANN001, ANN202
    """Write the first values of rows.

    Args:
        rows: Numbers of the rows in the store, int64 ``[U]``; unsigned, as all numbers and keys here.
        places: Position in ``out`` of each row, int64 ``[U]``.
        starts: The number of each table's first row, rising, int64 ``[T]``, of which the first is 0.
        first_keys: Key of each table's first row; what is drawn depends on the key. int64 ``[T]``.
        key_steps: By how much the keys of two successive rows of a table differ, int64 ``[T]``.
        stds: Standard deviation of each table's values, float64 ``[T]``.
        seed: Seed of the values of all rows, uint64.
        out: Result, float32 ``[R, D]``: the values, each row at its place.
    """
    dim = out.shape[1]
    stream = mix(seed + _GOLDEN)
    for i in range(rows.shape[0]):
        table = 0
        while table + 1 < starts.shape[0] and np.uint64(starts[table + 1]) <= np.uint64(rows[i]):
            table += 1
        place, std = places[i], stds[table]
        if std == 0.0:
            out[place, :] = np.float32(0)
            continue
        bits = mix(stream + np.uint64(first_keys[table] + (rows[i] - starts[table]) * key_steps[table]))
        word = np.uint64(0)
        for d in range(dim):
            if d & 1:
                word >>= _32
            else:
                bits += _GOLDEN
                word = mix(bits)
            out[place, d] = np.float32(std * _quantile((np.float64(word & _LOW) + 0.5) * 2.0**-32))


class RowDrawing:
    """First values of the rows of some tables.

    Args:
        layout: The tables, whose rows are numbered one table behind the other.
        first_keys: Key of each table's first row.
        key_steps: By how much the keys of two successive rows of each table differ.
        seed: Seed of the values of all rows.
    """

    def __init__(self, layout: TableLayout, first_keys: Iterable[int], key_steps: Iterable[int], *, seed: int) -> None:
        self._dim = layout.embedding_dim
        stds = np.array([table.init_std for table in layout.tables], dtype=np.float64)
        starts = as_int64s(layout.table_starts.values())
        self._rule = starts, as_int64s(first_keys), as_int64s(key_steps), stds, np.uint64(seed)

    def draw(self, rows_U: NDArray[np.int64]) -> NDArray[np.float32]:
        """The values of rows, by their numbers: float32 ``[U, D]``."""
        out = np.empty((len(rows_U), self._dim), dtype=np.float32)
        self.draw_into(rows_U, np.arange(len(rows_U)), out)
        return out

    def draw_into(self, rows_U: NDArray[np.int64], places_U: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """The same, each row at its place in ``out``, float32 ``[R, D]``."""
        _draw_rows(rows_U, places_U, *self._rule, out)
