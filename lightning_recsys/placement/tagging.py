"""Operators to trainers and group servers: rules, connected components, balancing, and greedy refinement."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal, get_args

from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.placement.exact import solve
from lightning_recsys.placement.loads import LoadModel
from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER, Operator, OperatorGraph, server_name

OperatorMethod = Literal["none", "rules", "greedy", "exact"]
Score = tuple[float, tuple[float, ...], float]
Devices = dict[str, str]


def place_operators(
    graph: OperatorGraph,
    machines: GroupMachines,
    *,
    method: OperatorMethod = "greedy",
    pinned: Mapping[str, str] | None = None,
    time_limit: float = 10.0,
) -> OperatorPlan:
    """Give every operator of a model a device of its group.

    ``rules``: operators with parameters go to group servers, those that :func:`tag` keeps there stay with them, and
    connected components of these are spread by the bytes of their weights. ``greedy`` refines that; ``exact`` solves it
    as a mixed integer program; ``none`` deals operators with parameters to the servers in turn, all others stay on
    trainers: what the others are compared with.

    Args:
        graph: The operators of the model.
        machines: The trainers and group servers of the group.
        method: How to place them: ``none``, ``rules``, ``greedy`` or ``exact``.
        pinned: Operators whose device is given.
        time_limit: Seconds for ``greedy``, after which the best plan so far is taken, and for ``exact``, after which it
            gives up.

    Raises:
        ImportError: ``exact`` without SciPy (the extra ``[exact]``).
        OperatorRoomError: an operator fits on no group server, or a device has no memory for its share.
        ValueError: the method is unknown, a pinned operator is not there or may not be where it is pinned, or ``exact``
            did not end in time.

    Reference: Huang et al. 2021, "Hierarchical Training", section 3.2.1.
    Differs from the paper: where moving one operator off the busiest device helps no more, moves of any operator and
    swaps of two are tried. Memory counts as a bottleneck only where a device has too little.
    """
    if method not in get_args(OperatorMethod):
        raise ValueError(f"operator_placement.method must be one of {list(get_args(OperatorMethod))}, got {method!r}.")
    pins = dict(pinned or {})
    _check_pins(graph, machines, pins)
    check_operators(graph, machines)
    if method == "exact":
        devices = solve(graph, machines, pinned=pins, time_limit=time_limit).devices
    elif method == "none":
        devices = _in_turn(graph, machines, pins)
    else:
        devices = by_rules(graph, machines, pins)
    if method == "greedy":
        devices = refine(LoadModel(graph, machines), devices, pinned=pins, time_limit=time_limit)
    check_memory(LoadModel(graph, machines), devices)
    plan = OperatorPlan(devices, machines.num_servers)
    plan.check(graph)
    return plan


def tag(graph: OperatorGraph) -> dict[str, bool]:
    """Whether each operator is to be on group servers; the rest is for trainers.

    Those with parameters are, so that a group has these once; their backward passes are part of them. All others are
    cheap, and on trainers by these rules, applied until nothing changes: operators that look embeddings up; those that
    read what trainers have, or what such an operator makes; those whose results trainers need; those that bring
    together what several others make, the pieces of a layer, say. What is left stands between operators with parameters
    alone, an activation between two layers, say, and stays with these.
    """
    on_server = {operator.name: not operator.trainer_only for operator in graph.operators}
    changed = True
    while changed:
        changed = False
        for operator in graph.operators:
            if (
                on_server[operator.name]
                and not operator.owns_parameters
                and _touches_trainer(graph, operator, on_server)
            ):
                on_server[operator.name] = False
                changed = True
    return on_server


def _touches_trainer(graph: OperatorGraph, operator: Operator, on_server: Mapping[str, bool]) -> bool:
    sources = [graph.value_of[name].producer for name in operator.inputs]
    made = [value.name for value in graph.made_by[operator.name]]
    return (
        len(set(sources)) > 1
        or any(source is None or not on_server[source] for source in sources)
        or any(name in graph.results for name in made)
        or any(not on_server[reader] for name in made for reader in graph.readers[name])
    )


def components(graph: OperatorGraph, on_server: Mapping[str, bool]) -> list[list[str]]:
    """Operators of servers in groups, so that no value goes from one group to another without passing a trainer."""
    group_of = {name: {name} for name, tagged in on_server.items() if tagged}
    for first, second in graph.edges:
        if first in group_of and second in group_of:
            group_of[first] |= group_of[second]
            group_of.update(dict.fromkeys(group_of[second], group_of[first]))
    found = {id(group): group for group in group_of.values()}
    return [[name for name in group_of if name in group] for group in found.values()]


def by_rules(graph: OperatorGraph, machines: GroupMachines, pinned: Mapping[str, str] | None = None) -> Devices:
    """Tagging, connected components, and these over the servers by the bytes of their weights, the largest first.

    A component goes to the server with the fewest bytes so far that has room for it; one for which none has room is
    taken apart, operator by operator.

    Raises:
        OperatorRoomError: an operator has no room.
    """
    pins = dict(pinned or {})
    on_server = tag(graph) | {name: device != TRAINER for name, device in pins.items()}
    devices = {name: TRAINER for name, tagged in on_server.items() if not tagged} | pins
    groups = [[x for x in group if x not in pins] for group in components(graph, on_server)]
    filled = dict.fromkeys(map(server_name, range(machines.num_servers)), 0)
    for name, device in pins.items():
        if device != TRAINER:
            filled[device] += machines.state_bytes(graph.by_name[name])
    _pack(graph, machines, [group for group in groups if group], filled, devices)
    return devices


def _pack(
    graph: OperatorGraph,
    machines: GroupMachines,
    groups: Iterable[Sequence[str]],
    filled: dict[str, int],
    devices: Devices,
) -> None:
    def state_bytes(group: Sequence[str]) -> int:
        return sum(machines.state_bytes(graph.by_name[name]) for name in group)

    for group in sorted(groups, key=state_bytes, reverse=True):
        needed = state_bytes(group)
        room = dict(zip(filled, machines.memories, strict=True))
        fits = [server for server in filled if filled[server] + needed <= room[server]]
        if not fits and len(group) > 1:
            _pack(graph, machines, [[name] for name in group], filled, devices)
            continue
        if not fits:
            left = {server: int(room[server] - used) for server, used in filled.items()}
            raise OperatorRoomError(f"operator {group[0]} ({graph.by_name[group[0]].kind})", needed, left)
        server = min(fits, key=filled.__getitem__)
        filled[server] += needed
        devices.update(dict.fromkeys(group, server))


def _in_turn(graph: OperatorGraph, machines: GroupMachines, pinned: Mapping[str, str]) -> Devices:
    owners = [operator.name for operator in graph.operators if operator.owns_parameters]
    turns = {name: server_name(number % machines.num_servers) for number, name in enumerate(owners)}
    return {operator.name: TRAINER for operator in graph.operators} | turns | dict(pinned)


def refine(
    model: LoadModel,
    devices: Mapping[str, str],
    *,
    pinned: Iterable[str] = (),
    time_limit: float = 10.0,
    tolerance: float = 0.02,
) -> Devices:
    """Move operators as long as that relieves the busiest resource.

    Of one step of every net, the device with the longest busy time of its processor or its link is the bottleneck. An
    operator of it moves to the device where that helps most; if none helps, any other operator, and then pairs of
    operators that change places. Placements are compared by :func:`score`, so the bottleneck never grows.

    Args:
        model: The loads of the model on its group.
        devices: The placement to begin with: the device of each operator.
        pinned: Operators that stay on their device.
        time_limit: Seconds after which the best placement so far is taken.
        tolerance: Ends where the busiest device is busier than the mean by no more than this share.
    """
    best = dict(devices)
    fixed = {*pinned, *(operator.name for operator in model.graph.operators if operator.trainer_only)}
    ends = time.monotonic() + time_limit
    found = score(model, best)
    while time.monotonic() < ends and not _is_balanced(found, tolerance):
        better = _improve(model, best, found, fixed, ends)
        if better is None:
            break
        best, found = better
    return best


def score(model: LoadModel, devices: Mapping[str, str]) -> Score:
    """The score of a plan, first things first: lacking memory, busy times from the longest down, bytes that travel."""
    loads = model.loads(devices)
    lacking = sum(max(0.0, load.memory_share - 1) for load in loads.values())
    busy = sorted((round(x, 12) for x in model.busy_seconds(loads).values()), reverse=True)
    return lacking, tuple(busy), loads[TRAINER].sent_bytes + loads[TRAINER].received_bytes


def _is_balanced(found: Score, tolerance: float) -> bool:
    lacking, busy, _ = found
    return not lacking and busy[0] <= (1 + tolerance) * sum(busy) / len(busy)


def _improve(
    model: LoadModel, devices: Devices, found: Score, fixed: set[str], ends: float
) -> tuple[Devices, Score] | None:
    for candidates in (_moves_off_bottleneck, _moves, _swaps):
        best = None
        for changes in candidates(model, devices, fixed):
            if time.monotonic() > ends:
                break
            changed = devices | changes
            if (new := score(model, changed)) < found:
                best, found = changed, new
        if best is not None:
            return best, found
    return None


def _allowed(model: LoadModel, operator: Operator) -> list[str]:
    return [device for device in model.device_names if device != TRAINER or not operator.owns_parameters]


def _moves(model: LoadModel, devices: Devices, fixed: set[str], *, only: str | None = None) -> Iterator[Devices]:
    for operator in model.graph.operators:
        name = operator.name
        if name not in fixed and only in (None, devices[name]):
            yield from ({name: device} for device in _allowed(model, operator) if device != devices[name])


def _moves_off_bottleneck(model: LoadModel, devices: Devices, fixed: set[str]) -> Iterator[Devices]:
    loads = model.loads(devices)
    bandwidth = model.machines.link.bandwidth

    def busy(device: str) -> tuple[float, float]:
        load = loads[device]
        return max(0.0, load.memory_share - 1), max(load.cpu_busy(), load.network_busy(bandwidth))

    yield from _moves(model, devices, fixed, only=max(loads, key=busy))


def _swaps(model: LoadModel, devices: Devices, fixed: set[str]) -> Iterator[Devices]:
    free = [operator for operator in model.graph.operators if operator.name not in fixed]
    for one, two in combinations(free, 2):
        here, there = devices[one.name], devices[two.name]
        if here != there and there in _allowed(model, one) and here in _allowed(model, two):
            yield {one.name: there, two.name: here}


def check_operators(graph: OperatorGraph, machines: GroupMachines) -> None:
    """Refuse a model of which an operator is larger than each group server, or all operators than all of them.

    Raises:
        OperatorRoomError: names the largest operator.
    """
    owners = [operator for operator in graph.operators if operator.owns_parameters]
    if not owners:
        return
    left = {server_name(i): int(min(memory, 1 << 62)) for i, memory in enumerate(machines.memories)}
    largest = max(owners, key=machines.state_bytes)
    total = sum(map(machines.state_bytes, owners))
    if machines.state_bytes(largest) > max(machines.memories):
        raise OperatorRoomError(f"operator {largest.name} ({largest.kind})", machines.state_bytes(largest), left)
    if total > sum(machines.memories):
        raise OperatorRoomError("the dense part of the model", total, left)


def check_memory(model: LoadModel, devices: Mapping[str, str]) -> None:
    """Refuse a placement for which a device has too little memory.

    Raises:
        OperatorRoomError: names the device that lacks most.
    """
    load = max(model.loads(devices).values(), key=lambda load: load.memory_share)
    if load.memory_share > 1:
        names = [name for name, device in devices.items() if device == load.device]
        what = f"{load.device}, with {', '.join(names[:5])}{' and others' if names[5:] else ''},"
        raise OperatorRoomError(what, int(load.memory_bytes), {load.device: int(load.available_bytes)})


def _check_pins(graph: OperatorGraph, machines: GroupMachines, pinned: Mapping[str, str]) -> None:
    """Check some operators as :meth:`OperatorPlan.check` does a whole plan: the others are where anything may be."""
    others = {
        operator.name: TRAINER if operator.trainer_only or not operator.owns_parameters else server_name(0)
        for operator in graph.operators
    }
    OperatorPlan(others | dict(pinned), machines.num_servers).check(graph)
