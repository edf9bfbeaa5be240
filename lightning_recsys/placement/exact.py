"""The best placement of operators, as a mixed integer linear program."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_recsys.placement.machines import Coding, GroupMachines
from lightning_recsys.placement.operators import TRAINER, OperatorGraph, Value, server_name

_Terms = dict[int, float]


@dataclass(frozen=True)
class ExactSolution:
    """The solution that the solver found.

    Args:
        devices: The device of each operator, by its name.
        bound: Busy seconds of the bottleneck, below which no placement comes.
    """

    devices: dict[str, str]
    bound: float


def solve(
    graph: OperatorGraph,
    machines: GroupMachines,
    *,
    pinned: Mapping[str, str] | None = None,
    time_limit: float = 60.0,
) -> ExactSolution:
    r"""Minimise the busy time of the busiest processor or link, by HiGHS.

    .. math:: \min z \quad \text{with} \quad \sum_d x_{o,d} = 1, \quad \text{busy}_{d,k}(x, y) \le z, \quad
        y^{in}_{v,d} \ge x_{r,d} - x_{p,d}, \quad y^{out}_{v,d} \ge x_{p,d} - x_{r,d}

    for operators ``o``, devices ``d``, resources ``k``, and values ``v`` from operator ``p`` to ``r``. A server is
    asked once here and gets each value once, even where it computes at several levels, so ``bound`` may be a little
    below what any placement has in :class:`~lightning_recsys.placement.loads.LoadModel`.

    Args:
        graph: The operators of the model.
        machines: The trainers and group servers of the group.
        pinned: Operators whose device is given.
        time_limit: Seconds after which the solver gives up.

    Raises:
        ImportError: SciPy is not installed (the extra ``[exact]``).
        ValueError: there is no placement for which the memory is enough, or none was proved best in time.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ImportError(
            "operator_placement.method=exact needs the extra [exact]: pip install lightning-recsys[exact]. "
            "The method greedy needs none."
        )
    # An extra, for torchmetrics imports it wherever it is installed: 63 MiB in every process that trains.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    program = _Program(graph, machines, dict(pinned or {}))
    rows, columns, numbers = program.matrix()
    shape = (len(program.limits), program.size)
    result = milp(
        program.objective(),
        integrality=program.integrality(),
        bounds=Bounds(0.0, program.upper_bounds()),
        constraints=LinearConstraint(csr_array((numbers, (rows, columns)), shape=shape), -np.inf, program.limits),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-4},
    )
    if result.x is None or result.status != 0:
        late = result.status == 1
        hint = "Take operator_placement.method=greedy, or give it more time." if late else "Give the servers memory."
        raise ValueError(
            f"operator_placement.method=exact found no best placement in {time_limit:g} s: {result.message} {hint}"
        )
    return ExactSolution(program.devices(result.x), program.unit * float(result.mip_dual_bound))


class _Program:
    """Variables by number, and rows ``terms <= limit``."""

    def __init__(self, graph: OperatorGraph, machines: GroupMachines, pinned: Mapping[str, str]) -> None:
        self.graph, self.machines, self.pinned = graph, machines, pinned
        self.names = [TRAINER, *map(server_name, range(machines.num_servers))]
        self.servers = self.names[1:]
        processor = machines.processor
        self.seconds = {x.name: processor.forward_seconds(x) + processor.backward_seconds(x) for x in graph.operators}
        # Times are in units of what all operators take together, so that the solver's tolerances are small beside them.
        self.unit = sum(self.seconds.values()) * machines.num_nets + machines.trainer_seconds + 1e-9
        self.numbers: dict[tuple[str, ...], int] = {("z",): 0}
        self.rows: list[_Terms] = []
        self.limits: list[float] = []
        self._place()
        self._cross()
        self._use()

    @property
    def size(self) -> int:
        return len(self.numbers)

    def _variable(self, *key: str) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _row(self, terms: Mapping[int, float], limit: float) -> None:
        self.rows.append(dict(terms))
        self.limits.append(limit)

    def _place(self) -> None:
        for operator in self.graph.operators:
            on = {self._variable("on", operator.name, device): 1.0 for device in self.names}
            self._row(on, 1.0)
            self._row(dict.fromkeys(on, -1.0), -1.0)

    def _cross(self) -> None:
        """Add the values that are sent: to a server that reads one and has not made it; and away from one that has."""
        for value in self.graph.values:
            for server in self.servers:
                into = self._variable("in", value.name, server)
                away = self._variable("out", value.name, server)
                made = None if value.producer is None else self._variable("on", value.producer, server)
                for reader in self.graph.readers[value.name]:
                    read = self._variable("on", reader, server)
                    self._row({into: -1.0, read: 1.0} | ({} if made is None else {made: -1.0}), 0.0)
                    if made is not None:
                        self._row({away: -1.0, made: 1.0, read: -1.0}, 0.0)
                if made is not None and value.name in self.graph.results:
                    self._row({away: -1.0, made: 1.0}, 0.0)
        for operator in self.graph.operators:
            for server in self.servers:
                self._row({self._variable("used", server): -1.0, self._variable("on", operator.name, server): 1.0}, 0.0)

    def _use(self) -> None:
        group = self.machines
        terms: dict[tuple[str, str], _Terms] = defaultdict(lambda: defaultdict(float))
        for operator in self.graph.operators:
            for device in self.names:
                number = self._variable("on", operator.name, device)
                terms[device, "cpu"][number] += self.seconds[operator.name]
                terms[device, "memory"][number] += operator.activation_bytes
                if device != TRAINER:
                    terms[device, "memory"][number] += group.state_bytes(operator) / group.num_nets
        for server in self.servers:
            used = self._variable("used", server)
            terms[TRAINER, "cpu"][used] += 2 * group.trainer_seconds_per_request
            terms[server, "cpu"][used] += 2 * group.server_seconds_per_request
            for value in self.graph.values:
                self._send(terms, value, server)
        self._limit(terms)

    def _send(self, terms: dict[tuple[str, str], _Terms], value: Value, server: str) -> None:
        group, size = self.machines, float(value.num_bytes)
        backward = size * value.has_gradient
        for key, source, target in (("in", TRAINER, server), ("out", server, TRAINER)):
            number = self._variable(key, value.name, server)
            terms[source, "cpu"][number] += _coding(group.activations, group.gradients, size, backward)
            terms[target, "cpu"][number] += _coding(group.gradients, group.activations, backward, size)
            ahead, back = group.activations.ratio * size, group.gradients.ratio * backward
            for device in (source, target):
                terms[device, "cpu"][number] += group.seconds_per_byte * (ahead + back)
            terms[source, "sent"][number] += ahead
            terms[target, "received"][number] += ahead
            terms[target, "sent"][number] += back
            terms[source, "received"][number] += back
            terms[target, "memory"][number] += size

    def _limit(self, terms: Mapping[tuple[str, str], _Terms]) -> None:
        group = self.machines
        shared: _Terms = defaultdict(float)
        for (device, resource), sums in terms.items():
            is_trainer = device == TRAINER
            nets = group.nets_per_trainer if is_trainer else group.num_nets
            if resource == "memory":
                memory = group.trainer_memory if is_trainer else group.memories[self.servers.index(device)]
                if math.isfinite(memory):
                    self._row({number: nets * x / memory for number, x in sums.items()}, 1.0)
                continue
            base = group.trainer_seconds if resource == "cpu" else group.trainer_bytes
            cores = group.trainer_cores if is_trainer else group.server_cores
            scale = nets / (cores if resource == "cpu" else group.link.bandwidth) / self.unit
            self._row({0: -1.0} | {number: scale * x for number, x in sums.items()}, -scale * base * is_trainer)
            if resource == "cpu" and group.shared_cores is not None:
                for number, x in sums.items():
                    shared[number] += x * group.num_nets * group.num_groups / group.shared_cores / self.unit
        if group.shared_cores is not None:
            base = group.trainer_seconds * group.num_nets * group.num_groups / group.shared_cores / self.unit
            self._row({0: -1.0} | shared, -base)

    def matrix(self) -> tuple[list[int], list[int], list[float]]:
        """Row, column and number of each entry."""
        entries = [(row, column, x) for row, terms in enumerate(self.rows) for column, x in terms.items()]
        rows, columns, numbers = zip(*entries, strict=True)
        return list(rows), list(columns), list(numbers)

    def objective(self) -> Any:
        """The bottleneck; of two placements with the same, the one that sends less."""
        costs = np.zeros(self.size)
        total = sum(value.num_bytes for value in self.graph.values) or 1
        for key, number in self.numbers.items():
            if key[0] in ("in", "out"):
                costs[number] = 1e-6 * self.graph.value_of[key[1]].num_bytes / total
        costs[0] = 1.0
        return costs

    def integrality(self) -> Any:
        """Whole numbers for what is on which device; all else follows."""
        return np.array([key[0] == "on" for key in self.numbers], dtype=int)

    def upper_bounds(self) -> Any:
        """0 where an operator may not be."""
        upper = np.ones(self.size)
        upper[0] = np.inf
        alike = not self.pinned and len(set(self.machines.memories)) == 1
        owners = [operator for operator in self.graph.operators if operator.owns_parameters]
        owners.sort(key=lambda operator: -self.seconds[operator.name])
        rank = {operator.name: number for number, operator in enumerate(owners)}
        for operator in self.graph.operators:
            for index, device in enumerate(self.names):
                wanted = self.pinned.get(operator.name, device)
                wrong = operator.owns_parameters if device == TRAINER else operator.trainer_only
                # Servers that are alike may be numbered in the order in which the operators come to them.
                wrong |= alike and index - 1 > rank.get(operator.name, index)
                if wrong or wanted != device:
                    upper[self._variable("on", operator.name, device)] = 0.0
        return upper

    def devices(self, x: Any) -> dict[str, str]:
        """The device of each operator."""
        return {
            operator.name: max(self.names, key=lambda device: x[self._variable("on", operator.name, device)])
            for operator in self.graph.operators
        }


def _coding(encoded: Coding, decoded: Coding, sent: float, received: float) -> float:
    """Processor time of one end, for what it sends and what it receives."""
    return encoded.encode_seconds * sent + decoded.decode_seconds * received
