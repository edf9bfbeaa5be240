"""Compiled loops of a reader: where the row of each id lies among many mapped files, and sums of such rows.

A place is the distance of a row from the first element of one array, the anchor, counted in float32 elements. Mapped
files lie anywhere in a process's memory, so the places of their rows may be far beyond the anchor's end, or negative.
Two values are no places, for every file begins at a whole page: ``GONE`` and the free cells of a hash table.
"""

# Shape suffixes: N ids, F features, B batch, D embedding dim, U ids of a file.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np

from lightning_recsys.compiled.hash_table import EMPTY, find, put, value_at
from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch
from lightning_recsys.compiled.vectors import add_floats, copy_floats, vector_width

GONE = -2
"""In an index: the row of this id was forgotten, and is drawn again."""

MISSING = -1
"""In place of a place: the row has to be drawn."""


@compile_loop
def index_rows(table, ids, first_row, places, dim):  # noqa: ANN001, ANN201
    """Note the places of a block's rows in an index, under the number of each id's row in the collection.

    Args:
        table: The hash table of the index, which is written to.
        ids: Ids of the rows, int64 ``[U]``; as many as the index has room for.
        first_row: Number in the collection of the row of id 0.
        places: The place of the first of the rows; or ``GONE``, for all of them.
        dim: Elements from one row to the next; 0 for ``GONE``.

    Returns:
        How many of the ids were new to the index.
    """
    new = 0
    for i in range(ids.shape[0]):
        row = first_row + ids[i]
        cell = find(table, row)
        new += value_at(table, cell) == EMPTY
        put(table, cell, row, places + i * dim)
    return new


@compile_loop
def find_places(ids, bounds, first_rows, table, first_blocks, blocks, shift, dim, places):  # noqa: ANN001, ANN201
    """The place of each id's row: by the index, else in the base where all rows exist, else ``MISSING``.

    Args:
        ids: Ids of the batch, feature-major, int64 ``[N]``.
        bounds: Where each feature's ids begin and end, int64 ``[F + 1]``.
        first_rows: The number of id 0 of each feature's table, int64 ``[F]``.
        table: The hash table of the index.
        first_blocks: The first block of each feature's table among all; -1 where only rows of the index exist.
        blocks: The place of each block of the base.
        shift: Blocks have ``2 ** shift`` rows.
        dim: Number of elements of a row.
        places: Result, int64 ``[N]``: the place of each id's row, or ``MISSING``.

    Returns:
        Number of ids whose row is missing.
    """
    missing, mask = 0, (np.int64(1) << shift) - 1
    for f in range(bounds.shape[0] - 1):
        for n in range(bounds[f], bounds[f + 1]):
            place = value_at(table, find(table, first_rows[f] + ids[n]))
            if place == EMPTY and first_blocks[f] >= 0:
                place = blocks[first_blocks[f] + (ids[n] >> shift)] + (ids[n] & mask) * dim
            elif place == EMPTY or place == GONE:  # noqa: SIM109 - compiled
                place = np.int64(MISSING)
                missing += 1
            places[n] = place
    return missing


@cache
def sum_bags_for(dim: int) -> Callable[..., None]:
    """Weighted sums of rows of width ``dim``.

    Its arguments:
        places: The place of each id's row, int64 ``[N]``.
        offsets: Of the bags, feature-major; empty where each holds one id.
        weights: Of the ids; empty where all are 1.
        anchor: From which places are counted.
        out: Result, float32 ``[B, F, D]``.
    """
    width = vector_width(dim)

    @compile_loop
    def sum_bags(places, offsets, weights, anchor, out):  # noqa: ANN001, ANN202
        batch_size, num_features, last = out.shape[0], out.shape[1], places.shape[0] - 1
        for f in range(num_features):
            for b in range(batch_size):
                bag = f * batch_size + b
                target = (b * num_features + f) * dim
                if not offsets.shape[0]:
                    prefetch(anchor, places[min(bag + AHEAD, last)])
                    copy_floats(out, target, anchor, places[bag], dim)
                    continue
                for d in range(dim):
                    out[b, f, d] = np.float32(0)
                for position in range(offsets[bag], offsets[bag + 1]):
                    prefetch(anchor, places[min(position + AHEAD, last)])
                    weight = weights[position] if weights.shape[0] else np.float32(1)
                    for d in range(0, dim, width):
                        add_floats(out, target + d, anchor, places[position] + d, weight, width)

    return cast(Callable[..., None], sum_bags)
