"""The way from a client to a server: a ZeroMQ socket, and how long one waits at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_recsys.parameter_server.keys import ClientKeys, Token
from lightning_recsys.parameter_server.loopback import send_unpaced
from lightning_recsys.parameter_server.wire import Frame, receive_frames, send_frames

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
        send_seconds: Within which it must be possible to send a message.

    Raises:
        ValueError: the endpoint is none.
    """

    def __init__(self, endpoint: str, *, keys: ClientKeys | Token | None, send_seconds: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a connection's window bounds both
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1000
        # A server that refuses our keys leaves a socket without a way out, on which a send would wait for ever.
        self._socket.sndtimeo = max(1, int(1000 * send_seconds))
        self._socket.ipv6 = "[" in endpoint
        if isinstance(keys, Token):
            self._socket.plain_username = PLAIN_USER
            self._socket.plain_password = keys.secret.encode()
        elif keys is not None:
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

    def close(self, *, linger_seconds: float) -> None:
        """Let go of it; what waits to be sent gets so much time."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(1000 * linger_seconds))
        self._context.term()
