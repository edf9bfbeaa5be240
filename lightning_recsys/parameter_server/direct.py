"""Messages over a plain socket within the machine: no thread stands between a process and the system.

ZeroMQ sends and receives with a thread of its own on either side. That is right for a network. Over loopback the bytes
of a large reply take a quarter of a millisecond, and waking those threads takes longer. A server without keys, which
only its own machine can reach, offers this way beside its ZeroMQ socket. The messages are the same.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from lightning_recsys.parameter_server.loopback import send_unpaced

MAX_FRAMES = 15  # of a message
_SIZES = struct.Struct(f"<{1 + MAX_FRAMES}Q")  # before each message: how many frames it has, and their sizes
_MAX_BUFFERS = 512  # in one call of the system
_TURN_BYTES = 4 << 20  # after which others get their turn

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class DirectSocket:
    """One end of a connection; nothing in it waits.

    Whatever is raised while bytes move, Ctrl-C included, closes it: nobody could say how far they have come.

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
        self._to_fill: list[Buffer] = [self._sizes]
        self._frames: list[memoryview] | None = None  # of the message whose sizes are known

    def fileno(self) -> int:
        """Its descriptor, for `select` and its like."""
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message behind those that wait. It must stay as it is until all is sent.

        Args:
            frames: 1 to 15.

        Returns:
            Whether all is sent; otherwise :meth:`send_rest` goes on, when the socket is writable.

        Raises:
            OSError: the connection is lost.
        """
        sizes = [len(frame) for frame in frames]
        self._unsent += [_SIZES.pack(len(sizes), *sizes, *[0] * (MAX_FRAMES - len(sizes))), *frames]
        return self.send_rest()

    def send_rest(self) -> bool:
        """Send what waits; returns and raises as :meth:`send`."""
        try:
            num_bytes = 0
            while self._unsent and num_bytes < _TURN_BYTES:
                sent = self._socket.sendmsg(self._unsent[:_MAX_BUFFERS])
                self._unsent = _without(self._unsent, sent)
                num_bytes += sent
        except BlockingIOError:
            pass
        except BaseException:
            self.close()
            raise
        return not self._unsent

    def receive(self) -> list[memoryview] | None:
        """The next message, or ``None`` where it has not arrived as a whole.

        Raises:
            OSError: the connection is lost, or what arrives are no messages.
        """
        try:
            num_bytes = 0
            while self._to_fill or not self._is_whole():
                if num_bytes >= _TURN_BYTES:
                    return None
                received, *_ = self._socket.recvmsg_into(self._to_fill)
                if received == 0:
                    raise ConnectionResetError("the connection was lost")
                self._to_fill = _without(self._to_fill, received)
                num_bytes += received
            frames, self._frames, self._to_fill = self._frames, None, [self._sizes]
            return frames
        except BlockingIOError:
            pass
        except BaseException:
            self.close()
            raise
        return None

    def _is_whole(self) -> bool:
        """Asked when nothing is left to fill; where those were the sizes, the frames come next."""
        if self._frames is None:
            self._frames = self._make_room()
            self._to_fill = [frame for frame in self._frames if len(frame)]
        return not self._to_fill

    def _make_room(self) -> list[memoryview]:
        count, *sizes = _SIZES.unpack(self._sizes)
        if not 1 <= count <= MAX_FRAMES or any(sizes[count:]) or sum(sizes) > self._max_bytes:
            raise ConnectionAbortedError("what arrived were no messages")
        return [np.empty(size, np.uint8).data for size in sizes[:count]]  # not touched before it is filled

    def close(self) -> None:
        """Let go of the socket; what waits is lost."""
        self._socket.close()


class DirectDoor:
    """Where a server takes such connections, at a free port.

    Args:
        host: An address of this machine.
        nonce: Said to everyone who comes, by which a client knows that it has found the server.
        max_bytes: Size of a message that is received, at most.

    Attributes:
        port: The port.
    """

    def __init__(self, host: str, *, nonce: bytes, max_bytes: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=128)
        self._listening.setblocking(False)
        send_unpaced(self._listening.fileno())
        self._nonce, self._max_bytes = nonce, max_bytes
        self.port: int = self._listening.getsockname()[1]

    def fileno(self) -> int:
        """Its descriptor, which is readable when somebody is there."""
        return self._listening.fileno()

    def let_in(self) -> DirectSocket | None:
        """Whoever is there; ``None`` where it has gone again.

        Raises:
            OSError: this process cannot have another socket.
        """
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return None
        try:
            connected.send(self._nonce)  # less than what every new socket has room for
            return DirectSocket(connected, max_bytes=self._max_bytes)
        except OSError:
            connected.close()
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
