"""Fields to processes that each hold the weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

FieldMethod = Literal["mod", "balanced"]


@dataclass(frozen=True)
class FieldCost:
    """Fields that stay together, since they share a table; one field, as a rule.

    Args:
        fields: Names of the fields.
        num_bytes: Bytes of all rows that belong to them, with optimizer state.
        lookups: Floats that an example looks up in them: mean number of ids times the widths of their tables.

    Raises:
        ValueError: there is no field, or a number is negative.
    """

    fields: tuple[str, ...]
    num_bytes: int
    lookups: float

    def __post_init__(self) -> None:
        if not self.fields or self.num_bytes < 0 or not 0 <= self.lookups < float("inf"):
            raise ValueError(f"fields need a name, and finite costs of at least 0, got {self}.")


@dataclass(frozen=True)
class FieldPlan:
    """Which process has which fields. ``print`` shows it as a table.

    Args:
        method: The method by which the plan was made.
        processes: The fields and costs of each process; it may have none.
    """

    method: FieldMethod
    processes: tuple[tuple[FieldCost, ...], ...]

    @property
    def owners(self) -> dict[str, int]:
        """The process of each field."""
        return {name: i for i, costs in enumerate(self.processes) for cost in costs for name in cost.fields}

    @property
    def imbalance(self) -> tuple[float, float]:
        """The largest process's bytes and lookups, each over the mean: 1 is perfect."""
        loads = [_loads(costs) for costs in self.processes]
        return _imbalance([load[0] for load in loads]), _imbalance([load[1] for load in loads])

    def __str__(self) -> str:
        total_bytes, total_lookups = (max(sum(load), 1) for load in zip(*map(_loads, self.processes), strict=True))
        lines = [f"{'process':>7}  {'fields':>6}  {'bytes':>18}  {'share':>6}  {'lookups':>12}  {'share':>6}"]
        for process, costs in enumerate(self.processes):
            num_bytes, lookups = _loads(costs)
            lines.append(
                f"{process:>7}  {sum(len(cost.fields) for cost in costs):>6}  {num_bytes:>18,.0f}"
                f"  {num_bytes / total_bytes:>6.1%}  {lookups:>12.6g}  {lookups / total_lookups:>6.1%}"
            )
        of_bytes, of_lookups = self.imbalance
        ends = f"imbalance (max / mean) {of_bytes:.3f} of bytes, {of_lookups:.3f} of lookups"
        return "\n".join([*lines, f"field_placement={self.method}, {ends}"])


def place_fields(costs: Sequence[FieldCost], num_processes: int, *, method: FieldMethod = "mod") -> FieldPlan:
    """Give every field to one process.

    ``mod`` deals fields in their order: the ``i``-th to process ``i mod num_processes``. ``balanced`` packs bytes and
    lookups at once: fields in the order of the larger of their two shares, each to the process whose larger load stays
    smallest. A field is never cut, so one that holds most of all rows still fills one process.

    Args:
        costs: The costs of the fields, in the order of the fields.
        num_processes: Number of processes; some may get no field.
        method: How to place them: ``mod`` or ``balanced``.

    Raises:
        ValueError: no process, an unknown method, or a field twice.

    Reference: Rong et al. 2020, "Distributed equivalent substitution training for large-scale recommender systems",
    section 5, for ``mod``; Graham 1969, "Bounds on multiprocessing timing anomalies", for packing the largest first.

    >>> costs = [FieldCost(("user",), 600, 1), FieldCost(("movie",), 300, 1), FieldCost(("genres",), 100, 2)]
    >>> place_fields(costs, 2).owners
    {'user': 0, 'genres': 0, 'movie': 1}
    >>> print(place_fields(costs, 2, method="balanced"))
    process  fields               bytes   share       lookups   share
          0       1                 600   60.0%             1   25.0%
          1       2                 400   40.0%             3   75.0%
    field_placement=balanced, imbalance (max / mean) 1.200 of bytes, 1.500 of lookups
    """
    if method not in get_args(FieldMethod):
        raise ValueError(f"strategy.field_placement must be one of {list(get_args(FieldMethod))}, got {method!r}.")
    names = [name for cost in costs for name in cost.fields]
    if num_processes < 1 or len(set(names)) < len(names):
        raise ValueError(f"placement needs a process and each field once, got {num_processes} and {names}.")
    owners = [i % num_processes for i in range(len(costs))] if method == "mod" else _pack(costs, num_processes)
    parts = [[cost for cost, owner in zip(costs, owners, strict=True) if owner == i] for i in range(num_processes)]
    return FieldPlan(method, tuple(map(tuple, parts)))


def _pack(costs: Sequence[FieldCost], num_processes: int) -> list[int]:
    total_bytes, total_lookups = (max(total, 1e-12) for total in _loads(costs))
    shares = [(cost.num_bytes / total_bytes, cost.lookups / total_lookups) for cost in costs]
    loads = [(0.0, 0.0)] * num_processes
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -max(shares[i])):
        after = [(load[0] + shares[i][0], load[1] + shares[i][1]) for load in loads]
        owner = min(range(num_processes), key=lambda process: (max(after[process]), sum(after[process])))
        loads[owner], owners[i] = after[owner], owner
    return owners


def _loads(costs: Sequence[FieldCost]) -> tuple[float, float]:
    return float(sum(cost.num_bytes for cost in costs)), float(sum(cost.lookups for cost in costs))


def _imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
