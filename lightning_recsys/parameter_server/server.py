"""The process that offers a folder of stores: one thread, many requests in flight, over ZeroMQ."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import re
import select
import signal
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_recsys.monitoring import MonitoringEndpoint
from lightning_recsys.parameter_server.access.keys import KeyFile, ServerKeys, Token
from lightning_recsys.parameter_server.access.own_files import check_own_folder, make_own_folder, open_own
from lightning_recsys.parameter_server.connections import LOOK_MILLISECONDS, Connections, Peer
from lightning_recsys.parameter_server.handler import MakeOffer, RequestHandler, Unfinished
from lightning_recsys.parameter_server.journal import JOURNAL
from lightning_recsys.parameter_server.messages.sockets import (
    allow_descriptors,
    expect_heartbeats,
    is_loopback,
    send_unpaced,
)
from lightning_recsys.parameter_server.messages.wire import Limits, receive_frames
from lightning_recsys.parameter_server.watched.metrics import collect
from lightning_recsys.runtime import configure_worker, process_end

LOCK = ".server.lock"
SOCKET = ".socket"  # in the folder
MAX_SOCKET_BYTES = 107  # of a path, by the system's `sockaddr_un`
BIND_SECONDS = 5.0  # a server that was killed may hold its port for a moment
DRAIN_SECONDS = 5.0  # for requests that had arrived when the server was told to stop
OWN_DESCRIPTORS = 256  # what a server may have open besides its clients' connections: files of stores, above all
LINGER_SECONDS = 2.0  # for answers that nobody takes
_STOP, _FINISHED = b"\0", b"\xff"  # no signal has that number
_READABLE = int(zmq.POLLIN)
_TURN = 64  # requests served before the other sockets are looked at
_MAX_WAITING = 8  # requests of one connection that are received before they are served; the rest stays with its sender

log = logging.getLogger(__name__)


class FolderInUseError(RuntimeError):
    """Another server, on the same machine, serves the folder."""


def serve(
    folder: Path,
    *,
    bind: str | None = None,
    keys: ServerKeys | KeyFile | Token | None = None,
    ready: Callable[[str], None] = lambda endpoint: None,
    num_threads: int = 1,
    limits: Limits | None = None,
    max_clients: int = 1024,
    offer: MakeOffer | None = None,
    metrics_port: int | None = None,
    monitored: Callable[[str], None] = lambda url: None,
) -> None:
    """Run a server in this process until it is told to stop; requests that have arrived by then are answered.

    It stops on SIGTERM and on SIGINT (where it runs in the main thread). In a process that :mod:`multiprocessing`
    started it leaves SIGINT to the process that started it, and stops when that one ends, however it ends.

    A server that starts again on the same folder and address goes on where the last one was, ``kill -9`` included:
    clients notice nothing but the time.

    Args:
        folder: The stores; made, for this user alone, if it is not there. One server per folder.
        bind: Where to listen: ``ipc:///socket``, a file that is made, or ``tcp://host:port``, of which port 0 is a free
            one. Default: a socket in the folder, so that whoever may write to the folder is let in.
        keys: Who may talk to it over TCP, which may change meanwhile with a :class:`KeyFile`; needed for every address
            but the machine's own, where a token is asked for, without keys that of the folder
            (:class:`~lightning_recsys.parameter_server.access.keys.Token`).
        ready: Called with the endpoint as soon as it listens.
        num_threads: Threads for the arithmetic, as in :func:`lightning_recsys.runtime.configure_worker`.
        limits: What one request, and its reply, may take.
        max_clients: Clients that the journal has room for.
        offer: What the server offers besides stores, as for
            :class:`~lightning_recsys.parameter_server.handler.RequestHandler`.
        metrics_port: Port of a :class:`~lightning_recsys.monitoring.MonitoringEndpoint`, 0 for a free one; at the
            host of ``bind``, or on loopback where that is a socket. Default: none.
        monitored: Called with the URL of that endpoint, which answers from before the stores are opened.

    Raises:
        ValueError: the address is not of this machine and there are no keys, or it is no address.
        RuntimeError: another server serves the folder, or it is one of several processes
            (:mod:`~lightning_recsys.parameter_server.processes`).
        PermissionError: the folder, or a file of the server's in it, is another user's, open to others, or a link.
        OSError: a port is taken.
        ModuleNotFoundError: there is a ``metrics_port``, and ``prometheus-client`` is not installed.
    """
    bind = _in(folder) if bind is None else bind
    check_bind(bind, keys)  # before anything is made
    configure_worker(num_threads)
    allow_descriptors(max_clients + OWN_DESCRIPTORS)
    if (folder / "0" / JOURNAL).exists():
        raise RuntimeError(f"{folder} has the stores of several processes: serve it with --processes, as it was made.")
    make_own_folder(folder)
    with ExitStack() as stack:
        # Before the server, which may have much to recover: it is alive meanwhile, and not ready.
        monitoring = None
        if metrics_port is not None:
            monitoring = stack.enter_context(MonitoringEndpoint(host=_host_of(bind), port=metrics_port))
            monitored(monitoring.url)
        options: dict[str, Any] = {"limits": limits, "max_clients": max_clients, "offer": offer}
        server = stack.enter_context(Server(folder, bind=bind, keys=keys, **options))
        if monitoring is not None:
            server.handler.metrics_url = monitoring.url
            monitoring.set_ready(partial(collect, server.handler))
            stack.callback(monitoring.set_unready)
        for descriptor in ends_of_parent():
            server.stop_when_readable(descriptor)
        with waking_on_signals(server.waker):
            ready(server.endpoint)
            server.run()


def ends_of_parent() -> list[int]:
    """File descriptors that are readable once the process has ended that started this one by :mod:`multiprocessing`."""
    parent = multiprocessing.parent_process()
    return [] if parent is None or parent.pid is None else [parent.sentinel, *process_end(parent.pid)]


class Server:
    """A server as an object: :func:`serve` runs one in a process of its own, tests in a thread.

    Args:
        folder: An existing folder of stores.
        bind: Where to listen; see :func:`serve`.
        keys: Keys of the server, where it encrypts; see :func:`serve`.
        limits: What one request, and its reply, may take.
        max_clients: Clients that the journal has room for.
        offer: Makes what the server offers besides stores; see :func:`serve`.

    Attributes:
        endpoint: Where it listens, with the port that it got.
        handler: The :class:`RequestHandler` that holds the stores and answers each request.
        waker: A byte sent here wakes the server: 0, or the number of a signal that it stops on; 255 where a request's
            result is there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bind: str | None = None,
        keys: ServerKeys | KeyFile | Token | None = None,
        limits: Limits | None = None,
        max_clients: int = 1024,
        offer: MakeOffer | None = None,
    ) -> None:
        limits = limits or Limits()
        bind = _in(folder) if bind is None else bind
        check_bind(bind, keys)
        check_own_folder(folder)
        # The lock comes before anything is read: a second server would put back rows that the first one is changing.
        # The handler comes before the address is bound, so no request is answered before rows are whole again.
        self._lock = _lock(folder)
        self.handler = RequestHandler(folder, limits=limits, max_clients=max_clients, offer=offer)
        if self.handler.recovered:
            log.warning("The server of %s was killed while it applied a push; what it touched is as before.", folder)
        self._keys: ServerKeys | KeyFile | Token | None = keys
        self._wake, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        # Requests whose results are there, with who asked: other threads add to it, and wake the loop, which answers.
        self._finished: deque[tuple[Peer, Unfinished]] = deque()
        self._stopping: list[int] = []  # file descriptors at whose end it stops
        self._connections: Connections | None = None  # once it listens
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._key_check = self._context.socket(zmq.REP)
        self._key_check.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whether a key may come in
        self._router = self._context.socket(zmq.ROUTER)
        # Beyond this a connection is cut without a word; a request over the limits, but below this, gets an answer.
        max_bytes = 2 * limits.message_bytes
        self._router.maxmsgsize = max_bytes
        self._router.rcvhwm = _MAX_WAITING
        self._router.router_mandatory = True  # an answer that has no room is an error, not lost without a word
        self._router.linger = int(1000 * LINGER_SECONDS)
        expect_heartbeats(self._router)
        try:
            if keys is None and bind.startswith("tcp://"):
                self._keys = Token.of_folder(folder)
            self._ask_for(self._keys)
            _bind(self._router, bind)
            self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._connections = Connections(
                self._router,
                max_unfinished=max_bytes + limits.header_bytes,
                max_unsent=limits.message_bytes,
                lost=self.handler.clients.lose,
            )
            self.handler.queued_bytes = self._connections.queued_bytes
        except BaseException:
            self.close()
            raise

    def _ask_for(self, keys: ServerKeys | KeyFile | Token | None) -> None:
        """Have ZeroMQ let nobody in who does not prove to know them, before anything of a message is read."""
        if isinstance(keys, Token):
            self._router.plain_server = True
        elif keys is not None:
            self._router.curve_server = True
            self._router.curve_secretkey = _server_keys(keys).secret
        if keys is not None:
            self._router.zap_domain = b"lightning_recsys"  # without which nobody would be asked

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Make :meth:`run` return; from any thread."""
        with suppress(OSError):  # full, or closed: then it stops anyway
            self.waker.send(_STOP)

    def stop_when_readable(self, descriptor: int) -> None:
        """Stop as well when this file descriptor becomes readable or is closed at its other end."""
        self._stopping.append(descriptor)

    def run(self) -> None:
        """Serve until told to stop, then answer what has arrived."""
        poller, connections, next_look, next_keys = zmq.Poller(), self._connections, 0.0, 0.0
        assert connections is not None
        for source in (self._router, connections.monitor, self._key_check, self._wake.fileno(), *self._stopping):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(LOOK_MILLISECONDS if connections else None))
            # Who has come and gone is noted before what they sent is served: a request must not be taken for one of
            # the connection that had the same descriptor before.
            if connections.monitor in ready:
                connections.look()
            if self._key_check in ready:
                self._check_key()
            if any(descriptor in ready for descriptor in self._stopping) or (
                self._wake.fileno() in ready and self._told_to_stop()
            ):
                break
            self._answer_finished()
            if (now := time.monotonic()) >= next_keys:
                self._look_at_keys()
                next_keys = now + LOOK_MILLISECONDS / 1000
            # Only when every whole message was served do the bytes that are left belong to one that is not whole.
            if (self._router not in ready or self._serve_some()) and now >= next_look:
                connections.cut_unfinished()
                next_look = now + LOOK_MILLISECONDS / 1000
        self._drain()

    def _serve_some(self) -> bool:
        """Serve what has arrived; ``False`` where the other sockets have to be looked at before all of it is."""
        # Asked before the next one, for an attempt in vain costs an exception, while the reply is on its way.
        return any(not self._serve_one() or not int(self._router.get(zmq.EVENTS)) & _READABLE for _ in range(_TURN))

    def _drain(self) -> None:
        """Answer what has arrived; without unbinding, which would cut the connections that the answers go over."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and self._serve_one():
            pass
        self._answer_finished()
        while self.handler.counts.unfinished and (seconds := deadline - time.monotonic()) > 0:
            if select.select([self._wake], [], [], seconds)[0]:
                self._wake.recv(4096)
            self._answer_finished()

    def _told_to_stop(self) -> bool:
        return bool(set(self._wake.recv(4096)) & {*_STOP, signal.SIGTERM, signal.SIGINT})

    def _finish_later(self, peer: Peer, unfinished: Unfinished) -> None:
        """Answer once the result is there; the thread that has it wakes the loop."""

        def finished(_: object) -> None:
            self._finished.append((peer, unfinished))
            with suppress(OSError):  # full: then it wakes anyway; closed: then nobody is answered any more
                self.waker.send(_FINISHED)

        self.handler.counts.unfinished += 1
        unfinished.future.add_done_callback(finished)

    def _answer_finished(self) -> None:
        assert self._connections is not None
        while self._finished:
            peer, unfinished = self._finished.popleft()
            self.handler.counts.unfinished -= 1
            reply = self.handler.finish(unfinished)
            if peer.is_alive:
                self._connections.send(peer, reply)

    def _serve_one(self) -> bool:
        assert self._connections is not None
        try:
            sender, *frames = receive_frames(self._router, before=1)
        except zmq.Again:
            return False
        peer = self._connections.sender(sender, frames[0])
        if peer is not None and self._is_shut_out(peer):
            self._connections.cut(peer, "is let in no more")
        elif peer is not None:
            # What a client had sent before it went still counts, such as its goodbye; there is nobody to answer.
            # The push counts before its answer is sent: killed between the two, the server leaves a client that sends
            # it again, and is told by the next server that it was applied.
            reply = self.handler.handle(frames, peer if peer.is_alive else None)
            del frames  # the memory of a large request goes before the next one comes
            if isinstance(reply, Unfinished):
                self._finish_later(peer, reply)
            elif peer.is_alive:
                self._connections.send(peer, reply)
        return True

    def _look_at_keys(self) -> None:
        """Let in whoever was added to the key file, and cut whoever was removed."""
        assert self._connections is not None
        if isinstance(self._keys, KeyFile) and self._keys.look():
            for peer in self._connections.named():
                if self._is_shut_out(peer):
                    self._connections.cut(peer, "is let in no more")

    def _is_shut_out(self, peer: Peer) -> bool:
        """Whether a client that was let in was removed since: nothing that it sends counts from then on."""
        return isinstance(self._keys, KeyFile) and not self._keys.knows(peer.key.encode())

    def _check_key(self) -> None:
        """Answer ZeroMQ's question about a client (RFC 27): yes to one that knows what it has to, no to any other."""
        self._look_at_keys()
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self._key_check.recv_multipart()
        answer = (b"200", b"OK") if self._knows(mechanism, credentials) else (b"400", b"unknown key")
        user = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        self._key_check.send_multipart([version, request_id, *answer, user, b""])

    def _knows(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        if isinstance(self._keys, Token):
            return mechanism == b"PLAIN" and len(credentials) == 2 and self._keys.is_equal(credentials[1])
        known = () if self._keys is None else _server_keys(self._keys).clients
        return mechanism == b"CURVE" and len(credentials) == 1 and zmq.utils.z85.encode(credentials[0]) in known

    def close(self) -> None:
        """Close sockets and stores; replies that wait to be sent get a moment."""
        # In the reverse of the constructor's order: the lock goes last, when the next server finds all of it written.
        if self._connections is not None:
            self._connections.close()
        self._router.close()
        self._key_check.close(0)
        self._context.term()
        self._wake.close()
        self.waker.close()
        self.handler.close()
        self._lock.close()


def _server_keys(keys: ServerKeys | KeyFile) -> ServerKeys:
    return keys.keys if isinstance(keys, KeyFile) else keys


def _in(folder: Path) -> str:
    """Where a server listens that was told nothing: only whom the system lets into the folder comes in."""
    return f"ipc://{folder.absolute() / SOCKET}"


def _host_of(bind: str) -> str:
    """The host at which a server listens; loopback where that is a socket."""
    host = bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "127.0.0.1" if bind.startswith("ipc://") else "0.0.0.0" if host == "*" else host  # noqa: S104 - as asked


def check_bind(bind: str, keys: ServerKeys | KeyFile | Token | None) -> None:
    """Refuse an address that other machines reach where there are no keys, and what is no address.

    Raises:
        ValueError: the address is refused; the message says what to do.
    """
    if bind.startswith("ipc:///"):
        if len(os.fsencode(bind.removeprefix("ipc://"))) > MAX_SOCKET_BYTES:
            raise ValueError(
                f"the system takes at most {MAX_SOCKET_BYTES} bytes for the path of a socket, got {bind!r}: name a"
                " shorter one (--bind ipc:///run/user/1000/tables), in a folder that is yours alone, or bind"
                " tcp://127.0.0.1:0."
            )
        return
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):([0-9]{1,5})", bind)
    if match is None or int(match[2]) > 65535:
        raise ValueError(
            "bind must be tcp://host:port, such as tcp://127.0.0.1:0 (0: a free port), or ipc:///path/of/a/socket, got"
            f" {bind!r}."
        )
    if (keys is None or isinstance(keys, Token)) and not is_loopback(match[1].strip("[]")):
        raise ValueError(
            f"bind={bind!r} can be reached from other machines, so it needs keys: make some with "
            "`lightning-recsys-server --make-keys FILE`, give FILE to the server and to its clients (--keys FILE, "
            "connect(..., keys=FILE)), or bind tcp://127.0.0.1:0."
        )


def _bind(router: zmq.Socket[bytes], bind: str) -> None:
    router.ipv6 = "[" in bind
    if bind.startswith("ipc://"):
        _check_socket(bind)
    deadline = time.monotonic() + BIND_SECONDS
    monitor = router.get_monitor_socket(int(zmq.EVENT_LISTENING))
    others_may = os.umask(0o177)  # a socket is its owner's alone from the first moment on
    try:
        while True:
            try:
                router.bind(bind)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise OSError(error.errno, f"cannot listen on {bind}: {error.strerror}") from None
            time.sleep(0.05)
        send_unpaced(int(recv_monitor_message(monitor)["value"]))
    finally:
        os.umask(others_may)
        router.disable_monitor()
        monitor.close(0)


def _check_socket(bind: str) -> None:
    """Refuse a path where somebody listens, or where something else is: ZeroMQ would put its socket in that place."""
    path = bind.removeprefix("ipc://")
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, f"cannot listen on {bind}: there is a file of that name")
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {bind}: Address already in use")


def _lock(folder: Path) -> Any:
    """Hold the folder; the system lets go of it when the process ends, however it ends."""
    file = os.fdopen(open_own(folder / LOCK), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise FolderInUseError(f"another server serves {folder}; two would count the same pushes.") from None
    return file


@contextmanager
def waking_on_signals(waker: socket.socket) -> Iterator[None]:
    """SIGTERM and SIGINT are a byte on this socket, whose other end is waited at; it must not block.

    A handler in Python would not do alone: where the signal comes between the last Python instruction and the wait for
    requests, it would run after the next request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers: list[Any] = [lambda *_: None] * 2
    if multiprocessing.parent_process() is not None:
        handlers[1] = signal.SIG_IGN  # Ctrl-C reaches every process of a terminal; who started this one decides
    wakeup = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    before = [signal.signal(number, handler) for number, handler in zip(numbers, handlers, strict=True)]
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
