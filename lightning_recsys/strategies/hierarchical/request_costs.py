"""The cost of a request to a group server on these machines, whatever it carries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD

from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.parts.operators import PROBE
from lightning_recsys.parameter_server.parts.remote_parts import RemoteParts
from lightning_recsys.partition.parts import Part
from lightning_recsys.strategies.hierarchical.cut.remote_forward import Net

PAUSE_SECONDS = 5e-3  # between two probes. A step computes meanwhile, and finds threads asleep and caches cold.
_FIRST = 2  # probes that do not count
_PROBES = 24  # that do, over all servers, and of each at least
_LEAST = 6


def measure_requests(servers: Iterable[Connection]) -> dict[str, float]:
    """Have a part that does nothing computed, forward and backward, a few times by each server.

    To be called while no other net asks them. It takes a fifth of a second, or a twentieth for each of many servers.

    Args:
        servers: Connections to the servers of a group, before they have parts of a model.

    Returns:
        ``trainer_seconds_per_request``, ``server_seconds_per_request`` and ``wait_per_request`` of
        :class:`~lightning_recsys.placement.machines.GroupMachines`, means over the servers. They add up to the median
        time of a request and its answer: where processor time of both ends was more, because they worked at the same
        time, each is taken in proportion.
    """
    connections = list(servers)
    probes = max(_PROBES // len(connections), _LEAST)
    costs = [_measure(connection, probes) for connection in connections]
    names = ("trainer_seconds_per_request", "server_seconds_per_request", "wait_per_request")
    return {name: statistics.mean(values) for name, values in zip(names, zip(*costs, strict=True), strict=True)}


def _measure(connection: Connection, probes: int) -> tuple[float, float, float]:
    part = Part(PROBE, "server", 0, nn.Identity(), ("x",), ("y",))
    net = Net({"server": RemoteParts(connection)}, SGD([torch.zeros(1)]), {PROBE: ()})
    seconds, own = [], 0.0
    for number in range(_FIRST + probes):
        if number == _FIRST:
            of_server = _processor_seconds(connection)
        time.sleep(PAUSE_SECONDS)
        x = torch.zeros(1, 1, requires_grad=True)
        began, processor = time.perf_counter(), time.process_time()
        (y,) = net.run(part, (x,))()
        time.sleep(PAUSE_SECONDS)
        y.backward(torch.ones(1, 1))  # type: ignore[no-untyped-call]
        if number >= _FIRST:
            seconds.append((time.perf_counter() - began - PAUSE_SECONDS) / 2)
            own += time.process_time() - processor
    request = statistics.median(seconds)
    trainer = own / (2 * probes)
    server = (_processor_seconds(connection) - of_server) / (2 * probes)
    share = min(1.0, request / (trainer + server))
    return share * trainer, share * server, max(0.0, request - trainer - server)


def _processor_seconds(connection: Connection) -> float:
    return float(connection.request("status").value["processor_seconds"])
