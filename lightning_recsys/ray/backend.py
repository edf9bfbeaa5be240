"""How Ray Train lets the ranks of a run meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from uuid import uuid4

import psutil
import ray
import ray.util
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from torch._C._distributed_c10d import TCPStore

ANSWER_SECONDS = 10.0  # for a worker to say that it lives
INTERFACE = "GLOO_SOCKET_IFNAME"
START = "LIGHTNING_RECSYS_RAY_START"  # names this start of a run's workers; those that are replaced later have it, too
REPLACES = "LIGHTNING_RECSYS_RAY_REPLACES"  # 1 in a worker that replaces another one, 0 in others that may be replaced


@dataclass
class RecsysTorchConfig(TorchConfig):
    """``TorchConfig`` whose workers reach each other by the network interface of their node's address in Ray.

    gloo takes the address that the machine's own name stands for, which is loopback on many, and Ray makes the process
    group before a training function runs. A worker whose ``GLOO_SOCKET_IFNAME`` is set keeps it.

    Args:
        replaces_workers: Let the other workers go on when one dies, and start another one in its place. There is no
            process group before the training function runs then: workers meet at a server of their strategy.

    Raises:
        RuntimeError: this version of Ray cannot replace single workers.
    """

    replaces_workers: bool = False

    def __post_init__(self) -> None:
        if self.replaces_workers and not hasattr(Backend, "has_replica_groups"):
            raise RuntimeError(
                f"Ray {ray.__version__} starts all workers again when one dies; 2.60 replaces single ones."
            )

    @property
    def backend_cls(self) -> type[_TorchBackend]:  # noqa: D102 - inherited
        return _ReplacingBackend if self.replaces_workers else _Backend


class _Backend(_TorchBackend):
    """Lives in the process of Ray that starts the workers of a run, and again those that failed."""

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: Any) -> None:
        worker_group.execute(name_interface)
        worker_group.execute(_tell, {START: uuid4().hex})
        super().on_start(worker_group, backend_config)


class _ReplacingBackend(_TorchBackend):
    has_replica_groups = True  # Ray replaces a worker that fails, unless all do
    share_cuda_visible_devices = False  # each worker is a node of its own, whose first GPU it takes

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: Any) -> None:
        replaces = _is_of_one(worker_group)
        if not replaces:
            self._workers: Any = worker_group
            self._start = uuid4().hex
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            # By which workers find each other, as long as any of them lives.
            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        told = {
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            START: self._start,
            REPLACES: str(int(replaces)),
        }
        worker_group.execute(name_interface)
        worker_group.execute(_tell, told)

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: Any) -> None:
        if not _is_of_one(worker_group):
            super().on_shutdown(worker_group, backend_config)
            return
        # One worker is gone, and Ray (2.60) asks the others to forget what they have reported. It would give the whole
        # run up where another one has died at the same time, which is to be replaced next.
        for other in self._workers.get_replica_groups():
            if other is not worker_group and other.is_active() and not _lives(other):
                other._active = False


def _is_of_one(group: BaseWorkerGroup) -> bool:
    """Whether this is the group of one worker that is replaced, and not that of all."""
    from ray.train.v2._internal.execution.worker_group import ReplicaGroup

    return isinstance(group, ReplicaGroup)


def _lives(group: Any) -> bool:
    try:
        answers: Any = group.execute_async(os.getpid)
        ray.get(answers, timeout=ANSWER_SECONDS)
    except RayActorError:
        return False
    except GetTimeoutError:
        return True
    return True


def _tell(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


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
