"""From what a step asks of its machines to what a cluster gives: examples a second, what limits it, bytes, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recsys.placement.communication import FLOAT_BYTES, Network, all_reduce
from lightning_recsys.placement.machine_kinds import Machines
from lightning_recsys.placement.queueing import closed_network_seconds
from lightning_recsys.planning.measuring import StepCost
from lightning_recsys.planning.methods import Method

TRAINER_CORES, SERVER_CORES = "trainers' cores", "servers' cores"
TRAINER_PORT, SERVER_PORT = "trainers' ports", "servers' ports"
WAITING = "waiting"
NOTABLE = 0.4  # share of the time from which something limits


@dataclass(frozen=True)
class Layout:
    """Which machines do what.

    Args:
        trainers: Kind of the machines that train.
        num_trainers: How many of them.
        workers: Processes that train on each of them.
        servers: Kind of the servers' machines; ``None`` where the servers are beside the workers, or there are none.
        num_servers: Machines with servers, or beside the workers the servers of all.
        per_server: Server processes on each of these machines.
    """

    trainers: str
    num_trainers: int
    workers: int
    servers: str | None = None
    num_servers: int = 0
    per_server: int = 1

    @property
    def num_workers(self) -> int:
        """Workers of all machines."""
        return self.num_trainers * self.workers

    @property
    def num_processes(self) -> int:
        """Server processes of all machines."""
        return self.num_servers * self.per_server

    @property
    def num_machines(self) -> int:
        """Machines that are used."""
        return self.num_trainers + (self.num_servers if self.servers else 0)

    @property
    def machines(self) -> dict[str, int]:
        """Kinds of machines that are used, with how many."""
        found = {self.trainers: self.num_trainers}
        if self.servers:
            found[self.servers] = found.get(self.servers, 0) + self.num_servers
        return found

    def __str__(self) -> str:
        trainers = f"{self.num_trainers} {self.trainers} x {self.workers}"
        if not self.num_servers:
            return trainers
        if self.servers is None:
            return f"{trainers}, {self.num_servers} servers beside"
        return f"{trainers}, {self.num_servers} {self.servers} x {self.per_server} servers"


@dataclass(frozen=True)
class Forecast:
    """The forecast of one strategy with one layout.

    Args:
        method: The strategy.
        layout: Which machines do what.
        examples_per_second: Of all workers together.
        step_seconds: Seconds from the begin of a worker's step to that of its next one.
        step_examples: Examples in a step of the whole: of all workers in step, else of one.
        limit: What is busy all the time, or takes most of a worker's step: one of the constants of this module.
        busy: Share of the time for which each of them is.
        trainer_bytes: Bytes a second that a machine with workers sends, and receives.
        server_bytes: The same of a machine with nothing but servers; 0 where there is none.
        worker_memory: Bytes of one worker's process.
        server_memory: Bytes of one server's process.
        staleness: Mean updates of others that a gradient has missed.
        survives: Workers that may die while the run goes on.
        price: What an hour costs.
        refused: Why it cannot be; the other numbers then mean nothing.
    """

    method: Method
    layout: Layout
    examples_per_second: float
    step_seconds: float
    step_examples: int
    limit: str
    busy: Mapping[str, float]
    trainer_bytes: tuple[float, float]
    server_bytes: tuple[float, float]
    worker_memory: float
    server_memory: float
    staleness: float
    survives: int
    price: float
    refused: str | None = None

    @property
    def cost(self) -> float:
        """Price of a thousand million examples, by the prices of machines."""
        return self.price / 3600 / self.examples_per_second * 1e9 if self.examples_per_second else float("inf")


@dataclass(frozen=True)
class _Demand:
    """The demands of a worker's step with so many workers: seconds of processors, and bytes."""

    worker_seconds: float
    server_seconds: float
    sent: float
    received: float
    dense: float  # bytes of a ring all-reduce
    gathered: float  # share of them that is gathered instead
    rows: float  # bytes to all other workers evenly
    gathers_rows: bool  # whether an all-gather sends those
    requests: float
    waiting: float
    inside: float  # of what is sent, and of what is received: what stays in a group
    ahead: float  # share of what is sent and received that travels while the worker computes
    grouped: bool  # whether each group has servers of its own


def forecast(
    method: Method,
    costs: Mapping[int, StepCost],
    layout: Layout,
    machines: Machines,
    *,
    alone: StepCost | None = None,
    gflops: float = 1.0,
) -> Forecast:
    """The forecast of a strategy on a layout.

    Free workers are a closed queueing network: each computes, and stands in line at the servers' ports and processors,
    over which rows are striped, so that one line stands for all of them. The workers of a group stand in line at its
    own servers. Workers in step come to the servers at once: the first passes all lines, the others follow behind the
    longest. What workers send each other follows, for a ring leaves a machine once, and rows go to all others evenly.
    Of workers in step the share of bytes that was asked ahead in the measurement is on its way while they compute.

    Args:
        method: The strategy.
        costs: What its step was measured to cost, by the number of workers.
        layout: Which machines do what.
        machines: What these machines are.
        alone: What a step of one process costs without any strategy, of which ``des`` needs the share that is cut.
        gflops: Of a core of the machine that measured; others are faster or slower by theirs.
    """
    step = _step_on(_demand(method, costs, layout, alone), layout, machines, gflops)
    workers, busy_seconds = layout.num_workers, step.busy_seconds()
    if method.in_step:
        seconds, staleness = max(step.in_step_seconds(), *busy_seconds.values()), 0.0
    else:
        seconds = max(step.free_seconds(), *busy_seconds.values())
        staleness = (workers - 1) * min(1.0, step.compute / seconds)  # others' pushes while one computes, at least
    batch = next(iter(costs.values())).batch_size
    examples = batch * (1 if method.shares_batch else workers)
    measured = max(costs.items())[1]
    busy = {name: used / seconds for name, used in busy_seconds.items()}
    made = Forecast(
        method,
        layout,
        examples_per_second=examples / seconds,
        step_seconds=seconds,
        step_examples=examples if method.in_step else batch,
        limit=step.limit(busy, seconds),
        busy=busy,
        trainer_bytes=(step.out_bytes / seconds, step.in_bytes / seconds),
        server_bytes=(step.server_bytes[0] / seconds, step.server_bytes[1] / seconds),
        worker_memory=measured.worker_bytes,
        server_memory=_server_memory(measured, layout),
        staleness=staleness,
        survives=0 if method.in_step else workers - 1,
        price=sum(number * machines.kinds[kind].price for kind, number in layout.machines.items()),
    )
    return _with_memory_checked(made, machines)


@dataclass(frozen=True)
class _Step:
    """A worker's step on a layout: seconds of processors, and bytes that leave its machine or come to it.

    Args:
        layout: Which machines do what.
        cores: Of a machine with workers.
        server_cores: Of a machine with nothing but servers.
        port: Of a machine with workers.
        server_port: Of a machine with nothing but servers; ``None`` where servers are beside workers.
        compute: Processor seconds of the worker.
        serving: Processor seconds of all servers.
        waiting: Seconds for which processes wake each other.
        sent: Bytes to servers on other machines.
        received: Bytes from servers on other machines.
        peers: Bytes to workers on other machines.
        alone: Of these, those that are on their way while nothing comes back.
        ahead: Share of what servers are asked that was asked a step earlier, and travels while the worker computes.
        grouped: Whether the servers of a machine serve the workers of that machine alone.
    """

    layout: Layout
    cores: int
    server_cores: int
    port: Network
    server_port: Network | None
    compute: float
    serving: float
    waiting: float
    sent: float
    received: float
    peers: float
    alone: float
    ahead: float
    grouped: bool

    @property
    def _of_servers_beside(self) -> float:
        """Workers whose requests the servers on a machine with workers answer; 0 where those are elsewhere."""
        layout = self.layout
        beside = self.server_port is None and layout.num_servers > 0
        return layout.num_workers / layout.num_trainers if beside else 0.0

    @property
    def out_bytes(self) -> float:
        """The bytes that leave a machine with workers while every worker makes a step."""
        return self.layout.workers * (self.sent + self.peers) + self._of_servers_beside * self.received

    @property
    def in_bytes(self) -> float:
        """The bytes that come to it."""
        return self.layout.workers * (self.received + self.peers) + self._of_servers_beside * self.sent

    @property
    def server_bytes(self) -> tuple[float, float]:
        """The bytes that a machine with nothing but servers sends and receives meanwhile."""
        if self.server_port is None:
            return 0.0, 0.0
        share = self.layout.num_workers / self.layout.num_servers
        return share * self.received, share * self.sent

    def busy_seconds(self) -> dict[str, float]:
        """How long each resource is busy while every worker makes a step."""
        layout, workers = self.layout, self.layout.num_workers
        cores = layout.workers * self.compute + self._of_servers_beside * self.serving
        found = {
            # A worker has one core to itself, where there are enough of them.
            TRAINER_CORES: max(self.compute, cores / self.cores),
            TRAINER_PORT: max(self.out_bytes, self.in_bytes) / self.port.bandwidth,
        }
        if layout.num_servers:
            found[SERVER_CORES] = workers * self.serving / layout.num_processes
        if self.server_port is not None:
            cores = workers * self.serving / layout.num_servers
            found[SERVER_CORES] = max(found[SERVER_CORES], cores / self.server_cores)
            found[SERVER_PORT] = max(self.server_bytes) / self.server_port.bandwidth
        return found

    def limit(self, busy: Mapping[str, float], seconds: float) -> str:
        """The resource that is busiest, or where nothing is full, that on which a worker's step spends most."""
        passing = self.sent + self.received + self.layout.workers * self.peers
        spent = {TRAINER_CORES: self.compute, TRAINER_PORT: passing / self.port.bandwidth}
        weight = {name: max(share, spent.get(name, 0.0) / seconds) for name, share in busy.items()}
        most = max(weight, key=weight.__getitem__)
        return most if weight[most] >= NOTABLE else WAITING

    def free_seconds(self) -> float:
        """A step of each of free workers: a closed queueing network, of each group where there are groups."""
        wait, layout = self.compute + self.waiting + self._own_way(), self.layout
        cycling = layout.workers if self.grouped else layout.num_workers
        return closed_network_seconds([(line, 1) for line in self._lines()], wait, cycling)

    def in_step_seconds(self) -> float:
        """A step of all workers: they compute, come to the servers at once, and then send each other what they owe."""
        layout, lines = self.layout, self._lines()
        cores = layout.workers * self.compute + self._of_servers_beside * self.serving
        compute = max(self.compute, cores / self.cores)
        asking = self._own_way() + sum(lines) + (layout.num_workers - 1) * max(lines, default=0.0)
        passing = layout.workers * (self.peers + self.alone) / self.port.bandwidth
        return max(compute, self.ahead * asking) + self.waiting + (1 - self.ahead) * asking + passing

    def _lines(self) -> list[float]:
        """Seconds that a step needs of each line at the servers, over all of which its requests are striped."""
        layout = self.layout
        if not layout.num_servers:
            return []
        serving = self.serving / (layout.per_server if self.grouped else layout.num_processes)
        return [serving, *self._ways_in_lines()]

    def _ways_in_lines(self) -> list[float]:
        if self.server_port is None:
            return []
        return [each / self.layout.num_servers / self.server_port.bandwidth for each in (self.sent, self.received)]

    def _own_way(self) -> float:
        """Seconds of the worker's own port, as far as the servers' ports do not take as long for the same bytes."""
        own = [each / self.port.bandwidth for each in (self.sent, self.received)]
        return sum(own) - sum(map(min, own, self._ways_in_lines()))


def _step_on(need: _Demand, layout: Layout, machines: Machines, gflops: float) -> _Step:
    """The demands of a worker on these machines."""
    workers, kind = layout.num_workers, machines.kinds[layout.trainers]
    server = machines.kinds[layout.servers] if layout.servers else kind
    port = machines.port(layout.trainers, layout.num_machines)
    apart = 1.0 if layout.servers else (layout.num_trainers - 1) / layout.num_trainers
    others = (workers - layout.workers) / (workers - 1) if workers > 1 else 0.0
    ring = need.dense / layout.workers if layout.num_trainers > 1 else 0.0  # it leaves a machine once
    rows = need.rows * others
    # Gloo gathers in pieces of half a buffer, of which the first is on its way alone.
    alone = (need.gathered * ring + (rows if need.gathers_rows else 0.0)) / (2 * max(1, workers - 1))
    messages = need.requests + (2 * (workers - 1) if ring or rows else 0)
    return _Step(
        layout,
        cores=kind.cores,
        server_cores=server.cores,
        port=port,
        server_port=machines.port(layout.servers, layout.num_machines) if layout.servers else None,
        compute=need.worker_seconds * gflops / (kind.gflops or gflops),
        serving=need.server_seconds * gflops / (server.gflops or gflops),
        waiting=need.waiting + 2 * (messages - need.ahead * need.requests) * port.latency,
        sent=max(0.0, need.sent - need.inside) * apart,
        received=max(0.0, need.received - need.inside) * apart,
        peers=rows + ring,
        alone=alone,
        ahead=need.ahead,
        grouped=need.grouped,
    )


def _demand(method: Method, costs: Mapping[int, StepCost], layout: Layout, alone: StepCost | None) -> _Demand:
    workers = layout.num_workers
    cost = costs[min(costs, key=lambda measured: abs(measured - workers))]
    ring = all_reduce(cost.dense_floats, num_processes=max(1, cost.workers)).sent_bytes
    dense = all_reduce(cost.dense_floats, num_processes=workers).sent_bytes
    averages = method.in_step and not method.shares_batch
    rows = cost.peer_bytes - (ring if averages else 0.0)
    if method.shares_batch:  # partial results of one batch, all of them by ring all-reduces
        dense = cost.peer_bytes * all_reduce(1, num_processes=workers).sent_bytes / FLOAT_BYTES if workers > 1 else 0.0
        rows = 0.0
    elif method.has_servers:  # each row's gradients go to one of the workers
        rows *= 2 * (workers - 1) / workers
    else:  # every worker's gradients of rows go to all
        rows *= workers - 1
    # Rows are striped: each further server gets requests of its own, with fewer rows in each.
    further = max(0, (layout.num_trainers if method.grouped else layout.num_processes) - 1) * cost.row_requests
    if method.grouped:
        further += (layout.per_server - 1) * (cost.requests - cost.row_requests)
    compute = cost.worker_seconds + further * cost.request_worker_seconds
    if method.shares_batch and alone is not None and workers > 1:
        # With n workers each computes the same beside an n-th of what is cut: two points of that line are known.
        cut = max(0.0, 2 * (alone.worker_seconds - compute))
        compute += cut * (1 / workers - 1 / 2)
    return _Demand(
        compute,
        cost.server_seconds + further * cost.request_server_seconds,
        cost.sent_bytes,
        cost.received_bytes,
        dense if averages or method.shares_batch else 0.0,
        cost.gathered,
        max(0.0, rows),
        not method.has_servers,
        cost.requests,
        max(each.waiting_seconds for each in costs.values()),
        cost.group_bytes,
        cost.ahead,
        method.grouped,
    )


def _server_memory(measured: StepCost, layout: Layout) -> float:
    """One server's process, which has its share of what all hold."""
    if not layout.num_servers:
        return 0.0
    empty = min(measured.empty_server_bytes, measured.server_bytes)
    return empty + (measured.server_bytes - empty) / layout.num_processes


def _with_memory_checked(made: Forecast, machines: Machines) -> Forecast:
    layout, gib = made.layout, 1 << 30
    kind = machines.kinds[layout.trainers]
    beside = layout.servers is None and layout.num_servers
    share = layout.num_servers / layout.num_trainers if beside else 0.0
    needs = {layout.trainers: (layout.workers * made.worker_memory + share * made.server_memory, kind.memory)}
    if layout.servers:
        own = machines.kinds[layout.servers]
        needs[f"{layout.servers} of servers"] = (layout.per_server * made.server_memory, own.memory)
    for name, (needed, there) in needs.items():
        if needed > there:
            why = (
                f"a machine {name} needs {needed / gib:.1f} GiB and has {there / gib:.1f}:"
                f" {(needed - there) / gib:.1f} GiB are missing"
            )
            return Forecast(**{**vars(made), "refused": why})
    return made
