"""Strategies and layouts for a model, its rows and some machines, best first, with the reason in words."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytorch_lightning as pl

from lightning_recsys.placement.machine_kinds import GIB, Machines
from lightning_recsys.planning.forecast import SERVER_PORT, TRAINER_PORT, Forecast, Layout, forecast
from lightning_recsys.planning.measuring import StepCost, measure_step
from lightning_recsys.planning.methods import METHODS, Method
from lightning_recsys.planning.this_machine import float32_gflops

Metric = Literal["eps", "cost"]
Costs = Mapping[str, Mapping[int, StepCost]]

log = logging.getLogger(__name__)

_PORT = 29600  # of servers, in the command lines of a plan
_SEVERAL = 4  # servers, beside one, by which the cost of a request is told from that of its rows


@dataclass(frozen=True)
class Measured:
    """The costs of the strategies' steps on this machine.

    Args:
        costs: By strategy and number of workers.
        refusals: Strategies that refuse the model, with their reasons.
        gflops: 10^9 float32 operations a second of one of its cores, in products.
    """

    costs: Costs
    refusals: Mapping[str, str]
    gflops: float

    def to_dict(self) -> dict[str, Any]:
        """The measurement as plain values, for a file."""
        costs = {name: {str(n): each.to_dict() for n, each in by.items()} for name, by in self.costs.items()}
        return {"costs": costs, "refusals": dict(self.refusals), "gflops": self.gflops}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measured:
        """From what :meth:`to_dict` gave."""
        costs = {name: {int(n): StepCost(**each) for n, each in by.items()} for name, by in data["costs"].items()}
        return cls(costs, data["refusals"], data["gflops"])


@dataclass(frozen=True)
class Plan:
    """Forecasts, best first. ``print`` shows them as a table with the reason for the first.

    Args:
        forecasts: One for each strategy and number of machines, those that cannot be left out.
        refused: By strategy: why it cannot be, or what it was narrowed out by.
        machines: The machines.
        metric: By what they are sorted: examples per second, or cost per example.
    """

    forecasts: Sequence[Forecast]
    refused: Mapping[str, str]
    machines: Machines
    metric: Metric

    @property
    def best(self) -> Forecast:
        """The first.

        Raises:
            ValueError: no strategy can be; the message has every reason.
        """
        if not self.forecasts:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise ValueError(f"no strategy can train this model on these machines. {reasons}")
        return self.forecasts[0]

    def of_each(self) -> list[Forecast]:
        """The best of each strategy, best first."""
        first: dict[str, Forecast] = {}
        for each in self.forecasts:
            first.setdefault(each.method.name, each)
        return list(first.values())

    def table(self, *, every: bool = False) -> list[list[str]]:
        """Rows of text below a row of titles: the best of each strategy, or every layout."""
        titles = [
            *("strategy", "machines", "examples/s", "limited by", "busy beside it", "MB/s of a machine out, in"),
            *("worker, server GiB", "examples a step", "staleness", "exact", "may die"),
        ]
        if any(each.price for each in self.forecasts):
            titles.append("cost of 10^9")
        rows = [self._row(each, with_cost=len(titles) > 11) for each in (self.forecasts if every else self.of_each())]
        return [titles, *rows]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "metric": self.metric,
            "refused": dict(self.refused),
            "forecasts": [
                {
                    **{name: value for name, value in vars(each).items() if name not in ("method", "layout")},
                    "strategy": each.method.name,
                    "layout": asdict(each.layout),
                    "command": command_of(each),
                }
                for each in self.forecasts
            ],
        }

    def reason(self) -> str:
        """Why the first is the first, in a sentence or two."""
        best, others = self.best, self.of_each()[1:]
        told = f"{best.method.name} on {best.layout}: {_limited(best)}."
        port = max(
            others, key=lambda each: max(each.busy.get(TRAINER_PORT, 0), each.busy.get(SERVER_PORT, 0)), default=None
        )
        if port is not None:
            there, here = (max(each.busy.get(TRAINER_PORT, 0), each.busy.get(SERVER_PORT, 0)) for each in (port, best))
            if there >= 0.5 and there > here + 0.1:
                told += f" With {port.method.name} bytes fill {there:.0%} of a port; with this, {here:.0%}."
        if others:
            told += f" Next is {others[0].method.name}, with {self._worse(others[0])}."
        return told

    def __str__(self) -> str:
        lines = _aligned(self.table())
        lines += [f"{name}: {why}" for name, why in self.refused.items()]
        return "\n".join([*lines, "", self.reason(), *command_of(self.best)]) if self.forecasts else "\n".join(lines)

    def _worse(self, other: Forecast) -> str:
        if self.metric == "cost":
            return f"{other.cost / self.best.cost:.2f} times the cost"
        return f"{other.examples_per_second / self.best.examples_per_second:.2f} of its examples a second"

    def _row(self, each: Forecast, *, with_cost: bool) -> list[str]:
        beside = ", ".join(
            f"{name} {share:.0%}" for name, share in each.busy.items() if name != each.limit and share >= 0.005
        )
        limit = f"{each.limit} {each.busy[each.limit]:.0%}" if each.limit in each.busy else each.limit
        memory = f"{each.worker_memory / GIB:.1f}" + (
            f", {each.server_memory / GIB:.1f}" if each.layout.num_servers else ""
        )
        row = [
            each.method.name,
            str(each.layout),
            f"{each.examples_per_second:,.0f}",
            limit,
            beside,
            ", ".join(f"{way / 1e6:.1f}" for way in each.trainer_bytes),
            memory,
            f"{each.step_examples:,}",
            f"{each.staleness:.1f}" + (" (s=100 a row)" if each.method.name == "het" else ""),
            "yes" if each.method.exact else "no",
            str(each.survives),
        ]
        return [*row, f"{each.cost:.2f}"] if with_cost else row


def measure(
    task: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    *,
    methods: Sequence[str] = tuple(METHODS),
    seconds: float = 4.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure what a step of each strategy costs on this machine; about ten seconds each.

    Args:
        task: What is trained.
        datamodule: Its data, prepared and set up.
        methods: Names of strategies, of :data:`~lightning_recsys.planning.methods.METHODS`.
        seconds: Seconds of training that count, of each.
        tell: Is told what is measured.

    Raises:
        ValueError: a name is unknown or there is none, or ``seconds`` is not above 0.
        TypeError: ``methods`` is one name.
    """
    _check_measured(methods, seconds)
    costs: dict[str, dict[int, StepCost]] = {}
    refusals: dict[str, str] = {}

    def measured(method: Method, workers: int, servers: int = 1) -> StepCost:
        tell(f"{method.name}, {workers} worker{'s' * (workers > 1)}" + f", {servers} servers" * (servers > 1))
        more = {"num_embedding_servers": servers} if method.grouped else {}
        return measure_step(
            *(task, datamodule, lambda **given: method.make(workers, **more, **given)),
            workers=workers,
            servers=servers if method.served else 0,
            warm_seconds=method.warm_seconds,
            seconds=seconds,
        )

    for method in (METHODS[name] for name in methods):
        for workers in method.measured:
            try:
                made = measured(method, workers)
            except Exception as error:  # whatever it refuses this model with is a row of the table
                refusals[method.name] = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
                costs.pop(method.name, None)
                log.debug("%s cannot be measured.", method.name, exc_info=True)
                break
            costs.setdefault(method.name, {})[workers] = made
    asking = [METHODS[name] for name in costs if METHODS[name].has_servers]
    if asking:  # that which is soonest at its usual pace stands for all, as their requests take the same way
        soonest = min(asking, key=lambda method: method.warm_seconds)
        try:
            several = measured(soonest, 1, _SEVERAL)
        except Exception:  # what was measured is of use without it
            log.warning("Several servers cannot be measured: layouts with many are foretold too fast.", exc_info=True)
        else:
            costs = {name: _with_requests(by, costs[soonest.name][1], several) for name, by in costs.items()}
    return Measured(costs, refusals, float32_gflops())


def _check_measured(methods: Sequence[str], seconds: float) -> None:
    if isinstance(methods, str):
        raise TypeError(f"strategies must be a list of names, such as [{methods}], got {methods!r}.")
    if not methods:
        raise ValueError(f"strategies must name one at least of {', '.join(METHODS)}.")
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, got {seconds}. 4 is the usual choice.")
    if unknown := sorted({*methods} - {*METHODS}):
        raise ValueError(f"there is no strategy {', '.join(unknown)}; there are {', '.join(METHODS)}.")


def _with_requests(costs: Mapping[int, StepCost], one: StepCost, several: StepCost) -> dict[int, StepCost]:
    """The costs, with those of a request: what a step takes longer with several servers than with one.

    Its rows are as many, and so are their bytes; there are more requests.
    """
    further = several.row_requests - one.row_requests
    worker, server = (
        max(0.0, getattr(several, name) - getattr(one, name)) / further if further > 0 else 0.0
        for name in ("worker_seconds", "server_seconds")
    )
    return {n: replace(cost, request_worker_seconds=worker, request_server_seconds=server) for n, cost in costs.items()}


def plan(task: pl.LightningModule, datamodule: pl.LightningDataModule, machines: Machines, **narrowed: Any) -> Plan:
    """Which strategy, in which layout, and what it will give: measured for one to two minutes, then compared.

    Args:
        task: What is trained.
        datamodule: Its data, prepared and set up.
        machines: What there is.
        narrowed: As :func:`compare` takes it.

    Raises:
        ValueError: as :func:`compare`.
    """
    check_narrowed(machines, **narrowed)
    return compare(measure(task, datamodule), machines, **narrowed)


def compare(
    measured: Measured,
    machines: Machines,
    *,
    metric: Metric = "eps",
    at_most_staleness: float | None = None,
    exact: bool = False,
    survives: int = 0,
) -> Plan:
    """Forecast every strategy in every layout.

    Args:
        measured: What steps cost.
        machines: What there is.
        metric: ``eps``: most examples per second first; ``cost``: least cost per example.
        at_most_staleness: Leave out what has more updates of others missing on the mean.
        exact: Leave out what does not train as one process does with the joined batches.
        survives: Leave out what ends when so many workers die.

    Raises:
        ValueError: a number is out of range, or there is a cost to be compared and no machine has a price.
    """
    check_narrowed(machines, metric=metric, at_most_staleness=at_most_staleness, exact=exact, survives=survives)
    refused, found = dict(measured.refusals), []
    alone = measured.costs.get("single", {}).get(1)
    for name, costs in measured.costs.items():
        method, reasons = METHODS[name], []
        for layout in layouts(method, machines):
            made = forecast(method, costs, layout, machines, alone=alone, gflops=measured.gflops)
            why = made.refused or _narrowed(made, at_most_staleness, exact=exact, survives=survives)
            if why is None:
                found.append(made)
            else:
                reasons.append(why)
        if reasons and not any(each.method.name == name for each in found):
            refused[name] = reasons[-1]
    key = (lambda each: each.cost) if metric == "cost" else (lambda each: -each.examples_per_second)
    return Plan(tuple(sorted(found, key=key)), refused, machines, metric)


def check_narrowed(
    machines: Machines,
    *,
    metric: Metric = "eps",
    at_most_staleness: float | None = None,
    exact: bool = False,
    survives: int = 0,
) -> None:
    """Raise what :func:`compare` raises of its arguments, so that nobody measures for minutes before.

    Raises:
        ValueError: a number is out of range, or there is a cost to be compared and no machine has a price.
    """
    if metric not in get_args(Metric):
        raise ValueError(f"metric must be {' or '.join(get_args(Metric))}, got {metric!r}.")
    if metric == "cost" and not any(kind.price for kind in machines.kinds.values()):
        raise ValueError("metric=cost needs a price of some kind of machine: its cost of an hour.")
    for name, number in (("at_most_staleness", at_most_staleness or 0), ("survives", survives)):
        if not number >= 0:
            raise ValueError(f"{name} must be at least 0, got {number}.")


def layouts(method: Method, machines: Machines) -> Iterator[Layout]:
    """The layouts that a plan compares: powers of two of each kind's machines, and all of them.

    Servers are beside the workers, one on each of their machines, which then have a worker less where they have several
    cores; of group servers there may be more, each in the place of a worker. Or, for a strategy that finds running
    servers, they are on machines of their own, at most one for two cores, as encryption has a thread beside a server's
    own; fewer of them get fewer requests.
    """
    for name, kind in machines.kinds.items():
        if method.name == "single":
            yield Layout(name, 1, 1)
            continue
        for number in _some(kind.number):
            if method.has_servers:
                yield from _with_servers(method, machines, name, number)
            elif number * kind.cores > 1:
                yield Layout(name, number, kind.cores)


def _with_servers(method: Method, machines: Machines, name: str, number: int) -> Iterator[Layout]:
    cores = machines.kinds[name].cores
    for own in (_some(cores // 2) or [1]) if method.grouped else (1,):
        yield Layout(name, number, max(1, cores - own), None, number, own)
    for other, kind in machines.kinds.items() if method.served else ():
        for servers in _some(min(number, kind.number - (number if other == name else 0))):
            for processes in _some(max(1, kind.cores // 2)):
                yield Layout(name, number, cores, other, servers, processes)


def command_of(made: Forecast, overrides: Sequence[str] = ()) -> list[str]:
    """The command lines that start it: those of servers, and that of every machine with workers.

    Args:
        made: The forecast.
        overrides: Words that choose the model and its data.
    """
    layout, method = made.layout, made.method
    words, lines = [*overrides, *method.overrides], []
    if layout.servers:
        processes, last = layout.per_server, _PORT + layout.per_server - 1
        several = f" --processes {processes}" * (processes > 1)
        lines = [
            f"lightning-recsys server --bind tcp://0.0.0.0:{_PORT} --keys keys --folder rows{several}"
            f"  # on each of {layout.num_servers} machines"
        ]
        ports = f"{_PORT}" + f"-{last}" * (processes > 1)
        hosts = [f"tcp://server-{i}:{ports}" for i in range(layout.num_servers)]
        words += [f"strategy.servers=[{','.join(hosts)}]", "strategy.key_file=keys"]
    elif method.grouped:
        words += [
            *(f"strategy.num_groups={layout.num_trainers}", f"strategy.trainers_per_group={layout.workers}"),
            *(
                f"strategy.servers_per_group={layout.per_server}",
                f"strategy.num_embedding_servers={layout.num_trainers}",
            ),
        ]
    elif layout.num_servers:
        words.append(f"strategy.num_embedding_servers={layout.num_servers}")
    if method.name == "shadowsync":
        words.append(f"strategy.num_trainers={layout.num_workers}")
    if layout.num_trainers == 1:
        train = "lightning-recsys train"
        if method.name not in ("single", "shadowsync", "hierarchical"):
            words.append(f"trainer.devices={layout.workers}")
    else:
        train = (
            f"GLOO_SOCKET_IFNAME=INTERFACE torchrun --nnodes={layout.num_trainers} --nproc-per-node={layout.workers}"
            " --node-rank=RANK --master-addr=FIRST --master-port=29500 -m lightning_recsys train"
        )
        words += ["trainer.num_nodes=auto", "trainer.devices=auto", "hydra.run.dir=runs/planned"]
    return [*lines, " ".join([train, *words])]


def keep(measured: Measured, path: Path) -> None:
    """Write it to a file, for the next plan."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(measured.to_dict(), indent=1))
    new.replace(path)


def kept(path: Path) -> Measured | None:
    """The measurement that :func:`keep` wrote; ``None`` where there is nothing that this version reads."""
    try:
        return Measured.from_dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _some(number: int) -> list[int]:
    powers = [1 << i for i in range(number.bit_length()) if 1 << i <= number]
    return [*powers, number] if powers and powers[-1] != number else powers


def _narrowed(made: Forecast, at_most_staleness: float | None, *, exact: bool, survives: int) -> str | None:
    if exact and not made.method.exact:
        return "left out by exact=true"
    if at_most_staleness is not None and made.staleness > at_most_staleness:
        return f"left out by at_most_staleness={at_most_staleness:g}: {made.staleness:.1f}"
    if made.survives < survives:
        return f"left out by survives={survives}: it goes on after {made.survives} deaths"
    return None


def _limited(made: Forecast) -> str:
    if made.limit not in made.busy:
        longest = max(made.busy, key=made.busy.__getitem__)
        return f"nothing is full; {longest} are busy for {made.busy[longest]:.0%} of the time, the rest is waiting"
    return f"{made.limit} limit it, and are busy for {made.busy[made.limit]:.0%} of the time"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
