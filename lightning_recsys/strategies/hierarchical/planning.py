"""Which operator of a model a group computes where, for the group that a strategy makes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from lightning_recsys.compression import COSTS, Codec, Compression
from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.partition.fc_split import By, LayerSplit, split_layers
from lightning_recsys.partition.split_choice import choose_splits
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.machine_kinds import read_machines
from lightning_recsys.placement.machines import Coding, GroupMachines, Processor
from lightning_recsys.placement.operator_plans.file import read_plan, write_plan
from lightning_recsys.placement.operator_plans.picture import draw_plan
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import OperatorGraph
from lightning_recsys.placement.step_time import StepTime, predict
from lightning_recsys.placement.tagging import OperatorMethod, place_operators
from lightning_recsys.strategies.common.settings import require_number, require_one_of
from lightning_recsys.strategies.hierarchical.cut.eight_bit import FCForward, in_eight_bits
from lightning_recsys.strategies.hierarchical.groups import Groups

FCSplits = Literal["none", "auto"] | Mapping[str, By]
PlacementMethod = Literal["auto", OperatorMethod]
_DESCRIBED: Mapping[str, type[Network] | type[Processor]] = {"link": Network, "processor": Processor}
_GIVEN = ("num_servers", "num_trainers", "nets_per_trainer", "num_groups", "activations", "gradients")


@dataclass(frozen=True)
class OperatorPlacement:
    """The way in which operators are placed.

    Args:
        method: ``rules`` (the paper's), ``greedy`` (the same, refined), ``auto``, which takes the one of these with
            the shorter predicted step, ``exact``, or ``none``, which deals operators with parameters to the group
            servers in turn.
        plan: A file that says where some operators, or all, are to be; the others are placed.
        save: Where to write the plan, as such a file; beside it goes a picture of it (``.png``), where matplotlib is
            installed (the extra ``[plots]``).
        time_limit: Seconds for ``auto``, ``greedy`` and ``exact``.
        machines: What is known of the machines, as arguments of
            :class:`~lightning_recsys.placement.machines.GroupMachines`; by default the processes of a single node share
            its cores, and servers the room that they tell. Or a file of machines as the planner takes it, alone or as
            ``file`` beside such arguments, which overrule it; with ``kind`` where it has several kinds. It says cores,
            port and speed; room is what servers tell.

    Raises:
        ValueError: an argument is not one of these.
        FileNotFoundError: there is no such file of machines.
    """

    method: PlacementMethod = "auto"
    plan: str | Path | None = None
    save: str | Path | None = None
    time_limit: float = 10.0
    machines: Mapping[str, Any] | str | Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "machines", _with_file(self.machines))  # workers may not see the file
        require_one_of("operator_placement.method", self.method, get_args(PlacementMethod))
        require_number("operator_placement.time_limit", self.time_limit)
        if self.time_limit <= 0:
            raise ValueError(
                f"strategy.operator_placement.time_limit must be a positive number of seconds, got {self.time_limit!r}."
            )
        allowed = [x.name for x in fields(GroupMachines) if x.name not in _GIVEN]
        assert not isinstance(self.machines, str | Path), "the file was read"
        if unknown := sorted((self.machines or {}).keys() - allowed):
            raise ValueError(f"strategy.operator_placement.machines has {unknown}; it takes {allowed}.")
        try:
            machines = _from_plain(self.machines or {})
            memory = machines.get("server_memory")
            GroupMachines(num_servers=len(memory) if isinstance(memory, tuple) else 1, **machines)
        except (TypeError, ValueError) as error:
            raise ValueError(f"strategy.operator_placement.machines={dict(self.machines or {})}: {error}") from error


def make_plan(
    model: nn.Module,
    sample: Sequence[Any],
    settings: OperatorPlacement,
    *,
    fc_splits: FCSplits,
    groups: Groups,
    compression: Compression,
    rooms: Sequence[int | None],
    measured: Mapping[str, float] | None = None,
    fc_forward: FCForward = "float32",
) -> tuple[list[LayerSplit], OperatorPlan, StepTime]:
    """Place a model's operators on a group, and predict its step.

    Args:
        model: The model.
        sample: Arguments of one call of the model.
        settings: How to place operators.
        fc_splits: Which layers to split first; ``auto`` splits some where that makes the predicted step shorter.
        groups: How many trainers, nets and servers there are.
        compression: Compression of what travels between trainers and group servers.
        rooms: Free bytes that each server of the group tells, ``None`` where it does not.
        measured: As for :func:`group_machines`; written to the file with the plan.
        fc_forward: Number format in which fully connected layers are computed forward.

    Raises:
        OperatorRoomError: an operator fits on no server, or a server has no room for its share.
        ValueError: the model cannot be traced, a layer cannot be split, or the file is no plan, or not one of this
            model.
        FileNotFoundError: there is no such file.
    """
    machines = group_machines(settings, groups, compression, rooms, measured)
    pinned = None if settings.plan is None else read_plan(Path(settings.plan))
    best: tuple[list[LayerSplit], OperatorGraph, OperatorPlan, StepTime] | None = None
    refused: OperatorRoomError | None = None
    for splits in _split_options(model, sample, fc_splits, machines):
        graph = trace(split_layers(model, splits).model, sample).operators
        if fc_forward == "int8":
            graph = in_eight_bits(graph, machines.processor)
        # Greedy refinement relieves the busiest device, and may still make the steps of a few nets longer.
        methods: Sequence[OperatorMethod] = ("rules", "greedy") if settings.method == "auto" else (settings.method,)
        for method in methods:
            try:
                plan = place_operators(graph, machines, method=method, pinned=pinned, time_limit=settings.time_limit)
            except OperatorRoomError as error:  # another way may find room
                refused = error
                continue
            prediction = predict(graph, plan, machines)
            if best is None or prediction.seconds < best[-1].seconds:
                best = splits, graph, plan, prediction
    if best is None:
        assert refused is not None
        raise refused
    splits, graph, plan, prediction = best
    if settings.save is not None:
        path = Path(settings.save)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plan(path, plan, graph, measured)
        if importlib.util.find_spec("matplotlib"):
            draw_plan(path.with_suffix(".png"), plan, graph)
    return splits, plan, prediction


def _split_options(
    model: nn.Module, sample: Sequence[Any], fc_splits: FCSplits, machines: GroupMachines
) -> list[list[LayerSplit]]:
    if not isinstance(fc_splits, str):
        return [given_splits(fc_splits, machines.num_servers)]
    chosen = choose_splits(model, sample, machines) if fc_splits == "auto" else []
    return [[], chosen] if chosen else [[]]


def given_splits(fc_splits: FCSplits, num_servers: int) -> list[LayerSplit]:
    """The layers that are named to be split over so many servers; none for ``none`` and ``auto``."""
    return [] if isinstance(fc_splits, str) else [LayerSplit(path, by, num_servers) for path, by in fc_splits.items()]


def group_machines(
    settings: OperatorPlacement,
    groups: Groups,
    compression: Compression,
    rooms: Sequence[int | None] = (),
    measured: Mapping[str, float] | None = None,
) -> GroupMachines:
    """The description of a group's machines: by the settings, then by measurement, then by defaults.

    Args:
        settings: How to place operators.
        groups: How many trainers, nets and servers there are.
        compression: Compression of what travels between trainers and group servers.
        rooms: Free bytes that each server of the group tells, ``None`` where it does not.
        measured: What was measured of the machines, by arguments of ``GroupMachines``.
    """
    assert not isinstance(settings.machines, str | Path), "the file was read"
    known = {**(measured or {}), **_from_plain(settings.machines or {})}
    if groups.num_nodes == 1:
        known.setdefault("shared_cores", float(len(os.sched_getaffinity(0))))
    if rooms and all(rooms):
        known.setdefault("server_memory", tuple(float(room) for room in rooms if room))
    return GroupMachines(
        num_servers=groups.servers_per_group,
        num_trainers=groups.trainers_per_group,
        nets_per_trainer=groups.nets_per_trainer,
        num_groups=groups.num_groups,
        activations=_coding(compression.activations),
        gradients=_coding(compression.gradients),
        **known,
    )


def _with_file(machines: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | None:
    """The arguments of ``GroupMachines`` that a file of machines says, and those that are given, which overrule it.

    Memory is not among them: what is free where a server's files lie is known better, and may be less.
    """
    given: Mapping[str, Any] | None = {"file": machines} if isinstance(machines, str | Path) else machines
    if given is None or "file" not in given:
        return given
    path = given["file"]
    kinds = read_machines(path).kinds
    wanted = given.get("kind", next(iter(kinds)) if len(kinds) == 1 else None)
    if wanted not in kinds:
        raise ValueError(
            f"strategy.operator_placement.machines: {path} has the kinds {list(kinds)}; say which one as kind, got"
            f" {wanted!r}."
        )
    kind = kinds[wanted]
    speed = {} if kind.gflops is None else {"processor": Processor(flops=1e9 * kind.gflops)}
    each = {"trainer_cores": kind.cores, "server_cores": kind.cores, "link": kind.port}
    return {**each, **speed, **{name: value for name, value in given.items() if name not in ("file", "kind")}}


def _from_plain(machines: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``GroupMachines`` from mappings and lists, as a YAML file has them."""
    made = dict(machines)
    for name, kind in _DESCRIBED.items():
        if isinstance(made.get(name), Mapping):
            made[name] = kind(**made[name])
        if name in made and not isinstance(made[name], kind):
            raise TypeError(f"{name} takes {[x.name for x in fields(kind)]}, got {made[name]!r}.")
    if isinstance(memory := made.get("server_memory"), Sequence):
        made["server_memory"] = tuple(memory)
    return made


def check_splits(fc_splits: FCSplits, placement: OperatorPlacement, *, num_servers: int) -> None:
    """Refuse what cannot be meant.

    Raises:
        ValueError: it is neither ``none``, ``auto`` nor a mapping of layers to ``output`` or ``input``; layers are
            named for one group server; or layers are chosen anew for a plan that names their pieces.
    """
    if isinstance(fc_splits, str):
        if fc_splits not in ("none", "auto"):
            raise ValueError(
                "strategy.fc_splits must be none, auto, or say for layers by what to split them, such as"
                f" {{top.0: output, top.2: input}}; got {fc_splits!r}."
            )
        if fc_splits == "auto" and placement.plan is not None:
            raise ValueError(
                f"strategy.operator_placement.plan={placement.plan} names the operators of a model whose layers are"
                " split in one way, and strategy.fc_splits=auto may choose another one. Name the layers in"
                " strategy.fc_splits, as the log of the run that wrote the plan has them."
            )
        return
    if not isinstance(fc_splits, Mapping):
        raise ValueError(f"strategy.fc_splits must be none, auto or a mapping of layers, got {fc_splits!r}.")
    if wrong := {path: by for path, by in fc_splits.items() if by not in ("output", "input")}:
        raise ValueError(f"strategy.fc_splits: a layer is split by output or by input, got {wrong}.")
    if num_servers < 2:
        raise ValueError(
            f"strategy.fc_splits names layers to split over strategy.servers_per_group={num_servers}: it takes at least"
            " 2 group servers. Use strategy.fc_splits=none."
        )


def _coding(codec: Codec) -> Coding:
    cost, shape = COSTS[codec.name], (512, 512)
    ratio = codec.encoded_bytes(shape) / (4 * shape[0] * shape[1])
    return Coding(ratio, cost.encode_seconds_per_mb / 1e6, cost.decode_seconds_per_mb / 1e6)
