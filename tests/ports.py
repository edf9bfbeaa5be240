"""Ports for processes that tests start: nobody else gets them until the test has ended."""

import random
import socket

# Below the ports that the system gives to whoever asks for any: it gives one that is held as below to another server.
_RANGE = range(20_000, 32_000)
_CHANCE = random.SystemRandom()  # other ones in each process: tests seed what others draw from
_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port on which a process may listen seconds later, or where nobody listens.

    A socket that is bound, and does not listen, keeps other tests from it meanwhile. Linux lets a server that sets
    SO_REUSEADDR, as torch's do, listen beside it.
    """
    return free_ports(1)


def free_ports(number: int) -> int:
    """The first of so many ports that follow each other, free as above."""
    while True:
        first, held = _CHANCE.choice(_RANGE), []
        try:
            for port in range(first, first + number):
                held.append(_hold(port))
        except OSError:  # somebody has one of them
            for taken in held:
                taken.close()
            continue
        _HELD.extend(held)
        return first


def _hold(port: int) -> socket.socket:
    with socket.socket() as alone:
        alone.bind(("", port))  # without SO_REUSEADDR: nobody else has it, not even bound as below
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", port))
    return held


def let_go() -> None:
    """Of all ports."""
    while _HELD:
        _HELD.pop().close()
