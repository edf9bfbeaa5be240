"""A plain ZeroMQ server that answers every request with so many bytes: what is left of a server without its work.

``python -m benchmarks.peers.zmq_echo [<file of keys>]``. With keys it encrypts as our servers do, and lets in whoever
has the server's public one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from lightning_recsys.parameter_server.keys import JobKeys

SIZE_BYTES = 8  # at the beginning of a request: how long its answer is to be


def serve(keys: JobKeys | None) -> None:
    """Serve until it is ended, and say where."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if keys is not None:
            router.curve_server, router.curve_secretkey = True, keys.server.secret
        router.bind("tcp://127.0.0.1:0")
        sys.stdout.write(f"ready: {router.getsockopt_string(zmq.LAST_ENDPOINT)}\n")
        sys.stdout.flush()
        answers: dict[int, bytes] = {}
        while True:
            sender, header, *_ = router.recv_multipart(copy=False)
            size = int.from_bytes(header.bytes[:SIZE_BYTES], "little")
            answer = answers.setdefault(size, bytes(size))
            router.send(sender, zmq.SNDMORE, copy=False)
            router.send(header, zmq.SNDMORE, copy=False)
            router.send(answer, copy=False)


@contextmanager
def asking(endpoint: str, keys: JobKeys | None) -> Iterator[zmq.Socket[bytes]]:
    """A client's socket, for :func:`ask`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        if keys is not None:
            socket.curve_serverkey = keys.client.server
            socket.curve_publickey, socket.curve_secretkey = keys.client.public, keys.client.secret
        socket.linger = 0
        socket.connect(endpoint)
        yield socket


def ask(socket: zmq.Socket[bytes], header: int, arrays: Sequence[memoryview], answer: int) -> None:
    """Send a header of so many bytes and some arrays, and wait for an answer of so many bytes."""
    socket.send(answer.to_bytes(SIZE_BYTES, "little").ljust(header, b"\0"), zmq.SNDMORE)
    for number, array in enumerate(arrays, 1):
        socket.send(array, zmq.SNDMORE if number < len(arrays) else 0, copy=False)
    socket.recv_multipart(copy=False)


if __name__ == "__main__":
    serve(JobKeys.load(Path(sys.argv[1])) if len(sys.argv) > 1 else None)
