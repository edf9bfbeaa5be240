"""Where the rows of a collection lie: which of its stores has a row, and at which place."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: F features, N ids, K keys, P parts of tables.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim.compiled import compile_loop
from lightning_recsys.placement import TablePart

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
    >>> first, second = TablePart("net", "a", 0, 4, 1, 0, 0.0), TablePart("net", "b", 0, 6, 0, 0, 0.0)
    >>> places = RowPlaces(tables, [[second], [first]])
    >>> [(which.tolist(), rows.tolist()) for which, rows in places.split(np.array([4, 3, 9]))]
    [([0, 2], [0, 5]), ([1], [3])]
    """

    def __init__(self, layout: TableLayout, stores: Sequence[Sequence[TablePart]]) -> None:
        starts, places = layout.table_starts, []
        for store, parts in enumerate(stores):
            row = 0
            for part in parts:
                key = starts[part.table] + part.first_row
                places.append((key, store, row - key))
                row += part.num_rows
        first_keys, stores_of_parts, shifts = zip(*sorted(places), strict=True)
        self._first_keys_P = as_int64s(first_keys).view(np.uint64)
        self._stores_P, self._shifts_P = np.array(stores_of_parts), as_int64s(shifts)
        self._num_stores = len(stores)
        self._keys_are_rows = len(stores) == 1 and not self._shifts_P.any()

    def split(self, keys_K: Integers) -> list[tuple[Integers | slice, Integers]]:
        """For each store: which of the keys are there, as an index of ``keys_K``, and their rows there."""
        if self._keys_are_rows:
            return [(slice(None), keys_K)]
        parts_K = np.searchsorted(self._first_keys_P, keys_K.view(np.uint64), side="right") - 1
        rows_K, stores_K = keys_K + self._shifts_P[parts_K], self._stores_P[parts_K]
        which = [np.flatnonzero(stores_K == store) for store in range(self._num_stores)]
        return [(positions, rows_K[positions]) for positions in which]
