"""How Ray Train lets the ranks of a run meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import psutil
import ray
import ray.util
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass
class RecsysTorchConfig(TorchConfig):
    """``TorchConfig`` whose workers reach each other by the network interface of their node's address in Ray.

    gloo takes the address that the machine's own name stands for, which is loopback on many, and Ray makes the process
    group before a training function runs. A worker whose ``GLOO_SOCKET_IFNAME`` is set keeps it.
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:  # noqa: D102 - inherited
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: Any) -> None:
        worker_group.execute(name_interface)
        super().on_start(worker_group, backend_config)


def name_interface() -> None:
    """Let gloo of this process use the interface of this node's address in Ray, unless one was chosen."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if (name := interface_of(address)) is not None:
        os.environ.setdefault(INTERFACE, name)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address; ``None`` where none has, as behind a container's NAT.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', None)
    """
    wanted = ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family.name in ("AF_INET", "AF_INET6") and ip_address(found.address.partition("%")[0]) == wanted:
                return str(name)
    return None
