"""From a plan of operators to the legs of a group's nets, and a model of the size of the paper's to plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from lightning_recsys.compression import COSTS, make_codec
from lightning_recsys.compression.codec import Carries
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.loads import LoadModel
from lightning_recsys.placement.machines import Coding, GroupMachines, Processor
from lightning_recsys.placement.operator_plans.plan import levels
from lightning_recsys.placement.operators import TRAINER, Operator, OperatorGraph, Value, server_index
from lightning_recsys.placement.tagging import OperatorMethod, place_operators
from lightning_recsys.simulation.groups import Group, Leg

PLANNING_SECONDS = 600.0  # far more than it takes: a plan that is cut short would depend on how busy this machine is
_FLOAT_BYTES = 4
_CODED_WIDTH = 1024  # of the rows whose scales int8 sends


@dataclass(frozen=True)
class LargeModel:
    """A model of the paper's kind and size: what is published of it is a dense part of several hundred megabytes.

    Groups of embeddings, and the dense features, go through towers of two layers; their results and the embeddings meet
    in an interaction; layers follow. Every number is an input, not a result.

    Args:
        batch_size: Examples of a step of a net.
        towers: Groups of embeddings.
        tower_inputs: Numbers of each group: 64 fields of width 64, say.
        tower_widths: Widths of a tower's two layers.
        interaction_width: Numbers that come out of the interaction.
        top_widths: Widths of the layers above the interaction.
        pieces: Into how many parts layers of more than half of the largest one's weights are cut; 1: none. The first
            of two such layers is cut by its outputs and the second by its inputs, and no gather is between them
            (section 4.1); a single one is cut by its outputs.
        forward_speedup: How much faster layers are forward: above 1 with 8-bit products (Model-B).
    """

    batch_size: int = 200
    towers: int = 4
    tower_inputs: int = 4096
    tower_widths: tuple[int, int] = (2048, 1024)
    interaction_width: int = 4096
    top_widths: tuple[int, ...] = (4096, 4096, 1024)
    pieces: int = 1
    forward_speedup: float = 1.0

    def graph(self) -> OperatorGraph:
        """Its operators."""
        made = _Builder(self.batch_size, self.forward_speedup)
        made.value("dense", 1024)
        made.operator(
            "lookups", (), {f"embeddings.{i}": self.tower_inputs for i in range(self.towers)}, only_trainer=True
        )
        threshold = max(a * b for a, b in zip(self.top_widths, self.top_widths[1:], strict=False)) // 2
        outputs = []
        for name, source in [("bottom", "dense"), *((f"tower.{i}", f"embeddings.{i}") for i in range(self.towers))]:
            outputs.append(made.chain(name, source, self.tower_widths, self.pieces, threshold))
        outputs += [f"embeddings.{i}" for i in range(self.towers)]
        made.operator(
            "interaction",
            outputs,
            {"interactions": self.interaction_width},
            flops_each=len(outputs) * self.tower_widths[-1],
        )
        result = made.chain("top", "interactions", (*self.top_widths, 1), self.pieces, threshold)
        return OperatorGraph(tuple(made.operators), tuple(made.values), (result,), self.batch_size)


@dataclass
class _Builder:
    """Collects operators and values of one batch size."""

    batch_size: int
    forward_speedup: float
    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)

    def value(self, name: str, width: int, producer: str | None = None) -> None:
        size = self.batch_size * width * _FLOAT_BYTES
        self.values.append(Value(name, size, producer, name != "dense"))
        self.widths[name] = width

    def operator(
        self,
        name: str,
        inputs: Iterable[str],
        outputs: Mapping[str, int],
        *,
        weights: int = 0,
        flops_each: float = 1.0,
        only_trainer: bool = False,
    ) -> None:
        """An operator; one with weights is a layer, others make so many operations for each number of their results."""
        numbers = self.batch_size * sum(outputs.values())
        forward = 2.0 * self.batch_size * weights if weights else flops_each * numbers
        self.operators.append(
            Operator(
                name,
                "layer" if weights else "function",
                tuple(inputs),
                forward_flops=0.0 if only_trainer else forward / (self.forward_speedup if weights else 1.0),
                backward_flops=0.0 if only_trainer else 2 * forward,
                weight_bytes=_FLOAT_BYTES * weights,
                activation_bytes=_FLOAT_BYTES * numbers,
                owns_parameters=weights > 0,
                trainer_only=only_trainer,
            )
        )
        for value, width in outputs.items():
            self.value(value, width, name)

    def chain(self, name: str, source: str, widths: tuple[int, ...], pieces: int, threshold: int) -> str:
        """Layers one behind the other, large ones in pieces; returns the name of the last one's result."""
        index = 0
        while index < len(widths):
            width, own = widths[index], self.widths[source]
            following = widths[index + 1] if index + 1 < len(widths) else 0
            layer = f"{name}.{index}"
            if pieces == 1 or own * width <= threshold:
                self.operator(layer, (source,), {f"{layer}.out": width}, weights=own * width)
                index += 1
            elif width * following > threshold:
                partial = []
                for i in range(pieces):  # by outputs, then by inputs: what is between them stays where it is
                    part = _share(width, pieces, i)
                    self.operator(f"{layer}.{i}", (source,), {f"{layer}.{i}.out": part}, weights=own * part)
                    partial.append(f"{name}.{index + 1}.{i}.out")
                    second = f"{name}.{index + 1}.{i}"
                    self.operator(second, (f"{layer}.{i}.out",), {partial[-1]: following}, weights=part * following)
                layer = f"{name}.{index + 1}"
                self.operator(f"{layer}.sum", partial, {f"{layer}.out": following}, flops_each=pieces)
                index += 2
            else:
                sizes = {f"{layer}.{i}.out": _share(width, pieces, i) for i in range(pieces)}
                for i, (piece, size) in enumerate(sizes.items()):
                    self.operator(f"{layer}.{i}", (source,), {piece: size}, weights=own * size)
                self.operator(f"{layer}.cat", tuple(sizes), {f"{layer}.out": width})
                index += 1
            source = f"{layer}.out"
        return source


def _share(width: int, pieces: int, index: int) -> int:
    return width // pieces + (index < width % pieces)


def legs_of(graph: OperatorGraph, machines: GroupMachines, devices: Mapping[str, str]) -> list[Leg | tuple[Leg, ...]]:
    """The step of one net: forward through the parts in their order, then backward through them.

    The seconds of each device are those that :class:`~lightning_recsys.placement.loads.LoadModel` counts for it: here
    they are put in an order. A trainer encodes all requests of a level, sends them at once, and decodes all answers.

    Args:
        graph: The operators of the model.
        machines: The trainers and group servers of the group.
        devices: The device of each operator, by its name.
    """
    model = LoadModel(graph, machines)
    level_of, traffic = levels(graph, devices), model.traffic(devices)
    seconds: dict[tuple[str, int], list[float]] = {}
    for operator in graph.operators:
        own = seconds.setdefault((devices[operator.name], level_of[operator.name]), [0.0, 0.0])
        own[0] += machines.processor.forward_seconds(operator)
        own[1] += machines.processor.backward_seconds(operator)
    last = max(level_of.values())
    legs: list[Leg | tuple[Leg, ...]] = [Leg(None, machines.trainer_seconds)]
    for backward in (False, True):
        for level in reversed(range(last + 1)) if backward else range(last + 1):
            messages, coding_seconds = [], 0.0
            for device, own_level in seconds:
                if own_level == level and (server := server_index(device)) is not None:
                    asked = model.request(traffic[device, level], backward=backward)
                    own_seconds = seconds[device, level][backward] + asked.server_seconds
                    coding_seconds += asked.trainer_seconds
                    messages.append(Leg(server, own_seconds, asked.sent_bytes, asked.returned_bytes))
            of_trainer = seconds.get((TRAINER, level), [0.0, 0.0])[backward]
            of_level: list[Leg | tuple[Leg, ...]] = [Leg(None, coding_seconds), tuple(messages)] if messages else []
            if of_trainer:
                of_level.insert(len(of_level) if backward else 0, Leg(None, of_trainer))
            legs += of_level
    return legs


def coding(name: str, carries: Carries) -> Coding:
    """A codec as planners have it, with the processor time measured for it."""
    cost, shape = COSTS[name], (1, _CODED_WIDTH)
    ratio = make_codec(name, carries).encoded_bytes(shape) / (_FLOAT_BYTES * math.prod(shape))
    return Coding(ratio, cost.encode_seconds_per_mb / 1e6, cost.decode_seconds_per_mb / 1e6)


def planned_group(
    *,
    model: LargeModel,
    num_trainers: int,
    num_servers: int,
    nets_per_trainer: int,
    cores: int,
    flops: float,
    bandwidth: float,
    latency: float,
    trainer_seconds: float,
    method: OperatorMethod = "greedy",
    fc_splits: bool = True,
    activations: str = "bf16",
    gradients: str = "bf16",
    seconds_per_byte: float = 1e-9,
    deviation: float = 0.05,
) -> Group:
    """A group whose operators are placed as :func:`~lightning_recsys.placement.tagging.place_operators` does.

    Args:
        model: The model that is trained, as far as its times go.
        num_trainers: Number of trainers of the group.
        num_servers: Group servers; 0: each trainer computes everything, as with elastic averaging alone.
        nets_per_trainer: Number of nets of each trainer.
        cores: Number of cores of every machine.
        flops: Floating-point operations per second of a core.
        bandwidth: Bytes per second of every machine's link.
        latency: Seconds that a message takes on every machine's link besides.
        trainer_seconds: Seconds of a core for each step of a net on its trainer: reading, lookups, loss.
        method: ``none`` (no tagging), ``rules``, ``greedy``, ``exact``.
        fc_splits: Whether large layers are cut into as many pieces as there are group servers.
        activations: Name of the codec for what goes forward.
        gradients: Name of the codec for what comes back.
        seconds_per_byte: Processor time of each end for a byte that travels.
        deviation: By how much the time of a leg varies; see :class:`~lightning_recsys.simulation.groups.Group`.
    """
    processor = Processor(flops=flops)
    if fc_splits and num_servers > 1:
        model = replace(model, pieces=num_servers)
    if num_servers:
        machines = GroupMachines(
            num_servers,
            num_trainers=num_trainers,
            nets_per_trainer=nets_per_trainer,
            trainer_cores=cores,
            server_cores=cores,
            processor=processor,
            link=Network(bandwidth, latency),
            activations=coding(activations, "activations"),
            gradients=coding(gradients, "gradients"),
            seconds_per_byte=seconds_per_byte,
            trainer_seconds=trainer_seconds,
        )
        legs = _planned_legs(model, machines, method)
    else:
        seconds = sum(processor.forward_seconds(x) + processor.backward_seconds(x) for x in model.graph().operators)
        legs = (Leg(None, trainer_seconds + seconds),)
    return Group(
        legs,
        num_trainers=num_trainers,
        nets_per_trainer=nets_per_trainer,
        num_servers=num_servers,
        trainer_cores=cores,
        server_cores=cores,
        link=Network(bandwidth, latency),
        deviation=deviation,
    )


@cache  # figures ask for the same plan several times
def _planned_legs(
    model: LargeModel, machines: GroupMachines, method: OperatorMethod
) -> tuple[Leg | tuple[Leg, ...], ...]:
    graph = model.graph()
    plan = place_operators(graph, machines, method=method, time_limit=PLANNING_SECONDS)
    return tuple(legs_of(graph, machines, plan.devices))
