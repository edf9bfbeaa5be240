"""A process that reads for all workers of a machine: each worker's batches come to it through shared memory.

The reader listens on a socket that its owner (one of the workers) has opened. A worker connects, says which batches it
wants, and gets a file descriptor of anonymous shared memory, cut into slots. The reader fills a slot with a pack of
batches, many where they are small, and says so over the connection; the worker copies the pack out and gives the slot
back. So what an exchange costs (four system calls, two changes of process) is paid once in half a megabyte. Windows of
rows are read once, however many workers take rows from them.

Nothing has a name: not the memory (``memfd_create``), not the socket (Linux's abstract namespace). So nothing can be
left behind, whoever is killed. A side that dies closes its connections, which the other side sees. The reader ends
when its owner has closed, or died, and the last worker has gone. Processes that a side has forked have copies of all
that it had open: so who leaves says so, by a byte or by shutting its connection down, and does not rely on closing.
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.prepared.manifest import Manifest
from lightning_recsys.data.prepared.order import EpochOrder
from lightning_recsys.data.prepared.packs import PackLayout, packs
from lightning_recsys.data.prepared.rows import PreparedRows
from lightning_recsys.data.prepared.stream import StreamRequest, Windows, prefetched, read_batches
from lightning_recsys.runtime import process_end

_HEADER = struct.Struct("<BIQQ")
_REQUEST, _LAYOUT, _MEMORY, _PACK, _FREE, _END, _ERROR = range(7)
_PROGRAM = "from lightning_recsys.data.prepared.service import main; main()"
_WINDOWS = 3  # of an epoch that are held in memory: workers need not be in step


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
        RuntimeError: the reader has ended.
    """
    with _own_connection() as connection:
        try:
            connection.connect(address)
            _send_text(connection, _REQUEST, {**asdict(request), "slots": slots})
            yield from _receive(connection)
        except (ConnectionError, EOFError) as error:
            raise RuntimeError(
                "the reader process (data.reader=shared) has ended: it was killed, or the worker that owns it ended "
                "early. Its own output says more."
            ) from error


@contextmanager
def _own_connection() -> Iterator[socket.socket]:
    """A connection that this process ends, whoever has forked from it meanwhile; their copies end nothing."""
    own = os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            yield connection
        finally:
            if os.getpid() == own:
                with suppress(OSError):  # never connected, or broken
                    connection.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket) -> Iterator[Batch]:
    memory: mmap.mmap | None = None
    layout: PackLayout | None = None
    try:
        while (message := _read(connection)).kind != _END:
            if message.kind == _ERROR:
                raise ValueError(_read_text(connection, message)["error"])
            if message.kind == _LAYOUT:
                layout = PackLayout(**_read_text(connection, message))
            elif message.kind == _MEMORY:
                if memory is not None:
                    memory.close()
                memory = _receive_memory(connection, message.size)
            else:
                assert memory is not None
                assert layout is not None
                pack = np.frombuffer(memory, np.uint8, message.size, message.start).copy()
                _send(connection, _Message(_FREE, message.memory, message.start, 0))
                yield from layout.unpack(pack)
    finally:
        if memory is not None:
            memory.close()


def _receive_memory(connection: socket.socket, size: int) -> mmap.mmap:
    _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
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
            thread = threading.Thread(target=self._serve, args=(listener.accept()[0],), daemon=True)
            thread.start()
            threads = [*(x for x in threads if x.is_alive()), thread]
        listener.close()
        for thread in threads:
            thread.join()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError, EOFError):  # the worker has gone
            try:
                options = _read_text(connection, _read(connection))
                slots = options.pop("slots")
                request = StreamRequest(**options)
                rows, windows = self._share(request)
                with closing(prefetched(packs(read_batches(request, rows, windows)), depth=1)) as made:
                    _serve_packs(connection, made, slots)
            except ValueError as error:
                _send_text(connection, _ERROR, {"error": str(error)})
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
                order = EpochOrder(rows.group_rows, seed=request.seed, epoch=request.epoch, window=request.window)
                self._windows[key] = Windows(rows, order, keep=_WINDOWS)
            return rows, self._windows[key]


def _serve_packs(connection: socket.socket, made: Iterator[list[Batch]], num_slots: int) -> None:
    """Send packs through slots of shared memory; where one needs a larger slot, through new memory."""
    memory: mmap.mmap | None = None
    layout: PackLayout | None = None
    slot_bytes = number = 0
    free: list[int] = []
    try:
        for pack in made:
            if layout is None:
                layout = PackLayout.of(pack[0])
                _send_text(connection, _LAYOUT, asdict(layout))
            size = layout.size(pack)
            if size > slot_bytes:
                if memory is not None:
                    memory.close()  # what the worker has not read yet is mapped by itself
                slot_bytes, number = -(-size // 64) * 72, number + 1  # an eighth more: packs of bags differ
                memory = _send_memory(connection, slot_bytes * num_slots)
                free = [slot_bytes * i for i in range(num_slots)]
            assert memory is not None
            while not free:
                message = _read(connection)
                if message.memory == number:
                    free.append(message.start)
            start = free.pop()
            layout.write(pack, memory, start)
            _send(connection, _Message(_PACK, number, start, size))
        _send(connection, _Message(_END, 0, 0, 0))
        _wait_for_the_end(connection)
    finally:
        if memory is not None:
            memory.close()


def _wait_for_the_end(connection: socket.socket) -> None:
    """Until the worker has read everything and goes; closed earlier, the connection would break while it sends."""
    while connection.recv(1 << 16):
        pass


def _send_memory(connection: socket.socket, size: int) -> mmap.mmap:
    descriptor = os.memfd_create("lightning-recsys")
    try:
        os.ftruncate(descriptor, size)
        _send(connection, _Message(_MEMORY, 0, 0, size))
        socket.send_fds(connection, [b"m"], [descriptor])
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


# --- messages on the connection --------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """What goes over the connection; after ``_REQUEST``, ``_LAYOUT`` and ``_ERROR`` comes text of ``size`` bytes.

    Args:
        kind: The kind of message: ``_REQUEST`` or another of the constants above.
        memory: Number of the piece of shared memory that is meant.
        start: Position in that memory where the pack begins.
        size: Bytes of the pack, of the shared memory, or of the text.
    """

    kind: int
    memory: int
    start: int
    size: int


def _send(connection: socket.socket, message: _Message) -> None:
    connection.sendall(_HEADER.pack(*message))


def _send_text(connection: socket.socket, kind: int, content: dict[str, Any]) -> None:
    text = json.dumps(content).encode()
    connection.sendall(_HEADER.pack(kind, 0, 0, len(text)) + text)


def _read(connection: socket.socket) -> _Message:
    return _Message(*_HEADER.unpack(_read_exactly(connection, _HEADER.size)))


def _read_text(connection: socket.socket, message: _Message) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_read_exactly(connection, message.size))
    return content


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise EOFError
        content += more
    return content


def main() -> None:
    """The reader process: ``ROOT DESCRIPTOR OWNER``, of the listening socket and the process id of who started us."""
    root, descriptor, owner = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when to end
    torch.set_num_threads(1)
    with socket.socket(fileno=int(descriptor)) as listener, suppress(ProcessLookupError):  # has died already
        _Service(Path(root)).run(listener, owner=[sys.stdin.fileno(), *process_end(int(owner))])
