"""A process that reads for all workers of a machine: each worker's batches come to it through shared memory.

The reader listens on a socket that its owner (one of the workers) has opened. A worker connects, says which batches it
wants, and gets a file descriptor of anonymous shared memory, cut into slots. The reader fills a slot with a pack of
batches, many where they are small, and says so over the connection; the worker copies the pack out and gives the slot
back. So what an exchange costs (four system calls, two changes of process) is paid once in some 2,048 rows. Windows of
rows are read once, however many workers take rows from them.

Nothing has a name: not the memory (``memfd_create``), not the socket (Linux's abstract namespace). So nothing can be
left behind, whoever is killed. A side that dies closes its connections, which the other side sees. The reader ends
when its owner has closed, or died, and the last worker has gone. Processes that a side has forked have copies of all
that it had open: so who leaves says so, by a byte or by shutting its connection down, and does not rely on closing.

Names in that namespace have no owner: where a reader has ended, another user's process could take its name. A worker
unpickles what its reader sends, and a reader hands out the rows; so each side asks the system whose the other one is.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.prepared.manifest import Manifest
from lightning_recsys.data.prepared.packs import padded, put_together, take_apart, write
from lightning_recsys.data.prepared.rows import PreparedRows
from lightning_recsys.data.prepared.stream import StreamRequest, Windows, prefetched, read_packs
from lightning_recsys.runtime import process_end

_PROGRAM = "from lightning_recsys.data.prepared.service import main; main()"
_WINDOWS = 3  # of an epoch that are held in memory: workers need not be in step


class ReaderEndedError(RuntimeError):
    """The reader process of this machine is gone; it was killed, or its owner was, and another worker ended before."""


class Reader:
    """The reader process, from its owner's side.

    Args:
        root: The folder of prepared rows.

    Raises:
        RuntimeError: the system is not Linux.
    """

    def __init__(self, root: Path) -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"data.reader=shared needs Linux, this is {sys.platform}. Use data.reader=local.")
        self.address = f"\0lightning-recsys-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(128)  # workers may connect while the reader is still starting
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-c", _PROGRAM, str(root), str(listener.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,  # a byte, or our death, tells the reader to end
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def close(self, timeout: float = 30.0) -> None:
        """End the process, once the last worker has gone.

        Args:
            timeout: Seconds to wait for that; then it is killed.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as told:  # it has ended
            told.write(b"\0")
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def receive_batches(address: str, request: StreamRequest, *, slots: int) -> Iterator[Batch]:
    """The batches of a request, made by the reader that listens at an address.

    Args:
        address: Where the reader listens: :attr:`Reader.address`.
        request: Says which batches to make.
        slots: Packs of batches that may wait in shared memory.

    Raises:
        ValueError: the reader found a damaged shard.
        ReaderEndedError: the reader has ended.
    """
    try:
        with _own_connection(address) as connection:
            _tell(connection, "request", slots=slots, request=asdict(request))
            yield from _receive(connection)
    except (ConnectionError, EOFError) as error:
        raise ReaderEndedError(
            "the reader process (data.reader=shared) has ended: it was killed, or the worker that owns it ended early."
        ) from error


@contextmanager
def _own_connection(address: str) -> Iterator[Connection]:
    """A connection that this process ends, whoever has forked from it meanwhile; their copies end nothing."""
    own = os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(address)
        if _user_at(end) != os.geteuid():
            raise ConnectionRefusedError(f"{address!r} is another user's")
        try:
            with Connection(os.dup(end.fileno())) as connection:
                yield connection
        finally:
            if os.getpid() == own:
                with suppress(OSError):  # it is broken
                    end.shutdown(socket.SHUT_RDWR)


def _user_at(end: socket.socket) -> int:
    """Whose process connected, or listened, at the other end: its effective user id at that moment."""
    credentials = struct.Struct("3i")  # process, user, group
    user: int = credentials.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]
    return user


def _receive(connection: Connection) -> Iterator[Batch]:
    memory: mmap.mmap | None = None
    try:
        while (message := _hear(connection))["kind"] != "end":
            match message["kind"]:
                case "error":
                    raise ValueError(message["error"])
                case "memory":
                    if memory is not None:
                        memory.close()
                    memory = _receive_memory(connection, message["size"])
                case "pack":
                    assert memory is not None
                    head, sizes = connection.recv_bytes(), message["sizes"]
                    pack = np.frombuffer(memory, np.uint8, padded(sizes), message["start"]).copy()
                    _tell(connection, "free", memory=message["memory"], start=message["start"])
                    yield from put_together(head, sizes, pack)
    finally:
        if memory is not None:
            memory.close()


def _receive_memory(connection: Connection, size: int) -> mmap.mmap:
    descriptor = recv_handle(connection)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


# --- the reader process ----------------------------------------------------------------------------------------------


class _Service:
    """Serves every connection in a thread of its own.

    Args:
        root: The folder of prepared rows.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._manifest = Manifest.load(root)
        self._rows: dict[str, PreparedRows] = {}
        self._windows: dict[tuple[str, int, int, int], Windows] = {}
        self._lock = threading.Lock()

    def run(self, listener: socket.socket, owner: Collection[int]) -> None:
        """Serve until a file descriptor of the owner's says that it leaves, and the last worker has gone."""
        threads: list[threading.Thread] = []
        while True:
            sources: list[Any] = [listener, *owner]
            readable, _, _ = select.select(sources, [], [])
            if listener not in readable:
                break
            end = listener.accept()[0]
            if _user_at(end) != os.geteuid():
                end.close()
                continue
            connection = Connection(end.detach())
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()
            threads = [*(x for x in threads if x.is_alive()), thread]
        listener.close()
        for thread in threads:
            thread.join()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(ConnectionError, EOFError):  # the worker has gone
            try:
                asked = _hear(connection)
                request = StreamRequest(**asked["request"])
                rows, windows = self._share(request)
                with closing(prefetched(read_packs(request, rows, windows), depth=1)) as made:
                    _serve_packs(connection, made, asked["slots"])
            except ValueError as error:
                _tell(connection, "error", error=str(error))
                _wait_for_the_end(connection)

    def _share(self, request: StreamRequest) -> tuple[PreparedRows, Windows]:
        """The windows of the epoch, the same for all who ask; those of earlier epochs are let go."""
        key = request.split, request.seed, request.epoch, request.window
        with self._lock:
            if request.split not in self._rows:
                shards = self._manifest.splits[request.split]
                self._rows[request.split] = PreparedRows(self._root, self._manifest, shards)
            rows = self._rows[request.split]
            if key not in self._windows:
                for old in [x for x in self._windows if x[0] == request.split]:
                    del self._windows[old]
                self._windows[key] = Windows(rows, request, keep=_WINDOWS)
            return rows, self._windows[key]


def _serve_packs(connection: Connection, made: Iterator[list[Batch]], num_slots: int) -> None:
    """Send packs through slots of shared memory; where one needs a larger slot, through new memory."""
    memory: mmap.mmap | None = None
    slot_bytes = number = 0
    free: list[int] = []
    try:
        for pack in made:
            head, pieces = take_apart(pack)
            sizes = [piece.nbytes for piece in pieces]
            if padded(sizes) > slot_bytes:
                if memory is not None:
                    memory.close()  # what the worker has not read yet is mapped by itself
                slot_bytes, number = -(-padded(sizes) // 64) * 72, number + 1  # an eighth more: packs of bags differ
                memory = _send_memory(connection, slot_bytes * num_slots)
                free = [slot_bytes * i for i in range(num_slots)]
            assert memory is not None
            while not free:
                message = _hear(connection)
                if message["memory"] == number:
                    free.append(message["start"])
            start = free.pop()
            write(pieces, memory, start)
            _tell(connection, "pack", memory=number, start=start, sizes=sizes)
            connection.send_bytes(head)
        _tell(connection, "end")
        _wait_for_the_end(connection)
    finally:
        if memory is not None:
            memory.close()


def _wait_for_the_end(connection: Connection) -> None:
    """Until the worker has read everything and goes; closed earlier, the connection would break while it sends."""
    with suppress(EOFError):
        while True:
            _hear(connection)


def _send_memory(connection: Connection, size: int) -> mmap.mmap:
    descriptor = os.memfd_create("lightning-recsys")
    try:
        os.ftruncate(descriptor, size)
        _tell(connection, "memory", size=size)
        send_handle(connection, descriptor, 0)  # the last is for Windows
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


# --- messages on the connection: JSON, since whoever can connect to the reader must not make it unpickle anything -


def _tell(connection: Connection, kind: str, **content: Any) -> None:
    connection.send_bytes(json.dumps({"kind": kind, **content}).encode())


def _hear(connection: Connection) -> dict[str, Any]:
    """The next message.

    Raises:
        EOFError: the other side has gone.
    """
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes())
    except OSError as error:  # in the midst of a message
        raise EOFError from error
    return message


def main() -> None:
    """The reader process: ``ROOT DESCRIPTOR OWNER``, of the listening socket and the process id of who started us."""
    root, descriptor, owner = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when to end
    torch.set_num_threads(1)
    with socket.socket(fileno=int(descriptor)) as listener, suppress(ProcessLookupError):  # has died already
        _Service(Path(root)).run(listener, owner=[sys.stdin.fileno(), *process_end(int(owner))])
