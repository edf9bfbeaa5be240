"""The machines of a group, and what they need for an operator and for a message."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.operators import Operator


@dataclass(frozen=True)
class Processor:
    """How fast one core computes.

    Args:
        flops: Floating-point operations per second, in matrix products.
        memory_bandwidth: Bytes per second that it reads or writes.
        call_seconds: Seconds that each call of an operation costs on top.

    Raises:
        ValueError: a speed is not positive, or ``call_seconds`` negative.
    """

    flops: float = 5e10
    memory_bandwidth: float = 1e10
    call_seconds: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory_bandwidth > 0 and self.call_seconds >= 0):
            raise ValueError(f"a processor needs positive speeds, got {self}.")

    def forward_seconds(self, operator: Operator) -> float:
        """The seconds of an operator's forward pass: measured, or else the longer of arithmetic and memory."""
        if operator.forward_seconds is not None:
            return operator.forward_seconds
        touched = operator.activation_bytes + operator.weight_bytes
        return self._seconds(operator, operator.forward_flops, touched)

    def backward_seconds(self, operator: Operator) -> float:
        """The seconds of its backward pass, with the update of its parameters."""
        if operator.backward_seconds is not None:
            return operator.backward_seconds
        if not operator.backward_flops:
            return 0.0
        touched = 2 * operator.activation_bytes + 3 * operator.weight_bytes
        return self._seconds(operator, operator.backward_flops, touched)

    def _seconds(self, operator: Operator, flops: float, touched: float) -> float:
        if not flops:
            return 0.0
        return operator.num_calls * self.call_seconds + max(flops / self.flops, touched / self.memory_bandwidth)


@dataclass(frozen=True)
class Coding:
    """The effect of compression on tensors that travel one way.

    Args:
        ratio: Bytes that travel for each byte of the tensor.
        encode_seconds: Processor time of the sender for each byte of the tensor.
        decode_seconds: Processor time of the receiver for each byte of the tensor.

    Raises:
        ValueError: ``ratio`` is not positive, or a time negative.
    """

    ratio: float = 1.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.ratio > 0 or self.encode_seconds < 0 or self.decode_seconds < 0:
            raise ValueError(f"a codec needs a positive ratio and times of at least 0, got {self}.")


@dataclass(frozen=True)
class GroupMachines:
    """The trainers and group servers of one group; those of a kind are alike.

    Args:
        num_servers: Number of group servers.
        num_trainers: Number of trainers.
        nets_per_trainer: Number of nets of each trainer; each net trains on batches of its own.
        trainer_cores: Number of cores of a trainer.
        server_cores: Number of cores of a group server.
        shared_cores: Where all processes of all groups are on one machine, its cores; ``None`` where every trainer and
            every group server has a machine of its own.
        num_groups: Number of groups that share ``shared_cores``; without meaning where that is ``None``.
        processor: Speed of a core.
        link: The link of each trainer and group server, used in both directions at once.
        trainer_memory: Bytes that a trainer has for what is placed on it.
        server_memory: Bytes of each group server, or of all of them by number.
        optimizer_copies: Numbers that the optimizer keeps for each parameter: 1 for Adagrad, 2 for Adam.
        activations: What compression makes of the tensors that go forward.
        gradients: What compression makes of the gradients that come back.
        seconds_per_byte: Processor time of each end for each byte that travels.
        trainer_seconds_per_request: Processor time of a trainer for each request; a part takes one forward and one
            backward.
        server_seconds_per_request: Processor time of a group server for each request.
        wait_per_request: Seconds for which a request, or its answer, is under way besides: threads and processes wake
            each other. Requests of parts that do not need each other are under way together.
        trainer_seconds: Processor time of a net's step for what is not placed: data, lookups, the loss.
        trainer_bytes: Bytes of a net's step on the trainer's link for that, each way: rows and their gradients.

    Raises:
        ValueError: a number is out of range, or there is not one ``server_memory`` for each server.
    """

    num_servers: int
    num_trainers: int = 1
    nets_per_trainer: int = 1
    trainer_cores: float = 1.0
    server_cores: float = 1.0
    shared_cores: float | None = None
    num_groups: int = 1
    processor: Processor = Processor()
    link: Network = field(default_factory=lambda: Network(1.25e8))
    trainer_memory: float = math.inf
    server_memory: float | tuple[float, ...] = math.inf
    optimizer_copies: int = 1
    activations: Coding = Coding()
    gradients: Coding = Coding()
    seconds_per_byte: float = 5e-10
    trainer_seconds_per_request: float = 1e-4
    server_seconds_per_request: float = 1e-4
    wait_per_request: float = 0.0
    trainer_seconds: float = 0.0
    trainer_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_servers", "num_trainers", "nets_per_trainer", "num_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a group must be at least 1, got {getattr(self, name)}.")
        shared_cores = 1.0 if self.shared_cores is None else self.shared_cores
        positive = (self.trainer_cores, self.server_cores, shared_cores, self.trainer_memory)
        costs = (
            *(self.optimizer_copies, self.seconds_per_byte, self.trainer_seconds, self.trainer_bytes),
            *(self.trainer_seconds_per_request, self.server_seconds_per_request, self.wait_per_request),
        )
        if not (all(number > 0 for number in positive) and all(cost >= 0 for cost in costs)):
            raise ValueError(f"cores and memory must be positive and costs at least 0, got {self}.")
        if len(self.memories) != self.num_servers or not all(memory > 0 for memory in self.memories):
            raise ValueError(f"server_memory must be positive, one for each of {self.num_servers} servers, got {self}.")

    @property
    def num_nets(self) -> int:
        """Nets that a group server serves."""
        return self.num_trainers * self.nets_per_trainer

    @property
    def memories(self) -> tuple[float, ...]:
        """Bytes of each group server."""
        memory = self.server_memory
        return memory if isinstance(memory, tuple) else (memory,) * self.num_servers

    def state_bytes(self, operator: Operator) -> int:
        """Bytes of an operator on a server whatever the nets do.

        A server has three copies of weights and optimizer state as it takes its parts: in the file that brings them, in
        its memory, and in the records by which a killed server's last update is undone. Later the gradient, which is no
        larger, is there in the place of the first.
        """
        return operator.weight_bytes * 3 * (1 + self.optimizer_copies)
