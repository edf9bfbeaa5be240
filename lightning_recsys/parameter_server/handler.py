"""What a server does with a request, without a socket: checks it, then reads or changes the stores of its folder.

Everything about a request is checked before anything is touched. Whatever arrives, there is a reply.
"""

# Shape suffixes: U distinct rows of a request, D embedding dim.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.errors import StoreReplacedError
from lightning_recsys.parameter_server.checks import (
    take_arguments,
    take_array,
    take_arrays,
    take_generation,
    take_nothing,
)
from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.exchange_wire import pack_reply
from lightning_recsys.parameter_server.journal import Journal, Undo
from lightning_recsys.parameter_server.lease import Lease
from lightning_recsys.parameter_server.served import ServedDense, ServedDynamic, ServedEmbedding, open_served
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
from lightning_recsys.stores.checks import check_rate, check_rows
from lightning_recsys.stores.dynamic_rows import DynamicRows, dynamic_from_plain
from lightning_recsys.stores.exchange import RowExchange, RowValues
from lightning_recsys.stores.locality import Place
from lightning_recsys.stores.mapped import MappedStores, check_same
from lightning_recsys.stores.mapped_arrays import META, check_name, remove_leftovers
from lightning_recsys.stores.plain import layout_from_plain, optimizer_from_plain

MAX_EMBEDDING_DIM = 1 << 16
MAX_RUN, MAX_HOLDER = 64, 200  # characters


@dataclass(frozen=True)
class _Push:
    """A push that was found right.

    Args:
        apply: Does it; returns a plain value or a tensor for the reply.
        undo: What it will touch; ``None`` where doing it twice is doing it once.
    """

    apply: Callable[[], object]
    undo: Undo | None = None


class _Gap(Exception):
    """A push that arrived before its predecessors: up to ``applied`` they have arrived."""

    def __init__(self, applied: int) -> None:
        super().__init__(applied)
        self.applied = applied


class RequestHandler:
    """Serves the stores of a folder, request by request.

    Args:
        folder: The folder.
        limits: What one request, and its reply, may take.
        max_clients: Clients that the journal has room for.

    Attributes:
        recovered: A push that the folder's last server had not finished was taken back.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: its journal is damaged.
    """

    def __init__(self, folder: Path, *, limits: Limits | None = None, max_clients: int = 1024) -> None:
        self.limits = limits or Limits()
        self.stores = MappedStores(folder)
        remove_leftovers(self.stores.folder)
        self._place = Place.of(folder)  # what clients find out by whether they may map the files
        self.journal = Journal(self.stores.folder, max_clients=max_clients)
        self.recovered = self.journal.recover()
        self._lease = Lease(self.stores.folder)  # to one run at a time; clients that ask for none are not held up by it
        self.requests = self.refused = self.pushes = self.duplicates = 0
        self._started = time.monotonic()
        self._open: dict[str, ServedEmbedding | ServedDense] = {}
        self._peer: Peer | None = None  # whose request is being served, where it came over a connection
        self._peers: dict[int, Peer] = {}  # over which the client of a slot was heard of last
        self._reads: dict[str, Callable[[Request], object]] = {
            "hello": self._hello,
            "lease": self._take_lease,
            "give_back": self._give_back_lease,
            "goodbye": self._goodbye,
            "status": self._status,
            "describe": self._describe,
            "counter": self._counter,
            "lookup": self._lookup,
            "pooled_lookup": self._pooled_lookup,
            "exchange": self._fetch_and_check,
            "read": self._read,
            "read_rows": self._read_rows,
            "live_rows": self._live_rows,
            "size": self._size,
            "pull": self._pull,
        }
        self._pushes: dict[str, Callable[[Request], _Push]] = {
            "create_embedding_store": self._create_embedding_store,
            "create_dynamic_store": self._create_dynamic_store,
            "create_dense_store": self._create_dense_store,
            "remove": self._remove,
            "apply_gradients": self._apply_gradients,
            "apply_row_gradients": self._apply_row_gradients,
            "exchange": self._exchange,
            "write": self._write,
            "insert": self._insert,
            "write_rows": self._write_rows,
            "clear": self._clear,
            "set_step": self._set_step,
            "assign": self._assign,
            "elastic_average": self._elastic_average,
            "push_gradient": self._push_gradient,
        }

    def handle(self, frames: Sequence[Frame], peer: Peer | None = None) -> list[bytes | memoryview]:
        """The frames of the reply to the frames of a request, and the connection that it came over, if any."""
        self._peer = peer
        return encode_reply(self._reply(frames))

    def lose(self, peer: Peer) -> None:
        """A connection is gone; its client has from now on to come back before its place is another's."""
        if peer.slot is not None and self._peers.get(peer.slot) is peer:
            del self._peers[peer.slot]
            self.journal.touch(peer.slot)

    def status(self) -> dict[str, Any]:
        """What a server tells of itself; plain numbers and strings."""
        return {
            **self.stores.status(),
            "requests": self.requests,
            "refused": self.refused,
            "pushes": self.pushes,
            "duplicates": self.duplicates,
            "clients": self.journal.num_clients(self._peers),
            "run": self._lease.holder or "none",
            "uptime": round(time.monotonic() - self._started, 3),
            "folder": str(self.stores.folder),
        }

    def close(self) -> None:
        """Let go of the stores and the journal."""
        for served in self._open.values():
            served.close()
        self._open.clear()
        self.stores.close()
        self.journal.close()

    def _reply(self, frames: Sequence[Frame]) -> Reply:
        self.requests += 1
        request_id = 0
        try:
            try:
                request = decode_request(frames, self.limits)
            except MessageError as error:
                request_id = error.request_id
                if error.push is not None:
                    self._refuse(error.push, error)
                raise
            request_id = request.id
            result = self._answer(request)
            if isinstance(result, Tensor):
                return Reply(request_id, Status.OK, None, [result])
            if isinstance(result, RowValues):
                return Reply(request_id, Status.OK, None, pack_reply(result))
            return Reply(request_id, Status.OK, result)
        except _Gap as gap:
            return Reply(request_id, Status.GAP, gap.applied)
        except (ValueError, TypeError, IndexError, OverflowError, StoreReplacedError) as error:
            status, reason = Status.REFUSED, str(error)
        except KeyError as error:
            status, reason = Status.MISSING, str(error.args[0])
        except Exception as error:  # whatever one request does to us, the next one is served
            status, reason = Status.FAILED, f"{type(error).__name__}: {error}"
        self.refused += 1
        return Reply(request_id, status, reason[:2000])

    def _answer(self, request: Request) -> object:
        if request.sequence:
            return self._once(request, self._check_push)
        read = self._reads.get(request.operation)
        if read is not None:
            slot = self.journal.slot(request.client)
            if slot is not None and self._peer is not None and self._peer.slot is None:
                self._meet(slot)  # one that was cut off, and may have nothing to push for long
            return read(request)
        if request.operation in self._pushes:
            raise MessageError(f"{request.operation} needs a sequence number")
        raise self._unknown(request)

    def _check_push(self, request: Request) -> _Push:
        check = self._pushes.get(request.operation)
        if check is not None:
            return check(request)
        if request.operation in self._reads:
            raise MessageError(f"{request.operation} changes nothing and takes no sequence number")
        raise self._unknown(request)

    def _unknown(self, request: Request) -> MessageError:
        known = sorted({*self._reads, *self._pushes})
        return MessageError(f"there is no operation {request.operation!r}; there are {known}")

    def _refuse(self, push: Request, error: Exception) -> None:
        """Count a push that cannot even be read, in its place among the client's; always raises."""

        def check(_: Request) -> _Push:
            raise error

        self._once(push, check)

    def _once(self, request: Request, check: Callable[[Request], _Push]) -> object:
        """Apply a push if it is the client's next one; one that was applied before is acknowledged again.

        Whatever is wrong with it, its number is used: later ones are on their way, and would wait for it for ever.
        """
        journal, sequence = self.journal, request.sequence
        slot = journal.slot(request.client)
        if slot is None:
            raise ValueError("this client has not said hello here, or was not heard of for long: connect again")
        applied = journal.applied(slot)
        if sequence > applied + 1:
            raise _Gap(applied)
        self._meet(slot)
        journal.touch(slot)
        if sequence <= applied:
            if journal.was_refused(slot, sequence):
                raise ValueError("this push was refused before")
            self.duplicates += 1
            return self._again(request)
        try:
            push = check(request)
            with journal.push(slot, sequence, push.undo):
                result = push.apply()
        except Exception:
            journal.refuse(slot, sequence)
            raise
        self.pushes += 1
        return result

    def _again(self, request: Request) -> object:
        """The reply to a push that was applied before: what the store has now."""
        if request.operation == "exchange":
            served = self._embedding(request)
            return _fetch_and_check(served, served.exchange(request, self.limits))
        if request.operation == "elastic_average":
            return self._dense(request).store.pull()
        if request.operation == "push_gradient":
            return self._dense(request).store.version
        return None

    # --- Clients and stores ------------------------------------------------------------------------------------------

    def _meet(self, slot: int) -> None:
        """The client of this slot is at the other end of the connection, and it alone.

        Raises:
            ValueError: another one is.
        """
        peer = self._peer
        if peer is not None and self._peers.get(slot) is not peer:
            if peer.slot is not None:
                raise ValueError("a connection is one client's; make another one")
            peer.slot = slot
            self._peers[slot] = peer

    def _hello(self, request: Request) -> object:
        take_nothing(request)
        if self._peer is not None and self._peer.slot not in (None, self.journal.slot(request.client)):
            raise ValueError("a connection is one client's; make another one")
        self._meet(self.journal.register(request.client, self._peers))
        return {"folder": str(self.stores.folder), "place": self._place.to_plain(), "nonce": self.journal.nonce}

    def _goodbye(self, request: Request) -> object:
        take_nothing(request)
        slot = self.journal.slot(request.client)
        if slot is not None:
            self.journal.say_goodbye(slot)
        return None

    def _take_lease(self, request: Request) -> object:
        run, holder = take_arguments(request, run=str, holder=str)
        take_arrays(request)
        if not 0 < len(run) <= MAX_RUN or not 0 < len(holder) <= MAX_HOLDER:
            raise ValueError(f"run must have 1 to {MAX_RUN} characters and holder 1 to {MAX_HOLDER}")
        return self._lease.take(run, holder)

    def _give_back_lease(self, request: Request) -> object:
        (run,) = take_arguments(request, run=str)
        take_arrays(request)
        self._lease.give_back(run)
        return None

    def _status(self, request: Request) -> object:
        take_nothing(request)
        return self.status()

    def _describe(self, request: Request) -> object:
        take_nothing(request)
        return self._served(request).describe()

    def _counter(self, request: Request) -> object:
        take_nothing(request)
        served = self._served(request)
        return served.store.step if isinstance(served, ServedEmbedding) else served.store.version

    def _create_embedding_store(self, request: Request) -> _Push:
        tables, rule, seed = take_arguments(request, tables=list, optimizer=dict, seed=int)
        return self._create_rows(request, tables, rule, seed, None)

    def _create_dynamic_store(self, request: Request) -> _Push:
        tables, rule, seed, dynamic = take_arguments(request, tables=list, optimizer=dict, seed=int, dynamic=dict)
        return self._create_rows(request, tables, rule, seed, dynamic_from_plain(dynamic))

    def _create_rows(
        self, request: Request, tables: object, rule: object, seed: int, dynamic: DynamicRows | None
    ) -> _Push:
        take_arrays(request)
        layout, optimizer = layout_from_plain(tables), optimizer_from_plain(rule)
        if layout.embedding_dim > MAX_EMBEDDING_DIM or not 0 <= seed < 2**63:
            raise ValueError(f"embedding_dim must be at most {MAX_EMBEDDING_DIM} and seed in [0, 2**63)")
        name = check_name(request.store)

        def apply() -> None:
            served = self._open.get(name)
            if isinstance(served, ServedDynamic) and served.generation:  # it cannot be opened twice
                check_same(self.stores.folder / name, served.store, layout, optimizer, dynamic)
            else:
                with closing(MappedStores(self.stores.folder)) as stores:  # ours would keep each store for good
                    stores.create_embedding_store(name, layout, optimizer, seed=seed, dynamic=dynamic)

        return _Push(apply)

    def _create_dense_store(self, request: Request) -> _Push:
        (rule,) = take_arguments(request, optimizer=(dict, type(None)))
        (initial,) = take_arrays(request, ("initial", torch.float32, 1))
        optimizer = None if rule is None else optimizer_from_plain(rule)
        name = check_name(request.store)

        def apply() -> None:
            with closing(MappedStores(self.stores.folder)) as stores:
                stores.create_dense_store(name, initial, optimizer=optimizer)

        return _Push(apply)

    def _remove(self, request: Request) -> _Push:
        take_nothing(request)
        name = check_name(request.store)

        def apply() -> None:
            served = self._open.pop(name, None)
            if served is not None:
                served.close()
            self.stores.remove(name)

        return _Push(apply)

    def _served(self, request: Request) -> ServedEmbedding | ServedDense:
        name, wanted = request.store, take_generation(request)
        served = self._open.get(name)
        if served is not None and not served.generation:  # somebody has removed it without asking us
            self._open.pop(name).close()
            served = None
        if served is None:
            folder = self.stores.folder
            try:
                served = self._open[name] = open_served(folder / check_name(name))
            except FileNotFoundError:
                names = sorted(path.parent.name for path in folder.glob(f"[!.]*/{META}"))
                raise KeyError(f"there is no store {name!r}; there are {names}") from None
        if wanted not in (None, served.generation):
            raise StoreReplacedError(name)
        return served

    def _embedding(self, request: Request) -> ServedEmbedding:
        served = self._served(request)
        if not isinstance(served, ServedEmbedding):
            raise KeyError(f"{request.store!r} is a dense store, and {request.operation} is for embedding stores")
        return served

    def _dense(self, request: Request) -> ServedDense:
        served = self._served(request)
        if not isinstance(served, ServedDense):
            raise KeyError(f"{request.store!r} is an embedding store, and {request.operation} is for dense stores")
        return served

    # --- Embedding stores --------------------------------------------------------------------------------------------

    def _lookup(self, request: Request) -> object:
        served = self._embedding(request)
        take_arguments(request)
        (rows_U,) = take_arrays(request, ("rows", torch.int64, 1))
        self._check_rows(served, rows_U)
        self._check_reply(rows_U.numel() * served.dim)
        return served.store.lookup(rows_U)

    def _pooled_lookup(self, request: Request) -> object:
        served = self._embedding(request)
        take_arguments(request, bags=bool, weighted=bool)
        sparse, rest = served.sparse(request, self.limits)
        if rest:
            raise ValueError(f"a pooled lookup takes ids, offsets and weights, got {len(rest)} more arrays")
        self._check_reply(sparse.batch_size * len(sparse.keys) * served.dim)
        return served.store.pooled_lookup(sparse)

    def _apply_gradients(self, request: Request) -> _Push:
        served = self._embedding(request)
        _, _, learning_rate = take_arguments(request, bags=bool, weighted=bool, learning_rate=float)
        sparse, rest = served.sparse(request, self.limits)
        shape = [sparse.batch_size, len(sparse.keys), served.dim]
        if len(rest) != 1 or rest[0].dtype != torch.float32 or list(rest[0].shape) != shape:
            raise ValueError(f"gradients must be one float32 array of shape {shape}")
        check_rate(learning_rate)
        apply = partial(served.store.apply_gradients, sparse, rest[0], learning_rate=learning_rate)
        return _Push(apply, served.undo(served.touched_rows(sparse)))

    def _apply_row_gradients(self, request: Request) -> _Push:
        served = self._embedding(request)
        (learning_rate,) = take_arguments(request, learning_rate=float)
        rows_U, grads_UD = take_arrays(request, ("rows", torch.int64, 1), ("gradients", torch.float32, 2))
        self._check_rows(served, rows_U)
        if list(grads_UD.shape) != [rows_U.numel(), served.dim]:
            raise ValueError(f"gradients must have shape {[rows_U.numel(), served.dim]}, got {list(grads_UD.shape)}")
        check_rate(learning_rate)
        apply = partial(served.store.apply_row_gradients, rows_U, grads_UD, learning_rate=learning_rate)
        return _Push(apply, served.undo(rows_U))

    def _fetch_and_check(self, request: Request) -> object:
        served = self._embedding(request)
        exchange = served.exchange(request, self.limits)
        if exchange.changes_rows:
            raise MessageError("an exchange with pushes or steps needs a sequence number")
        return _fetch_and_check(served, exchange)

    def _exchange(self, request: Request) -> _Push:
        served = self._embedding(request)
        exchange = served.exchange(request, self.limits)
        if not exchange.changes_rows:
            raise ValueError("an exchange without pushes and steps changes nothing and takes no sequence number")

        def apply() -> RowValues:
            return served.store.fetch_and_check(exchange, served.store.push_updates(exchange))

        return _Push(apply, served.undo(exchange.push_rows, clocks=True, counts=exchange.updates_per_push))

    def _read(self, request: Request) -> object:
        served = self._embedding(request)
        name, first_row, num_rows = take_arguments(request, array=str, first_row=int, num_rows=int)
        take_arrays(request)
        self._check_reply(num_rows * served.dim)
        return served.store.read(name, first_row, num_rows)

    def _write(self, request: Request) -> _Push:
        served = self._embedding(request)
        name, first_row = take_arguments(request, array=str, first_row=int)
        if len(request.arrays) != 1 or request.arrays[0].dtype != torch.float32:
            raise ValueError("write takes one float32 array of values")
        return _Push(partial(served.store.write, name, first_row, request.arrays[0]))

    def _set_step(self, request: Request) -> _Push:
        served = self._embedding(request)
        (step,) = take_arguments(request, step=int)
        take_arrays(request)
        if not 0 <= step < 2**62:
            raise ValueError(f"step must be in [0, 2**62), got {step}")
        return _Push(partial(setattr, served.store, "step", step))

    def _dynamic(self, request: Request) -> ServedDynamic:
        served = self._embedding(request)
        if not isinstance(served, ServedDynamic):
            raise KeyError(f"{request.store!r} has no dynamic rows, which {request.operation} is for")
        return served

    def _size(self, request: Request) -> object:
        served = self._dynamic(request)
        take_nothing(request)
        return [served.store.num_live, served.store.num_slots]

    def _live_rows(self, request: Request) -> object:
        served = self._dynamic(request)
        first, count = take_arguments(request, first_slot=int, num_slots=int)
        take_arrays(request)
        if first < 0 or not 0 <= count <= self.limits.rows:
            raise ValueError(f"a request names at most {self.limits.rows} slots from 0 on, got {count} from {first}")
        return served.store.rows_in_slots(first, count)

    def _read_rows(self, request: Request) -> object:
        served = self._dynamic(request)
        (name,) = take_arguments(request, array=str)
        (rows_U,) = take_arrays(request, ("rows", torch.int64, 1))
        self._check_rows(served, rows_U)
        self._check_reply(rows_U.numel() * served.dim)
        return served.store.read_rows(name, rows_U)

    def _write_rows(self, request: Request) -> _Push:
        served = self._dynamic(request)
        (name,) = take_arguments(request, array=str)
        if len(request.arrays) != 2 or request.arrays[1].dtype != torch.float32:
            raise ValueError("write_rows takes rows and one float32 array of values")
        rows_U = take_array(request.arrays[:1], "rows", torch.int64, 1)
        self._check_rows(served, rows_U)
        return _Push(partial(served.store.write_rows, name, rows_U, request.arrays[1]))

    def _insert(self, request: Request) -> _Push:
        served = self._dynamic(request)
        take_arguments(request)
        (rows_U,) = take_arrays(request, ("rows", torch.int64, 1))
        self._check_rows(served, rows_U)
        return _Push(partial(served.store.insert, rows_U))

    def _clear(self, request: Request) -> _Push:
        served = self._dynamic(request)
        take_nothing(request)
        return _Push(served.store.clear)

    def _check_rows(self, served: ServedEmbedding, rows_U: Tensor) -> None:
        if rows_U.numel() > self.limits.rows:
            raise ValueError(f"a request names at most {self.limits.rows} rows, got {rows_U.numel()}")
        check_rows(rows_U, served.num_rows)

    def _check_reply(self, num_elements: int) -> None:
        size, limit = 4 * num_elements, self.limits.message_bytes
        if not 0 <= size <= limit:
            raise ValueError(f"the reply would have {size} bytes and may have {limit}: ask in parts")

    # --- Dense stores ------------------------------------------------------------------------------------------------

    def _pull(self, request: Request) -> object:
        take_nothing(request)
        served = self._dense(request)
        self._check_reply(served.store.size)
        return served.store.pull()

    def _assign(self, request: Request) -> _Push:
        take_arguments(request)
        served, values = self._dense_and_vector(request)
        return _Push(partial(served.store.assign, values))

    def _elastic_average(self, request: Request) -> _Push:
        (alpha,) = take_arguments(request, alpha=float)
        served, local = self._dense_and_vector(request)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {alpha}")
        # The answer takes the place of the vector that came, which nobody reads again.
        apply = partial(served.store.elastic_average, local, alpha=alpha, out=local)
        return _Push(apply, served.undo("values"))

    def _push_gradient(self, request: Request) -> _Push:
        (learning_rate,) = take_arguments(request, learning_rate=float)
        served, gradient = self._dense_and_vector(request)
        check_rate(learning_rate)
        apply = partial(served.store.push_gradient, gradient, learning_rate=learning_rate)
        return _Push(apply, served.undo("values", *served.store.state))

    def _dense_and_vector(self, request: Request) -> tuple[ServedDense, Tensor]:
        (vector,) = take_arrays(request, ("values", torch.float32, 1))
        served = self._dense(request)
        if vector.numel() != served.store.size:
            raise ValueError(f"{request.store!r} has {served.store.size} elements, got {vector.numel()}")
        return served, vector


def _fetch_and_check(served: ServedEmbedding, exchange: RowExchange) -> RowValues:
    """What an exchange asks for, without its pushes: nothing then tells whether a held copy is current."""
    return served.store.fetch_and_check(exchange, torch.zeros_like(exchange.held_clocks, dtype=torch.bool))
