"""Open stores as a server needs them: what requests are checked against, and what a push will touch."""

# Shape suffixes: B batch, F features, N ids of the batch.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.parameter_server.journal import Undo
from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.parameter_server.requests.checks import take_array
from lightning_recsys.stores import embedding_store
from lightning_recsys.stores.checks import check_features
from lightning_recsys.stores.dense_store import MappedDenseStore
from lightning_recsys.stores.dynamic import hash_store
from lightning_recsys.stores.dynamic.hash_store import HashEmbeddingStore
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.folders.mapped_arrays import read_meta
from lightning_recsys.stores.versions import tag_arrays


class Served:
    """An open store.

    Args:
        store: The store that requests are answered from.
    """

    store: MappedEmbeddingStore | HashEmbeddingStore | MappedDenseStore

    def __init__(self, store: MappedEmbeddingStore | HashEmbeddingStore | MappedDenseStore) -> None:
        self.store = store

    def describe(self) -> dict[str, Any]:
        """The description of the store for a client, in plain values."""
        return {"generation": self.generation, **self.store.arrays.meta}

    @property
    def generation(self) -> int:
        """Which of all stores of this name it is; 0 once it was removed."""
        arrays = self.store.arrays
        return 0 if arrays.is_removed else arrays.generation


class ServedEmbedding(Served):
    """An open embedding store."""

    store: MappedEmbeddingStore | HashEmbeddingStore

    def __init__(self, store: MappedEmbeddingStore | HashEmbeddingStore) -> None:
        super().__init__(store)
        layout = store.layout
        self.keys = tuple(feature for table in layout.tables for feature in table.feature_names)
        self.num_rows, self.dim = layout.num_rows, layout.embedding_dim
        self._sizes_F = torch.from_numpy(as_int64s(table.num_embeddings for table in layout.feature_tables))
        self._trained = (*store.row_shapes, *tag_arrays(store.normalization, 0))

    def sparse(self, request: Request, limits: Limits) -> tuple[SparseFeatures, list[Tensor]]:
        """The features of a request, checked, and the arrays behind them.

        Raises:
            ValueError: they are not features of this store.
            IndexError: an id is not in its table.
        """
        arrays = list(request.arrays)
        ids_N = take_array(arrays, "ids", torch.int64, 1)
        offsets = take_array(arrays, "offsets", torch.int64, 1) if request.arguments["bags"] else None
        weights_N = take_array(arrays, "weights", torch.float32, 1) if request.arguments["weighted"] else None
        if max(ids_N.numel(), 0 if offsets is None else offsets.numel() - 1) > limits.rows:
            raise ValueError(f"a request has at most {limits.rows} ids or bags")
        sparse = SparseFeatures(self.keys, ids_N, offsets=offsets, weights=weights_N)
        check_features(sparse, self._sizes_F)
        return sparse, arrays

    def undo(self, rows: Tensor, *others: str, counts: Tensor | None = None) -> Undo:
        """How to take back an update of these rows.

        Args:
            rows: Their places in the store, int64 ``[U]``.
            others: Arrays that the update touches besides weights and states.
            counts: How many updates each row gets, int32 ``[U]``; default: one each.
        """
        return Undo(self.store.arrays, (*self._trained, *others), rows)

    def update(
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None
    ) -> tuple[Callable[[], Tensor | None], Undo]:
        """Make an update by the gradients of a pooled lookup ready: the call that makes it, and how to take it back.

        The gradients are summed first, for the sums name the rows, each once.
        """
        assert isinstance(self.store, MappedEmbeddingStore), "the others have a class of their own"
        rows, apply = self.store.begin_gradients(sparse, grad_BFD, lr=lr, versions=versions)
        return apply, self.undo(rows)


class ServedDynamic(ServedEmbedding):
    """An open store with dynamic rows."""

    store: HashEmbeddingStore

    def undo(self, rows: Tensor, *others: str, counts: Tensor | None = None) -> Undo:
        """Do as other stores do, by slots: the rows that the update will make are made here, and need no undoing."""
        slots = self.store.admit(rows.contiguous().numpy(), None if counts is None else counts.numpy())
        return super().undo(torch.from_numpy(slots[slots >= 0]), *others)

    def update(  # noqa: D102 - inherited
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None
    ) -> tuple[Callable[[], Tensor | None], Undo]:
        apply = partial(self.store.apply_gradients, sparse, grad_BFD, lr=lr, versions=versions)
        return apply, self.undo(self.store.layout.rows_of(sparse))


class ServedDense(Served):
    """An open vector."""

    store: MappedDenseStore

    def __init__(self, store: MappedDenseStore) -> None:
        super().__init__(store)
        self._undo: dict[tuple[str, ...], Undo] = {}

    def undo(self, *names: str) -> Undo:
        """How to take back an update of these arrays; the same object each time."""
        if names not in self._undo:
            self._undo[names] = Undo(self.store.arrays, names, None)
        return self._undo[names]


def open_served(folder: Path) -> ServedEmbedding | ServedDense:
    """Open the store in a folder.

    Raises:
        FileNotFoundError: there is no store in the folder.
    """
    kind = read_meta(folder)["kind"]
    if kind == hash_store.KIND:
        return ServedDynamic(HashEmbeddingStore(folder))
    if kind == embedding_store.KIND:
        return ServedEmbedding(MappedEmbeddingStore(folder))
    return ServedDense(MappedDenseStore(folder))
