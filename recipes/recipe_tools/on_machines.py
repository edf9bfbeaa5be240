"""A cluster of the simulator on the machines of a file: their ports, and a group's cores, in place of its own."""

from __future__ import annotations

import copy
from typing import Any

from recipe_tools.build import Config

from lightning_recsys.placement.machine_kinds import MachineKind, Machines, read_machines


def on_machines(cluster: Config, chosen: Config) -> Config:
    """The configuration of a cluster with the links of a file of machines, and where it has groups with their cores.

    Numbers of workers and servers stay the cluster's, and so do times of a batch, which no file of machines knows.

    Args:
        cluster: The node ``cluster`` of a configuration, with ``link`` and ``servers.link``, and where it has them
            ``synchronization.servers`` and ``group``. It stays as it is.
        chosen: ``file``, or ``None`` for none; ``workers`` and ``servers``, the kinds of machines that they are on.
            Where a file has one kind, it is that of both.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read, or has no such kind; the message names the key.
    """
    if chosen["file"] is None:
        if named := [name for name in ("workers", "servers") if chosen[name] is not None]:
            raise ValueError(f"machines.{named[0]} names a kind of a file: add machines.file=... to the command line.")
        return cluster
    machines = read_machines(chosen["file"])
    workers, servers = (_kind(machines, chosen, name) for name in ("workers", "servers"))
    made = copy.deepcopy(cluster)
    made["link"] |= _link(workers)
    made["servers"]["link"] |= _link(servers)
    if (centre := (made.get("synchronization") or {}).get("servers")) is not None:
        centre["link"] |= _link(servers)
    if (group := made.get("group")) is not None:
        group |= {"cores": workers.cores, **_link(workers)}
        if workers.gflops is not None:
            group["flops"] = workers.gflops * 1e9
    return made


def _kind(machines: Machines, chosen: Config, name: str) -> MachineKind:
    kinds, wanted = machines.kinds, chosen[name]
    if wanted is None and len(kinds) == 1:
        return next(iter(kinds.values()))
    if wanted not in kinds:
        raise ValueError(f"machines.{name} must be a kind of {chosen['file']}: {', '.join(kinds)}; got {wanted}.")
    return kinds[wanted]


def _link(kind: MachineKind) -> dict[str, Any]:
    """Half of a message's time is that of either end."""
    return {"bandwidth": kind.port.bandwidth, "latency": kind.port.latency / 2}
