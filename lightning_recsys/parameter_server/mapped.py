"""The stores of a folder, opened straight from its files: what ``shm://`` endpoints give."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.parameter_server import dense_store, embedding_store
from lightning_recsys.parameter_server.dense_store import MappedDenseStore
from lightning_recsys.parameter_server.embedding_store import MappedEmbeddingStore
from lightning_recsys.parameter_server.interfaces import Stores
from lightning_recsys.parameter_server.mapped_arrays import META, check_name, remove_arrays, total_bytes


class MappedStores(Stores):
    """All stores of a folder, in shared memory (``/dev/shm/...``) or on disk for tables larger than memory.

    Any number of processes may open the same folder, and any may create: a second one that asks for the same store
    gets the first one's.

    Args:
        folder: An existing folder.

    Raises:
        FileNotFoundError: there is no such folder.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> center = MappedStores(folder).create_dense_store("center", torch.zeros(2))
    >>> MappedStores(folder).dense_store("center").elastic_average(torch.ones(2), alpha=0.5).tolist()
    [0.5, 0.5]
    >>> center.version, center.pull().tolist()
    (1, [0.5, 0.5])
    >>> MappedStores(folder).remove("center")
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder of stores {self.folder}: is its server up, on this machine? A folder goes when the"
                " run that made it ends."
            )
        self.endpoint = f"shm://{self.folder}"
        self._opened: list[MappedEmbeddingStore | MappedDenseStore] = []

    def create_embedding_store(  # noqa: D102 - inherited
        self, name: str, layout: TableLayout, optimizer: RowOptimizer, *, seed: int
    ) -> MappedEmbeddingStore:
        path, store = self.folder / check_name(name), None
        if not path.exists():
            with suppress(FileExistsError):  # another process was faster
                store = MappedEmbeddingStore.create(path, layout, optimizer, seed=seed)
                self._opened.append(store)
        store = store or self.embedding_store(name)
        if store.layout != layout or store.optimizer != optimizer:
            raise ValueError(
                f"a store {name!r} is in {self.folder} with other tables or another rule: it has {store.layout.tables} "
                f"and {store.optimizer}, asked were {layout.tables} and {optimizer}. Choose another name or remove it."
            )
        return store

    def create_dense_store(  # noqa: D102 - inherited
        self, name: str, initial: Tensor, *, optimizer: RowOptimizer | None = None
    ) -> MappedDenseStore:
        path, store = self.folder / check_name(name), None
        if not path.exists():
            with suppress(FileExistsError):
                store = MappedDenseStore.create(path, initial, optimizer=optimizer)
                self._opened.append(store)
        store = store or self.dense_store(name)
        if store.size != initial.numel() or store.optimizer != optimizer:
            raise ValueError(
                f"a store {name!r} is in {self.folder} with {store.size} elements and the rule {store.optimizer}, "
                f"asked were {initial.numel()} and {optimizer}. Choose another name or remove it."
            )
        return store

    def embedding_store(self, name: str) -> MappedEmbeddingStore:  # noqa: D102 - inherited
        store = MappedEmbeddingStore(self._path(name, embedding_store.KIND))
        self._opened.append(store)
        return store

    def dense_store(self, name: str) -> MappedDenseStore:  # noqa: D102 - inherited
        store = MappedDenseStore(self._path(name, dense_store.KIND))
        self._opened.append(store)
        return store

    def remove(self, name: str) -> None:  # noqa: D102 - inherited
        remove_arrays(self._path(name))

    def status(self) -> dict[str, Any]:
        """Stores, rows and bytes of the folder; a folder sees no requests."""
        stored = self._stored()
        embedding = [found for found in stored.values() if found["meta"]["kind"] == embedding_store.KIND]
        return {
            "stores": len(stored),
            "rows": sum(found["arrays"]["weight"][1][0] for found in embedding),
            "bytes": sum(total_bytes(found["arrays"]) for found in stored.values()),
        }

    def close(self) -> None:  # noqa: D102 - inherited
        for store in self._opened:
            store.close()
        self._opened.clear()

    def _stored(self) -> dict[str, dict[str, Any]]:
        """What every store's JSON says, by name."""
        found = {}
        for path in sorted(self.folder.glob(f"*/{META}")):
            if not path.parent.name.startswith("."):  # one that is being made
                with suppress(FileNotFoundError):  # one that is being removed
                    found[path.parent.name] = json.loads(path.read_text())
        return found

    def _path(self, name: str, kind: str | None = None) -> Path:
        names = [key for key, found in self._stored().items() if kind in (None, found["meta"]["kind"])]
        if check_name(name) not in names:
            what = "store" if kind is None else f"{kind} store"
            raise KeyError(f"no {what} {name!r} in {self.folder}, which has {names}.")
        return self.folder / name
