"""Two hosts on one machine: network namespaces joined by a link of a given rate. Needs root and iproute2.

A namespace outlives the process that made it. So its name has the process's id, and whoever comes next removes those of
processes that were killed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

HEADERS = 66  # bytes of a packet: Ethernet 14, IP 20, TCP with time stamps 32

RUNNING_SECONDS = 30.0  # for a link to run on a busy machine

_numbers = count()  # of the links of this process: several may be there at once


@dataclass(frozen=True)
class Host:
    """A namespace.

    Args:
        namespace: Name of the network namespace, as ``ip netns`` lists it.
        address: Its address on the link.
        interface: Its end of the link.
    """

    namespace: str
    address: str
    interface: str

    def command(self, *command: str) -> list[str]:
        """The command, run there."""
        return ["ip", "netns", "exec", self.namespace, *command]


class NoLinkError(RuntimeError):
    """There can be no namespaces here; says why."""


@contextmanager
def linked_hosts(rate: str | None = "1gbit") -> Iterator[tuple[Host, Host]]:
    """Two hosts of this process's own, gone afterwards.

    Args:
        rate: Of the link, in each direction, in the words of ``tc``; ``None`` for as fast as the machine is.

    Raises:
        NoLinkError: namespaces need root, iproute2 and a kernel that has them.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoLinkError("network namespaces need root and iproute2")
    _remove_left_over()
    pid, number = os.getpid(), next(_numbers)
    hosts = tuple(
        Host(f"lrb{pid}-{number}{x}", f"10.{128 + pid % 64}.{pid // 64 % 256}.{i}", f"b{pid}-{number}{x}")
        for i, x in ((1, "a"), (2, "b"))
    )
    a, b = hosts
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        _run(*f"ip link add {a.interface} netns {a.namespace} type veth peer {b.interface} netns {b.namespace}".split())
        for host in hosts:
            inside = ("ip", "-n", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*inside, "link", "set", host.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
        for host in hosts:
            _await_running(host)
        if rate is not None:
            limit_rate((a, b), rate)
        yield a, b
    finally:
        for host in hosts:
            _delete(host.namespace)


def limit_rate(hosts: tuple[Host, Host], rate: str, *, burst: str = "128kb") -> None:
    """Give the link another rate, in each direction; whatever runs there goes on.

    Args:
        hosts: Its ends.
        rate: In the words of ``tc``.
        burst: What goes through at once after a pause, in the same words: ``128kb``. A large one lets short messages
            through for free. Packets that the kernel joins are no larger, for they would be cut up one by one.
    """
    kilo = burst.endswith("kb")
    joined = min(65536, 2 * int(burst.rstrip("kb")) * (1024 if kilo else 1) // 3)
    for host in hosts:
        _run(*host.command(*f"ip link set dev {host.interface} gso_max_size {joined}".split()))
        shape = f"tc qdisc replace dev {host.interface} root tbf rate {rate} burst {burst} latency 50ms"
        _run(*host.command(*shape.split()))


def counted_by(interface: str) -> tuple[int, int, int, int]:
    """Bytes and packets that an interface of this process's host has sent so far, then those that it has received."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            columns = numbers.split()
            return int(columns[8]), int(columns[9]), int(columns[0]), int(columns[1])
    raise ValueError(f"there is no network interface {interface!r}.")


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_running(host: Host) -> None:
    """Wait until the kernel says that the interface runs, which may be later than that both of its ends are up.

    Torch RPC skips interfaces that do not run where it looks for an address by an interface's name.
    """
    deadline = time.monotonic() + RUNNING_SECONDS
    while " UP " not in _run("ip", "-n", host.namespace, "-brief", "link", "show", "dev", host.interface):
        if time.monotonic() > deadline:
            raise NoLinkError(f"{host.interface} in {host.namespace} does not run after {RUNNING_SECONDS:.0f} s")
        time.sleep(0.02)


def _remove_left_over() -> None:
    """Remove the namespaces of processes that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)  # noqa: S607
    for name, pid in re.findall(r"^(lrb(\d+)-\d+[ab])\b", listed.stdout, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            _delete(name)


def _delete(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)  # noqa: S603, S607


def _run(*command: str) -> str:
    """Run a command; returns what it said."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise NoLinkError(f"{' '.join(command)}: {error.stderr.strip()}") from None
