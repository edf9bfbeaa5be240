"""Tables of a collection, read and written where the parts of each lie: as the stores have them, past every cache."""

# Shape suffixes: U rows of a request, D embedding dim.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import are_below, as_int64
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.placement import TablePart
from lightning_recsys.stores.interfaces import EmbeddingStore, Rows
from lightning_recsys.stores.versions import dtype_of

_BLOCK_BYTES = 1 << 24  # rows are read and written this many bytes at a time


@dataclass(frozen=True)
class _Place:
    """Where a part of a table lies: its rows are the store's from ``start`` on."""

    store: EmbeddingStore
    part: TablePart
    start: int

    def blocks(self, ids: Rows, size: int) -> Iterator[tuple[Rows, Rows]]:
        """The positions among all ids, and the rows, of those ids that are here, so many at a time."""
        stripe, step = self.part.stripe, self.part.num_stripes
        if isinstance(ids, slice):
            low = max(-(-(ids.start - stripe) // step), 0)  # the first row of the stripe from `ids.start` on
            high = max(-(-(ids.stop - stripe) // step), low)
            for first in range(low, high, size):
                stop = min(first + size, high)
                ends = first * step + stripe - ids.start, (stop - 1) * step + stripe + 1 - ids.start
                yield slice(*ends, step), slice(self.start + first, self.start + stop)
            return
        rows, stripes = np.divmod(ids.numpy().view(np.uint64), np.uint64(step))
        rows_U = torch.from_numpy(rows.view(np.int64))
        for positions in torch.split(torch.from_numpy(np.flatnonzero(stripes == stripe)), size):
            if positions.numel():
                yield positions, rows_U[positions] + as_int64(self.start)


class StoredTables:
    """The tables of a collection.

    Args:
        layout: The tables of the collection.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        stores: The stores that hold the rows, each with its parts of tables in their order.

    Attributes:
        tables: Number of rows of each table, by its name.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
    """

    def __init__(
        self,
        layout: TableLayout,
        row_shapes: Mapping[str, tuple[int, ...]],
        stores: Sequence[tuple[EmbeddingStore, Sequence[TablePart]]],
    ) -> None:
        self.tables = {table.name: table.num_embeddings for table in layout.tables}
        self.row_shapes = row_shapes
        self._dtype_of = partial(dtype_of, layout)
        self._block_rows = max(_BLOCK_BYTES // (4 * layout.embedding_dim), 1)
        self._places: list[_Place] = []
        for store, parts in stores:
            starts = accumulate((part.num_rows for part in parts), initial=0)
            self._places += [_Place(store, part, start) for part, start in zip(parts, starts, strict=False)]

    def read(self, table: str, name: str, ids: Rows) -> Tensor:
        """The values of some rows of a table, by its name (:meth:`EmbeddingStore.read_rows`): a copy, ``[U, ...]``.

        Args:
            table: Name of the table.
            name: ``weight``, a state, ``version``, ``change`` or ``digest``.
            ids: A stretch of ids, or single ones, int64 ``[U]``.
        """
        size = ids.stop - ids.start if isinstance(ids, slice) else ids.numel()
        values = torch.empty(size, *self.row_shapes.get(name, ()), dtype=self._dtype_of(name))
        for store, positions, rows in self._blocks(table, ids):
            values[positions] = store.read_rows(name, rows)
        return values

    def write(self, table: str, name: str, ids: Rows, values: Tensor) -> None:
        """The reverse of :meth:`read`."""
        values = values.to("cpu", self._dtype_of(name))
        for store, positions, rows in self._blocks(table, ids):
            store.write_rows(name, rows, values[positions])

    def _blocks(self, table: str, ids: Rows) -> Iterator[tuple[EmbeddingStore, Rows, Rows]]:
        """In blocks: a store, the positions of its ids among all, and their rows there."""
        if not isinstance(ids, slice) and (wrong := self.outside(table, ids)):
            raise IndexError(wrong)
        for place in self._places:
            if place.part.table == table:
                for positions, rows in place.blocks(ids, self._block_rows):
                    yield place.store, positions, rows

    def outside(self, table: str, ids_U: Tensor) -> str | None:
        """The complaint about ids beyond a table, whose rows would be those of the next one."""
        inside = are_below(ids_U, torch.tensor(as_int64(self.tables[table])))
        if bool(inside.all()):
            return None
        return (
            f"table {table!r} has {self.tables[table]} ids, and the rows of {int((~inside).sum())} others were given,"
            f" such as {int(ids_U[~inside][0])}: a checkpoint of a larger table needs a num_embeddings as large."
        )
