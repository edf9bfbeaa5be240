"""A model's operators and the tensors between them: what placement decides on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

TRAINER = "trainer"
_SERVER = "server"


def server_name(index: int) -> str:
    """The name of a group server in plans: ``server0``, ``server1``, ..."""
    return f"{_SERVER}{index}"


def server_index(device: str) -> int | None:
    """The number of a group server by its name; ``None`` for the trainer.

    Raises:
        ValueError: the name is neither ``trainer`` nor that of a group server.
    """
    number = device.removeprefix(_SERVER)
    if device == TRAINER:
        return None
    if number == device or not number.isdecimal() or server_name(int(number)) != device:
        raise ValueError(f"devices are {TRAINER!r} and {server_name(0)!r}, {server_name(1)!r}, ..., got {device!r}.")
    return int(number)


@dataclass(frozen=True)
class Value:
    """A tensor that goes from one operator to others.

    Args:
        name: Name of the value, unique in its graph.
        num_bytes: Size of the value for the sample batch, in bytes.
        producer: The operator that makes it; ``None`` for an input of the model, which every trainer has.
        has_gradient: Whether the backward pass has a gradient of it, of the same size.
    """

    name: str
    num_bytes: int
    producer: str | None
    has_gradient: bool = True


@dataclass(frozen=True)
class Operator:
    """One piece of work that is placed as a whole, forward and backward.

    Args:
        name: Name of the operator, unique in its graph; where it can be, the path of the module that does the work.
        kind: What it does, for people: classes of modules, names of functions.
        inputs: Names of the values that it reads.
        forward_flops: Floating-point operations of the forward pass of the sample batch.
        backward_flops: Floating-point operations of the backward pass of the sample batch.
        weight_bytes: Bytes of its parameters and buffers.
        activation_bytes: Bytes of all tensors that its forward pass makes; what the backward pass needs is among them.
        num_calls: Calls of modules and functions that it consists of.
        forward_seconds: Processor time of the forward pass, where it was measured.
        backward_seconds: Processor time of the backward pass, where it was measured.
        owns_parameters: Whether it has parameters of the dense part, which must exist once in a group.
        trainer_only: Whether it must be on trainers: it looks embeddings up, or reads or returns what is no tensor.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    weight_bytes: int = 0
    activation_bytes: int = 0
    num_calls: int = 1
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    owns_parameters: bool = False
    trainer_only: bool = False


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of a model in an order in which they can run, and the values between them.

    Args:
        operators: The operators, each after those whose values it reads.
        values: All values that operators read or make.
        results: Names of the values that the model returns, which trainers need.
        batch_size: Examples of the sample batch that the costs are of.

    Raises:
        ValueError: a name is used twice, or an operator reads a value that is unknown or made after it.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    results: tuple[str, ...]
    batch_size: int

    def __post_init__(self) -> None:
        for what, names in (("operators", self._names(self.operators)), ("values", self._names(self.values))):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{what} need names of their own, got {repeated} twice.")
        self._check_order()

    @staticmethod
    def _names(items: Iterable[Operator | Value]) -> list[str]:
        return [item.name for item in items]

    def _check_order(self) -> None:
        known = {value.name for value in self.values if value.producer is None}
        made_by: dict[str | None, list[str]] = {}
        for value in self.values:
            made_by.setdefault(value.producer, []).append(value.name)
        for operator in self.operators:
            if missing := [name for name in operator.inputs if name not in known]:
                raise ValueError(f"operator {operator.name!r} reads {missing}, which no operator before it makes.")
            known.update(made_by.pop(operator.name, ()))
        if missing := [name for name in self.results if name not in known] or [x for x in made_by if x is not None]:
            raise ValueError(f"the graph has no operator for {missing}.")

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        """Operators by their names."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def value_of(self) -> dict[str, Value]:
        """Values by their names."""
        return {value.name: value for value in self.values}

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """For each value, the operators that read it."""
        readers: dict[str, list[str]] = {value.name: [] for value in self.values}
        for operator in self.operators:
            for name in dict.fromkeys(operator.inputs):
                readers[name].append(operator.name)
        return {name: tuple(found) for name, found in readers.items()}

    @cached_property
    def made_by(self) -> dict[str, list[Value]]:
        """For each operator, the values that it makes."""
        made: dict[str, list[Value]] = {operator.name: [] for operator in self.operators}
        for value in self.values:
            if value.producer is not None:
                made[value.producer].append(value)
        return made

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of operators of which the second reads what the first makes."""
        return tuple(
            dict.fromkeys(
                (producer, operator.name)
                for operator in self.operators
                for name in operator.inputs
                if (producer := self.value_of[name].producer) is not None
            )
        )
