"""The two ways from a client to a server: ZeroMQ, and a plain socket where both are on one machine."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
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
_GREETING_SECONDS = 1.0  # from a server on this machine


class LinkLostError(Exception):
    """A link that is of no use any more, and why."""


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
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(1000 * linger_seconds))
        self._context.term()


class DirectLink:
    """A plain socket to a server on this machine.

    Args:
        host: Of this machine.
        port: Where the server said that it listens.
        greeting: What it says first; whoever says anything else is not that server.
        send_seconds: Within which it must be possible to send something.
        max_bytes: Size of a message from the server, at most.

    Raises:
        OSError: there is nobody, or somebody else.
    """

    def __init__(self, host: str, port: int, *, greeting: bytes, send_seconds: float, max_bytes: int) -> None:
        connected = socket.create_connection((host, port), timeout=_GREETING_SECONDS)
        try:
            if connected.recv(len(greeting), socket.MSG_WAITALL) != greeting:
                raise ConnectionRefusedError(f"port {port} of this machine is not the server's")
            send_unpaced(connected.fileno())
            self._socket = DirectSocket(connected, max_bytes=max_bytes)
        except BaseException:
            connected.close()
            raise
        self._send_seconds = send_seconds
        self._arrived: deque[list[memoryview]] = deque()
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(connected, select.POLLIN)
        self._either.register(connected, select.POLLIN | select.POLLOUT)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:  # noqa: D102 - as in Link
        try:
            sent = self._socket.send(frames)
            while not sent:  # a server takes nothing from whoever does not take its answers
                if not self._either.poll(1000 * self._send_seconds):
                    raise LinkLostError("nothing can be sent")
                if (message := self._socket.receive()) is not None:
                    self._arrived.append(message)
                sent = self._socket.send_rest()
        except OSError as error:
            raise LinkLostError("the connection was lost") from error

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
            raise LinkLostError("the connection was lost") from error
        return message

    def close(self, *, linger_seconds: float) -> None:  # noqa: D102 - as in Link
        self._socket.close()  # all is with the system already, which goes on sending it
