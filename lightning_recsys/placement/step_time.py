"""How long a step takes with a plan, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recsys.placement.loads import DeviceLoad, LoadModel
from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER, OperatorGraph
from lightning_recsys.placement.queueing import closed_network_seconds


@dataclass(frozen=True)
class Utilisation:
    """Shares of what a device has, 1 for all of it.

    Args:
        cpu: Share of the time of its cores.
        network: Share of the busier direction of its link.
        memory: Share of the memory that it has for what is placed on it.
    """

    cpu: float
    network: float
    memory: float


@dataclass(frozen=True)
class StepTime:
    """The prediction for one plan. ``print`` shows it as a table.

    Args:
        seconds: One step of a net, while all nets of the group make theirs.
        alone_seconds: One step of a net while no other runs.
        bottleneck: The resource that would be busy all the time with ever more nets.
        examples_per_second: Examples per second of the whole group.
        loads: What each device does while every net makes one step.
        utilisation: Which shares of its resources each device uses.
        plan: Which device computes each operator.
        graph: The operators whose step was timed.
    """

    seconds: float
    alone_seconds: float
    bottleneck: str
    examples_per_second: float
    loads: Mapping[str, DeviceLoad]
    utilisation: Mapping[str, Utilisation]
    plan: OperatorPlan
    graph: OperatorGraph

    def __str__(self) -> str:
        lines = [f"{'device':<9}  {'operators':>9}  {'weights':>14}  {'cpu':>6}  {'network':>7}  {'memory':>6}"]
        for device, used in self.utilisation.items():
            operators = [self.graph.by_name[name] for name in self.plan.on(device)]
            weights = sum(operator.weight_bytes for operator in operators)
            lines.append(
                f"{device:<9}  {len(operators):>9}  {weights:>14,}  {used.cpu:>6.1%}  {used.network:>7.1%}"
                f"  {used.memory:>6.1%}"
            )
        return "\n".join(
            [
                *lines,
                f"a net's step {self.seconds * 1e3:.2f} ms ({self.alone_seconds * 1e3:.2f} ms alone), "
                f"{self.examples_per_second:,.0f} examples/s a group, limited by {self.bottleneck}",
            ]
        )


def predict(graph: OperatorGraph, plan: OperatorPlan, machines: GroupMachines) -> StepTime:
    """Predict the step time of a plan.

    A net computes, sends and waits in turn, and meets the others at processors and links, which serve one after the
    other: a closed queueing network (:func:`~lightning_recsys.placement.queueing.closed_network_seconds`). A
    resource with ``c`` cores is a queue of ``D / c`` behind a wait of ``D (c - 1) / c``. Bytes queue at servers' links;
    those of trainers are a limit. Where processors are shared, all processes queue for the same cores.

    What a net's devices compute side by side is subtracted: of a level's parts only the longest counts, or where
    processors are shared, their sum over the cores if that is longer. With many nets the bottleneck limits what that
    can gain.

    Reference: Seidmann et al. 1987, "Computerized closed queueing network models of flexible manufacturing systems",
    for several cores.
    """
    model = LoadModel(graph, machines)
    loads = model.loads(plan.devices)
    busy = model.busy_seconds(loads)
    bottleneck = max(busy, key=busy.__getitem__)
    levels = model.side_by_side(plan.devices)
    queues, wait = _queues(machines, loads)
    wait += len(levels) * (4 * machines.link.latency + 2 * machines.wait_per_request)
    saved = sum(sum(parts) - max(*parts, sum(parts) / (machines.shared_cores or math.inf), 0.0) for parts in levels)
    groups = 1 if machines.shared_cores is None else machines.num_groups
    alone = wait + sum(time * copies for time, copies in queues) - saved
    seconds = max(closed_network_seconds(queues, wait, machines.num_nets * groups) - saved, busy[bottleneck])
    used = {
        device: Utilisation(
            load.cpu_busy() / seconds, load.network_busy(machines.link.bandwidth) / seconds, load.memory_share
        )
        for device, load in loads.items()
    }
    examples_per_second = machines.num_nets * graph.batch_size / seconds
    return StepTime(seconds, alone, bottleneck, examples_per_second, loads, used, plan, graph)


def _queues(machines: GroupMachines, loads: Mapping[str, DeviceLoad]) -> tuple[list[tuple[float, int]], float]:
    """For each queue the seconds that a step needs of one of its copies, and their number; and what is waited for."""
    shared = machines.shared_cores
    groups = 1 if shared is None else machines.num_groups
    queues: list[tuple[float, int]] = []
    wait = total = 0.0
    for device, load in loads.items():
        is_trainer = device == TRAINER
        of_step = load.cpu_seconds / (machines.nets_per_trainer if is_trainer else machines.num_nets)
        total += of_step
        if shared is None:
            wait += _add_cores(queues, of_step, load.cores, machines.num_trainers if is_trainer else 1)
        if not is_trainer:
            for sent in (load.sent_bytes, load.received_bytes):
                queues.append((sent / machines.num_nets / machines.link.bandwidth / groups, groups))
    if shared is not None:
        wait += _add_cores(queues, total, shared, 1)
    rows = machines.trainer_bytes / machines.link.bandwidth  # each way, to servers that are no bottleneck
    return queues, wait + 2 * rows


def _add_cores(queues: list[tuple[float, int]], seconds: float, cores: float, copies: int) -> float:
    """Queue for the cores of a machine; returns how much of the time is no matter of queueing."""
    queues.append((seconds / max(cores, 1.0) / copies, copies))
    return seconds * (1 - 1 / max(cores, 1.0))
