"""The handler of requests, without a socket: finds the operation, counts pushes once, and always replies.

An operation that takes long answers with a future, so that the server goes on with other requests meanwhile.

Everything about a request is checked before anything is touched. What the operations are, the parts in ``requests/``
say; none of them is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recsys.errors import StoreReplacedError
from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.journal import Journal
from lightning_recsys.parameter_server.messages.wire import (
    Frame,
    Limits,
    MessageError,
    Reply,
    Request,
    Status,
    decode_request,
    encode_reply,
)
from lightning_recsys.parameter_server.requests.checks import take_plain
from lightning_recsys.parameter_server.requests.clients import Clients
from lightning_recsys.parameter_server.requests.dense import DenseRequests
from lightning_recsys.parameter_server.requests.dynamic import DynamicRequests
from lightning_recsys.parameter_server.requests.exchange import ExchangeRequests
from lightning_recsys.parameter_server.requests.meetings import MeetingRequests
from lightning_recsys.parameter_server.requests.operations import Answer, Offer, Operations, Push
from lightning_recsys.parameter_server.requests.rows import RowRequests
from lightning_recsys.parameter_server.requests.stores import OpenStores
from lightning_recsys.parameter_server.watched.counts import Counts, OperationCounts
from lightning_recsys.stores.folders.mapped_arrays import remove_leftovers
from lightning_recsys.stores.folders.room import is_for_want_of_room

MakeOffer = Callable[[Path, Limits, Callable[[], Peer | None]], Offer]
"""Makes what a server offers besides stores; as ``offer`` of :class:`RequestHandler`."""


class _Gap(Exception):
    """A push that arrived before its predecessors: up to ``applied`` they have arrived."""

    def __init__(self, applied: int) -> None:
        super().__init__(applied)
        self.applied = applied


@dataclass(frozen=True)
class Unfinished:
    """A request that is being worked on in another thread; :meth:`RequestHandler.finish` has its reply.

    Args:
        request_id: Id of the request, which its reply has to carry.
        future: Future of the result.
        counts: Where it is counted once it is answered.
        begun: When it was taken, in nanoseconds.
        received: Its size in bytes.
    """

    request_id: int
    future: Future[object]
    counts: OperationCounts
    begun: int
    received: int


class RequestHandler:
    """Serves the stores of a folder, request by request.

    Args:
        folder: The folder that holds the stores and the journal.
        limits: What one request, and its reply, may take.
        max_clients: Clients that the journal has room for.
        offer: Makes what the server offers besides stores, from its folder, its limits and a function that tells over
            which connection the present request came.

    Attributes:
        stores: The stores of the folder that are open.
        clients: The clients that talk to the server, with their slots in the journal.
        journal: The journal, by which each push counts once.
        recovered: A push that the folder's last server had not finished was taken back.
        counts: Counts of what was done so far.
        metrics_url: Where the server tells its metrics, if it does; its status says so.
        queued_bytes: Tells how many bytes of requests wait to be read; whoever has the connections sets it.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: its journal is damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limits: Limits | None = None,
        max_clients: int = 1024,
        offer: MakeOffer | None = None,
    ) -> None:
        self.stores = OpenStores(folder, limits or Limits())
        remove_leftovers(self.stores.folder)
        # Rows come back to what they were before anything reads them: a push that a killed server had begun is sent
        # again by its client, and would otherwise be applied to rows that already have a part of it.
        self.journal = Journal(self.stores.folder, max_clients=max_clients)
        self.recovered = self.journal.recover()
        self.clients = Clients(self.journal)
        self.metrics_url: str | None = None
        self.queued_bytes: Callable[[], int] = lambda: 0
        offered = [kind(self.stores).operations for kind in (RowRequests, DynamicRequests, DenseRequests)]
        offered += [self.clients.operations, self.stores.operations, ExchangeRequests(self.stores).operations]
        self._meetings = MeetingRequests(self.stores.folder)
        offered.append(self._meetings.operations)
        self._offer = None
        if offer is not None:
            self._offer = offer(self.stores.folder, self.stores.limits, lambda: self.clients.peer)
            offered.append(self._offer.operations)
        self._operations = reduce(or_, offered, Operations(reads={"status": self._status}))
        self.counts = Counts({*self._operations.reads, *self._operations.pushes})

    def handle(self, frames: Sequence[Frame], peer: Peer | None = None) -> list[bytes | memoryview] | Unfinished:
        """The frames of the reply to the frames of a request, unless that takes long.

        Args:
            frames: The frames of the request.
            peer: The connection that it came over, if any.
        """
        counts = self.counts
        counts.begun = begun = time.perf_counter_ns()
        counts.requests += 1
        self.clients.peer = peer
        of_operation = counts.others
        try:
            request = decode_request(frames, self.stores.limits)
        except MessageError as error:
            outcome = self._outcome(error.request_id, partial(self._refuse_message, error))
        else:
            of_operation = counts.operations.get(request.operation, of_operation)
            outcome = self._outcome(request.id, partial(self._answer, request))
        received = sum(map(len, frames))
        if isinstance(outcome, Future):
            counts.begun = 0
            return Unfinished(request.id, outcome, of_operation, begun, received)
        return self._encoded(outcome, of_operation, begun, received)

    def finish(self, unfinished: Unfinished) -> list[bytes | memoryview]:
        """The frames of the reply to a request whose result is there."""
        reply = self._outcome(unfinished.request_id, unfinished.future.result)
        assert isinstance(reply, Reply), "a future gives no future"
        return self._encoded(reply, unfinished.counts, unfinished.begun, unfinished.received)

    def _encoded(self, reply: Reply, counts: OperationCounts, begun: int, received: int) -> list[bytes | memoryview]:
        """The frames of a reply, which is counted."""
        frames = encode_reply(reply)
        is_ok = reply.status == Status.OK or reply.status == Status.GAP
        counts.add(time.perf_counter_ns() - begun, received, sum(map(len, frames)), is_ok=is_ok)
        self.counts.begun = 0
        return frames

    def status(self) -> dict[str, Any]:
        """The status of the server: plain numbers and strings."""
        counts = self.counts
        return {
            **self.stores.mapped.status(),
            "requests": counts.requests,
            "refused": counts.refused,
            "full": counts.full,
            "received_bytes": sum(x.received_bytes for x in counts.operations.values()),
            "sent_bytes": sum(x.sent_bytes for x in counts.operations.values()),
            "queued_bytes": self.queued_bytes(),
            "unfinished": counts.unfinished,
            "pushes": counts.pushes,
            "duplicates": counts.duplicates,
            "clients": len(self.clients),
            "restarts": self.journal.restarts,
            **self.stores.staleness_status(),
            "run": self.clients.lease.holder or "none",
            "uptime": round(time.monotonic() - counts.started, 3),
            "folder": str(self.stores.folder),
            **({} if self.metrics_url is None else {"metrics": self.metrics_url}),
            **({} if self._offer is None else self._offer.status()),
        }

    def close(self) -> None:
        """Let go of the stores and the journal."""
        if self._offer is not None:
            self._offer.close()
        self._meetings.close()
        self.stores.close()
        self.journal.close()

    def _status(self, request: Request) -> object:
        take_plain(request)
        return self.status()

    def _refuse_message(self, error: MessageError) -> object:
        """Raise; a push that cannot even be read is counted, in its place among the client's."""

        def check(_: Request) -> Push:
            raise error

        if error.push is not None:
            self._once(error.push, check)
        raise error

    def _outcome(self, request_id: int, work: Callable[[], object]) -> Reply | Future[object]:
        """The reply that says what came of some work, errors included; the future where that is one."""
        try:
            result = work()
            if isinstance(result, Future):
                return result
            if isinstance(result, Answer):
                return Reply(request_id, Status.OK, result.value, result.arrays)
            if isinstance(result, Tensor):
                result = (result,)
            if isinstance(result, tuple):
                return Reply(request_id, Status.OK, None, list(result))
            return Reply(request_id, Status.OK, result)
        except _Gap as gap:
            return Reply(request_id, Status.GAP, gap.applied)
        except (ValueError, TypeError, IndexError, OverflowError, StoreReplacedError) as error:
            status, reason = Status.REFUSED, str(error)
        except KeyError as error:
            status, reason = Status.MISSING, str(error.args[0])
        except Exception as error:  # whatever one request does to us, the next one is served
            status, reason = Status.FAILED, f"{type(error).__name__}: {error}"
            self.counts.full += is_for_want_of_room(error)
        self.counts.refused += 1
        return Reply(request_id, status, reason[:2000])

    def _answer(self, request: Request) -> object:
        if request.sequence:
            return self._once(request, self._check_push)
        read = self._operations.reads.get(request.operation)
        if read is not None:
            self.clients.meet_reader(request)
            return read(request)
        if request.operation in self._operations.pushes:
            raise MessageError(f"{request.operation} needs a sequence number")
        raise self._unknown(request)

    def _check_push(self, request: Request) -> Push:
        check = self._operations.pushes.get(request.operation)
        if check is not None:
            return check(request)
        if request.operation in self._operations.reads:
            raise MessageError(f"{request.operation} changes nothing and takes no sequence number")
        raise self._unknown(request)

    def _unknown(self, request: Request) -> MessageError:
        known = sorted({*self._operations.reads, *self._operations.pushes})
        return MessageError(f"there is no operation {request.operation!r}; there are {known}")

    def _once(self, request: Request, check: Callable[[Request], Push]) -> object:
        """Apply a push if it is the client's next one; one that was applied before is acknowledged again.

        Whatever is wrong with it, its number is used: later ones are on their way, and would wait for it for ever.
        """
        journal, sequence = self.journal, request.sequence
        slot = journal.slot(request.client)
        if slot is None:
            raise ValueError("this client has not said hello here, or was not heard of for long: connect again")
        applied = journal.applied(slot)
        if sequence > applied + 1:
            raise _Gap(applied)  # the client sends again from there; nothing was counted
        self.clients.meet(slot)
        journal.touch(slot)
        if sequence <= applied:
            # Its first answer was lost, or the server was killed after the push counted and before it answered.
            if journal.was_refused(slot, sequence):
                raise ValueError("this push was refused before")
            self.counts.duplicates += 1
            again = self._operations.again.get(request.operation)
            return None if again is None else again(request)
        try:
            push = check(request)
            # Killed in here, the server has the push wholly or, after its successor's `recover`, not at all. The
            # client was told nothing in either case: it sends the push again, and its number says which case it is.
            with journal.push(slot, sequence, push.undo):
                result = push.apply()
        except Exception:
            journal.refuse(slot, sequence)
            raise
        self.counts.pushes += 1
        return result
