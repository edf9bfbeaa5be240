"""Suite ``plan``: what the planner foretells from measurements on one machine, held against runs on two hosts.

Forecasts are made before the runs, from the local measurement alone. The hosts are network namespaces with one
processor each. Strategies with servers have a worker on the first host and a server on the second; the others have a
worker on each, hierarchical training with a group's servers beside it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.bars import Bar
from benchmarks.harness.choices import check_choices
from benchmarks.harness.jobs.hosts import Host, NoLinkError
from benchmarks.harness.jobs.job import Job
from benchmarks.harness.ours import MODELS
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.processes import python
from benchmarks.harness.report import Columns, Result
from benchmarks.suites.des.suite import environments
from benchmarks.suites.het.link import MakeJob, measure_on_links, server_with_keys
from benchmarks.suites.plan.training import GRAPH, make
from recipe_tools.record import digest, git_commit, machine, versions

from lightning_recsys.placement.machine_kinds import MachineKind, Machines
from lightning_recsys.planning import Forecast, Layout, measure
from lightning_recsys.planning import Measured as Steps
from lightning_recsys.planning.forecast import forecast
from lightning_recsys.planning.methods import METHODS

Part = Literal["link"]

TRAINING = "benchmarks.suites.plan.training"
GBIT = {"1gbit": 1.0, "333mbit": 0.333, "125mbit": 0.125}
BURST = "24kb"  # a link as machines have it, which keeps nothing for short messages after a pause
APART = 1.2  # strategies whose rates differ by more than this have to be foretold in their order

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Held:
    """A forecast beside what came.

    Args:
        workload: Model, batch size, width and rate of the link.
        method: The strategy.
        foretold: Examples a second that were forecast.
        measured: Examples a second that came.
        limit: What limits them by the forecast.
    """

    workload: str
    method: str
    foretold: float
    measured: float
    limit: str

    @property
    def error(self) -> float:
        """Percent by which the forecast is above what came; negative below."""
        return 100 * (self.foretold / self.measured - 1)


def run(
    *,
    parts: list[Part],
    models: list[str],
    methods: list[str],
    batch_sizes: list[int],
    dims: list[int],
    rates: list[str],
    rows: int,
    rounds: int,
    seconds: float,
    local_seconds: float,
    warm_steps: Mapping[str, int],
    cache: str,
) -> list[Result]:
    """Measure, forecast, run and compare; see ``conf/suite/plan.yaml`` for the arguments.

    Raises:
        ValueError: a model, a strategy or a rate that there is not.
    """
    check_choices("suite.models", models, (*MODELS, GRAPH))
    check_choices("suite.methods", methods, METHODS)
    check_choices("suite.rates", rates, GBIT)
    link = partial(
        _link,
        cache=Path(cache),
        workloads=list(itertools.product(models, batch_sizes, dims)),
        methods=methods,
        rates=rates,
        rows=rows,
        rounds=rounds,
        seconds=seconds,
        local_seconds=local_seconds,
        warm_steps=warm_steps,
    )
    return measure_parts(parts, {"link": link})


def _link(
    *,
    cache: Path,
    workloads: Sequence[tuple[str, int, int]],
    rows: int,
    **measured: Any,
) -> Measured:
    held: list[Held] = []
    for model, batch_size, dim in workloads:
        settings = {"model": model, "batch_size": batch_size, "dim": dim, "rows": rows}
        here = [versions(), git_commit(), machine()]  # another forecast or another strategy is measured anew
        name = f"{model}-{batch_size}-{dim}-{digest([settings, measured, here])}.json"
        if (path := cache / name).exists():
            held += [Held(**each) for each in json.loads(path.read_text())]
            log.info("%s, B=%d, D=%d: taken from %s", model, batch_size, dim, path)
            continue
        try:
            found = _held(settings, **measured)
        except NoLinkError as error:
            log.warning("The link is left out: %s.", error)
            return [], _bars([])
        cache.mkdir(parents=True, exist_ok=True)
        (new := path.with_suffix(".new")).write_text(json.dumps([asdict(each) for each in found]))
        new.replace(path)
        held += found
    header = ("", "strategy", "foretold", "measured", "off by", "limited by")
    lines = [
        [
            *(each.workload, each.method, f"{each.foretold:,.0f}", f"{each.measured:,.0f}"),
            *(f"{each.error:+.0f} %", each.limit),
        ]
        for each in held
    ]
    return [Columns("Examples per second between two hosts", header, lines)], _bars(held)


def _held(
    settings: Mapping[str, Any],
    *,
    methods: Sequence[str],
    rates: Sequence[str],
    rounds: int,
    seconds: float,
    local_seconds: float,
    warm_steps: Mapping[str, int],
) -> list[Held]:
    """The forecasts of one model, batch size and width, and what came."""
    model, batch_size, dim = (settings[name] for name in ("model", "batch_size", "dim"))
    task, data = make(**settings)
    alone_first = ["single", *(x for x in methods if x != "single")]
    steps = measure(task, data, methods=alone_first, seconds=local_seconds)
    for name, why in steps.refusals.items():
        log.warning("%s of %s is left out: %s", name, model, why)
    measured = [name for name in methods if name in steps.costs]
    foretold = {rate: {name: _forecast(steps, name, rate) for name in measured} for rate in rates}
    makes: dict[str, MakeJob] = {name: partial(_job, name, settings, warm_steps.get(name, 5)) for name in measured}
    came, _ = measure_on_links(
        *(makes, rates),
        batch_size=batch_size,
        rounds=rounds,
        seconds=seconds,
        read=lambda job: job.telemetry,
        burst=BURST,
    )
    held = []
    for rate, name in itertools.product(rates, measured):
        examples = came[rate].median(name) / (2 if METHODS[name].shares_batch else 1)
        made = foretold[rate][name]
        workload = f"{model}, B={batch_size}, D={dim}, {rate}"
        held.append(Held(workload, name, made.examples_per_second, examples, made.limit))
        log.info("%s, %s: %.1f %%", workload, name, held[-1].error)
    return held


def _bars(held: Sequence[Held]) -> list[Bar]:
    """Their values are missing where nothing was measured."""
    errors = [abs(each.error) for each in held]
    return [
        Bar("median error of a forecast", statistics.median(errors) if held else None, "at most", 15, " %"),
        Bar("largest error of a forecast", max(errors) if held else None, "at most", 30, " %"),
        Bar("pairs of strategies in the wrong order", float(_misordered(held)) if held else None, "at most", 0),
    ]


def _misordered(held: Sequence[Held]) -> int:
    """Pairs of one workload that are more than 20 % apart, and were foretold the other way round."""
    wrong = 0
    for one, other in itertools.permutations(held, 2):
        if one.workload == other.workload and one.measured > APART * other.measured:
            wrong += one.foretold < other.foretold
    return wrong


def _forecast(steps: Steps, name: str, rate: str) -> Forecast:
    method = METHODS[name]
    layout = Layout("host", 1, 1, "host", 1) if method.served else Layout("host", 2, 1, None, 2 * method.grouped)
    if name == "single":
        layout = Layout("host", 1, 1)
    machines = Machines({"host": MachineKind(number=2, cores=1, port_gbit=GBIT[rate], latency_us=0.0)})  # none here
    alone = steps.costs.get("single", {}).get(1)
    return forecast(method, steps.costs[name], layout, machines, alone=alone, gflops=steps.gflops)


def _job(name: str, settings: Mapping[str, Any], warm_steps: int, hosts: tuple[Host, Host], folder: Path) -> Job:
    """The workers, each on a processor of its own."""
    steps, method = folder / "steps", METHODS[name]
    steps.mkdir()
    common: dict[str, Any] = {"training": TRAINING, "folder": steps, "warm_steps": warm_steps}
    if method.served:
        here, there = hosts
        command, keys = server_with_keys(there, folder)
        own = {"server": [*_on(1), *command], "key_file": str(keys), "interface": here.interface}
        launchers, given, workers = [here.command(*_on(0), *python())], [{**settings, "method": name, **own}], 1
        environment = [{"GLOO_SOCKET_IFNAME": here.interface}]
    elif name == "single":
        launchers, given, workers = [_on(0) + python()], [{**settings, "method": name}], 1
        environment = [{}]
    else:
        launchers = [host.command(*_on(i), *python()) for i, host in enumerate(hosts)]
        given, workers = [{**settings, "method": name, "num_nodes": 2}] * 2, 2
        environment = environments(hosts)
    return Job(name, launchers, settings=given, workers=workers, environment=environment, **common)


def _on(processor: int) -> list[str]:
    """So that a process has one of the machine's processors, where there are as many."""
    allowed = sorted(os.sched_getaffinity(0))
    tool = shutil.which("taskset")
    return [] if tool is None else [tool, "-c", str(allowed[processor % len(allowed)])]
