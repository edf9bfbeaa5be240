"""What a server does with a request, without a socket: checks it, then reads or changes the stores of its folder.

Everything about a request is checked before anything is touched. Whatever arrives, there is a reply.
"""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of a request.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.parameter_server import embedding_store
from lightning_recsys.parameter_server.dense_store import MappedDenseStore
from lightning_recsys.parameter_server.embedding_store import MappedEmbeddingStore
from lightning_recsys.parameter_server.journal import Journal, Undo
from lightning_recsys.parameter_server.mapped import MappedStores
from lightning_recsys.parameter_server.mapped_arrays import META, MappedArrays, check_name
from lightning_recsys.parameter_server.plain import (
    layout_from_plain,
    layout_to_plain,
    optimizer_from_plain,
    optimizer_to_plain,
)
from lightning_recsys.parameter_server.wire import (
    Frame,
    Limits,
    MessageError,
    Reply,
    Request,
    Status,
    decode_request,
    encode_reply,
)

MAX_EMBEDDING_DIM = 1 << 16
_MAX_SEED = 2**63 - 1

Answer: TypeAlias = "tuple[Any, list[Tensor]]"
_NOTHING: Answer = (None, [])


@dataclass(frozen=True)
class _Push:
    """A push that was found right: what it would touch, and how to do it."""

    undo: Undo | None
    apply: Callable[[], Answer]


class _Embedding:
    """An open embedding store, with what its requests are checked against."""

    def __init__(self, arrays: MappedArrays) -> None:
        self.name = arrays.folder.name
        self.store = MappedEmbeddingStore(arrays.folder)
        self.arrays = arrays
        layout = self.store.layout
        tables = layout.feature_tables
        self.keys = tuple(feature for table in layout.tables for feature in table.feature_names)
        self.starts_F = torch.tensor(layout.feature_starts)
        self.sizes_F = torch.tensor([table.num_embeddings for table in tables])
        self.num_rows, self.dim = layout.num_rows, layout.embedding_dim

    def undo(self, rows: Tensor) -> Undo:
        return Undo(self.name, self.arrays, ("weight", *self.store.row_state), rows)

    def describe(self) -> dict[str, Any]:
        store = self.store
        return {
            "kind": "embedding",
            "tables": layout_to_plain(store.layout),
            "optimizer": optimizer_to_plain(store.optimizer),
        }

    def close(self) -> None:
        self.store.close()
        self.arrays.close()


class _Dense:
    """An open vector."""

    def __init__(self, arrays: MappedArrays) -> None:
        self.name = arrays.folder.name
        self.store = MappedDenseStore(arrays.folder)
        self.arrays = arrays

    def undo(self, names: Sequence[str]) -> Undo:
        return Undo(self.name, self.arrays, names, None)

    def describe(self) -> dict[str, Any]:
        rule = self.store.optimizer
        return {"kind": "dense", "size": self.store.size, "optimizer": rule and optimizer_to_plain(rule)}

    def close(self) -> None:
        self.store.close()
        self.arrays.close()


class RequestHandler:
    """Serves the stores of a folder, request by request.

    Args:
        folder: The folder.
        limits: What one request, and its reply, may take.
        max_clients: Clients that the journal has room for.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: its journal is damaged.
    """

    def __init__(self, folder: Path, *, limits: Limits | None = None, max_clients: int = 1024) -> None:
        self.limits = limits or Limits()
        self.stores = MappedStores(folder)
        self.journal = Journal(self.stores.folder, max_clients=max_clients)
        self.recovered = self.journal.recover()
        self.requests = self.refused = self.pushes = self.duplicates = 0
        self._started = time.monotonic()
        self._open: dict[str, _Embedding | _Dense] = {}
        self._reads: dict[str, Callable[[Request], Answer]] = {
            "hello": self._hello,
            "goodbye": self._goodbye,
            "status": self._status,
            "describe": self._describe,
            "counter": self._counter,
            "lookup": self._lookup,
            "pooled_lookup": self._pooled_lookup,
            "read": self._read,
            "pull": self._pull,
        }
        self._pushes: dict[str, Callable[[Request], _Push]] = {
            "create_embedding_store": self._create_embedding_store,
            "create_dense_store": self._create_dense_store,
            "remove": self._remove,
            "apply_gradients": self._apply_gradients,
            "apply_row_gradients": self._apply_row_gradients,
            "write": self._write,
            "set_step": self._set_step,
            "assign": self._assign,
            "elastic_average": self._elastic_average,
            "push_gradient": self._push_gradient,
        }

    def handle(self, frames: Sequence[Frame]) -> list[bytes | memoryview]:
        """The frames of the reply to the frames of a request."""
        return encode_reply(self._reply(frames))

    def close(self) -> None:
        """Let go of the stores and the journal."""
        for opened in self._open.values():
            opened.close()
        self._open.clear()
        self.stores.close()
        self.journal.close()

    def _reply(self, frames: Sequence[Frame]) -> Reply:
        self.requests += 1
        request_id = 0
        try:
            request = decode_request(frames, self.limits)
            request_id = request.id
            value, arrays = self._answer(request)
            return Reply(request_id, Status.OK, value, arrays)
        except _Gap as gap:
            return Reply(request_id, Status.GAP, gap.applied)
        except MessageError as error:
            status, reason, request_id = Status.REFUSED, str(error), error.request_id or request_id
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            status, reason = Status.REFUSED, str(error)
        except KeyError as error:
            status, reason = Status.MISSING, str(error.args[0] if error.args else error)
        except Exception as error:  # whatever one request does to us, the next one is served
            status, reason = Status.FAILED, f"{type(error).__name__}: {error}"
        self.refused += 1
        return Reply(request_id, status, reason[:2000])

    def _answer(self, request: Request) -> Answer:
        read = self._reads.get(request.operation)
        if read is not None:
            if request.sequence:
                raise MessageError(f"{request.operation} changes nothing and takes no sequence number")
            return read(request)
        check = self._pushes.get(request.operation)
        if check is None:
            known = [*self._reads, *self._pushes]
            raise MessageError(f"there is no operation {request.operation!r}; there are {known}")
        return self._once(request, check)

    def _once(self, request: Request, check: Callable[[Request], _Push]) -> Answer:
        journal, sequence = self.journal, request.sequence
        slot = journal.slot(request.client)
        if slot is None:
            raise ValueError("this client has not said hello here, or was not heard of for long: connect again")
        if sequence == 0:
            raise MessageError(f"{request.operation} needs a sequence number")
        applied = journal.applied(slot)
        if sequence > applied + 1:
            raise _Gap(applied)
        journal.touch(slot)
        if sequence <= applied:
            if journal.was_refused(slot, sequence):
                raise ValueError("this push was refused before")
            self.duplicates += 1
            return self._again(request)
        try:
            push = check(request)
            with journal.push(slot, sequence, push.undo):
                answer = push.apply()
        except Exception:
            journal.refuse(slot, sequence)
            raise
        self.pushes += 1
        return answer

    def _again(self, request: Request) -> Answer:
        """The reply to a push that was applied before: what the store has now."""
        if request.operation == "elastic_average":
            return None, [self._dense(request.store).store.pull()]
        if request.operation == "push_gradient":
            return self._dense(request.store).store.version, []
        return _NOTHING

    # --- Clients and stores ------------------------------------------------------------------------------------------

    def _hello(self, request: Request) -> Answer:
        _arguments(request)
        _arrays(request)
        self.journal.register(request.client)
        return {"folder": str(self.stores.folder), "nonce": self.journal.nonce}, []

    def _goodbye(self, request: Request) -> Answer:
        slot = self.journal.slot(request.client)
        if slot is not None:
            self.journal.say_goodbye(slot)
        return _NOTHING

    def _status(self, request: Request) -> Answer:
        _arguments(request)
        _arrays(request)
        return self.status(), []

    def status(self) -> dict[str, Any]:
        """What a server tells of itself; plain numbers and strings."""
        return {
            **self.stores.status(),
            "requests": self.requests,
            "refused": self.refused,
            "pushes": self.pushes,
            "duplicates": self.duplicates,
            "clients": self.journal.num_clients(),
            "uptime": round(time.monotonic() - self._started, 3),
            "folder": str(self.stores.folder),
        }

    def _describe(self, request: Request) -> Answer:
        _arguments(request)
        _arrays(request)
        return self._store(request.store).describe(), []

    def _counter(self, request: Request) -> Answer:
        _arguments(request)
        _arrays(request)
        store = self._store(request.store).store
        return store.step if isinstance(store, MappedEmbeddingStore) else store.version, []

    def _create_embedding_store(self, request: Request) -> _Push:
        tables, rule, seed = _arguments(request, tables=list, optimizer=dict, seed=int)
        _arrays(request)
        layout, optimizer = layout_from_plain(tables), optimizer_from_plain(rule)
        if layout.embedding_dim > MAX_EMBEDDING_DIM or not 0 <= seed <= _MAX_SEED:
            raise ValueError(f"embedding_dim must be at most {MAX_EMBEDDING_DIM} and seed in [0, 2**63)")
        name = _name(request)

        def apply() -> Answer:
            self.stores.create_embedding_store(name, layout, optimizer, seed=seed).close()
            return self._store(name).describe(), []

        return _Push(None, apply)

    def _create_dense_store(self, request: Request) -> _Push:
        (rule,) = _arguments(request, optimizer=(dict, type(None)))
        (initial,) = _arrays(request, ("initial", torch.float32, 1))
        optimizer = None if rule is None else optimizer_from_plain(rule)
        name = _name(request)

        def apply() -> Answer:
            self.stores.create_dense_store(name, initial, optimizer=optimizer).close()
            return self._store(name).describe(), []

        return _Push(None, apply)

    def _remove(self, request: Request) -> _Push:
        _arguments(request)
        _arrays(request)
        name = _name(request)

        def apply() -> Answer:
            opened = self._open.pop(name, None)
            if opened is not None:
                opened.close()
            self.stores.remove(name)
            return _NOTHING

        return _Push(None, apply)

    def _store(self, name: str) -> _Embedding | _Dense:
        opened = self._open.get(name)
        if opened is None:
            try:
                arrays = MappedArrays(self.stores.folder / check_name(name))
            except FileNotFoundError:
                names = sorted(path.parent.name for path in self.stores.folder.glob(f"[!.]*/{META}"))
                raise KeyError(f"there is no store {name!r}; there are {names}") from None
            opened = _Embedding(arrays) if arrays.meta["kind"] == embedding_store.KIND else _Dense(arrays)
            self._open[name] = opened
        return opened

    def _embedding(self, name: str) -> _Embedding:
        opened = self._store(name)
        if not isinstance(opened, _Embedding):
            raise KeyError(f"{name!r} is a dense store, not an embedding store")
        return opened

    def _dense(self, name: str) -> _Dense:
        opened = self._store(name)
        if not isinstance(opened, _Dense):
            raise KeyError(f"{name!r} is an embedding store, not a dense store")
        return opened

    # --- Embedding stores --------------------------------------------------------------------------------------------

    def _lookup(self, request: Request) -> Answer:
        _arguments(request)
        (rows_U,) = _arrays(request, ("rows", torch.int64, 1))
        opened = self._embedding(request.store)
        self._check_rows(opened, rows_U)
        self._check_reply(rows_U.numel() * opened.dim)
        return None, [opened.store.lookup(rows_U)]

    def _pooled_lookup(self, request: Request) -> Answer:
        opened = self._embedding(request.store)
        _arguments(request, bags=bool, weighted=bool)
        sparse, rest = self._sparse(opened, request)
        if rest:
            raise ValueError(f"a pooled lookup takes no further arrays, got {len(rest)}")
        self._check_reply(sparse.batch_size * len(sparse.keys) * opened.dim)
        return None, [opened.store.pooled_lookup(sparse)]

    def _apply_gradients(self, request: Request) -> _Push:
        opened = self._embedding(request.store)
        _, _, learning_rate = _arguments(request, bags=bool, weighted=bool, learning_rate=float)
        sparse, rest = self._sparse(opened, request)
        shape = [sparse.batch_size, len(sparse.keys), opened.dim]
        if len(rest) != 1 or rest[0].dtype != torch.float32 or list(rest[0].shape) != shape:
            raise ValueError(f"gradients must be one float32 array of shape {shape}")
        _check_rate(learning_rate)

        def apply() -> Answer:
            opened.store.apply_gradients(sparse, rest[0], learning_rate=learning_rate)
            return _NOTHING

        return _Push(opened.undo(_touched_rows(opened, sparse)), apply)

    def _apply_row_gradients(self, request: Request) -> _Push:
        opened = self._embedding(request.store)
        (learning_rate,) = _arguments(request, learning_rate=float)
        rows_U, grads_UD = _arrays(request, ("rows", torch.int64, 1), ("gradients", torch.float32, 2))
        self._check_rows(opened, rows_U)
        if list(grads_UD.shape) != [rows_U.numel(), opened.dim]:
            raise ValueError(f"gradients must have shape {[rows_U.numel(), opened.dim]}, got {list(grads_UD.shape)}")
        _check_rate(learning_rate)

        def apply() -> Answer:
            opened.store.apply_row_gradients(rows_U, grads_UD, learning_rate=learning_rate)
            return _NOTHING

        return _Push(opened.undo(rows_U), apply)

    def _read(self, request: Request) -> Answer:
        opened = self._embedding(request.store)
        name, first_row, num_rows = _arguments(request, array=str, first_row=int, num_rows=int)
        _arrays(request)
        self._check_reply(num_rows * opened.dim)
        return None, [opened.store.read(name, first_row, num_rows)]

    def _write(self, request: Request) -> _Push:
        opened = self._embedding(request.store)
        name, first_row = _arguments(request, array=str, first_row=int)
        if len(request.arrays) != 1 or request.arrays[0].dtype != torch.float32:
            raise ValueError("write takes one float32 array of values")
        values = request.arrays[0]
        opened.store.read(name, first_row, 0)  # its own checks of name and row

        def apply() -> Answer:
            opened.store.write(name, first_row, values)
            return _NOTHING

        return _Push(None, apply)

    def _set_step(self, request: Request) -> _Push:
        opened = self._embedding(request.store)
        (step,) = _arguments(request, step=int)
        _arrays(request)
        if not 0 <= step < 2**62:
            raise ValueError(f"step must be in [0, 2**62), got {step}")

        def apply() -> Answer:
            opened.store.step = step
            return _NOTHING

        return _Push(None, apply)

    def _check_rows(self, opened: _Embedding, rows_U: Tensor) -> None:
        if rows_U.numel() > self.limits.rows:
            raise ValueError(f"a request names at most {self.limits.rows} rows, got {rows_U.numel()}")
        if rows_U.numel():
            low, high = (int(x) for x in rows_U.aminmax())
            if low < 0 or high >= opened.num_rows:
                raise IndexError(f"rows must be in [0, {opened.num_rows}), got {low} to {high}")

    def _check_reply(self, num_elements: int) -> None:
        size, limit = 4 * num_elements, self.limits.message_bytes
        if not 0 <= size <= limit:
            raise ValueError(f"the reply would have {size} bytes and may have {limit}: ask in parts")

    def _sparse(self, opened: _Embedding, request: Request) -> tuple[SparseFeatures, list[Tensor]]:
        """The features of a request, checked, and the arrays behind them."""
        arrays = list(request.arrays)
        values_N = _pop(arrays, "ids", torch.int64)
        offsets = _pop(arrays, "offsets", torch.int64) if request.arguments["bags"] else None
        weights_N = _pop(arrays, "weights", torch.float32) if request.arguments["weighted"] else None
        if max(values_N.numel(), 0 if offsets is None else offsets.numel() - 1) > self.limits.rows:
            raise ValueError(f"a request has at most {self.limits.rows} ids or bags")
        sparse = SparseFeatures(opened.keys, values_N, offsets=offsets, weights=weights_N)
        if offsets is None:
            _check_single(opened, values_N)
        else:
            _check_bags(opened, values_N, offsets)
        return sparse, arrays

    # --- Dense stores ------------------------------------------------------------------------------------------------

    def _pull(self, request: Request) -> Answer:
        _arguments(request)
        _arrays(request)
        opened = self._dense(request.store)
        self._check_reply(opened.store.size)
        return None, [opened.store.pull()]

    def _assign(self, request: Request) -> _Push:
        _arguments(request)
        opened, values = self._dense_and_vector(request)

        def apply() -> Answer:
            opened.store.assign(values)
            return _NOTHING

        return _Push(None, apply)

    def _elastic_average(self, request: Request) -> _Push:
        (alpha,) = _arguments(request, alpha=float)
        opened, local = self._dense_and_vector(request)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {alpha}")

        def apply() -> Answer:
            return None, [opened.store.elastic_average(local, alpha=alpha)]

        return _Push(opened.undo(("values",)), apply)

    def _push_gradient(self, request: Request) -> _Push:
        (learning_rate,) = _arguments(request, learning_rate=float)
        opened, gradient = self._dense_and_vector(request)
        _check_rate(learning_rate)

        def apply() -> Answer:
            return opened.store.push_gradient(gradient, learning_rate=learning_rate), []

        return _Push(opened.undo(("values", *opened.store.state)), apply)

    def _dense_and_vector(self, request: Request) -> tuple[_Dense, Tensor]:
        (vector,) = _arrays(request, ("values", torch.float32, 1))
        opened = self._dense(request.store)
        if vector.numel() != opened.store.size:
            raise ValueError(f"{request.store!r} has {opened.store.size} elements, got {vector.numel()}")
        return opened, vector


class _Gap(Exception):
    """A push that arrived before its predecessors: up to ``applied`` they have arrived."""

    def __init__(self, applied: int) -> None:
        super().__init__(applied)
        self.applied = applied


# --- Checks of a request's parts --------------------------------------------------------------------------------------


def _name(request: Request) -> str:
    if not request.store:
        raise ValueError(f"{request.operation} needs a store's name")
    return request.store


def _arguments(request: Request, **types: type | tuple[type, ...]) -> tuple[Any, ...]:
    """The arguments, in the order asked for; exactly those, of exactly these types."""
    given = request.arguments
    if given.keys() != types.keys():
        raise ValueError(f"{request.operation} takes the arguments {sorted(types)}, got {sorted(given)!s:.200}")
    for name, kind in types.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(given[name]) not in allowed:
            raise ValueError(f"{name} must be {' or '.join(x.__name__ for x in allowed)}, got {given[name]!r:.100}")
    return tuple(given[name] for name in types)


def _arrays(request: Request, *expected: tuple[str, torch.dtype, int]) -> list[Tensor]:
    """The arrays; exactly as many, of these types and numbers of dimensions."""
    arrays = list(request.arrays)
    found = [_pop(arrays, name, dtype, dims) for name, dtype, dims in expected]
    if arrays:
        raise ValueError(f"{request.operation} takes {len(expected)} arrays, got {len(request.arrays)}")
    return found


def _pop(arrays: list[Tensor], name: str, dtype: torch.dtype, dims: int = 1) -> Tensor:
    if not arrays:
        raise ValueError(f"an array is missing: {name}")
    array = arrays.pop(0)
    if array.dtype != dtype or array.dim() != dims:
        got = f"{array.dtype} of shape {list(array.shape)}"
        raise ValueError(f"{name} must be {dtype} with {dims} dimensions, got {got}")
    return array


def _check_rate(learning_rate: float) -> None:
    if not math.isfinite(learning_rate) or learning_rate < 0:
        raise ValueError(f"a learning rate must be a finite number of at least 0, got {learning_rate}")


def _check_single(opened: _Embedding, values_N: Tensor) -> None:
    if not values_N.numel():
        return
    ids_FB = values_N.view(len(opened.keys), -1)
    low, high = ids_FB.min(), ids_FB.amax(1)
    if bool(low < 0) or bool((high >= opened.sizes_F).any()):
        raise IndexError(f"ids must be in [0, {opened.sizes_F.tolist()}) by feature, got {int(low)} to {high.tolist()}")


def _check_bags(opened: _Embedding, values_N: Tensor, offsets: Tensor) -> None:
    low, high = (int(x) for x in offsets.aminmax())
    lengths = offsets.diff()  # which cannot overflow where all offsets are in range
    if low or high > values_N.numel() or offsets[0] or offsets[-1] != values_N.numel() or bool((lengths < 0).any()):
        raise ValueError(f"offsets must rise from 0 to the number of ids, {values_N.numel()}")
    if not values_N.numel():
        return
    per_feature = lengths.view(len(opened.keys), -1).sum(1)
    sizes_N = opened.sizes_F.repeat_interleave(per_feature)
    if bool((values_N < 0).any()) or bool((values_N >= sizes_N).any()):
        raise IndexError(f"ids must be in [0, {opened.sizes_F.tolist()}) by feature")


def _touched_rows(opened: _Embedding, sparse: SparseFeatures) -> Tensor:
    """Places of the rows in the store; a row that occurs twice is named twice."""
    if sparse.is_single_hot:
        return (sparse.values.view(len(sparse.keys), -1) + opened.starts_F.unsqueeze(1)).view(-1)
    per_feature = sparse.bag_lengths().view(len(sparse.keys), -1).sum(1)
    return sparse.values + opened.starts_F.repeat_interleave(per_feature)
