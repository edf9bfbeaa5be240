"""Rows of a virtual HET cluster: one store, and in front of it the very cache that a real worker has, once for each."""

# Shape suffixes: B batch, F features, D embedding dim, U distinct rows of a batch, W workers.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import SparseFeatures, Ticket
from lightning_recsys.embeddings.backend import row_shapes
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache.backend import CachedBackend
from lightning_recsys.row_cache.owners import divide
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.exchange import RowExchange, RowValues, bytes_by_kind, row_dtype
from lightning_recsys.sync import StalenessNormalization

_NOT_COUNTED = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Message:
    """The bytes that one exchange moves.

    Args:
        sent: Bytes from a worker to the servers.
        answered: Number of bytes that the server sends back.
        kinds: All of them by kind: ``rows``, ``clocks``, ``gradients``.
    """

    sent: int
    answered: int
    kinds: Mapping[str, int]


class ServerRows(MappedEmbeddingStore):
    """A store that is asked by messages, as one behind a server is, and that writes down what each of them moves.

    (Caches move rows of a plain :class:`MappedEmbeddingStore` in place, without a message.)

    Attributes:
        messages: The messages since the list was last emptied.
        wire_shapes: Shape of what one row has on the network of ``weight`` and of each state.
    """

    messages: list[Message]
    wire_shapes: Mapping[str, tuple[int, ...]]

    def begin_exchange(self, request: RowExchange) -> Callable[[], RowValues]:
        """Do it at once, and note it."""
        num_rows = self.layout.num_rows
        fetched, checked = request.fetch_rows.numel(), request.check_rows.numel()
        kinds = request.bytes_by_kind(num_rows, self.wire_shapes)
        back = bytes_by_kind(num_rows, self.wire_shapes, fetched=fetched, checked=0, pushed=0)
        answered = sum(back.values()) - fetched * row_dtype(num_rows).itemsize + -(-checked // 8)
        self.messages.append(Message(sum(kinds.values()) - answered, answered, kinds))
        return super().begin_exchange(request)


@dataclass(frozen=True)
class CachedGradient:
    """The effect of one worker's batch on its copies of the rows of one collection.

    Args:
        rows: The cached rows of the collection.
        worker: Number of the worker whose batch it is.
        tickets: Tickets of the batch's lookups. While they are held, the cache keeps the rows.
        grad_BFD: Gradient of the pooled rows.
    """

    rows: CachedRows
    worker: int
    tickets: Sequence[Ticket]
    grad_BFD: Tensor

    @property
    def num_bytes(self) -> int:
        """None: the store's messages are counted."""
        return 0

    def push(self, normalization: StalenessNormalization | None, *, lr: float) -> NDArray[np.int32]:
        """Train the worker's copies. Its clocks bound how stale they are, so nothing is normalised."""
        self.rows.caches[self.worker].apply_gradients(self.tickets, self.grad_BFD, lr=lr)
        return _NOT_COUNTED


class CachedRows(StoreBackend):
    """All rows of a collection in one store, and each worker's cache of them. Gradients are kept until :meth:`take`.

    Args:
        folder: Where the store's files are made.
        layout: The tables of the collection.
        optimizer: The update rule.
        num_workers: Number of workers, each of which has a cache.
        cache_fraction: Rows that may stay in each of them, as a share of all; 0 keeps none.
        wire_dim: Numbers that a row's weights have on the network; ``None``: as many as here.
        options: Further arguments of :class:`CachedBackend`.

    Attributes:
        caches: The cache of each worker.
        worker: Number of the worker whose batch is looked up.
        store: The store that holds all rows.
    """

    def __init__(
        self,
        folder: Path,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        num_workers: int,
        cache_fraction: float,
        wire_dim: int | None,
        **options: Any,
    ) -> None:
        store = ServerRows.create(folder, layout, optimizer, seed=0)
        assert isinstance(store, ServerRows)
        store.messages = []
        wide = [replace(table, embedding_dim=wire_dim or table.embedding_dim) for table in layout.tables]
        store.wire_shapes = row_shapes(TableLayout(tuple(wide)), optimizer)
        stores = [(store, [TablePart("", table.name, table.num_embeddings, server=0) for table in layout.tables])]
        super().__init__(layout, optimizer, stores=stores)
        self.store, self.worker = store, 0
        self._taken: list[CachedGradient] = []
        cache_rows = math.ceil(cache_fraction * layout.num_rows)
        # In a tuple they are no submodules: what is saved and moved are the rows in the store.
        self.caches = tuple(
            CachedBackend(layout, optimizer, stores=stores, cache_rows=cache_rows, **options)
            for _ in range(num_workers)
        )

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:  # noqa: D102 - inherited
        return self.caches[self.worker].lookup(sparse)

    def prefetch(self, sparse: SparseFeatures) -> None:  # noqa: D102 - inherited
        self.caches[self.worker].prefetch(sparse)

    def announce(self, sparse: SparseFeatures, *, ahead: int) -> None:  # noqa: D102 - inherited
        self.caches[self.worker].announce(sparse, ahead=ahead)

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        """Keep the gradient."""
        self._taken.append(CachedGradient(self, self.worker, tickets, grad_BFD))

    def take(self) -> list[CachedGradient]:
        """The gradients since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def flush(self) -> None:
        """Push what all workers owe."""
        for cache in self.caches:
            cache.flush()

    def take_messages(self) -> list[Message]:
        """The messages since the last call."""
        messages, self.store.messages = self.store.messages, []
        return messages

    def finish_step(self) -> list[int]:
        """In step: one update of each row with all workers' gradients, made at its owner.

        The pushes to the store are what :meth:`flush` makes.

        Returns:
            Bytes that each worker has sent to others or received from them.
        """
        parts = [part for cache in self.caches if (part := cache.take_gradients()) is not None]
        assert len(parts) == len(self.caches), "a worker had no batch in a step of all"
        keys_W = [part.keys for part in parts]
        counts_WP = np.array([[keys.size] for keys in keys_W])
        divided = [divide(0, keys_W, counts_WP, rank) for rank in range(len(parts))]
        moved = np.full(len(parts), 2 * (len(parts) - 1) * int(counts_WP.max()) * 4)  # all learn all keys
        gradient_bytes = 4 * math.prod(self.store.wire_shapes["weight"])
        for rank, (part, (_, places_W)) in enumerate(zip(parts, divided, strict=True)):
            for other, places in enumerate(places_W):
                if other != rank:
                    sent = torch.from_numpy(np.flatnonzero(divided[other][0] == rank))
                    part.sums.index_add_(0, torch.from_numpy(places), parts[other].sums.index_select(0, sent))
                    moved[[rank, other]] += gradient_bytes * len(sent)
        for rank, (cache, (owner_U, _)) in enumerate(zip(self.caches, divided, strict=True)):
            cache.finish_step(np.flatnonzero(owner_U == rank), counts=rank == 0)
        return [int(x) for x in moved]

    def counts(self) -> dict[str, float]:
        """Distinct rows that the workers' batches had, and how many of them were missing, too old, too far ahead."""
        told = [cache.telemetry() for cache in self.caches]
        reads = sum(each["cache/reads"] for each in told)
        shares = ("miss", "stale", "refresh")
        return {
            "reads": reads,
            "evictions": sum(each["cache/evictions"] for each in told),
            **{name: sum(each[f"cache/{name}_rate"] * each["cache/reads"] for each in told) for name in shares},
        }
