"""Two hosts on one machine: network namespaces joined by a link. Needs root and iproute2."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Host:
    """A namespace, its address, and its end of the link."""

    namespace: str
    address: str
    link: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def enter(self) -> None:
        """Let this process live there; only the calling thread moves, and those that it starts."""
        with open(f"/var/run/netns/{self.namespace}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def set_link(self, state: str) -> None:
        """Cut the link (``down``), or mend it (``up``)."""
        _ip("-n", self.namespace, "link", "set", self.link, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Namespaces of this process's own, gone afterwards; the test is skipped where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    pid = os.getpid()
    hosts = tuple(
        Host(f"lrs{pid}{x}", f"10.{64 + pid % 64}.{pid // 64 % 256}.{i}", f"v{pid}{x}") for i, x in ((1, "a"), (2, "b"))
    )
    a, b = hosts
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.namespace)
            _ip("link", "add", a.link, "netns", a.namespace, "type", "veth", "peer", b.link, "netns", b.namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for host in hosts:
            inside = ("-n", host.namespace)
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.link)
            host.set_link("up")
            _ip(*inside, "link", "set", "lo", "up")
        yield a, b
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
