"""Which operator of a model a group computes where, for the group that a strategy makes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from lightning_recsys.compression import COSTS, Codec, Compression
from lightning_recsys.placement.machines import Coding, GroupMachines
from lightning_recsys.placement.operators import OperatorGraph
from lightning_recsys.placement.plan import OperatorPlan
from lightning_recsys.placement.plan_file import read_plan, write_plan
from lightning_recsys.placement.step_time import StepTime, predict
from lightning_recsys.placement.tagging import OperatorMethod, place_operators
from lightning_recsys.strategies.hierarchical.groups import Groups

_GIVEN = ("num_servers", "num_trainers", "nets_per_trainer", "num_groups", "activations", "gradients")


@dataclass(frozen=True)
class OperatorPlacement:
    """How operators are placed.

    Args:
        method: ``greedy`` (the paper's rules, refined), ``rules``, ``exact``, or ``none``, which deals operators with
            parameters to the group servers in turn.
        plan: A file that says where some operators, or all, are to be; the others are placed.
        save: Where to write the plan, as such a file.
        time_limit: Seconds for ``greedy`` and ``exact``.
        machines: What is known of the machines, as arguments of
            :class:`~lightning_recsys.placement.machines.GroupMachines`; by default the processes of a single node share
            its cores, and servers the room that they tell.

    Raises:
        ValueError: an argument is not one of these.
    """

    method: OperatorMethod = "greedy"
    plan: str | Path | None = None
    save: str | Path | None = None
    time_limit: float = 10.0
    machines: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in get_args(OperatorMethod):
            raise ValueError(
                f"strategy.operator_placement.method must be one of {', '.join(get_args(OperatorMethod))}, got"
                f" {self.method!r}."
            )
        allowed = [x.name for x in fields(GroupMachines) if x.name not in _GIVEN]
        if unknown := sorted(self.machines.keys() - allowed):
            raise ValueError(f"strategy.operator_placement.machines has {unknown}; it takes {allowed}.")


def make_plan(
    graph: OperatorGraph,
    settings: OperatorPlacement,
    *,
    groups: Groups,
    compression: Compression,
    rooms: Sequence[int | None],
) -> tuple[OperatorPlan, StepTime]:
    """Place a model's operators on a group, and predict its step.

    Args:
        graph: The operators.
        settings: How to place them.
        groups: How many trainers, nets and servers there are.
        compression: Between them.
        rooms: Free bytes that each server of the group tells, ``None`` where it does not.

    Raises:
        OperatorRoomError: an operator fits on no server, or a server has no room for its share.
        ValueError: the file is no plan, or not one of this model.
        FileNotFoundError: there is no such file.
    """
    known = dict(settings.machines)
    if groups.num_nodes == 1:
        known.setdefault("shared_cores", float(len(os.sched_getaffinity(0))))
    if rooms and all(rooms):
        known.setdefault("server_memory", tuple(float(room) for room in rooms if room))
    machines = GroupMachines(
        num_servers=groups.servers_per_group,
        num_trainers=groups.trainers_per_group,
        nets_per_trainer=groups.nets_per_trainer,
        num_groups=groups.num_groups,
        activations=_coding(compression.activations),
        gradients=_coding(compression.gradients),
        **known,
    )
    pinned = None if settings.plan is None else read_plan(Path(settings.plan))
    plan = place_operators(graph, machines, method=settings.method, pinned=pinned, time_limit=settings.time_limit)
    if settings.save is not None:
        path = Path(settings.save)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plan(path, plan, graph)
    return plan, predict(graph, plan, machines)


def _coding(codec: Codec) -> Coding:
    cost, shape = COSTS[codec.name], (512, 512)
    ratio = codec.encoded_bytes(shape) / (4 * shape[0] * shape[1])
    return Coding(ratio, cost.encode_seconds_per_mb / 1e6, cost.decode_seconds_per_mb / 1e6)
