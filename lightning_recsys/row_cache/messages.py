"""Where the rows of a collection lie, and what a cache says to the stores that have them: one message to each."""

# Shape suffixes: F features, N ids, K keys or pushed rows, M fetched rows, C checked rows.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache.copies import RowUpdates
from lightning_recsys.row_cache.index import Integers
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.exchange import RowExchange, RowValues, bytes_by_kind
from lightning_recsys.stores.exchange_loops import NUM_COUNTS
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, EmbeddingStore
from lightning_recsys.stores.stripes import place_keys
from lightning_recsys.sync import ClockRule

Clocks = NDArray[np.int32]
NO_KEYS: Integers = np.empty(0, dtype=np.int64)
NO_CLOCKS: Clocks = np.empty(0, dtype=np.int32)


class RowPlaces:
    """Finds rows by their keys, which count the rows of all tables: ``layout.table_starts[table] + id``.

    Args:
        layout: The collection's tables.
        stores: The parts that each store holds, in the order of its tables.

    >>> from lightning_recsys.embeddings import EmbeddingBagConfig
    >>> tables = TableLayout((EmbeddingBagConfig("a", 4, 2, ("x",)), EmbeddingBagConfig("b", 6, 2, ("y",))))
    >>> parts = [TablePart("net", "b", 3, server=0, stripe=1, num_stripes=2), TablePart("net", "a", 4, server=1)]
    >>> places = RowPlaces(tables, [parts[:1], [parts[1], TablePart("net", "b", 3, server=1, num_stripes=2)]])
    >>> [(which.tolist(), rows.tolist()) for which, rows in places.split(np.array([4, 3, 9]))]
    [([2], [2]), ([0, 1], [4, 3])]
    """

    def __init__(self, layout: TableLayout, stores: Sequence[Sequence[TablePart]]) -> None:
        self._starts_F = layout.feature_starts_F
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
        keys_N: Integers = features.rows_from(self._starts_F).numpy()
        return keys_N


@dataclass(frozen=True, slots=True)
class Answer:
    """The message that one store will send.

    Args:
        wait: Waits for the answer and returns it.
        fetched: Which of the keys to fetch it brings, as an index of them.
        checked: Which of the keys to check it judges, as an index of them.
    """

    wait: Callable[[], RowValues]
    fetched: Integers | slice
    checked: Integers | slice


class RowMessages:
    """Cuts what is to be said by store, and says it in one message each, all of them on their way at once.

    Args:
        stores: The stores of the collection, in the order of ``places``.
        places: Knows which store has which row.
        rule: What a push tells the stores' clocks, and when a copy is too old.
        row_shapes: Shape of what one row has of ``weight`` and of each state.

    Attributes:
        needs_copies: Whether a store forgets rows: what is owed then comes with copies of the rows.
        shortest_expiry: After how many updates one does, at the earliest; ``None`` where none does.
        counts: ``messages`` sent so far, and bytes both ways for ``rows``, ``clocks`` and ``gradients``, of which those
            sent ahead of a lookup are ``ahead``; what else happens to the collection's copies is counted there as well
            (:class:`HeldRows`).
        unsent_steps: Updates of the whole collection that each store has not heard of.
        places: Which store has which row.
        rule: What a push tells the stores' clocks, and when a copy is too old.
        moved: What would have been said to each store had its rows not moved in place, as
            :mod:`~lightning_recsys.stores.exchange_loops` count it.
    """

    def __init__(
        self,
        stores: Sequence[EmbeddingStore],
        places: RowPlaces,
        rule: ClockRule,
        row_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.unsent_steps = [0] * len(stores)
        self.places, self.rule = places, rule
        self.moved = np.zeros((len(stores), NUM_COUNTS), dtype=np.int64)
        self._stores, self._row_shapes = stores, row_shapes
        dynamic = [x.dynamic if isinstance(x, DynamicEmbeddingStore) else DynamicRows() for x in stores]
        self._counts_updates = [rule.clock == "max" and x.admission > 1 for x in dynamic]  # else the clocks say it
        self._needs_copies = [x.expire_after is not None for x in dynamic]
        self.needs_copies = any(self._needs_copies)
        self.shortest_expiry = min((x.expire_after for x in dynamic if x.expire_after is not None), default=None)
        self._owed: list[RowUpdates] = []

    @property
    def num_bytes(self) -> int:
        """Bytes both ways of all messages that were sent so far, and of gradients that were counted beside them."""
        return sum(self.counts[kind] for kind in ("rows", "clocks", "gradients"))

    @property
    def step(self) -> int:
        """Updates that the tables have seen, from all workers; what this one has not sent yet included."""
        return max(store.step + steps for store, steps in zip(self._stores, self.unsent_steps, strict=True))

    def total(self) -> Counter[str]:
        """The counts, with those of rows that moved in place."""
        total = self.counts.copy()
        for store, counts in zip(self._stores, self.moved.tolist(), strict=True):
            fetched, checked, stale, ahead, pushed, returned, exchanges, missed = counts
            sizes = {"pushed": pushed, "fetched": fetched + returned, "checked": checked}
            total.update(bytes_by_kind(store.layout.num_rows, self._row_shapes, **sizes))
            total.update(misses=fetched, stale=stale, refreshes=ahead, messages=exchanges)
            total["most_missed"] = max(total["most_missed"], missed)
        return total

    def count_step(self) -> None:
        """Note an update; the stores hear of it with the next push or flush."""
        self.unsent_steps = [steps + 1 for steps in self.unsent_steps]

    def owe(self, updates: RowUpdates) -> None:
        """Let updates of rows ride on the next message, ahead of its fetches."""
        if len(updates.keys):
            self._owed.append(updates)

    def send(
        self,
        fetch_M: Integers = NO_KEYS,
        check_C: Integers = NO_KEYS,
        clocks_C: Clocks = NO_CLOCKS,
        *,
        with_steps: bool = False,
    ) -> list[Answer]:
        """Send what is owed, ask for rows, have copies checked; nothing to a store that this does not concern.

        Args:
            fetch_M: Keys of rows to get.
            check_C: Keys of copies to check.
            clocks_C: Clocks of those copies.
            with_steps: Let every store know of all steps.
        """
        # What is owed leaves the cache with this message and is in no other one: each update is applied once.
        owed, self._owed = self._owed, []
        keys_K = np.concatenate([x.keys for x in owed] or [NO_KEYS])
        heard_K = np.concatenate([self.rule.sent(x.current, x.unsent) for x in owed] or [NO_CLOCKS])
        updates = {name: _joined([x.values[name] for x in owed]) for name in self._row_shapes if owed}
        unsent_K = np.concatenate([x.unsent for x in owed] or [NO_CLOCKS])
        copies = {}
        if owed and self.needs_copies:
            copies = {name: _joined([x.copies[name] for x in owed]) for name in self._row_shapes}
        # A store does what a message says in this order: updates, fetches, checks. So a row that is pushed and fetched
        # again in one message comes back with its own updates.
        answers = []
        splits = [self.places.split(keys) for keys in (keys_K, fetch_M, check_C)]
        for index, (store, *parts) in enumerate(zip(self._stores, *splits, strict=True)):
            (pushed, push_rows), (fetched, fetch_rows), (checked, check_rows) = parts
            # Each store hears of each step once: with the next push to it, or where all of them are to know.
            steps = self.unsent_steps[index] if with_steps or len(push_rows) else 0
            if not (steps or len(push_rows) or len(fetch_rows) or len(check_rows)):
                continue
            self.unsent_steps[index] -= steps
            request = RowExchange(
                push_rows=torch.from_numpy(push_rows),
                push_clocks=torch.from_numpy(heard_K[pushed]),
                updates=_of_rows(updates, pushed, push_rows),
                push_counts=torch.from_numpy(unsent_K[pushed] if self._counts_updates[index] else NO_CLOCKS),
                copies=_of_rows(copies, pushed, push_rows) if self._needs_copies[index] else {},
                num_steps=steps,
                fetch_rows=torch.from_numpy(fetch_rows),
                check_rows=torch.from_numpy(check_rows),
                check_clocks=torch.from_numpy(clocks_C[checked]),
                staleness=self.rule.staleness,
                clock=self.rule.clock,
            )
            answers.append(Answer(store.begin_exchange(request), fetched, checked))
            widths = {"weight_bytes": store.weight_bytes, "gradient_bytes": store.gradient_bytes}
            sizes = request.bytes_by_kind(store.layout.num_rows, self._row_shapes, **widths)
            self.counts.update(sizes)
            self.counts["messages"] += 1
        return answers


def _of_rows(arrays: Mapping[str, Tensor], which: Integers | slice, rows: Integers) -> dict[str, Tensor]:
    """The rows of one store among all pushed ones; nothing where it has none of them."""
    return {name: values[which] for name, values in arrays.items() if len(rows)}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other, on the CPU."""
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to("cpu")
