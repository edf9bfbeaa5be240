"""How ranks find each other: those of one machine where no other reaches them, those of several in bounded time."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

LOOPBACK = "127.0.0.1"


def loopback_store(port: int, *, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store by which the ranks of one machine meet; rank 0 keeps it, and no other machine can connect to it.

    Args:
        port: Where, on loopback.
        rank: Of this process.
        world_size: Ranks that will come.
        timeout: For all of them to come.

    Raises:
        OSError: somebody else listens there.
    """
    if rank:
        return TCPStore(LOOPBACK, port, world_size, is_master=False, timeout=timeout)
    listening = socket.create_server((LOOPBACK, port), backlog=max(128, 2 * world_size))  # reuses the address
    descriptor = listening.detach()  # the store's from now on
    return TCPStore(LOOPBACK, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def launcher_keeps_store() -> bool:
    """Whether there is a store before there are ranks: torchrun's own, unless it was told that rank 0 makes one."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def await_all_ranks(environment: ClusterEnvironment, patience: timedelta) -> None:
    """Return when every rank of a job of torchrun's has called this, through the store that torchrun keeps.

    Args:
        environment: Of the job.
        patience: For those that have more to do before they come here.

    Raises:
        RuntimeError: not all came in time, or the store is gone.
    """
    address = environment.main_address, environment.main_port
    store = TCPStore(*address, is_master=False, timeout=patience, wait_for_workers=False)
    place = f"lightning_recsys/ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if store.add(f"{place}/here", 1) == environment.world_size():
        store.set(f"{place}/all", "")
    store.wait([f"{place}/all"], patience)


def extend_timeout(timeout: timedelta) -> None:
    """What the default process group, and groups made of it, wait for from now on."""
    _set_pg_timeout(timeout)
    _get_default_store().set_timeout(timeout)
