"""The connections to a server's socket: which of them live, and what each may keep of the server's memory.

ZeroMQ bounds a frame, and how many messages wait. It bounds no bytes: a peer may send frame after frame of a message
that it never ends, or ask and not read the answers. Both can be seen from here, in what the system has received on a
connection and no message has brought, and in what was answered and has not left. Such a connection is cut. One of our
own clients makes a new one, and asks again for what it waits for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_recsys.parameter_server.messages.wire import Frame

LOOK_MILLISECONDS = 500  # between two looks at what has arrived

_SPARE_DESCRIPTORS = 8  # below the limit, at which it is told of
_MOST_GONE = 1024  # peers that are remembered after they went
_ACCEPTED, _DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_MORE, _NOBLOCK = int(zmq.SNDMORE), int(zmq.NOBLOCK)
_BYTES_RECEIVED = struct.Struct("<128xQ")  # of the system's struct tcp_info
_BYTES_QUEUED = struct.Struct("i")  # what TIOCOUTQ and FIONREAD tell

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of a connection.

    Args:
        descriptor: File descriptor of our end of the connection; ZeroMQ owns it.
        inode: Inode of our end, by which it is known from another connection that gets the same descriptor later.
        identity: ZeroMQ's name for it; empty until it has sent something.
        key: Public key of the client, as ZeroMQ was told when it let it in; empty where clients have none.
        slot: Slot in the journal of the client that uses the connection; ``None`` until there is one.
        is_alive: Whether the connection is still open.
        was_heard: Whether a message has come since the last look.
        received: Bytes that had arrived by the last look after a message.
        unsent: Large frames of answers that may not have left: what tells it, and their bytes.
    """

    descriptor: int
    inode: int
    identity: bytes = b""
    key: str = ""
    slot: int | None = None
    is_alive: bool = True
    was_heard: bool = False
    received: int = 0
    unsent: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)

    def unsent_bytes(self) -> int:
        """The bytes of answers that it has not taken; small frames, of which ZeroMQ bounds the number, do not count."""
        while self.unsent and self.unsent[0][0].done:
            self.unsent.popleft()
        return sum(size for _, size in self.unsent)


class Connections:
    """The connections of a ROUTER socket.

    Args:
        router: The socket, which listens already, and is used through this object from now on.
        max_unfinished: Bytes of one message, at most; looked at twice a second, where the system counts them (TCP).
        max_unsent: Bytes of answers that a peer has not taken when it asks for more, at most.
        lost: Called with every peer that is not connected any more.

    Attributes:
        monitor: Readable when connections have come or gone; :meth:`look` then.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        *,
        max_unfinished: int,
        max_unsent: int,
        lost: Callable[[Peer], None],
    ) -> None:
        self.monitor = router.get_monitor_socket(_ACCEPTED | _DISCONNECTED, "inproc://connections")
        self._router = router
        self._max_unfinished, self._max_unsent = max_unfinished, max_unsent
        self._lost = lost
        # Connections that live, by the descriptor of our end: each from the moment that the monitor tells of it, or
        # that its first message comes, until the monitor tells that it is gone. The system gives the number of a
        # closed descriptor away again, so both are read in the order in which they happened, and a peer keeps its
        # inode, which no later connection has.
        self._by_descriptor: dict[int, Peer] = {}
        # The same, by ZeroMQ's name for them: those that have sent something.
        self._by_identity: dict[bytes, Peer] = {}
        # The last that went, by the same name: what they had sent may still wait in the router, and counts.
        self._gone: dict[bytes, Peer] = {}
        self._is_roomy = True  # until it was said that there is no descriptor for another one

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def sender(self, identity: zmq.Frame, first: zmq.Frame) -> Peer | None:
        """Who has sent a message, and may be gone since; ``None`` where it does not take its answers and is cut."""
        name = identity.bytes
        peer = self._by_identity.get(name)
        if peer is None and name not in self._gone:
            self.look()  # who had the descriptor before is gone by now
        if peer is None and name not in self._gone:
            peer = self._welcome(int(first.get("__fd")), name)
            if peer is not None:
                peer.key = _key_of(first)
        if peer is None:
            return self._gone.get(name)
        peer.was_heard = True
        if peer.unsent_bytes() > self._max_unsent and _does_not_take(peer):
            self.cut(peer, f"does not take its answers: more than {self._max_unsent:,} bytes wait")
            return None
        return peer

    def send(self, peer: Peer, frames: Sequence[Frame]) -> None:
        """Send a message, without a copy of large frames; nothing happens where the peer is gone."""
        # The name alone goes first, as it is the one frame that can fail: an answer is sent whole or not at all. One
        # that is not sent is asked for again, by a new connection of the same client.
        try:
            self._router.send(peer.identity, _MORE | _NOBLOCK)
        except zmq.Again:
            self.cut(peer, "does not take its answers: too many wait")
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            tracker = self._router.send(frame, _MORE if number < last else 0, copy=False, track=True)
            if not tracker.done:
                peer.unsent.append((tracker, len(frame)))

    def look(self) -> None:
        """Take note of who has come and gone."""
        # Events come in the order in which things happened, so one that tells of a descriptor's end comes before that
        # of the next connection which has its number.
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, _NOBLOCK)
                descriptor = int(event["value"])
                if int(event["event"]) == _ACCEPTED:
                    self._welcome(descriptor)
                elif (peer := self._by_descriptor.pop(descriptor, None)) is not None:
                    if self._by_identity.pop(peer.identity, None) is not None:
                        self._gone[peer.identity] = peer
                        if len(self._gone) > _MOST_GONE:
                            del self._gone[next(iter(self._gone))]
                    peer.is_alive = False
                    self._lost(peer)

    def cut_unfinished(self) -> None:
        """Cut who has sent too much of a message. To be called when no whole message waits."""
        for peer in list(self._by_descriptor.values()):
            with suppress(OSError), _borrowed(peer) as connected:  # one that is gone, or is no TCP connection
                # Where a message came since the last look, all bytes are taken for a part of such. Where none did, and
                # no whole one waits, those that came since are the beginning of one.
                information = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
                (received,) = _BYTES_RECEIVED.unpack(information)
                if peer.was_heard:
                    peer.was_heard, peer.received = False, received
                elif received - peer.received > self._max_unfinished:
                    self.cut(peer, f"has sent more than {self._max_unfinished:,} bytes of one message")

    def named(self) -> list[Peer]:
        """The connections over which something has come."""
        return list(self._by_identity.values())

    def queued_bytes(self) -> int:
        """Bytes that the system has received and nobody has read yet, of all connections; from any thread."""
        total = 0
        for peer in list(self._by_descriptor.values()):
            with suppress(OSError), _borrowed(peer) as connected:
                total += _BYTES_QUEUED.unpack(fcntl.ioctl(connected, termios.FIONREAD, bytes(_BYTES_QUEUED.size)))[0]
        return total

    def close(self) -> None:
        """Look no more."""
        if not self.monitor.closed:
            self._router.disable_monitor()
            self.monitor.close(0)

    def _welcome(self, descriptor: int, identity: bytes = b"") -> Peer | None:
        """The peer at a descriptor, by its name from now on; ``None`` where it is gone again."""
        peer = self._by_descriptor.get(descriptor)
        if peer is None:
            try:
                peer = Peer(descriptor, os.fstat(descriptor).st_ino)
            except OSError:
                return None
            self._by_descriptor[descriptor] = peer
            self._warn_if_last(descriptor)
        if identity:
            peer.identity = identity
            self._by_identity[identity] = peer
        return peer

    def _warn_if_last(self, descriptor: int) -> None:
        """Say once that further clients find no way in, and cannot be told; the system gives out low numbers first."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if self._is_roomy and descriptor >= limit - _SPARE_DESCRIPTORS > 0:
            self._is_roomy = False
            log.warning(
                "This server has %d connections and almost no file descriptor left of %d: further clients will wait in "
                "vain. Let it have more before it starts: `ulimit -n %d`.",
                len(self),
                limit,
                4 * limit,
            )

    def cut(self, peer: Peer, why: str) -> None:
        """End a connection; ZeroMQ finds it ended, and frees what was kept for it."""
        with suppress(OSError), _borrowed(peer) as connected:
            connected.shutdown(socket.SHUT_RDWR)
            log.warning("A connection is cut whose other end %s.", why)


def _key_of(frame: zmq.Frame) -> str:
    """The public key of the client that has sent a frame."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # it came in without
        return ""


def _does_not_take(peer: Peer) -> bool:
    """Whether the system still holds bytes that the peer has not taken.

    ZeroMQ lets go of a frame some time after its last byte has left, and tells a thread of ours, which may have to wait
    for its turn. A peer whose system has acknowledged every byte is one that reads: it may have asked again because it
    has the answer that such a frame was a part of.
    """
    try:
        with _borrowed(peer) as connected:
            queued: int = _BYTES_QUEUED.unpack(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(_BYTES_QUEUED.size)))[0]
    except OSError:
        return False  # it is gone
    return queued > 0


@contextmanager
def _borrowed(peer: Peer) -> Iterator[socket.socket]:
    """The socket of a peer, which stays ZeroMQ's.

    Raises:
        OSError: the socket is closed.
    """
    with socket.socket(fileno=os.dup(peer.descriptor)) as own:
        if os.fstat(own.fileno()).st_ino != peer.inode:
            raise ConnectionResetError("the descriptor is another connection's")
        yield own
