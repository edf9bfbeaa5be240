"""The stores of a server's folder: made, removed, and found again by name and generation."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor, float32

from lightning_recsys.errors import StoreReplacedError
from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_arrays, take_generation, take_plain
from lightning_recsys.parameter_server.requests.operations import Operations, Push
from lightning_recsys.parameter_server.requests.served import ServedDense, ServedDynamic, ServedEmbedding, open_served
from lightning_recsys.stores.checks import check_rows
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.folders.mapped_arrays import META, check_name
from lightning_recsys.stores.mapped import MappedStores, check_same
from lightning_recsys.stores.plain import layout_from_plain, optimizer_from_plain, optional_from_plain
from lightning_recsys.sync import StalenessNormalization

MAX_EMBEDDING_DIM = 1 << 16
_PERHAPS = (dict, type(None))


class OpenStores:
    """The stores that requests name, each opened when it is named first.

    A store may be removed, and one of the same name made, by others who map the folder. A removed one is never served:
    its generation, which the files tell, is 0 from that moment on.

    Args:
        folder: The folder in which the stores lie.
        limits: What one request, and its reply, may take.

    Attributes:
        mapped: The folder's stores as this process may use them itself.
        operations: The operations that a client may ask for, by name.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.mapped = MappedStores(folder)
        self.folder = self.mapped.folder
        self.limits = limits
        self._open: dict[str, ServedEmbedding | ServedDense] = {}
        self.operations = Operations(
            reads={"describe": self._describe, "counter": self._counter},
            pushes={
                "create_embedding_store": self._create_embedding_store,
                "create_dense_store": self._create_dense_store,
                "remove": self._remove,
            },
        )

    def close(self) -> None:
        """Let go of the files."""
        for served in self._open.values():
            served.store.close()
        self._open.clear()
        self.mapped.close()

    def staleness(self) -> dict[str, dict[int, int]]:
        """How often each staleness occurred in the pushes to each open store, for stores that count versions.

        Another thread may ask.
        """
        found = {name: dict(served.store.observed.counts) for name, served in list(self._open.items())}
        return {name: counts for name, counts in found.items() if counts}

    def staleness_status(self) -> dict[str, float]:
        """The mean staleness of all pushes to all open stores; nothing where none counts versions."""
        counts = [pair for counts in self.staleness().values() for pair in counts.items()]
        total = sum(count for _, count in counts)
        return {"mean_staleness": sum(x * count for x, count in counts) / total} if total else {}

    # --- What the other parts ask ------------------------------------------------------------------------------------

    def embedding(self, request: Request) -> ServedEmbedding:
        """The embedding store that a request names.

        Raises:
            KeyError: there is no embedding store of that name.
            StoreReplacedError: the one that was meant was removed.
        """
        served = self._served(request)
        if not isinstance(served, ServedEmbedding):
            raise KeyError(f"{request.store!r} is a dense store, and {request.operation} is for embedding stores")
        return served

    def dynamic(self, request: Request) -> ServedDynamic:
        """The embedding store with dynamic rows; errors as for :meth:`embedding`."""
        served = self.embedding(request)
        if not isinstance(served, ServedDynamic):
            raise KeyError(f"{request.store!r} has no dynamic rows, which {request.operation} is for")
        return served

    def dense(self, request: Request) -> ServedDense:
        """The dense store; errors as for :meth:`embedding`."""
        served = self._served(request)
        if not isinstance(served, ServedDense):
            raise KeyError(f"{request.store!r} is an embedding store, and {request.operation} is for dense stores")
        return served

    def check_rows(self, served: ServedEmbedding, rows_U: Tensor) -> None:
        """Refuse rows that are too many, or not in the store.

        Raises:
            ValueError: the rows are more than one request may name.
            IndexError: a row is not in the store.
        """
        if rows_U.numel() > self.limits.rows:
            raise ValueError(f"a request names at most {self.limits.rows} rows, got {rows_U.numel()}")
        check_rows(rows_U, served.num_rows)

    def check_reply(self, num_elements: int) -> None:
        """Refuse a request whose reply would have more float32 numbers than a message may.

        Raises:
            ValueError: the reply would be too large.
        """
        size, limit = 4 * num_elements, self.limits.message_bytes
        if not 0 <= size <= limit:
            raise ValueError(f"the reply would have {size} bytes and may have {limit}: ask in parts")

    # --- Operations --------------------------------------------------------------------------------------------------

    def _served(self, request: Request) -> ServedEmbedding | ServedDense:
        name, wanted = request.store, take_generation(request)
        served = self._open.get(name)
        if served is not None and not served.generation:  # somebody has removed it without asking us
            self._open.pop(name).store.close()
            served = None
        if served is None:
            try:
                served = self._open[name] = open_served(self.folder / check_name(name))
            except FileNotFoundError:
                names = sorted(path.parent.name for path in self.folder.glob(f"[!.]*/{META}"))
                raise KeyError(f"there is no store {name!r}; there are {names}") from None
        if wanted not in (None, served.generation):
            raise StoreReplacedError(name)
        return served

    def _describe(self, request: Request) -> object:
        take_plain(request)
        return self._served(request).describe()

    def _counter(self, request: Request) -> object:
        take_plain(request)
        return self.embedding(request).store.step

    def _create_embedding_store(self, request: Request) -> Push:
        optional = {"normalization": None, "dynamic": None}
        kinds: dict[str, Any] = {"tables": list, "optimizer": dict, "seed": int, **dict.fromkeys(optional, _PERHAPS)}
        tables, rule, seed, normalization, dynamic = take_plain(request, optional, **kinds)
        layout, optimizer = layout_from_plain(tables), optimizer_from_plain(rule)
        if layout.embedding_dim > MAX_EMBEDDING_DIM or not 0 <= seed < 2**63:
            raise ValueError(f"embedding_dim must be at most {MAX_EMBEDDING_DIM} and seed in [0, 2**63)")
        options: dict[str, Any] = {
            "dynamic": optional_from_plain(DynamicRows, dynamic),
            "normalization": optional_from_plain(StalenessNormalization, normalization),
        }

        def apply() -> None:
            served = self._open.get(request.store)
            if isinstance(served, ServedDynamic) and served.generation:  # it cannot be opened twice
                check_same(self.folder / request.store, served.store, layout, optimizer, **options)
            else:
                with closing(MappedStores(self.folder)) as stores:  # ours would keep each store for good
                    stores.create_embedding_store(request.store, layout, optimizer, seed=seed, **options)

        # No undo: stores are made beside their place and renamed into it, and making one that is there is no change.
        return Push(apply)

    def _create_dense_store(self, request: Request) -> Push:
        kinds: dict[str, Any] = {"optimizer": _PERHAPS, "normalization": _PERHAPS, "parts": list}
        rule, normalization, parts = take_arguments(request, {"normalization": None, "parts": []}, **kinds)
        (initial,) = take_arrays(request, ("initial", float32, 1))
        if any(type(size) is not int for size in parts):
            raise ValueError(f"parts must be whole numbers of elements, got {parts!r:.200}")
        options: dict[str, Any] = {
            "optimizer": None if rule is None else optimizer_from_plain(rule),
            "normalization": optional_from_plain(StalenessNormalization, normalization),
            "parts": parts,
        }

        def apply() -> None:
            with closing(MappedStores(self.folder)) as stores:
                stores.create_dense_store(request.store, initial, **options)

        return Push(apply)

    def _remove(self, request: Request) -> Push:
        take_plain(request)

        def apply() -> None:
            served = self._open.pop(request.store, None)
            if served is not None:
                served.store.close()
            self.mapped.remove(request.store)

        return Push(apply)
