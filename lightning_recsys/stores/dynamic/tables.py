"""Tables whose rows exist only once they are trained: read, written, saved and loaded by the ids of those that do."""

# Shape suffix: L rows of a table that exist.

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import are_below, as_int64, in_order
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim.swap import PERIOD
from lightning_recsys.placement import TablePart
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, EmbeddingStore
from lightning_recsys.stores.tables import StoredTables

IDS = "ids"
"""In a state dict ``<table>.ids`` names the rows of ``<table>.weight`` and of the states."""


class DynamicTables(StoredTables):
    """The tables of a collection whose stores have dynamic rows; arguments as for :class:`StoredTables`."""

    @property
    def _stores(self) -> list[DynamicEmbeddingStore]:
        """Each once."""
        return [x for x in dict.fromkeys(place.store for place in self._places) if isinstance(x, DynamicEmbeddingStore)]

    def live_ids(self) -> dict[str, Tensor]:
        """By table the ids whose rows exist, int64 ``[L]``, rising (as unsigned numbers)."""
        rows: dict[EmbeddingStore, Tensor] = {store: store.live_rows() for store in self._stores}
        found: dict[str, list[Tensor]] = {table: [] for table in self.tables}
        for place in self._places:
            here = rows[place.store] - as_int64(place.start)
            is_here = are_below(here, torch.tensor(as_int64(place.part.num_rows)))
            found[place.part.table].append(here[is_here] * place.part.num_stripes + place.part.stripe)
        return {table: in_order(torch.cat(parts)) for table, parts in found.items()}

    def drawing(self, table: str) -> tuple[int, int, int]:
        """How rows that do not exist are drawn: the seed, the key of id 0, and the difference of two ids' keys."""
        place = next(place for place in self._places if place.part.table == table)
        store, part = place.store, place.part
        assert isinstance(store, DynamicEmbeddingStore)
        index = [*store.layout.table_starts.values()].index(place.start)
        first_keys, key_steps = store.dynamic.keys(store.layout.table_starts.values())
        step = key_steps[index] // part.num_stripes
        return store.seed, first_keys[index] - part.stripe * step, step

    def clear(self) -> None:
        """Let no row exist."""
        for store in self._stores:
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
            if ids is not None and (wrong := self.outside(table, ids)):
                error_msgs.append(wrong)
            for name, shape in self.row_shapes.items():
                key, expected = f"{prefix}{table}.{name}", [rows, *shape]
                values = state_dict.get(key)
                if values is None and name == PERIOD:
                    continue  # a checkpoint of another rule, after which periods begin
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
    keys = dynamic.keys(layout.table_starts.values())
    first, step = (dict(zip(layout.table_starts, numbers, strict=True)) for numbers in keys)
    return dataclasses.replace(
        dynamic,
        first_keys=tuple(first[part.table] + part.stripe * step[part.table] for part in parts),
        key_steps=tuple(part.num_stripes * step[part.table] for part in parts),
    )
