"""The rows of a model in training, read while they change: all of them, or those that are not as they were published.

What was published of a row is known by its digest, so that nothing has to be counted or marked while rows are trained.
A row's digest is taken from the copy that is published and not from the row itself: a row that moves between two looks
is found again by the next version.
"""

# Shape suffixes: U rows, D embedding dim, N rows of a table.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, RowDtype, TableBackend
from lightning_recsys.serving.manifest import Drawing
from lightning_recsys.serving.rows.files import block_rows
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.digests import DIGEST, digest_rows

_LOOKS = 3  # at a row that moves while it is copied

Backend: TypeAlias = "TableBackend | CopiedTables"

Rows = tuple[Tensor | None, Tensor]
"""Ids, or ``None`` where row ``i`` is that of id ``i``; and rows."""


class TableSnapshot(ABC):
    """The published state of a table so far.

    Args:
        config: Name, size and width of the table.

    Attributes:
        drawing: How rows are drawn that do not exist; ``None`` where all exist.
        moving: Rows that changed every time while the latest version was copied.
    """

    drawing: Drawing | None = None

    def __init__(self, config: EmbeddingBagConfig) -> None:
        self.config = config
        self.moving = 0

    @abstractmethod
    def all_rows(self, backend: Backend) -> Iterator[Rows]:
        """Every row, in blocks."""

    @abstractmethod
    def changed_rows(self, backend: Backend) -> Iterator[Rows]:
        """The rows that are not as they were published, in blocks, with their ids."""

    @abstractmethod
    def published_ids(self) -> Tensor:
        """The ids of all rows that were published and not forgotten."""

    @abstractmethod
    def forgotten_ids(self) -> Tensor:
        """After :meth:`changed_rows`: the ids of rows that are no more, int64."""


class WholeTable(TableSnapshot):
    """A table of which every row exists."""

    def __init__(self, config: EmbeddingBagConfig) -> None:
        super().__init__(config)
        self._published_N = torch.zeros(config.num_embeddings, dtype=torch.int64)  # digests

    def all_rows(self, backend: Backend) -> Iterator[Rows]:  # noqa: D102 - inherited
        self.moving = 0
        for block in self._blocks():
            rows_UD = _read(backend, self.config.name, block)
            self._published_N[block] = digest_rows(rows_UD)
            yield None, rows_UD

    def changed_rows(self, backend: Backend) -> Iterator[Rows]:  # noqa: D102 - inherited
        self.moving = 0
        for block in self._blocks():
            now_U = _digests(backend, self.config.name, block)
            ids_U = (now_U != self._published_N[block]).nonzero().flatten() + block.start
            if ids_U.numel():
                rows_UD, digests_U = self._copy(backend, ids_U)
                self._published_N[ids_U] = digests_U
                yield ids_U, rows_UD

    def _copy(self, backend: Backend, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of rows and their digests; of a row that moves meanwhile the latest copy.

        In shared memory a copy may be half of one update and half of the next, as every lookup may.
        """
        rows_UD = _read(backend, self.config.name, ids_U)
        digests_U = digest_rows(rows_UD)
        for look in range(_LOOKS):
            again_UD = _read(backend, self.config.name, ids_U)
            again_U = digest_rows(again_UD)
            moved = int((again_U != digests_U).sum())
            rows_UD, digests_U = again_UD, again_U
            if not moved:
                break
            if look == _LOOKS - 1:
                self.moving += moved
        return rows_UD, digests_U

    def published_ids(self) -> Tensor:  # noqa: D102 - inherited
        return torch.arange(self.config.num_embeddings)

    def forgotten_ids(self) -> Tensor:  # noqa: D102 - inherited
        return torch.empty(0, dtype=torch.int64)

    def _blocks(self) -> Iterator[slice]:
        size = block_rows(self.config.embedding_dim)
        for first in range(0, self.config.num_embeddings, size):
            yield slice(first, min(first + size, self.config.num_embeddings))


class GrowingTable(TableSnapshot):
    """A table whose rows come and go."""

    def __init__(self, config: EmbeddingBagConfig, drawing: Drawing) -> None:
        super().__init__(config)
        self.drawing = drawing
        self._ids_N = torch.empty(0, dtype=torch.int64)  # published, rising as unsigned numbers
        self._digests_N = torch.empty(0, dtype=torch.int64)
        self._gone = self._ids_N

    def all_rows(self, backend: Backend) -> Iterator[Rows]:  # noqa: D102 - inherited
        ids_N = _dynamic(backend).live_ids()[self.config.name]
        self._ids_N, self._digests_N = ids_N, torch.zeros_like(ids_N)
        yield from self._copy(backend, torch.arange(ids_N.numel()))

    def changed_rows(self, backend: Backend) -> Iterator[Rows]:  # noqa: D102 - inherited
        tables = _dynamic(backend)
        ids_N = tables.live_ids()[self.config.name]
        now_N = tables.read(self.config.name, DIGEST, ids_N)
        places = _find(self._ids_N, ids_N)
        known = places >= 0
        before_N = torch.where(known, self._digests_N[places] if len(self._ids_N) else 0, 0)
        changed = (~known | (before_N != now_N)).nonzero().flatten()
        self._gone = self._ids_N[_find(ids_N, self._ids_N) < 0]
        self._ids_N, self._digests_N = ids_N, before_N
        yield from self._copy(backend, changed)

    def _copy(self, backend: Backend, places: Tensor) -> Iterator[Rows]:
        for some in torch.split(places, block_rows(self.config.embedding_dim)):
            if some.numel():
                ids_U = self._ids_N[some]
                rows_UD = _dynamic(backend).read(self.config.name, "weight", ids_U).float()
                self._digests_N[some] = digest_rows(rows_UD)
                yield ids_U, rows_UD

    def published_ids(self) -> Tensor:  # noqa: D102 - inherited
        return self._ids_N

    def forgotten_ids(self) -> Tensor:  # noqa: D102 - inherited
        return self._gone


def snapshot_of(tables: Sequence[EmbeddingBagConfig], collection: EmbeddingBagCollection) -> list[TableSnapshot]:
    """The snapshot of a collection's tables of which nothing is published yet.

    Args:
        tables: All tables of the collection, those included that other processes have.
        collection: The collection that is in training.
    """
    backend = backend_of(collection)
    dynamic = backend.dynamic if isinstance(backend, StoreBackend) else None
    # Published rows have a format of their own, whatever those in training are kept in.
    tables = [replace(config, dtype=RowDtype.FLOAT32) for config in tables]
    if dynamic is None:
        return [WholeTable(config) for config in tables]
    rules = [dynamic.drawing(config.name) for config in tables]
    return [
        GrowingTable(config, Drawing(seed, first_key % 2**64, key_step))
        for config, (seed, first_key, key_step) in zip(tables, rules, strict=True)
    ]


def backend_of(collection: EmbeddingBagCollection) -> TableBackend:
    """Where the rows of a collection are.

    Raises:
        ValueError: the collection has no rows in this process that could be published.
    """
    backend = collection.embedding_bags
    is_cut = collection.whole_tables is not None
    if not isinstance(backend, TableBackend) or backend.is_meta or (is_cut and isinstance(backend, StoreBackend)):
        names = [table.name for table in collection.tables]
        why = "they are dynamic, and of each process its own" if is_cut else "device='meta'"
        raise ValueError(f"the tables {names} have no rows that could be published ({why}).")
    return backend


class CopiedTables:
    """Tables whose rows were copied from several processes at one moment: what a snapshot asks of a backend.

    Args:
        rows: The rows of each table by its name, float32 ``[N, D]``.
        step: Number of updates that the tables have had.
    """

    def __init__(self, rows: Mapping[str, Tensor], step: int) -> None:
        self._rows, self.step = rows, step

    def read(self, table: str, name: str) -> Tensor:
        """The rows of a table."""
        return self._rows[table]


def _dynamic(backend: Backend) -> Any:
    assert isinstance(backend, StoreBackend)
    assert backend.dynamic is not None
    return backend.dynamic


def _read(backend: Backend, table: str, ids: slice | Tensor) -> Tensor:
    """Copies of rows as the stores have them, in float32: what a worker keeps of them is for the thread that trains."""
    if isinstance(backend, StoreBackend):
        return backend.stored.read(table, "weight", ids).float()
    rows = backend.read(table, "weight").detach()
    found = rows[ids] if isinstance(ids, slice) else rows.index_select(0, ids.to(rows.device))
    return found.to("cpu", torch.float32, copy=isinstance(ids, slice))


def _digests(backend: Backend, table: str, ids: slice) -> Tensor:
    if isinstance(backend, StoreBackend):
        return backend.stored.read(table, DIGEST, ids)
    return digest_rows(backend.read(table, "weight")[ids].detach().cpu().float())


def _find(sorted_N: Tensor, wanted_U: Tensor) -> Tensor:
    """Where ids are among others that rise as unsigned numbers; -1 where they are not."""
    if not len(sorted_N):
        return torch.full_like(wanted_U, -1)
    them: NDArray[np.uint64] = sorted_N.numpy().view(np.uint64)
    places = np.searchsorted(them, wanted_U.numpy().view(np.uint64)).clip(max=len(them) - 1)
    found = np.where(them[places] == wanted_U.numpy().view(np.uint64), places, -1)
    return torch.from_numpy(found)
