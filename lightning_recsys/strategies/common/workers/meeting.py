"""How ranks find each other: those of one machine where no other reaches them, those of several in bounded time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.distributed import _init_dist_connection
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.strategies import DDPStrategy
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from lightning_recsys.launchers.loopback import LOOPBACK, join_store

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun sets it
MEETING_TIME = timedelta(seconds=60)  # for the connections between machines, once all ranks are there


def join_process_group(strategy: RecsysStrategy, join: Callable[[], None]) -> None:
    """Join the process group, on one machine where no other reaches it.

    Workers of an asynchronous run, which may die, meet at a server, and otherwise find each other by the store of who
    has started them. Machines that cannot reach each other end soon, instead of one waiting for the other.

    Args:
        strategy: The strategy of this process.
        join: What ``DDPStrategy`` does for it.

    Raises:
        RuntimeError: the ranks cannot connect to each other.
    """
    place = None if dist.is_initialized() else strategy.run_servers.meeting_place()
    if place is not None:
        from lightning_recsys.strategies.common.workers.succession import meet_at

        strategy._process_group_backend = meet_at(place, strategy)
        join_by_store(strategy)
    elif dist.is_initialized() or (strategy.num_nodes == 1 and not strategy.launches):
        join()
        _set_pg_timeout(strategy.patience)  # an engine that has made the group does not know it
    elif strategy.num_nodes == 1:
        join_by_store(strategy)
    else:
        with ending_soon(strategy):
            join()


def await_all_ranks(environment: ClusterEnvironment, patience: timedelta) -> None:
    """Return when every rank of a job of torchrun's has called this, through the store that torchrun keeps.

    Args:
        environment: The cluster environment of the job.
        patience: Time for ranks that have more to do before they come here.

    Raises:
        RuntimeError: not all came in time, or the store is gone.
    """
    address = environment.main_address, environment.main_port
    store = TCPStore(*address, is_master=False, timeout=patience, wait_for_workers=False)
    place = f"lightning_recsys/ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if store.add(f"{place}/here", 1) == environment.world_size():
        store.set(f"{place}/all", "")
    store.wait([f"{place}/all"], patience)


def connect_members(
    places: Store, rank: int, num_members: int, *, host: str, patience: timedelta
) -> dist.ProcessGroupGloo:
    """A group that connects to all its members at once, and is no other group's part; all of them call this together.

    Dropping the last reference to it leaves it. Torch's default group is not touched: torch numbers that by the groups
    that a process has tried to make, so a process that was started later could not find the others.

    Args:
        places: A store of this group alone, where its members find each other.
        rank: Number of this member in the group.
        num_members: Number of members of the group.
        host: Host name or address at which the others reach each member: loopback, or any other for what torch chooses
            on each machine.
        patience: Time for members that are behind in a collective. Those that die are noticed at once.

    Raises:
        RuntimeError: one of them did not come, or went again.
    """
    if host == LOOPBACK:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = MEETING_TIME  # a member that has died since does not come
        group = dist.ProcessGroupGloo(places, rank, num_members, options)
    else:
        group = dist.ProcessGroupGloo(places, rank, num_members, MEETING_TIME)
    group._set_default_timeout(patience)
    return group


def join_by_store(strategy: RecsysStrategy) -> None:
    """Join the process group as ``DDPStrategy`` does, by the store of who has started this process.

    Where that is our launcher, the store is on loopback; torch's own listens to everybody.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    reset_seed()
    strategy.set_world_ranks()
    strategy._process_group_backend = strategy._get_process_group_backend()
    host = LOOPBACK if strategy.launches else environment.main_address
    store = join_store(environment.main_port, host=host, timeout=strategy.patience)
    device = strategy.root_device if strategy.root_device.type != "cpu" else None
    options: dict[str, Any] = {"timeout": strategy._timeout, "device_id": device, "store": store}
    _init_dist_connection(environment, strategy._process_group_backend, **options)


@contextmanager
def ending_soon(strategy: DDPStrategy) -> Iterator[None]:
    """Meanwhile machines that cannot reach each other end soon, instead of one waiting for the other.

    Raises:
        RuntimeError: they cannot; the error says what to look at.
    """
    environment, patience = strategy.cluster_environment, strategy._timeout
    assert environment is not None
    # There is a store before there are ranks: torchrun's own, unless it was told that rank 0 makes one.
    has_store = isinstance(environment, TorchElasticEnvironment) and os.environ.get(AGENT_STORE) == "True"
    afterwards = patience if has_store else None  # what the group waits for once all are connected
    if afterwards is not None:
        await_all_ranks(environment, afterwards)
        strategy._timeout = min(afterwards, MEETING_TIME)
    try:
        yield
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the one of this machine's own name")
        raise RuntimeError(
            f"rank {environment.global_rank()} of {environment.world_size()} could not connect to the others (main"
            f" node {environment.main_address}:{environment.main_port}). Name the network interface on each machine"
            f" (GLOO_SOCKET_IFNAME=eth0; it is {interface}), and see that a firewall lets machines connect to any"
            f" port of each other. What was tried: {error}"
        ) from error
    finally:
        strategy._timeout = patience
    if afterwards is not None:
        _set_pg_timeout(afterwards)
        _get_default_store().set_timeout(afterwards)
