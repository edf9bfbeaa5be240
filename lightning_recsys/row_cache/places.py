"""Where the rows of a collection lie: which of its stores has a row, and at which place."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: F features, N ids, K keys.

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.placement import TablePart
from lightning_recsys.stores.stripes import place_keys

Integers = NDArray[np.int64]


@compile_loop
def add_starts(ids_N, bounds, starts_F, keys_N):  # noqa: ANN001, ANN201
    """Number the rows of all tables: a key is an id and the first key of its feature's table.

    Args:
        ids_N: int64 ``[N]``, feature by feature.
        bounds: Where each feature's ids begin and end, int64 ``[F + 1]``.
        starts_F: First key of each feature's table, int64 ``[F]``.
        keys_N: Result, int64 ``[N]``.
    """
    for f in range(starts_F.shape[0]):
        for i in range(bounds[f], bounds[f + 1]):
            keys_N[i] = ids_N[i] + starts_F[f]


class RowPlaces:
    """Finds rows by their keys, which count the rows of all tables: ``layout.table_starts[table] + id``.

    Args:
        layout: The collection's tables.
        stores: For each store the parts that it holds, in the order of its tables.

    >>> from lightning_recsys.embeddings import EmbeddingBagConfig
    >>> tables = TableLayout((EmbeddingBagConfig("a", 4, 2, ("x",)), EmbeddingBagConfig("b", 6, 2, ("y",))))
    >>> parts = [TablePart("net", "b", 3, server=0, stripe=1, num_stripes=2), TablePart("net", "a", 4, server=1)]
    >>> places = RowPlaces(tables, [parts[:1], [parts[1], TablePart("net", "b", 3, server=1, num_stripes=2)]])
    >>> [(which.tolist(), rows.tolist()) for which, rows in places.split(np.array([4, 3, 9]))]
    [([2], [2]), ([0, 1], [4, 3])]
    """

    def __init__(self, layout: TableLayout, stores: Sequence[Sequence[TablePart]]) -> None:
        self._starts = as_int64s(layout.feature_starts)
        order = {table.name: number for number, table in enumerate(layout.tables)}
        stripes = [1] * len(order)
        places = []
        for store, parts in enumerate(stores):
            row = 0
            for part in parts:
                stripes[order[part.table]] = part.num_stripes
                places.append((order[part.table], part.stripe, store, row))
                row += part.num_rows
        places.sort()
        self._tables = (
            as_int64s(layout.table_starts.values()),
            np.array(stripes, dtype=np.int64),
            np.cumsum([0, *stripes[:-1]], dtype=np.int64),
            np.array([store for _, _, store, _ in places], dtype=np.int64),
            as_int64s(row for _, _, _, row in places),
        )
        self._num_stores = len(stores)
        in_order = [part.table for part in stores[0]] == list(order) if len(stores) == 1 else False
        self._keys_are_rows = in_order and len(places) == len(order)

    def split(self, keys_K: Integers) -> list[tuple[Integers | slice, Integers]]:
        """For each store: which of the keys are there, as an index of ``keys_K``, and their rows there."""
        if self._keys_are_rows:
            return [(slice(None), keys_K)]
        positions_K, rows_K = np.empty_like(keys_K), np.empty_like(keys_K)
        counts = np.zeros(self._num_stores, dtype=np.int64)
        place_keys(keys_K, *self._tables, counts, positions_K, rows_K)
        bounds = np.cumsum([0, *counts])
        return [(positions_K[first:stop], rows_K[first:stop]) for first, stop in pairwise(bounds)]

    def keys_of(self, features: SparseFeatures) -> Integers:
        """The key of each id of a batch on the CPU, int64 ``[N]``: its row's number among the rows of all tables."""
        if features.is_single_hot:
            keys_FB: Integers = features.values.numpy().reshape(len(self._starts), -1) + self._starts[:, None]
            return keys_FB.reshape(-1)
        keys_N = np.empty(features.values.numel(), dtype=np.int64)
        add_starts(features.values.numpy(), np.array(features.feature_bounds()), self._starts, keys_N)
        return keys_N
