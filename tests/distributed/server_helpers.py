"""Servers and clients for tests: in a thread, in a process that can be killed, and a handler without a socket."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
import zmq

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.messages.wire import Limits, Request, decode_reply, encode_request
from lightning_recsys.parameter_server.server import Server

CLIENT = bytes(range(1, 17))
LAYOUT = TableLayout(
    (EmbeddingBagConfig("a", 6, 4, ("x", "y"), init_std=0.5), EmbeddingBagConfig("b", 3, 4, ("z",), init_std=0.5))
)


class ForgetfulServer(Server):
    """Loses one request in five, and three replies in ten.

    Attributes:
        lost: How many.
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._draws = random.Random(0)  # a fixed rhythm could hit the same request of every repetition
        self.lost = 0

    def _serve_one(self):
        try:
            sender, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        fate, peer = self._draws.random(), self._connections.sender(sender, frames[0])
        reply = self.handler.handle(frames, peer if peer and peer.is_alive else None) if fate > 0.2 else None
        if fate > 0.5 and peer is not None and peer.is_alive:
            self._connections.send(peer, reply)
        else:
            self.lost += 1
        return True


class OpenServer(Server):
    """Listens on loopback and asks nobody for a token: for raw sockets that count bytes as the system does for TCP."""

    def __init__(self, folder: Path, **options) -> None:
        super().__init__(folder, bind="tcp://127.0.0.1:0", **options)

    def _ask_for(self, keys) -> None:
        pass


@contextmanager
def running(folder: Path, *, kind: type[Server] = Server, **options) -> Iterator[Server]:
    """A server in a thread of this process."""
    folder.chmod(0o700)
    server = kind(folder, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()


def listening_child(endpoint: str, parent: psutil.Process | None = None) -> psutil.Process:
    """The process below this one, or below another, that listens at an ``ipc:///socket``."""
    path = endpoint.removeprefix("ipc://")
    for process in (parent or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another one that ends as we look
            if any(x.laddr == path for x in process.net_connections("unix")):
                return process
    raise AssertionError(f"nobody listens at {endpoint}")


def request_frames(
    operation: str, *arrays: torch.Tensor, sequence=0, store="", request_id=1, client=CLIENT, **arguments
):
    request = Request(operation, request_id, client, sequence, store, arguments, list(arrays))
    return [bytearray(frame) for frame in encode_request(request)]


def ask(handler: RequestHandler, operation: str, *arrays: torch.Tensor, **fields):
    """The reply of a handler, past all sockets."""
    return decode_reply(
        [bytearray(frame) for frame in handler.handle(request_frames(operation, *arrays, **fields))], Limits()
    )


def digest(folder: Path) -> dict[str, bytes]:
    """Every byte of every store."""
    return {str(path): path.read_bytes() for path in sorted(folder.glob("*/*"))}


def raw_dealer(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """A socket that sends what it likes."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    return socket
