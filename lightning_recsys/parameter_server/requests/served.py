"""Open stores as a server needs them: what requests are checked against, and what a push will touch."""

# Shape suffixes: B batch, F features, N ids of the batch.

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.parameter_server.journal import Undo
from lightning_recsys.parameter_server.requests.checks import take_array
from lightning_recsys.parameter_server.wire import Limits, Request
from lightning_recsys.stores import embedding_store
from lightning_recsys.stores.checks import check_features
from lightning_recsys.stores.dense_store import MappedDenseStore
from lightning_recsys.stores.dynamic import hash_store
from lightning_recsys.stores.dynamic.hash_store import HashEmbeddingStore
from lightning_recsys.stores.dynamic.rows import dynamic_to_plain
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.mapped_arrays import MappedArrays, read_meta
from lightning_recsys.stores.plain import normalization_to_plain, optimizer_to_plain, rows_to_plain
from lightning_recsys.stores.versions import tag_arrays


class ServedEmbedding:
    """An open embedding store.

    Args:
        arrays: The mapped files of the store.
    """

    store: MappedEmbeddingStore | HashEmbeddingStore

    def __init__(self, arrays: MappedArrays) -> None:
        self._serve(MappedEmbeddingStore(arrays.folder), arrays)

    def _serve(self, store: MappedEmbeddingStore | HashEmbeddingStore, arrays: MappedArrays) -> None:
        self.store = store
        self._arrays = arrays
        layout = self.store.layout
        self.keys = tuple(feature for table in layout.tables for feature in table.feature_names)
        self.num_rows, self.dim = layout.num_rows, layout.embedding_dim
        self._sizes_F = torch.from_numpy(as_int64s(table.num_embeddings for table in layout.feature_tables))
        self._trained = (*self.store.row_shapes, *tag_arrays(self.store.normalization, 0))

    def describe(self) -> dict[str, Any]:
        """What a client must know, in plain values."""
        described = rows_to_plain(self.store.layout, self.store.optimizer, self.store.normalization)
        return {"kind": "embedding", "generation": self.generation, **described}

    @property
    def generation(self) -> int:
        """Which of all stores of this name it is; 0 once it was removed."""
        return 0 if self._arrays.is_removed else self._arrays.generation

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

    def touched_rows(self, sparse: SparseFeatures) -> Tensor:
        """Places in the store of the rows that an update will touch; one that occurs twice is named twice."""
        return self.store.layout.rows_of(sparse)

    def undo(self, rows: Tensor, *others: str, counts: Tensor | None = None) -> Undo:
        """How to take back an update of these rows.

        Args:
            rows: Their places in the store, int64 ``[U]``.
            others: Arrays that the update touches besides weights and states.
            counts: How many updates each row gets, int32 ``[U]``; default: one each.
        """
        return Undo(self._arrays, (*self._trained, *others), rows)

    def close(self) -> None:
        """Let go of the files."""
        self.store.close()
        self._arrays.close()


class ServedDynamic(ServedEmbedding):
    """An open store with dynamic rows.

    Args:
        store: The store that requests are answered from.
    """

    store: HashEmbeddingStore

    def __init__(self, store: HashEmbeddingStore) -> None:
        self._serve(store, store.arrays)

    def describe(self) -> dict[str, Any]:  # noqa: D102 - inherited
        dynamic = dynamic_to_plain(self.store.dynamic)
        return super().describe() | {"kind": hash_store.KIND, "dynamic": dynamic, "seed": self.store.seed}

    def undo(self, rows: Tensor, *others: str, counts: Tensor | None = None) -> Undo:
        """As for other stores, by slots: the rows that the update will make are made here, and need no undoing."""
        slots = self.store.admit(rows.contiguous().numpy(), None if counts is None else counts.numpy())
        return super().undo(torch.from_numpy(slots[slots >= 0]), *others)


class ServedDense:
    """An open vector.

    Args:
        arrays: The mapped files of the vector.
    """

    def __init__(self, arrays: MappedArrays) -> None:
        self.store = MappedDenseStore(arrays.folder)
        self._arrays = arrays
        self._undo: dict[tuple[str, ...], Undo] = {}

    def describe(self) -> dict[str, Any]:
        """What a client must know, in plain values."""
        rule = self.store.optimizer
        plain = rule and optimizer_to_plain(rule)
        described = {"parts": list(self.store.parts), "normalization": normalization_to_plain(self.store.normalization)}
        return {"kind": "dense", "generation": self.generation, "optimizer": plain, **described}

    @property
    def generation(self) -> int:
        """As for embedding stores."""
        return 0 if self._arrays.is_removed else self._arrays.generation

    def undo(self, *names: str) -> Undo:
        """How to take back an update of these arrays; the same object each time."""
        if names not in self._undo:
            self._undo[names] = Undo(self._arrays, names, None)
        return self._undo[names]

    def close(self) -> None:
        """Let go of the files."""
        self.store.close()
        self._arrays.close()


def open_served(folder: Path) -> ServedEmbedding | ServedDense:
    """Open the store in a folder.

    Raises:
        FileNotFoundError: there is no store in the folder.
    """
    kind = read_meta(folder)["kind"]
    if kind == hash_store.KIND:
        return ServedDynamic(HashEmbeddingStore(folder))
    arrays = MappedArrays(folder)
    return ServedEmbedding(arrays) if kind == embedding_store.KIND else ServedDense(arrays)
