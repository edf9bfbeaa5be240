"""Which operator is computed where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightning_recsys.placement.operators import TRAINER, OperatorGraph, server_index


@dataclass(frozen=True)
class OperatorPlan:
    """A device for every operator of a model's dense part: the trainers, each of which has it, or one group server.

    Args:
        devices: Operator -> ``trainer``, ``server0``, ``server1``, ...
        num_servers: Number of group servers of a group.

    Raises:
        ValueError: there is no group server, or a device is none of the above.

    >>> OperatorPlan({"bottom.0": "server0", "cat": "trainer"}, num_servers=1).on("server0")
    ('bottom.0',)
    """

    devices: Mapping[str, str] = field(hash=False)
    num_servers: int = 1

    def __post_init__(self) -> None:
        if self.num_servers < 1:
            raise ValueError(f"a group needs at least 1 group server, got {self.num_servers}.")
        for name, device in self.devices.items():
            index = server_index(device)
            if index is not None and index >= self.num_servers:
                raise ValueError(f"operator {name!r} is on {device}, but a group has {self.num_servers} group servers.")

    def on(self, device: str) -> tuple[str, ...]:
        """The operators of a device."""
        return tuple(name for name, other in self.devices.items() if other == device)

    def check(self, graph: OperatorGraph) -> None:
        """Refuse a plan that is not one of this graph.

        Raises:
            ValueError: an operator has no device, the plan has an operator that is not there, one that must stay on
                trainers is elsewhere, or parameters are on trainers, each of which would have its own.
        """
        missing = [name for name in graph.by_name if name not in self.devices]
        unknown = [name for name in self.devices if name not in graph.by_name]
        if missing or unknown:
            raise ValueError(
                f"the plan is of another model: it has no device for {missing}, and this model has no {unknown}. Make "
                "it anew, or edit its file."
            )
        for operator in graph.operators:
            device = self.devices[operator.name]
            if operator.trainer_only and device != TRAINER:
                raise ValueError(
                    f"operator {operator.name!r} ({operator.kind}) is on {device}, but has to be on trainers: it looks "
                    "embeddings up, or reads or returns what is no tensor."
                )
            if operator.owns_parameters and device == TRAINER:
                raise ValueError(
                    f"operator {operator.name!r} ({operator.kind}) owns parameters and is on trainers: a group keeps "
                    "them once, on its group servers."
                )


def levels(graph: OperatorGraph, devices: Mapping[str, str]) -> dict[str, int]:
    """In which order devices compute: the operators of one device and level make up a part.

    An operator's level is the highest of those whose values it reads, and one more where these are on another device; 0
    where it reads the model's inputs alone. Then a server's part joins a later one of the same server, which asks it
    once less, where all that read its values come later still. So levels never fall along an edge, they rise where the
    device changes, and no part waits for itself.

    Args:
        graph: The model's operators.
        devices: The device of each operator, by its name.
    """
    found: dict[str, int] = {}
    parts: dict[tuple[int, str], list[str]] = {}
    for operator in graph.operators:
        device = devices[operator.name]
        before = (graph.value_of[name].producer for name in operator.inputs)
        level = max((found[x] + (devices[x] != device) for x in before if x is not None), default=0)
        found[operator.name] = level
        parts.setdefault((level, device), []).append(operator.name)
    for level, device in sorted(parts, reverse=True):
        names = parts[level, device]
        latest = min(
            (found[x] - (devices[x] != device) for x in _readers(graph, names)), default=max(found.values(), default=0)
        )
        later = [other for other in range(level + 1, latest + 1) if (other, device) in parts]
        if device != TRAINER and later:
            parts[later[0], device] += parts.pop((level, device))
            found.update(dict.fromkeys(names, later[0]))
    return found


def _readers(graph: OperatorGraph, names: Collection[str]) -> set[str]:
    """Operators that read what some others make."""
    made = (value.name for name in names for value in graph.made_by[name])
    return {reader for value in made for reader in graph.readers[value]} - set(names)
