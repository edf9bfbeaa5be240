"""The two ways from a client to a server: ZeroMQ, and a plain socket where both are on one machine."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_recsys.parameter_server.direct import DirectSocket
from lightning_recsys.parameter_server.keys import ClientKeys
from lightning_recsys.parameter_server.loopback import send_unpaced
from lightning_recsys.parameter_server.wire import Frame, receive_frames, send_frames

_LOST = {
    int(zmq.EVENT_DISCONNECTED): "the connection was lost",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the server does not accept these keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the server speaks another protocol, or has other keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake was cut short",
}
_CONNECT_SECONDS = 1.0  # within a machine, where the system answers
LOOK_SECONDS = 0.2  # how often a wait looks whether anybody still wants its end,
LAST_SECONDS = 2.0  # and how long it lasts once nobody does


class LinkLostError(Exception):
    """A link that is of no use any more, and why."""


class Patience:
    """How long to wait; not much longer once nobody wants the result.

    Args:
        seconds: At most.
        cancelled: Whether nobody wants it any more.
    """

    def __init__(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        self._deadline = time.monotonic() + seconds
        self._cancelled = cancelled
        self._looked = False

    def next_wait(self) -> float:
        """Seconds to wait before asking again, 0 when the time is over."""
        now = time.monotonic()
        if self._looked and self._cancelled():
            self._deadline = min(self._deadline, now + LAST_SECONDS)
        self._looked = True
        return max(0.0, min(self._deadline - now, LOOK_SECONDS))


class Link(Protocol):
    """Messages to a server, and from it, in their order."""

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message, which must stay as it is until its answer comes.

        Raises:
            LinkLostError: it cannot be sent.
        """

    def receive(self, seconds: float) -> Sequence[Frame] | None:
        """The next message; ``None`` where there is none so far, at the latest after ``seconds``.

        Raises:
            LinkLostError: none can come any more.
        """

    def close(self, *, linger_seconds: float) -> None:
        """Let go of it; what waits to be sent gets so much time."""


class ZeroMQLink:
    """A DEALER socket.

    Args:
        endpoint: ``tcp://host:port``.
        keys: For a server that asks for them.
        send_seconds: Within which it must be possible to send a message.

    Raises:
        ValueError: the endpoint is none.
    """

    def __init__(self, endpoint: str, *, keys: ClientKeys | None, send_seconds: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a connection's window bounds both
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1000
        # A server that refuses our keys leaves a socket without a way out, on which a send would wait for ever.
        self._socket.sndtimeo = max(1, int(1000 * send_seconds))
        self._socket.ipv6 = "[" in endpoint
        if keys is not None:
            self._socket.curve_serverkey = keys.server
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret
        self._monitor = self._socket.get_monitor_socket(sum(_LOST) | zmq.EVENT_CONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(linger_seconds=0)
            raise ValueError(f"{endpoint!r} is no endpoint, such as tcp://host:port: {error.strerror}.") from None

    def send(self, frames: Sequence[bytes | memoryview]) -> None:  # noqa: D102 - as in Link
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            raise LinkLostError("nothing can be sent") from None

    def receive(self, seconds: float) -> Sequence[Frame] | None:  # noqa: D102 - as in Link
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

    def close(self, *, linger_seconds: float) -> None:  # noqa: D102 - as in Link
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(1000 * linger_seconds))
        self._context.term()


class DirectLink:
    """A plain socket to a server on this machine; of use once :meth:`is_ready`.

    Args:
        host: Of this machine.
        port: Where the server said that it listens.
        nonce: What it says first there; whoever says anything else is not that server.
        send_seconds: Within which it must be possible to send a message.
        cancelled: Whether nobody wants it sent any more.
        max_bytes: Size of a message from the server, at most.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        nonce: bytes,
        send_seconds: float,
        cancelled: Callable[[], bool],
        max_bytes: int,
    ) -> None:
        self._plain = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        send_unpaced(self._plain.fileno())
        self._socket = DirectSocket(self._plain, max_bytes=max_bytes)
        self._nonce, self._send_seconds, self._cancelled = nonce, send_seconds, cancelled
        self._arrived: deque[list[memoryview]] = deque()
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(self._plain, select.POLLIN)
        self._either.register(self._plain, select.POLLIN | select.POLLOUT)

    def is_ready(self) -> bool:
        """Whether the server has greeted us, which a busy one does later.

        Raises:
            OSError: it was somebody else.
        """
        try:
            said = self._plain.recv(len(self._nonce), socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not self._nonce.startswith(said) or not said:
            raise ConnectionRefusedError("this port of the machine is not the server's")
        return len(said) == len(self._nonce) and bool(self._plain.recv(len(said)))

    def send(self, frames: Sequence[bytes | memoryview]) -> None:  # noqa: D102 - as in Link
        patience = Patience(self._send_seconds, self._cancelled)
        try:
            sent = self._socket.send(frames)
            while not sent:  # a server takes nothing from whoever does not take its answers
                seconds = patience.next_wait()
                if not self._either.poll(1000 * seconds) and not seconds:
                    raise LinkLostError("nothing can be sent")
                if (message := self._socket.receive()) is not None:
                    self._arrived.append(message)
                sent = self._socket.send_rest()
        except OSError as error:
            raise LinkLostError(str(error)) from error
        except BaseException:  # the rest of the message would be missing
            self._socket.close()
            raise

    def receive(self, seconds: float) -> Sequence[Frame] | None:  # noqa: D102 - as in Link
        if self._arrived:
            return self._arrived.popleft()
        deadline = time.monotonic() + seconds
        try:
            while (message := self._socket.receive()) is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._readable.poll(1000 * left):
                    return None
        except OSError as error:
            raise LinkLostError(str(error)) from error
        return message

    def close(self, *, linger_seconds: float) -> None:  # noqa: D102 - as in Link
        self._socket.close()  # what was sent is with the system already, which goes on by itself
