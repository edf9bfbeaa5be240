"""Messages over a plain socket within the machine: no thread stands between a process and the system.

ZeroMQ sends and receives with a thread of its own on either side. That is right for a network. Over loopback the bytes
of a large reply take a quarter of a millisecond, and waking those threads takes longer. A server without keys, which
only its own machine can reach, offers this way beside its ZeroMQ socket. The messages are the same.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from lightning_recsys.parameter_server.loopback import send_unpaced

MAX_FRAMES = 15  # of a message
_SIZES = struct.Struct(f"<{1 + MAX_FRAMES}Q")  # before each message: how many frames it has, and their sizes
_MAX_BUFFERS = 512  # in one call of the system

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class DirectSocket:
    """One end of a connection; nothing in it waits.

    Args:
        connected: The socket, which belongs to this object from now on.
        max_bytes: Size of a message that is received, at most.
    """

    def __init__(self, connected: socket.socket, *, max_bytes: int) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._max_bytes = max_bytes
        self._unsent: list[Buffer] = []
        self._sizes = memoryview(bytearray(_SIZES.size))
        self._empty: list[Buffer] = [self._sizes]  # what is to be filled before anything else can be done
        self._frames: list[memoryview] | None = None  # of the message whose sizes are known

    def fileno(self) -> int:
        """To wait for it."""
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent, for which the socket must become writable."""
        return bool(self._unsent)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message behind those that wait. It must stay as it is until all is sent.

        Returns:
            Whether all is sent; otherwise :meth:`send_rest` goes on.

        Raises:
            OSError: the connection is lost.
        """
        sizes = [len(frame) for frame in frames]
        self._unsent += [_SIZES.pack(len(sizes), *sizes, *[0] * (MAX_FRAMES - len(sizes))), *frames]
        return self.send_rest()

    def send_rest(self) -> bool:
        """Send what waits; returns and raises as :meth:`send`."""
        while self._unsent:
            try:
                sent = self._socket.sendmsg(self._unsent[:_MAX_BUFFERS])
            except BlockingIOError:
                return False
            self._unsent = _without(self._unsent, sent)
        return True

    def receive(self) -> list[memoryview] | None:
        """The next message, or ``None`` where it has not arrived as a whole.

        Raises:
            OSError: the connection is lost, or what arrives are no messages.
        """
        while True:
            while self._empty:
                try:
                    received, *_ = self._socket.recvmsg_into(self._empty)
                except BlockingIOError:
                    return None
                if received == 0:
                    raise ConnectionResetError("the other side has closed the connection")
                self._empty = _without(self._empty, received)
            if self._frames is not None:
                frames, self._frames, self._empty = self._frames, None, [self._sizes]
                return frames
            self._frames = self._make_room()
            self._empty = [frame for frame in self._frames if len(frame)]

    def _make_room(self) -> list[memoryview]:
        count, *sizes = _SIZES.unpack(self._sizes)
        if not 1 <= count <= MAX_FRAMES or any(sizes[count:]) or sum(sizes) > self._max_bytes:
            raise ConnectionAbortedError("these are no messages")
        return [np.empty(size, np.uint8).data for size in sizes[:count]]  # not touched before it is filled

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Let go of the socket; what waits gets so much time, and is lost then."""
        with suppress(OSError):
            self._socket.settimeout(linger_seconds)
            self.send_rest()
        self._socket.close()


class DirectDoor:
    """Where a server takes such connections, at a free port.

    Args:
        host: An address of this machine.
        greeting: Said to everyone who comes, by which a client knows that it has found the server.
        max_bytes: Size of a message that is received, at most.

    Attributes:
        port: The port.
    """

    def __init__(self, host: str, *, greeting: bytes, max_bytes: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=128)
        self._listening.setblocking(False)
        send_unpaced(self._listening.fileno())
        self._greeting, self._max_bytes = greeting, max_bytes
        self.port: int = self._listening.getsockname()[1]

    def fileno(self) -> int:
        """To wait for somebody."""
        return self._listening.fileno()

    def let_in(self) -> DirectSocket | None:
        """Whoever is there; ``None`` where it has gone again.

        Raises:
            OSError: this process cannot have another socket.
        """
        with suppress(BlockingIOError, ConnectionError):
            connected, _ = self._listening.accept()
            connected.send(self._greeting)  # less than what every new socket has room for
            return DirectSocket(connected, max_bytes=self._max_bytes)
        return None

    def close(self) -> None:
        """Let nobody in any more."""
        self._listening.close()


def _without(buffers: list[Buffer], num_bytes: int) -> list[Buffer]:
    """What is left of them after their first bytes."""
    for position, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [memoryview(buffer)[num_bytes:], *buffers[position + 1 :]]
        num_bytes -= len(buffer)
    return []
