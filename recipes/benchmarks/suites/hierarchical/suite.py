"""Suite ``hierarchical``: operators' placements and compression over a slow link, and what groups do to quality.

Steps are measured on two hosts, which are network namespaces. Rows are in memory that the hosts share, and so what
crosses are activations and gradients alone. A group's servers run on the node of its first rank; that rank only waits,
and the trainer on the other host is measured.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.harness.bars import Bar
from benchmarks.harness.choices import check_choices, check_numbers
from benchmarks.harness.jobs.hosts import Host, NoLinkError, limit_rate, linked_hosts
from benchmarks.harness.jobs.job import Job, run_in_turns
from benchmarks.harness.ours import MODELS
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.processes import python
from benchmarks.harness.report import Columns, Result, Row
from benchmarks.harness.turns import Measurement
from benchmarks.harness.workload import Workload
from benchmarks.suites.des.processors import encryption_seconds
from benchmarks.suites.des.suite import environments
from benchmarks.suites.het.link import PER_STEP, Crossed
from benchmarks.suites.hierarchical.quality import measure as measure_quality
from benchmarks.suites.hierarchical.training import PLAN, ROWS, WARM_STEPS, make_network, make_optimizer

from lightning_recsys.compression import Compression
from lightning_recsys.partition.timing import time_operators
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.operator_plans.file import read_measured, write_plan
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import OperatorGraph
from lightning_recsys.placement.step_time import predict
from lightning_recsys.placement.tagging import OperatorMethod, place_operators
from lightning_recsys.strategies.hierarchical.groups import Groups
from lightning_recsys.strategies.hierarchical.planning import OperatorPlacement, group_machines

Part = Literal["steps", "quality"]

TRAINING = "benchmarks.suites.hierarchical.training"
ONE_PROCESS = "one process"
COMPRESSIONS: Mapping[str, str | Mapping[str, str]] = {
    "none": "none",
    "bf16": "bf16",
    "int8, bf16": {"activations": "int8", "gradients": "bf16"},
    "topk": {"gradients": "topk"},
}
BYTES_PER_SECOND = {"mbit": 1.25e5, "gbit": 1.25e8}
BURST_SECONDS = 1e-3  # of the link, which go through at once after a pause
PAYLOAD = 1448 / 1514  # of what a full packet takes of the link
TRAINER = 1  # the rank that is measured

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Variant:
    """What is compared.

    Args:
        method: How operators are placed.
        compression: One of :data:`COMPRESSIONS`.
    """

    method: OperatorMethod
    compression: str = "none"

    @property
    def name(self) -> str:
        return self.method if self.compression == "none" else f"{self.method}, {self.compression}"


def run(
    *,
    parts: Sequence[Part],
    model: str,
    placements: Sequence[OperatorMethod],
    compressions: Sequence[str],
    compressed_placement: OperatorMethod,
    batch_sizes: Sequence[int],
    rates: Sequence[str],
    num_servers: int,
    rounds: int,
    seconds: float,
    quality: Mapping[str, Any],
    cache: str,
    data: str,
) -> list[Result]:
    """Measure a trainer and the servers of its group on two hosts, and what several groups learn.

    Args:
        parts: Which of the two.
        model: One of ``benchmarks.harness.ours.MODELS``.
        placements: How operators are placed, at the first batch size.
        compressions: Some of :data:`COMPRESSIONS`, at all batch sizes.
        compressed_placement: How operators are placed where compressions are compared: ``none`` or ``rules``, which
            do not depend on what travels.
        batch_sizes: Examples of a step.
        rates: Of the link, in ``mbit`` or ``gbit``.
        num_servers: Group servers.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each variant in each round.
        quality: Arguments of :func:`benchmarks.suites.hierarchical.quality.measure`.
        cache: Folder in which that keeps finished runs.
        data: Folder of the data sets.

    Raises:
        ValueError: a part, model, placement or compression that there is not; a rate in another unit.
    """
    check_choices("suite.model", [model], MODELS)
    check_choices("suite.placements", placements, get_args(OperatorMethod))
    check_choices("suite.compressed_placement", [compressed_placement], ["none", "rules"])
    check_choices("suite.compressions", compressions, COMPRESSIONS)
    check_numbers("suite.rounds", rounds)
    links = {rate: Network(PAYLOAD * bytes_per_second(rate), 5e-5) for rate in rates}
    compressed = [Variant(compressed_placement, name) for name in compressions]
    suites = {}
    for batch_size in batch_sizes:
        placed = [Variant(method) for method in placements] if batch_size == batch_sizes[0] else []
        variants = list(dict.fromkeys([*placed, *compressed]))
        suite = Suite(model, batch_size, num_servers=num_servers, rounds=rounds, seconds=seconds)
        suites[suite] = variants

    def measure_steps() -> Measured:
        measured = [suite.measure(variants, links) for suite, variants in suites.items()]
        return [x for results, _ in measured for x in results], [x for _, bars in measured for x in bars]

    measures = {
        "steps": measure_steps,
        "quality": lambda: measure_quality(**quality, cache=Path(cache), root=data),
    }
    return measure_parts(parts, measures)


def bytes_per_second(rate: str) -> float:
    """Of a rate in the words of ``tc``.

    >>> bytes_per_second("100mbit")
    12500000.0
    """
    number, unit = rate[:-4], rate[-4:]
    if unit not in BYTES_PER_SECOND or not number.isdecimal():
        raise ValueError(f"suite.rates must be such as 100mbit or 1gbit, got {rate!r}.")
    return int(number) * BYTES_PER_SECOND[unit]


@dataclass(frozen=True)
class Planned:
    """A variant at one rate.

    Args:
        variant: The variant.
        rate: Of the link.
        plan: Where each operator is.
        machines: What is known of the machines before the job.
    """

    variant: Variant
    rate: str
    plan: OperatorPlan
    machines: GroupMachines

    @property
    def job(self) -> tuple[tuple[tuple[str, str], ...], str]:
        """What is the same for all that one job can measure."""
        return tuple(sorted(self.plan.devices.items())), self.variant.compression

    def seconds(self, graph: OperatorGraph, measured: Mapping[str, float]) -> float:
        """The prediction of a net's step, but for what is not placed.

        Args:
            graph: The model's operators.
            measured: What the job measured of its machines as it began.
        """
        return predict(graph, self.plan, replace(self.machines, **measured)).alone_seconds  # type: ignore[arg-type]


@dataclass(frozen=True)
class Suite:
    """One batch size.

    Args:
        model: One of ``benchmarks.harness.ours.MODELS``.
        batch_size: Examples of a step.
        num_servers: Group servers.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each variant in each round.
    """

    model: str
    batch_size: int
    num_servers: int
    rounds: int
    seconds: float

    def measure(self, variants: Sequence[Variant], links: Mapping[str, Network]) -> Measured:
        """Rates of all variants at all links, beside one process that has everything."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            graph = self.timed_operators()
            planned = self.plan(graph, variants, links, folder)
            try:
                measured, crossed, costs = self._run(planned, list(links), folder)
            except NoLinkError as error:
                log.warning("The link is left out: %s.", error)
                return [], [self._error_bar(x, None) for x in planned]
        results: list[Result] = [
            Row(f"{self.model}, {rate}, B={self.batch_size}", rates, base=ONE_PROCESS)
            for rate, rates in measured.items()
        ]
        table, bars = self._predictions(graph, planned, measured, costs)
        title = f"Bytes between a trainer and its group's servers, both ways, B={self.batch_size}"
        results += [table, Columns(title, PER_STEP, [each.line(name) for name, each in crossed.items()])]
        return results, [*bars, *(each.bar(f"{name}, B={self.batch_size}") for name, each in crossed.items())]

    def timed_operators(self) -> OperatorGraph:
        """The model's operators with the times that they take here."""
        work = Workload(rows=self.batch_size)
        (batch,) = work.batches(self.batch_size)
        network, sample = make_network(work, self.model, device=None), (batch.dense, batch.sparse)
        return time_operators(trace(network, sample), sample, make_optimizer=make_optimizer)

    def plan(
        self, graph: OperatorGraph, variants: Sequence[Variant], links: Mapping[str, Network], folder: Path
    ) -> list[Planned]:
        """Place operators for each variant and link by what their operators take."""
        groups = Groups(num_groups=1, trainers_per_group=1, nets_per_trainer=1, servers_per_group=self.num_servers)
        per_byte = GroupMachines(self.num_servers).seconds_per_byte + encryption_seconds() / 2
        planned = []
        for rate, link in links.items():
            machines = {"link": link, "shared_cores": None, "seconds_per_byte": per_byte}
            for variant in variants:
                path = folder / f"{len(planned)}.yaml"
                settings = OperatorPlacement(variant.method, machines=machines)
                compression = Compression.from_option(COMPRESSIONS[variant.compression], top_k_fraction=0.1)
                known = group_machines(settings, groups, compression)
                plan = place_operators(graph, known, method=variant.method)
                write_plan(path, plan, graph)
                planned.append(Planned(variant, rate, plan, known))
        return planned

    def _run(
        self, planned: Sequence[Planned], rates: Sequence[str], folder: Path
    ) -> tuple[dict[str, Measurement], dict[str, Crossed], dict[Any, dict[str, float]]]:
        """Each job on a link of its own; variants with the same plan at two rates are one job.

        Returns:
            The rates of variants at each link's rate, the bytes of each job, and what each job measured as it began.
        """
        with ExitStack() as stack:
            links, jobs = [], {}
            jobs[ONE_PROCESS] = self._job(ONE_PROCESS, folder, [python()], [{"strategy": None}])
            numbers: dict[Any, str] = {}
            for number, each in enumerate(planned):
                if each.job not in numbers:
                    hosts = stack.enter_context(linked_hosts(None))
                    links.append(hosts)
                    taken = f"{each.variant.name}, planned for {each.rate}" if each.variant.name in jobs else None
                    name = numbers[each.job] = taken or each.variant.name
                    jobs[name] = self._on_two_hosts(name, folder, hosts, folder / f"{number}.yaml", each.variant)

            def limit_all(rate: str) -> None:
                for hosts in links:
                    limit_rate(hosts, rate, burst=f"{int(BURST_SECONDS * bytes_per_second(rate))}b")

            changes = [partial(limit_all, rate) for rate in rates]
            run_in_turns(jobs, rounds=self.rounds, seconds=self.seconds, before=changes)
            # The first turn at each rate does not count; of the very first `rates` has none.
            turns = {
                name: job.rates(self.batch_size, rank=TRAINER * (name != ONE_PROCESS)) for name, job in jobs.items()
            }
            measured = {}
            for i, rate in enumerate(rates):
                own = slice(i * (self.rounds + 1), i * (self.rounds + 1) + self.rounds)
                names = {x.variant.name: numbers[x.job] for x in planned if x.rate == rate}
                found = {name: turns[job][own] for name, job in names.items()}
                measured[rate] = Measurement({ONE_PROCESS: turns[ONE_PROCESS][own], **found})
            crossed = {
                name: Crossed.read(job.folder, rank=TRAINER) for name, job in jobs.items() if name != ONE_PROCESS
            }
            costs = {key: read_measured(jobs[name].folder / PLAN) for key, name in numbers.items()}
        return measured, crossed, costs

    def _on_two_hosts(self, name: str, folder: Path, hosts: tuple[Host, Host], plan: Path, variant: Variant) -> Job:
        strategy = {
            "trainers_per_group": 2,
            "servers_per_group": self.num_servers,
            "fc_splits": "none",  # the plan names whole layers
            "compression": COMPRESSIONS[variant.compression],
        }
        settings = {"strategy": strategy, "plan": str(plan)}
        return self._job(
            name,
            folder,
            [host.command(*python()) for host in hosts],
            [settings, {**settings, "interface": hosts[TRAINER].interface}],
            environment=environments(hosts),
        )

    def _job(
        self,
        name: str,
        folder: Path,
        launchers: Sequence[Sequence[str]],
        settings: Sequence[Mapping[str, Any]],
        **own: Any,
    ) -> Job:
        steps = folder / name.replace(" ", "-")
        steps.mkdir()
        common = {"model": self.model, "batch_size": self.batch_size, "rows": min(ROWS, 64 * self.batch_size)}
        return Job(
            f"{name}, B={self.batch_size}",
            launchers,
            training=TRAINING,
            settings=[{**common, **x} for x in settings],
            folder=steps,
            workers=len(launchers),
            warm_steps=WARM_STEPS,
            **own,
        )

    def _predictions(
        self,
        graph: OperatorGraph,
        planned: Sequence[Planned],
        measured: Mapping[str, Measurement],
        costs: Mapping[Any, Mapping[str, float]],
    ) -> tuple[Columns, list[Bar]]:
        """A step as foretold and as measured. What is not placed takes what one process takes beside its operators."""
        placed = sum((x.forward_seconds or 0.0) + (x.backward_seconds or 0.0) for x in graph.operators)
        lines, bars = [], []
        for each in planned:
            rates = measured[each.rate]
            alone = self.batch_size / rates.median(ONE_PROCESS)
            of_job = costs[each.job]
            told = each.seconds(graph, of_job) + max(alone - placed, 0.0)
            seen = self.batch_size / rates.median(each.variant.name)
            bars.append(self._error_bar(each, 100 * abs(told / seen - 1)))
            lines.append(
                [
                    each.rate,
                    each.variant.name,
                    f"{sum(x != 'trainer' for x in each.plan.devices.values())}",
                    f"{1e3 * sum(of_job.values()):.2f}",
                    *(f"{1e3 * x:.1f}" for x in (placed, alone, told, seen)),
                ]
            )
        times = ("ms a request", "ms of operators", "ms, one process", "ms foretold", "ms of a step")
        header = ("link", "", "on servers", *times)
        return Columns(f"Steps of {self.model}, B={self.batch_size}", header, lines), bars

    def _error_bar(self, each: Planned, error: float | None) -> Bar:
        name = f"step time foretold off the measured, {each.rate}, {each.variant.name}, B={self.batch_size}"
        return Bar(name, error, "at most", 25, " %")
