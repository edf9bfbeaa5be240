"""Tables whose rows exist only once they are trained: read, written, saved and loaded by the ids of those that do."""

# Shape suffixes: L rows of a table that exist, U rows of a request, D embedding dim.

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import are_below, as_int64, in_order
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.placement import TablePart
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, EmbeddingStore
from lightning_recsys.stores.versions import ROW_DTYPES

IDS = "ids"
"""In a state dict ``<table>.ids`` names the rows of ``<table>.weight`` and of the states."""

_BLOCK_BYTES = 1 << 24  # rows are read and written this many bytes at a time
_Shares = Sequence[tuple[EmbeddingStore, Sequence[TablePart]]]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a part of a table lies."""

    store: DynamicEmbeddingStore
    part: TablePart
    start: int

    @property
    def num_rows(self) -> Tensor:
        """Of the part, as an int64 that ids are compared with."""
        return torch.tensor(as_int64(self.part.num_rows))


class DynamicTables:
    """The tables of a collection whose stores have dynamic rows.

    Args:
        layout: The tables of the collection.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        places: Where every part of every table lies.
    """

    def __init__(
        self, layout: TableLayout, row_shapes: Mapping[str, tuple[int, ...]], places: Sequence[_Place]
    ) -> None:
        self.tables = {table.name: table.num_embeddings for table in layout.tables}
        self.row_shapes = row_shapes
        self._places = places

    @classmethod
    def over(
        cls, layout: TableLayout, row_shapes: Mapping[str, tuple[int, ...]], shares: _Shares
    ) -> DynamicTables | None:
        """The tables over stores with their parts in order, or ``None`` where all rows exist from the start."""
        places = []
        for store, parts in shares:
            if not isinstance(store, DynamicEmbeddingStore):
                return None
            starts = accumulate((part.num_rows for part in parts), initial=0)
            places += [_Place(store, part, start) for part, start in zip(parts, starts, strict=False)]
        return cls(layout, row_shapes, places)

    def live_ids(self) -> dict[str, Tensor]:
        """By table the ids whose rows exist, int64 ``[L]``, rising (as unsigned numbers)."""
        rows = {store: store.live_rows() for store in {place.store: None for place in self._places}}
        found: dict[str, list[Tensor]] = {table: [] for table in self.tables}
        for place in self._places:
            here = rows[place.store] - as_int64(place.start)
            ids = here[are_below(here, place.num_rows)] * place.part.num_stripes + place.part.stripe
            found[place.part.table].append(ids)
        return {table: in_order(torch.cat(parts)) for table, parts in found.items()}

    def read(self, table: str, name: str, ids_U: Tensor) -> Tensor:
        """``weight``, a state, ``version`` or ``change`` of some rows, ``[U, ...]``."""
        shape = self.row_shapes.get(name, ())
        values = torch.empty(ids_U.numel(), *shape, dtype=ROW_DTYPES.get(name, torch.float32))
        for store, positions, rows in self._split(table, name, ids_U):
            values[positions] = store.read_rows(name, rows)
        return values

    def digests(self, table: str, ids_U: Tensor) -> Tensor:
        """The digest of each of some rows, int64 ``[U]``: another one once a row has changed."""
        digests = torch.empty(ids_U.numel(), dtype=torch.int64)
        for store, positions, rows in self._split(table, "weight", ids_U):
            digests[positions] = store.row_digests(rows)
        return digests

    def drawing(self, table: str) -> tuple[int, int, int]:
        """How rows that do not exist are drawn: the seed, the key of id 0, and the difference of two ids' keys."""
        place = next(place for place in self._places if place.part.table == table)
        dynamic, part, layout = place.store.dynamic, place.part, place.store.layout
        index = [*layout.table_starts.values()].index(place.start)
        first = place.start if dynamic.first_keys is None else dynamic.first_keys[index]
        step = (1 if dynamic.key_steps is None else dynamic.key_steps[index]) // part.num_stripes
        return place.store.seed, first - part.stripe * step, step

    def write(self, table: str, name: str, ids_U: Tensor, values: Tensor) -> None:
        """The reverse of :meth:`read`; makes the rows that do not exist."""
        values = values.to("cpu", ROW_DTYPES.get(name, torch.float32))
        for store, positions, rows in self._split(table, name, ids_U):
            store.write_rows(name, rows, values[positions])

    def _split(self, table: str, name: str, ids_U: Tensor) -> Iterator[tuple[DynamicEmbeddingStore, Tensor, Tensor]]:
        """In blocks: a store, the positions of its ids among all, and their rows there."""
        block_rows = max(_BLOCK_BYTES // (4 * max(prod(self.row_shapes.get(name, ())), 1)), 1)
        for place in self._places:
            if place.part.table != table:
                continue
            rows, stripes = np.divmod(ids_U.numpy().view(np.uint64), np.uint64(place.part.num_stripes))
            rows_U = torch.from_numpy(rows.view(np.int64))
            here = torch.from_numpy(np.flatnonzero(stripes == place.part.stripe))
            for positions in torch.split(here, block_rows):
                if positions.numel():
                    yield place.store, positions, rows_U[positions] + as_int64(place.start)

    def clear(self) -> None:
        """Let no row exist."""
        for store in {place.store: None for place in self._places}:
            store.clear()

    def save(self, destination: dict[str, Any], prefix: str) -> None:
        """Put ids, rows and state of what exists into a state dict."""
        for table, ids in self.live_ids().items():
            destination[f"{prefix}{table}.{IDS}"] = ids
            for name in self.row_shapes:
                destination[f"{prefix}{table}.{name}"] = self.read(table, name, ids)

    def load(self, state_dict: Mapping[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]) -> None:
        """Let exactly the rows of a state dict exist; all rows, where it has no ids.

        Args:
            state_dict: Holds the ids of each table and what their rows have, as :meth:`save` writes them.
            prefix: Beginning of the keys that belong to these tables.
            missing_keys: A list to which the keys are added that the state dict lacks.
            error_msgs: A list to which messages are added about what does not fit; then nothing is changed.
        """
        found, before = {}, len(error_msgs)
        for table, num_rows in self.tables.items():
            ids = state_dict.get(f"{prefix}{table}.{IDS}")
            rows = num_rows if ids is None else ids.numel()
            for name, shape in self.row_shapes.items():
                key, expected = f"{prefix}{table}.{name}", [rows, *shape]
                values = state_dict.get(key)
                if values is None:
                    missing_keys.append(key)
                elif list(values.shape) != expected:
                    error_msgs.append(
                        f"size mismatch for {key}: the checkpoint has {list(values.shape)}, and {expected} fit the "
                        f"{rows} rows of {prefix}{table}{'' if ids is None else '.' + IDS}."
                    )
                else:
                    found[table, name] = ids, values
        if len(error_msgs) > before:
            return
        self.clear()
        for (table, name), (ids, values) in found.items():
            self.write(table, name, torch.arange(len(values)) if ids is None else ids, values)


def keep_keys(dynamic: DynamicRows, layout: TableLayout, parts: Sequence[TablePart]) -> DynamicRows:
    """The same for a store with some parts of a collection: its rows keep the keys that they have in the whole.

    Args:
        dynamic: The collection's rules by which rows are made and forgotten, with the keys of the whole tables.
        layout: The tables of the collection.
        parts: The parts of tables that the store holds, in its order.
    """
    names = [table.name for table in layout.tables]
    first = layout.table_starts if dynamic.first_keys is None else dict(zip(names, dynamic.first_keys, strict=True))
    step = dict.fromkeys(names, 1) if dynamic.key_steps is None else dict(zip(names, dynamic.key_steps, strict=True))
    return dataclasses.replace(
        dynamic,
        first_keys=tuple(first[part.table] + part.stripe * step[part.table] for part in parts),
        key_steps=tuple(part.num_stripes * step[part.table] for part in parts),
    )
