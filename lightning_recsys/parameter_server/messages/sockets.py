"""The settings of sockets at both ends of a connection: how many there can be, when they end, how a machine talks."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq

CONNECTION_DESCRIPTORS = 4  # the socket's own, the connection, and the two ends by which it tells what becomes of that
_IO_THREADS = min(4, os.cpu_count() or 1)  # which encrypt and copy, for all connections of a process
_CONTEXT_DESCRIPTORS = 2 * _IO_THREADS + 5

HEARTBEAT_SECONDS = 30.0  # between two questions to the other end whether it is there
SILENCE_SECONDS = 300.0  # after which an end that was asked and sent nothing is gone


# The context of all clients' connections of this process, once there is one. A process that was forked has none of its
# parent's threads and makes its own. The parent's stays here all the same, for nobody may end it there.
_contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
_inherited: list[zmq.Context[zmq.Socket[bytes]]] = []
_making = threading.Lock()


def _begin_anew() -> None:
    """Leave the context to the parent, in a process that was just forked."""
    _inherited.extend(_contexts)
    _contexts.clear()
    _making.release()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_begin_anew)


def shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """ZeroMQ's threads for the clients' connections of this process, made when first asked for; they end with it.

    A server has a context of its own, in which it alone says whose keys may come in.

    Raises:
        OSError: the process has no file descriptors for it.
    """
    with _making:
        if not _contexts:
            _check_descriptors(_CONTEXT_DESCRIPTORS)  # without them, ZeroMQ would abort the process
            context = zmq.Context(_IO_THREADS)
            context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
            context.socket(zmq.PAIR).close(0)  # the first one starts the threads, which take their descriptors now
            _contexts.append(context)
        return _contexts[0]


@contextmanager
def spending_descriptors(what: str) -> Iterator[None]:
    """Around what makes a connection, which takes :data:`CONNECTION_DESCRIPTORS` of the process's file descriptors.

    ZeroMQ connects in a thread of its own and tells nobody that it has no descriptor for that. So whether there are as
    many as it will need is asked beforehand.

    Args:
        what: The connection, as it is named in the message.

    Raises:
        OSError: there are not so many; the message says what to do.
    """
    try:
        _check_descriptors(CONNECTION_DESCRIPTORS)
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            error.errno,
            f"no file descriptors are left for {what}, which takes {CONNECTION_DESCRIPTORS}: this process may have "
            f"{soft:,} open. Close connections that nobody uses, or let it have more before it starts: `ulimit -n "
            f"{hard if hard != resource.RLIM_INFINITY else 65536}`",
        ) from None


def _check_descriptors(needed: int) -> None:
    opened = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def allow_descriptors(wanted: int) -> None:
    """Let this process have so many files open, as far as the system lets it say so itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def expect_heartbeats(of: zmq.Socket[bytes], *, at_least: float = 0.0) -> None:
    """Have ZeroMQ end connections whose other end sends nothing, answers to its questions included; before they begin.

    A machine that loses power, or its network, closes no connection: without questions, one that nobody writes to lives
    for ever. ZeroMQ asks and answers in threads of its own, so an end that computes is not taken for one that is gone.
    It answers when the message that is under way has come whole: the largest that there may be (512 MiB) takes less
    than :data:`SILENCE_SECONDS` from 15 Mbit/s on.

    A connection that waits for bytes of its own to be acknowledged is the system's to end (TCP, within some 15
    minutes).

    Args:
        of: A socket that neither listens nor connects yet. What it does within the machine needs no questions, and does
            no harm by them.
        at_least: Seconds that the other end may be silent, where these are more than :data:`SILENCE_SECONDS`.
    """
    seconds = max(SILENCE_SECONDS, at_least)
    of.heartbeat_ivl = int(1000 * min(HEARTBEAT_SECONDS, seconds))
    of.heartbeat_timeout = int(1000 * seconds)


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is the machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def send_unpaced(descriptor: int) -> None:
    """Take the simplest congestion control for a TCP socket on loopback; a listening one hands it on.

    BBR, a common default, paces what it sends by timers, and every ten seconds lets a connection nearly dry up to
    measure the path. On loopback that costs a third of the processor time of a large message (measured: 2.9 instead of
    1.8 ms for 4 MB there and back). Sockets of other kinds, and systems without a choice, stay as they are.

    Args:
        descriptor: The socket's, which stays the caller's.
    """
    with suppress(OSError, AttributeError):  # it may be gone meanwhile, and the option is Linux's
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as own:
            name = own.getsockname()
            if isinstance(name, tuple) and is_loopback(name[0]):
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # every kernel has it
