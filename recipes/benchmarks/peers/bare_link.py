"""What a link allows: a plain socket that answers every request of so many bytes with so many bytes.

``python -m benchmarks.peers.bare_link <endpoint> <bytes of a request> <bytes of an answer>``. Nothing is looked up,
framed, encrypted or copied; both ends use the same memory again and again.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def serve(endpoint: str, request_bytes: int, answer_bytes: int) -> None:
    """Serve one client until it leaves, and say when it may come."""
    request, answer = memoryview(bytearray(request_bytes)), bytes(answer_bytes)
    with socket.create_server(_address(endpoint)) as door:
        sys.stdout.write(f"ready: {endpoint}\n")
        sys.stdout.flush()
        client, _ = door.accept()
    with client, suppress(EOFError):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            receive(client, request)
            client.sendall(answer)


@contextmanager
def exchanges(endpoint: str, request_bytes: int, answer_bytes: int) -> Iterator[Callable[[], None]]:
    """A connection; the function that it gives sends a request and waits for the whole answer."""
    request, answer = bytes(request_bytes), memoryview(bytearray(answer_bytes))
    with socket.create_connection(_address(endpoint)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def exchange() -> None:
            server.sendall(request)
            receive(server, answer)

        yield exchange


def receive(peer: socket.socket, into: memoryview) -> None:
    """Fill some memory with what the other end sends.

    Raises:
        EOFError: it has left before.
    """
    done = 0
    while done < len(into):
        if not (more := peer.recv_into(into[done:])):
            raise EOFError("the other end has left.")
        done += more


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
