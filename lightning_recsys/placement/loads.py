"""The load that a plan puts on each device of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.operator_plans.plan import levels
from lightning_recsys.placement.operators import TRAINER, OperatorGraph, server_index, server_name


@dataclass(frozen=True)
class DeviceLoad:
    """The load of one device while every net of its group makes one step.

    Args:
        device: ``trainer`` for each of the trainers, or a group server.
        cpu_seconds: Processor time on one core.
        sent_bytes: Bytes that it sends.
        received_bytes: Bytes that it receives.
        memory_bytes: Bytes that it needs for what is placed on it.
        available_bytes: Bytes that it has.
        cores: Its cores.
    """

    device: str
    cpu_seconds: float
    sent_bytes: float
    received_bytes: float
    memory_bytes: float
    available_bytes: float
    cores: float

    @property
    def memory_share(self) -> float:
        """The share of its memory that it needs; above 1 it has too little."""
        return self.memory_bytes / self.available_bytes

    def cpu_busy(self) -> float:
        """Seconds that its cores are busy for."""
        return self.cpu_seconds / self.cores

    def network_busy(self, bandwidth: float) -> float:
        """Seconds that the busier direction of its link is busy for."""
        return max(self.sent_bytes, self.received_bytes) / bandwidth


@dataclass
class PartTraffic:
    """Bytes that a part on a server receives and sends in a net's step, before compression.

    Args:
        inputs: Bytes of the tensors that the part takes.
        outputs: Bytes of the tensors that it returns.
        output_grads: Bytes of the gradients of its outputs, which it takes in the backward pass.
        input_grads: Bytes of the gradients of its inputs, which it returns in the backward pass.
    """

    inputs: int = 0
    outputs: int = 0
    output_grads: int = 0
    input_grads: int = 0


class RequestCost(NamedTuple):
    """The cost of one request to a part: of a forward pass, or of a backward pass.

    Args:
        sent_bytes: Bytes from the trainer to the server, as they travel.
        returned_bytes: Bytes from the server back to the trainer, as they travel.
        trainer_seconds: Processor time of the trainer for them, with their compression.
        server_seconds: Processor time of the server for them, with their compression.
    """

    sent_bytes: float
    returned_bytes: float
    trainer_seconds: float
    server_seconds: float


@dataclass
class _Load:
    """The load of one step of one net."""

    cpu: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    memory: float = 0.0


class LoadModel:
    """The loads of one model on one group, for any placement of its operators.

    A value goes from its device to a trainer once, and from a trainer to each part that reads it, as
    :func:`~lightning_recsys.partition.parts.split` cuts them; so do gradients, backwards.

    Args:
        graph: The model's operators.
        machines: The trainers and group servers of the group.
    """

    def __init__(self, graph: OperatorGraph, machines: GroupMachines) -> None:
        self.graph, self.machines = graph, machines
        processor = machines.processor
        self._seconds = {x.name: processor.forward_seconds(x) + processor.backward_seconds(x) for x in graph.operators}
        self.device_names = [TRAINER, *map(server_name, range(machines.num_servers))]

    def traffic(self, devices: Mapping[str, str]) -> dict[tuple[str, int], PartTraffic]:
        """The bytes that each part on a server receives and sends in a net's step, by its device and level."""
        level_of = levels(self.graph, devices)
        part_of = {name: (devices[name], level) for name, level in level_of.items()}
        found = {part: PartTraffic() for part in part_of.values() if part[0] != TRAINER}
        for value in self.graph.values:
            source = None if value.producer is None else part_of[value.producer]
            parts = {part_of[reader] for reader in self.graph.readers[value.name]} - {source}
            backward = value.num_bytes * value.has_gradient
            for part in parts:
                if part[0] != TRAINER:
                    found[part].inputs += value.num_bytes
                    found[part].input_grads += backward
            if source in found and (parts or value.name in self.graph.results):
                found[source].outputs += value.num_bytes
                found[source].output_grads += backward
        return found

    def loads(self, devices: Mapping[str, str]) -> dict[str, DeviceLoad]:
        """The loads of the trainer, then of each group server."""
        group = self.machines
        of_net = {device: _Load() for device in self.device_names}
        states = dict.fromkeys(self.device_names, 0)
        for operator in self.graph.operators:
            device = devices[operator.name]
            of_net[device].cpu += self._seconds[operator.name]
            of_net[device].memory += operator.activation_bytes
            states[device] += group.state_bytes(operator)
        trainer = of_net[TRAINER]
        trainer.cpu += group.trainer_seconds
        trainer.sent += group.trainer_bytes
        trainer.received += group.trainer_bytes
        for (device, _), part in self.traffic(devices).items():
            server = of_net[device]
            trainer.memory += part.outputs
            server.memory += part.inputs
            for backward in (False, True):
                request = self.request(part, backward=backward)
                trainer.cpu += request.trainer_seconds
                server.cpu += request.server_seconds
                trainer.sent += request.sent_bytes
                server.received += request.sent_bytes
                trainer.received += request.returned_bytes
                server.sent += request.returned_bytes
        return {device: self._load(device, of_net[device], states[device]) for device in self.device_names}

    def side_by_side(self, devices: Mapping[str, str]) -> list[list[float]]:
        """For each level with parts on servers, the processor time of a net's step that each device takes for its part.

        Servers are asked together, and the trainer computes its own part meanwhile.
        """
        found = {
            part: sum(self.request(traffic, backward=backward).server_seconds for backward in (False, True))
            for part, traffic in self.traffic(devices).items()
        }
        for name, level in levels(self.graph, devices).items():
            part = devices[name], level
            found[part] = found.get(part, 0.0) + self._seconds[name]
        numbers = {level for device, level in found if device != TRAINER}
        return [[seconds for (_, level), seconds in found.items() if level == number] for number in sorted(numbers)]

    def request(self, part: PartTraffic, *, backward: bool) -> RequestCost:
        """The cost of a trainer's request to a part in one of the two passes."""
        group = self.machines
        coding = group.gradients if backward else group.activations
        there, back = (part.output_grads, part.input_grads) if backward else (part.inputs, part.outputs)
        sent, returned = coding.ratio * there, coding.ratio * back
        wire = group.seconds_per_byte * (sent + returned)
        trainer = (
            wire + group.trainer_seconds_per_request + coding.encode_seconds * there + coding.decode_seconds * back
        )
        server = wire + group.server_seconds_per_request + coding.decode_seconds * there + coding.encode_seconds * back
        return RequestCost(sent, returned, trainer, server)

    def _load(self, device: str, of_net: _Load, state_bytes: int) -> DeviceLoad:
        group, server = self.machines, server_index(device)
        nets = group.nets_per_trainer if server is None else group.num_nets
        return DeviceLoad(
            device,
            cpu_seconds=nets * of_net.cpu,
            sent_bytes=nets * of_net.sent,
            received_bytes=nets * of_net.received,
            memory_bytes=nets * of_net.memory + state_bytes,
            available_bytes=group.trainer_memory if server is None else group.memories[server],
            cores=group.trainer_cores if server is None else group.server_cores,
        )

    def busy_seconds(self, loads: Mapping[str, DeviceLoad]) -> dict[str, float]:
        """For each resource how long it is busy while every net makes one step; the longest one limits the group."""
        busy = {}
        total = 0.0
        for load in loads.values():
            total += load.cpu_seconds * (self.machines.num_trainers if load.device == TRAINER else 1)
            busy[f"{load.device} cpu"] = load.cpu_busy()
            busy[f"{load.device} network"] = load.network_busy(self.machines.link.bandwidth)
        if self.machines.shared_cores is not None:
            busy["shared cpu"] = total * self.machines.num_groups / self.machines.shared_cores
        return busy
