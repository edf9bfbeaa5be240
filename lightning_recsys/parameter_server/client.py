"""A connection to a server: many requests in flight, pushes in order and once, patience while a server restarts."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.parameter_server.access.keys import ClientKeys, Token
from lightning_recsys.parameter_server.messages.sockets import (
    expect_heartbeats,
    send_unpaced,
    shared_context,
    spending_descriptors,
)
from lightning_recsys.parameter_server.messages.wire import (
    CLIENT_ID_BYTES,
    MAX_WINDOW,
    Frame,
    Limits,
    MessageError,
    Reply,
    Request,
    Status,
    check_size,
    decode_reply,
    encode_request,
    receive_frames,
    send_frames,
)

WINDOW_BYTES = 256 << 20  # of pushes on their way, at most
FIRST_BACK_OFF_SECONDS = 0.05
LONGEST_BACK_OFF_SECONDS = 2.0
LAST_SECONDS = 2.0  # for an answer that nobody wants any more
GOODBYE_SECONDS = 0.2  # for the answer to a goodbye
PLAIN_USER = b"lightning_recsys"
CANCEL_SECONDS = 0.2  # how often a long wait asks whether anybody still wants its end
_LOST = {
    int(zmq.EVENT_DISCONNECTED): "the connection was lost",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the server does not accept these keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the server speaks another protocol, or has other keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake was cut short",
}


class LinkLostError(Exception):
    """A link that is of no use any more, and why."""


class Patience:
    """How long to wait; not much longer once nobody wants the result.

    Args:
        seconds: Longest time to wait.
        cancelled: Tells whether the result is no longer wanted.
        last_seconds: Longest time to wait from then on.
    """

    def __init__(self, seconds: float, cancelled: Callable[[], bool], *, last_seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._cancelled, self._last_seconds = cancelled, last_seconds
        self._looked = False

    def next_wait(self) -> float:
        """Seconds to wait before asking again, 0 when the time is over."""
        now = time.monotonic()
        if self._looked and self._cancelled():
            self._deadline = min(self._deadline, now + self._last_seconds)
        self._looked = True
        return max(0.0, min(self._deadline - now, CANCEL_SECONDS))


class Link:
    """Messages to a server, and from it, in their order; a DEALER socket.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc:///socket``.
        keys: The client's keys or the server's token; ``None`` for a server that asks for neither.
        answer_seconds: Within which it must be possible to send a message, and an answer may be under way.

    Raises:
        OSError: the process has no file descriptors for it.
        ValueError: the endpoint is none.
    """

    def __init__(self, endpoint: str, *, keys: ClientKeys | Token | None, answer_seconds: float) -> None:
        with spending_descriptors(f"a connection to {endpoint}"), ExitStack() as opened:
            self._socket = shared_context().socket(zmq.DEALER)
            opened.callback(self._socket.close, 0)
            self._monitor = self._socket.get_monitor_socket(sum(_LOST) | zmq.EVENT_CONNECTED)
            opened.callback(self._monitor.close, 0)
            opened.callback(self._socket.disable_monitor)
            self._prepare(keys, answer_seconds, ipv6="[" in endpoint)
            try:
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ValueError(f"{endpoint!r} is no endpoint, such as tcp://host:port: {error.strerror}.") from None
            self._opened = opened.pop_all()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _prepare(self, keys: ClientKeys | Token | None, answer_seconds: float, *, ipv6: bool) -> None:
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a connection's window bounds both
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1000
        # A server that refuses our keys leaves a socket without a way out, on which a send would wait for ever.
        self._socket.sndtimeo = max(1, int(1000 * answer_seconds))
        expect_heartbeats(self._socket, at_least=answer_seconds)
        self._socket.ipv6 = ipv6
        if isinstance(keys, Token):
            self._socket.plain_username = PLAIN_USER
            self._socket.plain_password = keys.secret.encode()
        elif keys is not None:
            self._socket.curve_serverkey = keys.server
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message, which must stay as it is until its answer comes.

        Raises:
            LinkLostError: the message cannot be sent over this link any more.
        """
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            raise LinkLostError("nothing can be sent") from None

    def receive(self, seconds: float) -> Sequence[Frame] | None:
        """The next message; ``None`` where there is none so far, at the latest after ``seconds``.

        Raises:
            LinkLostError: none can come any more.
        """
        if seconds > 0:
            ready = dict(self._poller.poll(int(1000 * seconds) + 1))
            if self._socket not in ready:
                if self._monitor in ready:
                    self._look_what_happened()
                return None
        try:
            return receive_frames(self._socket)
        except zmq.Again:
            return None

    def _look_what_happened(self) -> None:
        event = recv_monitor_message(self._monitor)
        if event["event"] != zmq.EVENT_CONNECTED:
            raise LinkLostError(_LOST.get(int(event["event"]), ""))
        send_unpaced(int(event["value"]))

    def close(self) -> None:
        """Let go of it, and of what was not sent; nothing happens a second time."""
        self._opened.close()


@dataclass(slots=True, eq=False)
class Pending:
    """A request in flight.

    Args:
        request: What was sent; sent again where the answer does not come.
        num_bytes: Size of the request's arrays, in bytes.
        reply: The server's reply; ``None`` until it is there.
        is_held: It was not sent over the present connection, and is when somebody waits for it.
    """

    request: Request
    num_bytes: int
    reply: Reply | None = None
    is_held: bool = False


@dataclass(slots=True)
class Traffic:
    """The bytes that went over a connection; sizes of arrays, without headers.

    Args:
        requests: Requests sent, those sent again included.
        sent_bytes: Bytes sent.
        received_bytes: Bytes received.
        reconnects: New connections after the first.
        waiting_seconds: Time that was spent waiting for answers, of all threads.
    """

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    reconnects: int = 0
    waiting_seconds: float = 0.0


@dataclass(slots=True)
class _Unacknowledged:
    """Pushes that the server has not acknowledged, and refusals that nobody was told of, by request id."""

    pushes: int = 0
    num_bytes: int = 0
    refusals: dict[int, RequestRefusedError] = field(default_factory=dict)


class Connection:
    """One client of one server.

    Reads are sent at once and waited for when their result is wanted. Pushes carry a sequence number and are not waited
    for, as long as few are on their way; the server applies each once and in order, however often it must be sent. A
    push that was refused raises at the next call, and one that is larger than a message may be at once: neither holds
    up those that follow.

    Two threads may use one connection, and wait for each other; give each its own where that matters. It does not
    survive a fork: in a process that was forked from the connection's own, all calls but :meth:`close` raise
    ``RuntimeError``, and that one lets go of it without a word to the server.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc:///socket``.
        keys: The client's keys or the server's token; ``None`` for a server that asks for neither.
        timeout: Seconds without any answer after which an attempt has failed.
        retries: Attempts after the first, with growing pauses between them, before it gives up.
        window: Pushes on their way, at most, and of :data:`WINDOW_BYTES`; the next one waits. At most 64, of which a
            server remembers which it has refused.
        limits: What one reply may take, and one exchange, which is cut where it is larger; a server's are the same.
        cancelled: Asked while it waits; once ``True``, this attempt is the last and ends within two seconds.

    Attributes:
        traffic: Counts of requests and bytes over this connection so far.

    Raises:
        OSError: the process has no file descriptors left for it; it takes four.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: ClientKeys | Token | None = None,
        timeout: float = 10.0,
        retries: int = 5,
        window: int = 32,
        limits: Limits | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        if not timeout > 0 or retries < 0 or not 1 <= window <= MAX_WINDOW:
            raise ValueError(
                f"timeout must be above 0, window from 1 to {MAX_WINDOW} and retries at least 0, got "
                f"timeout={timeout}, window={window}, retries={retries}."
            )
        self.endpoint = endpoint
        self.traffic = Traffic()
        self._keys, self._timeout, self._retries = keys, timeout, retries  # as given; for each new link and attempt
        self._max_pushes = window  # that may be unacknowledged before a push waits
        self.limits = limits or Limits()
        self._cancelled = cancelled  # asked while this client waits, by whichever thread does
        self._id = os.urandom(CLIENT_ID_BYTES)  # the server knows this client by it, over all its connections
        self._next_id, self._next_sequence = 1, 1  # of the next request, and of the next push
        # Requests in flight by their ids, in the order of sending. A push stays until it is acknowledged, and a read
        # until somebody has waited for it. So whatever is lost, what is to be sent again is here, and in order.
        self._pending: OrderedDict[int, Pending] = OrderedDict()
        self._window = _Unacknowledged()  # how much of it are pushes
        self._detail = ""  # what was last seen to go wrong, for the error that may come
        self._lost = False  # the link is of no use: everything in flight goes out again with the next one
        self._closed = False  # by `close`, for good
        self._process = os.getpid()  # whose threads carry the link's bytes; a process that is forked has none of them
        self._has_pushed = False  # something of a push was sent, so the server keeps this client's place
        # After how many attempts and seconds, and why; nothing was heard since.
        self._gave_up: tuple[int, float, str] | None = None
        self._mutex = threading.RLock()  # held by whoever sends or waits: answers to others are taken meanwhile
        self._random = random.Random(self._id)  # noqa: S311 - spreads retries, guards nothing
        self._link = self._new_link()  # the present socket; another one after each loss

    # --- Asking ------------------------------------------------------------------------------------------------------

    def request(
        self, operation: str, *, store: str = "", arguments: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()
    ) -> Reply:
        """Ask what changes nothing, and wait for the answer."""
        return self.wait(self.begin(operation, store=store, arguments=arguments, arrays=arrays))

    def begin(
        self, operation: str, *, store: str = "", arguments: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()
    ) -> Pending:
        """Ask what changes nothing; :meth:`wait` has the answer. ``arrays`` must stay as they are until then."""
        self._refuse_in_fork()
        with self._mutex:
            self._check_usable()
            return self._send_new(Request(operation, 0, self._id, 0, store, arguments or {}, list(arrays)))

    def push(
        self, operation: str, *, store: str = "", arguments: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()
    ) -> Pending:
        """Send a change; returns when it is on its way. ``arrays`` belong to the connection from now on.

        Raises:
            RequestRefusedError: earlier pushes were refused, and this one was not sent; or it is larger than a message
                may be.
            ServerUnreachableError: too many pushes are on their way, and the server does not answer.
        """
        self._refuse_in_fork()
        size = sum(array.nbytes for array in arrays)
        with self._mutex:
            self._check_usable()
            # A full window waits for its oldest push: the server answers pushes in their order.
            while self._window.pushes and (
                self._window.pushes >= self._max_pushes or self._window.num_bytes + size > WINDOW_BYTES
            ):
                oldest = next(pending for pending in self._pending.values() if pending.request.sequence)
                self._await(oldest)
            # What has come is taken without waiting, so that a refusal is raised now, before this push has a number.
            while self._pending and not self._lost and self._receive(0.0):
                pass
            self._raise_refusal()
            sequence = self._next_sequence
            return self._send_new(Request(operation, 0, self._id, sequence, store, arguments or {}, list(arrays)))

    def wait(self, pending: Pending) -> Reply:
        """The answer to a request.

        Raises:
            KeyError: the store is not there.
            RequestRefusedError: the server refused it, or could not do it.
            ServerUnreachableError: no answer in all attempts.
        """
        self._refuse_in_fork()
        with self._mutex:
            try:
                reply = self._await(pending)
            finally:
                if not pending.request.sequence:
                    self._pending.pop(pending.request.id, None)
            self._window.refusals.pop(pending.request.id, None)  # it is raised here
            if reply.status == Status.MISSING:
                raise KeyError(f"{self.endpoint}: {reply.value}")
            if reply.status != Status.OK:
                raise RequestRefusedError(self.endpoint, pending.request.operation, str(reply.value))
            return reply

    def flush(self) -> None:
        """Wait until the server has applied every push.

        Raises:
            RequestRefusedError: one of them was refused.
            ServerUnreachableError: no answer in all attempts; the pushes are kept, and a later call tries again.
        """
        self._refuse_in_fork()
        with self._mutex:
            while self._window.pushes:
                oldest = next(pending for pending in self._pending.values() if pending.request.sequence)
                self._await(oldest)
            self._raise_refusal()

    def close(self) -> None:
        """Flush, say goodbye, and let go of the socket, whatever happens; where nobody answered before, at once.

        Raises:
            RequestRefusedError: pushes were refused.
            ServerUnreachableError: pushes are lost: the server has not acknowledged them, and may have some of them.
        """
        if self._is_forked:  # the socket is the parent's, which goes on with it, and so are the pushes
            self._closed = True
            return
        with self._mutex:
            if self._closed:
                return
            try:
                if self._gave_up is None:
                    started = time.monotonic()
                    try:
                        self.flush()
                    except ServerUnreachableError:
                        pass  # which pushes that costs is told below
                    except OSError as error:  # there is no descriptor for another link
                        self._gave_up = 1, time.monotonic() - started, error.strerror or str(error)
            finally:
                self._closed = True
                if self._gave_up is None:
                    self._say_goodbye()
                self._link.close()
            self._raise_lost()
            self._raise_refusal()

    def _raise_lost(self) -> None:
        lost = [pending.request.operation for pending in self._pending.values() if pending.request.sequence]
        if lost and self._gave_up is not None:
            attempts, seconds, why = self._gave_up
            what = f"{len(lost)} {'push was' if len(lost) == 1 else 'pushes were'} never acknowledged"
            raise ServerUnreachableError(self.endpoint, lost[0], attempts, seconds, f"{why}; {what}" if why else what)

    # --- Sending and receiving ---------------------------------------------------------------------------------------

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _refuse_in_fork(self) -> None:
        """Raise in a forked process, before the mutex, which a thread of the parent may have held for ever."""
        if self._is_forked:
            raise RuntimeError(
                f"the connection to {self.endpoint} does not survive a fork: connect anew in the forked process."
            )

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(f"the connection to {self.endpoint} is closed.")

    def _send_new(self, request: Request) -> Pending:
        request.id = self._next_id
        frames = encode_request(request)
        try:
            check_size(frames, self.limits)
        except MessageError as error:  # before it has taken a place among the pushes
            raise RequestRefusedError(self.endpoint, request.operation, str(error)) from None
        self._next_id += 1
        pending = Pending(request, sum(array.nbytes for array in request.arrays))
        self._pending[request.id] = pending
        if request.sequence:
            # The number is this push's from now on, whether or not it gets through: one that is given to no push would
            # hold up all later ones for ever.
            self._next_sequence += 1
            self._window.pushes += 1
            self._window.num_bytes += pending.num_bytes
        self._send(pending, frames)
        return pending

    def _send(self, pending: Pending, frames: Sequence[bytes | memoryview]) -> None:
        if self._lost:
            return  # it goes out with the others when the connection is made again
        self._has_pushed |= bool(pending.request.sequence)  # perhaps in part
        try:
            self._link.send(frames)
        except LinkLostError as lost:
            self._lose(lost)
            return
        self.traffic.requests += 1
        self.traffic.sent_bytes += pending.num_bytes

    def _await(self, pending: Pending) -> Reply:
        if pending.is_held and not self._lost:
            pending.is_held = False
            self._send(pending, encode_request(pending.request))
        started, attempts = time.monotonic(), 1
        deadline = started + self._timeout  # of this attempt
        while pending.reply is None:
            if not self._lost and self._receive(max(0.0, deadline - time.monotonic())):
                attempts = 1  # the server is there and works; what it has answered is not asked again
            else:
                self._try_again(pending, attempts, started)
                attempts += 1
            deadline = time.monotonic() + self._timeout
        self.traffic.waiting_seconds += time.monotonic() - started
        return pending.reply

    def _receive(self, seconds: float) -> bool:
        """Take one reply; ``False`` where none came in time, or the connection was lost meanwhile."""
        try:
            frames = self._next_message(seconds)
        except LinkLostError as lost:
            self._lose(lost)
            return False
        if frames is None:
            return False
        try:
            reply = decode_reply(frames, self.limits)
        except MessageError as error:
            raise MessageError(f"{self.endpoint}: {error}") from None
        return self._take(reply)

    def _next_message(self, seconds: float) -> Sequence[Frame] | None:
        """None where the time is over, or the wait was cancelled."""
        patience = Patience(seconds, self._cancelled, last_seconds=LAST_SECONDS)
        while True:
            wait = patience.next_wait()
            frames = self._link.receive(wait)
            if frames is None and wait > 0:
                continue
            if frames is None and seconds > 0:
                self._detail = "no answer in time"
            return frames

    def _lose(self, lost: LinkLostError) -> None:
        self._lost, self._detail = True, str(lost)

    def _take(self, reply: Reply) -> bool:
        pending = self._pending.get(reply.id)
        if pending is None:
            return True  # answered before, or given up
        if reply.status == Status.GAP:
            # A push before this one was lost, with a connection of before. It is still pending, as are all after it:
            # they go out anew, in order, and the server acknowledges again those that it has.
            self._detail = f"pushes after {reply.value} have not arrived"
            self._lost = True
            return False
        self._gave_up = None
        pending.reply = reply
        self.traffic.received_bytes += sum(array.nbytes for array in reply.arrays)
        if pending.request.sequence:
            del self._pending[reply.id]
            self._window.pushes -= 1
            self._window.num_bytes -= pending.num_bytes
            if reply.status != Status.OK:
                refusal = RequestRefusedError(self.endpoint, pending.request.operation, str(reply.value))
                self._window.refusals[reply.id] = refusal
        return True

    def _raise_refusal(self) -> None:
        """Raise for the first of them; what it says names the others."""
        if self._window.refusals:
            first, *others = self._window.refusals.values()
            self._window.refusals.clear()
            also = "".join(f"; and {other.operation!r}: {other.reason}" for other in others)
            raise RequestRefusedError(first.endpoint, first.operation, f"{first.reason}{also}")

    # --- Connecting --------------------------------------------------------------------------------------------------

    def _new_link(self) -> Link:
        return Link(self.endpoint, keys=self._keys, answer_seconds=self._timeout)

    def _renew_link(self) -> None:
        """Another link in the place of this one, which is of no use.

        Raises:
            OSError: the process has no file descriptors for it. The link stays lost, so the next call tries again.
        """
        self._link.close()
        self._lost = True
        self._link = self._new_link()
        self._lost = False

    def _say_goodbye(self) -> None:
        """Wait a moment until the server has heard it: what is closed sends no more."""
        if self._lost:
            try:
                self._renew_link()
            except OSError:  # there is no descriptor for it: the place is free again when its time is over
                return
        goodbye = self._send_new(Request("goodbye", 0, self._id))
        deadline = time.monotonic() + GOODBYE_SECONDS
        while not self._lost and goodbye.reply is None and (seconds := deadline - time.monotonic()) > 0:
            self._receive(seconds)

    def _try_again(self, awaited: Pending, attempts: int, started: float) -> None:
        """After a pause, send again what has no answer, over a new connection and in its order; or give up."""
        if attempts > self._retries or self._cancelled():
            self._gave_up = attempts, time.monotonic() - started, self._detail
            self._reopen(awaited)
            raise ServerUnreachableError(self.endpoint, awaited.request.operation, *self._gave_up)
        pause = min(FIRST_BACK_OFF_SECONDS * 2 ** (attempts - 1), LONGEST_BACK_OFF_SECONDS)
        time.sleep(pause * self._random.uniform(0.5, 1.5))
        self._reopen(awaited)

    def _reopen(self, awaited: Pending) -> None:
        """Send again all pushes, and of what changes nothing only what is waited for.

        A server that has cut the connection because its answers were not taken would do so again, asked for all.
        """
        self._renew_link()
        self.traffic.reconnects += 1
        if not self._has_pushed:  # while it was away its place may have been given to another one
            with suppress(LinkLostError):  # what it is answered nobody waits for: no request has its id
                self._link.send(encode_request(Request("hello", self._next_id, self._id)))
            self._next_id += 1
        for pending in self._pending.values():
            if pending.reply is None:
                pending.is_held = pending is not awaited and not pending.request.sequence
                if not pending.is_held:
                    self._send(pending, encode_request(pending.request))
