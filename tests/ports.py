"""Ports for processes that tests start: nobody else gets them until the test has ended."""

import socket

_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port on which a process may listen seconds later, or where nobody listens.

    A socket that is bound, and does not listen, keeps the system from giving the port to anybody else meanwhile. Linux
    lets a server that sets SO_REUSEADDR, as torch's do, listen beside it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port


def free_ports(number: int) -> int:
    """The first of so many ports that follow each other, free as above."""
    while True:
        first, held = free_port(), []
        try:
            for port in range(first + 1, first + number):
                held.append(socket.socket())
                held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held[-1].bind(("", port))
        except OSError:  # somebody has one of them, or there is none so high
            for taken in held:
                taken.close()
            continue
        _HELD.extend(held)
        return first


def let_go() -> None:
    """Of all ports."""
    while _HELD:
        _HELD.pop().close()
