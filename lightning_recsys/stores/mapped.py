"""The stores of a folder, opened straight from its files: what ``shm://`` endpoints give."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.stores import dense_store, embedding_store
from lightning_recsys.stores.dense_store import MappedDenseStore
from lightning_recsys.stores.dynamic import hash_store
from lightning_recsys.stores.dynamic.hash_store import HashEmbeddingStore
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.folders.locality import boot_id
from lightning_recsys.stores.folders.mapped_arrays import META, check_name, remove_arrays, total_bytes
from lightning_recsys.stores.folders.room import free_bytes, used_bytes
from lightning_recsys.stores.interfaces import EmbeddingStore, Stores
from lightning_recsys.sync import StalenessNormalization


class MappedStores(Stores):
    """All stores of a folder, in shared memory (``/dev/shm/...``) or on disk for tables larger than memory.

    Any number of processes may open the same folder, and any may create: a second one that asks for the same store
    gets the first one's. Where the folder has a server, that one creates and removes, for it has stores open, and
    whoever sends it messages is to find the same ones. Only stores with dynamic rows are open in one process at a time:
    the folder's server, where there is one.

    Args:
        folder: An existing folder.
        server: Connects to the folder's server, which makes and removes stores then, and has those with dynamic rows to
            itself; without it this process does all that.

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

    def __init__(self, folder: str | Path, *, server: Callable[[], Stores] | None = None) -> None:
        self.folder = Path(folder).absolute()
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder of stores {self.folder}: is its server up, on this machine? A folder goes when the"
                " run that made it ends."
            )
        self.endpoint = f"shm://{self.folder}"
        self.route = f"the files of {self.folder}, mapped"
        self._opened: list[MappedEmbeddingStore | HashEmbeddingStore | MappedDenseStore] = []
        self._connect = server
        self._connected: Stores | None = None

    def create_embedding_store(  # noqa: D102 - inherited
        self,
        name: str,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        seed: int,
        dynamic: DynamicRows | None = None,
        normalization: StalenessNormalization | None = None,
    ) -> EmbeddingStore:
        options: dict[str, Any] = {"seed": seed, "normalization": normalization}
        path = self.folder / check_name(name)
        created: MappedEmbeddingStore | HashEmbeddingStore
        if self._connect is not None and (dynamic is not None or not path.exists()):
            served = self._server().create_embedding_store(name, layout, optimizer, dynamic=dynamic, **options)
            if dynamic is not None:
                return served
        elif not path.exists():
            with suppress(FileExistsError):  # another process was faster
                if dynamic is None:
                    created = MappedEmbeddingStore.create(path, layout, optimizer, **options)
                else:
                    created = HashEmbeddingStore.create(path, layout, optimizer, dynamic=dynamic, **options)
                self._opened.append(created)
                return created
        store = self.embedding_store(name)
        check_same(path, store, layout, optimizer, dynamic, normalization)
        return store

    def create_dense_store(  # noqa: D102 - inherited
        self,
        name: str,
        initial: Tensor,
        *,
        optimizer: RowOptimizer | None = None,
        normalization: StalenessNormalization | None = None,
        parts: Sequence[int] = (),
    ) -> MappedDenseStore:
        options: dict[str, Any] = {"optimizer": optimizer, "normalization": normalization, "parts": parts}
        path, store = self.folder / check_name(name), None
        if self._connect is not None and not path.exists():
            self._server().create_dense_store(name, initial, **options)
        elif not path.exists():
            with suppress(FileExistsError):
                store = MappedDenseStore.create(path, initial, **options)
                self._opened.append(store)
        store = store or self.dense_store(name)
        wanted = tuple(parts) or (initial.numel(),)
        if (store.parts, store.optimizer, store.normalization) != (wanted, optimizer, normalization):
            raise ValueError(
                f"a store {name!r} is in {self.folder} with {store.size} elements in {len(store.parts)} parts, the rule"
                f" {store.optimizer} and normalization={store.normalization}, asked were {initial.numel()} in"
                f" {len(wanted)}, {optimizer} and normalization={normalization}. Choose another name or remove it."
            )
        return store

    def embedding_store(self, name: str) -> EmbeddingStore:  # noqa: D102 - inherited
        path = self._path(name, embedding_store.KIND, hash_store.KIND)
        is_dynamic = self._stored()[name]["meta"]["kind"] == hash_store.KIND
        if is_dynamic and self._connect is not None:
            return self._server().embedding_store(name)
        store = HashEmbeddingStore(path) if is_dynamic else MappedEmbeddingStore(path)
        self._opened.append(store)
        return store

    def dense_store(self, name: str) -> MappedDenseStore:  # noqa: D102 - inherited
        store = MappedDenseStore(self._path(name, dense_store.KIND))
        self._opened.append(store)
        return store

    def remove(self, name: str) -> None:  # noqa: D102 - inherited
        path = self._path(name)
        if self._connect is not None:
            self._server().remove(name)
        else:
            remove_arrays(path)

    def status(self) -> dict[str, Any]:
        """Stores, rows, how many of them exist, bytes of the folder, and what is free; a folder sees no requests.

        ``bytes`` are those of the stores' files, and ``used_bytes`` those of them that take room already.
        ``free_bytes`` are there for new files, and ``place`` is machine and file system, which share them.
        """
        stored = self._stored()
        tables = {name: found["meta"]["tables"] for name, found in stored.items() if "tables" in found["meta"]}
        rows = {name: sum(table["num_embeddings"] for table in tables[name]) for name in tables}
        dynamic = [name for name, found in stored.items() if found["meta"]["kind"] == hash_store.KIND]
        live = rows | {name: self._live_rows(name) for name in dynamic}
        return {
            "stores": len(stored),
            "rows": min(sum(rows.values()), 2**64 - 1),  # what a message can say
            "live_rows": sum(live.values()),
            "bytes": sum(
                self._file_bytes(name) if name in dynamic else total_bytes(found["arrays"])
                for name, found in stored.items()
            ),
            "used_bytes": sum(used_bytes(path) for name in stored for path in (self.folder / name).glob("[!.]*")),
            "free_bytes": free_bytes(self.folder),
            "place": f"{boot_id() or socket.gethostname()}:{self.folder.stat().st_dev}",
        }

    def close(self) -> None:  # noqa: D102 - inherited
        for store in self._opened:
            store.close()
        self._opened.clear()
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _server(self) -> Stores:
        if self._connected is None:
            assert self._connect is not None
            self._connected = self._connect()
        return self._connected

    def _live_rows(self, name: str) -> int:
        with suppress(FileNotFoundError):  # one that is being removed
            return int(np.fromfile(self.folder / name / "counters", dtype=np.int64)[hash_store.LIVE_COUNTER])
        return 0

    def _file_bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name).glob("[!.]*") if path.name != META)

    def _stored(self) -> dict[str, dict[str, Any]]:
        """The entries that every store's JSON has, by name."""
        found = {}
        for path in sorted(self.folder.glob(f"*/{META}")):
            if not path.parent.name.startswith("."):  # one that is being made
                with suppress(FileNotFoundError):  # one that is being removed
                    found[path.parent.name] = json.loads(path.read_text())
        return found

    def _path(self, name: str, *kinds: str) -> Path:
        names = [key for key, found in self._stored().items() if not kinds or found["meta"]["kind"] in kinds]
        if check_name(name) not in names:
            what = f"{kinds[0]} store" if kinds else "store"
            raise KeyError(f"no {what} {name!r} in {self.folder}, which has {names}.")
        return self.folder / name


def check_same(
    path: Path,
    store: EmbeddingStore,
    layout: TableLayout,
    optimizer: RowOptimizer,
    dynamic: DynamicRows | None,
    normalization: StalenessNormalization | None,
) -> None:
    """Refuse to take a store for another one.

    Raises:
        ValueError: it has other tables or another rule than asked for, makes its rows otherwise, or has other versions.
    """
    has = getattr(store, "dynamic", None)
    if (store.layout, store.optimizer, has, store.normalization) != (layout, optimizer, dynamic, normalization):
        raise ValueError(
            f"a store {path.name!r} is in {path.parent} with other tables or another rule: it has "
            f"{store.layout.tables}, {store.optimizer}, dynamic={has} and normalization={store.normalization}, asked "
            f"were {layout.tables}, {optimizer}, dynamic={dynamic} and normalization={normalization}. Choose another "
            "name or remove it."
        )
