"""A worker and its server on two hosts of suite ``het``: what the cache saves where every byte crosses a slow link.

The hosts are network namespaces, and share this machine's memory. So the job says ``transport=tcp``, and the bytes that
the interface counted are held against those that the strategy tells of: a comparison whose rows did not cross the link
fails its bar.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from benchmarks.harness.bars import Bar
from benchmarks.harness.jobs.hosts import HEADERS, Host, NoLinkError, free_port, limit_rate, linked_hosts
from benchmarks.harness.jobs.job import Job, run_in_turns
from benchmarks.harness.jobs.training import TRAFFIC
from benchmarks.harness.parts import Measured
from benchmarks.harness.processes import python
from benchmarks.harness.report import Columns, Result, Row
from benchmarks.harness.turns import Measurement

from lightning_recsys.launchers.sidecars import SHARED_MEMORY
from lightning_recsys.parameter_server.access.keys import JobKeys

TRAINING = "benchmarks.suites.het.training"
PER_STEP = ("", "steps", "MB a step on the interface", "MB a step told")
HYBRID, PREFETCHED, HET = "hybrid", "hybrid, prefetched", "het"

T = TypeVar("T")
MakeJob = Callable[[tuple[Host, Host], Path], Job]

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Crossed:
    """Bytes of a job, both ways, over all of its steps but the first.

    Args:
        steps: How many.
        counted: By the worker's interface, without packets' headers.
        told: By the strategy, ``comm/sent_bytes`` and ``comm/received_bytes``.
    """

    steps: int
    counted: float
    told: float

    @classmethod
    def of(cls, readings: np.ndarray) -> Crossed:
        """From what :class:`benchmarks.suites.het.training.CrossedBytes` wrote.

        >>> Crossed.of(np.array([[0, 0, 0, 0, 0, 0], [700, 2, 500, 3, 400, 300], [1400, 4, 1000, 6, 800, 600]]))
        Crossed(steps=2, counted=1740.0, told=1400.0)
        """
        sent, sent_packets, received, received_packets, *told = readings[-1] - readings[0]
        counted = sent + received - HEADERS * (sent_packets + received_packets)
        return cls(len(readings) - 1, float(counted), float(sum(told)))

    @classmethod
    def read(cls, folder: Path, *, rank: int = 0) -> Crossed:
        """From the folder of a job that has run."""
        return cls.of(np.fromfile(next(folder.glob(f"{TRAFFIC}-{rank}-*"))).reshape(-1, 6))

    @property
    def error(self) -> float:
        """Percent by which the interface counted more than was told, or less."""
        return 100 * abs(self.counted / self.told - 1) if self.told else 100.0

    def line(self, name: str) -> list[str]:
        """Of a table with :data:`PER_STEP` above."""
        return [name, f"{self.steps:,}", *(f"{x / self.steps / 1e6:.3f}" for x in (self.counted, self.told))]

    def bar(self, name: str, told: str = "told") -> Bar:
        """What was counted against what was told, or expected."""
        return Bar(f"bytes on the interface off those {told}, {name}", self.error, "at most", 2, " %")


def measure(
    *,
    rates: Sequence[str],
    at_least: Sequence[float],
    models: Sequence[str],
    batch_size: int,
    dim: int,
    rows: int,
    staleness: int,
    rounds: int,
    seconds: float,
    warm_steps: int,
) -> Measured:
    """Rates of a worker with and without the cache, and the bytes that crossed the link.

    Args:
        rates: Of the link, in the words of ``tc``.
        at_least: Bars: het's rate over hybrid's, at each of these.
        models: Some of ``training.PAPERS_MODELS``.
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples in memory.
        staleness: Of het.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each variant in each round.
        warm_steps: Steps until the cache is full.
    """
    strategies = variants(staleness, warm_steps)
    limits = dict(zip(rates, at_least, strict=True))
    results: list[Result] = []
    bars: list[Bar] = []
    lines: list[list[str]] = []
    for model in models:
        settings = {"model": model, "batch_size": batch_size, "dim": dim, "rows": rows}
        try:
            measured, jobs = measure_variants(settings, strategies, rates, rounds=rounds, seconds=seconds)
        except NoLinkError as error:
            log.warning("The link is left out: %s.", error)
            return results, [*bars, *(_speed_bar(model, rate, None, least) for rate, least in limits.items())]
        for rate, least in limits.items():
            results.append(Row(f"{model}, {rate}, B={batch_size}, D={dim}", measured[rate], base=HYBRID))
            bars.append(_speed_bar(model, rate, measured[rate].ratio(HET, HYBRID), least))
        for name, job in jobs.items():
            lines.append(job.crossed.line(f"{model}, {name}"))
            bars.append(job.crossed.bar(f"{model}, {name}"))
    return [*results, Columns("Bytes between worker and server, both ways", PER_STEP, lines)], bars


def measure_combined(
    *,
    rates: Sequence[str],
    at_least: float,
    prefetched_at_least: float,
    model: str,
    batch_size: int,
    dim: int,
    rows: int,
    rounds: int,
    seconds: float,
    warm_steps: int,
) -> Measured:
    """A worker of ShadowSync, which trains its rows where they lie, asks for them early, or has them in a cache.

    Measured are rates, and the bytes that crossed.

    Args:
        rates: Of the link, in the words of ``tc``.
        at_least: Bar: the rate with cached rows over that with plain ones, at each of these.
        prefetched_at_least: The same for rows that are asked for one step early.
        model: One of ``training.PAPERS_MODELS``.
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples in memory.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each variant in each round.
        warm_steps: Steps until the cache is full.
    """
    plain, cached, prefetched = (f"shadowsync, {kind} rows" for kind in ("plain", "cached", "prefetched"))
    limits = {cached: at_least, prefetched: prefetched_at_least}
    strategies = {
        plain: ({"dense": "easgd", "rows": "plain", "pace": "free"}, 5),
        prefetched: ({"dense": "easgd", "rows": "plain", "pace": "free", "prefetch": True}, 5),
        cached: ({"dense": "easgd", "rows": "cached", "pace": "free"}, warm_steps),
    }
    settings = {"model": model, "batch_size": batch_size, "dim": dim, "rows": rows}
    try:
        measured, jobs = measure_variants(settings, strategies, rates, rounds=rounds, seconds=seconds)
    except NoLinkError as error:
        log.warning("The link is left out: %s.", error)
        return [], [Bar(f"{x} / plain, {rate}", None, "at least", limits[x], " x") for rate in rates for x in limits]
    results: list[Result] = [
        Row(f"{model}, {rate}, B={batch_size}, D={dim}", measured[rate], base=plain) for rate in rates
    ]
    lines = [job.crossed.line(name) for name, job in jobs.items()]
    bars = [
        Bar(f"{name} / plain, {rate}", measured[rate].ratio(name, plain), "at least", limit, " x")
        for rate in rates
        for name, limit in limits.items()
    ]
    bars += [job.crossed.bar(name) for name, job in jobs.items()]
    return [*results, Columns("Bytes between worker and server, both ways", PER_STEP, lines)], bars


def variants(staleness: int, warm_steps: int) -> dict[str, tuple[Mapping[str, Any], int]]:
    """By name: arguments of the strategy, and steps before the first turn.

    *Hybrid, prefetched* is a cache of one row without staleness, which moves the rows and gradients that hybrid moves:
    those that the next batch alone has are under way while the present one computes, and those that both have come
    when they are looked up, with their update. One worker alone can do so: several go in step, and prefetch nothing.

    Args:
        staleness: Of het.
        warm_steps: Of het, until its cache is full.
    """
    return {
        HYBRID: ({"algorithm": "hybrid"}, 5),
        PREFETCHED: ({"algorithm": "het", "cache_rows": 1, "lookahead_batches": 0, "staleness": 0}, 5),
        HET: ({"algorithm": "het", "staleness": staleness}, warm_steps),
    }


def _speed_bar(model: str, rate: str, ratio: float | None, least: float) -> Bar:
    return Bar(f"het / hybrid, {model}, {rate}", ratio, "at least", least, " x")


@dataclass(frozen=True)
class Told:
    """What a job tells in the end.

    Args:
        crossed: What went over its link.
        telemetry: Of its worker's strategy.
    """

    crossed: Crossed
    telemetry: Mapping[str, float]

    @classmethod
    def read(cls, job: Job) -> Told:
        """Of a job that has ended, and that counts bytes as :class:`~benchmarks.suites.het.training.CrossedBytes`."""
        return cls(Crossed.read(job.folder), job.telemetry.get(0, {}))


def measure_variants(
    settings: Mapping[str, Any],
    strategies: Mapping[str, tuple[Mapping[str, Any], int]],
    rates: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    training: str = TRAINING,
) -> tuple[dict[str, Measurement], dict[str, Told]]:
    """Each variant on a link of its own, so that what is on its way when it is stopped is in nobody else's way.

    Args:
        settings: What the module that trains takes, beside the strategy, the server and the interface.
        strategies: By name: arguments of the strategy, and steps before the first turn.
        rates: Of the link, in the words of ``tc``.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each variant in each round.
        training: The module that trains; it counts bytes as :class:`benchmarks.suites.het.training.CrossedBytes`.

    Returns:
        Examples a second at each rate, and what each job told.

    Raises:
        NoLinkError: there can be no namespaces here.
    """
    makes: dict[str, MakeJob] = {
        name: partial(_job, name, training, settings, strategy, warm_steps)
        for name, (strategy, warm_steps) in strategies.items()
    }
    return measure_on_links(
        makes, rates, batch_size=settings["batch_size"], rounds=rounds, seconds=seconds, read=Told.read
    )


def measure_on_links(
    makes: Mapping[str, MakeJob],
    rates: Sequence[str],
    *,
    batch_size: int,
    rounds: int,
    seconds: float,
    read: Callable[[Job], T],
    burst: str = "128kb",
) -> tuple[dict[str, Measurement], dict[str, T]]:
    """Jobs in turns, each on a link of its own whose ends are what it is made with, and an empty folder.

    Args:
        makes: How each job is made.
        rates: Of the link, in the words of ``tc``.
        batch_size: Examples of a step.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each job in each round.
        read: What is taken of each job when all have ended, before their folders go.
        burst: Of the link, in the words of ``tc``: what goes through at once after a pause.

    Returns:
        Examples a second at each rate, and what was read of each job.

    Raises:
        NoLinkError: there can be no namespaces here.
    """
    with ExitStack() as stack:
        links, jobs = [], {}
        for name, make in makes.items():
            hosts = stack.enter_context(linked_hosts(None))
            # In memory: a disk that is written to beside the training would have its say in the rates.
            made = tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix=f"link-{os.getpid()}-")
            folder = Path(stack.enter_context(made))
            links.append(hosts)
            jobs[name] = make(hosts, folder)

        def limit_all(rate: str) -> None:
            for hosts in links:
                limit_rate(hosts, rate, burst=burst)

        run_in_turns(jobs, rounds=rounds, seconds=seconds, before=[partial(limit_all, rate) for rate in rates])
        turns = {name: job.rates(batch_size) for name, job in jobs.items()}
        measured = {
            # The first turn at each rate does not count; of the very first `rates` has none.
            rate: Measurement({name: x[i * (rounds + 1) :][:rounds] for name, x in turns.items()})
            for i, rate in enumerate(rates)
        }
        told = {name: read(job) for name, job in jobs.items()}
    return measured, told


def _job(
    name: str,
    training: str,
    settings: Mapping[str, Any],
    strategy: Mapping[str, Any],
    warm_steps: int,
    hosts: tuple[Host, Host],
    folder: Path,
) -> Job:
    """The worker on the first host, which starts its server on the second, with keys as between any two machines."""
    here, there = hosts
    steps, (server, keys) = folder / "steps", server_with_keys(there, folder)
    steps.mkdir()
    own = {**strategy, "key_file": str(keys), "transport": "tcp"}
    return Job(
        name,
        [here.command(*python())],
        training=training,
        settings=[{**settings, "strategy": own, "server": server, "interface": here.interface}],
        folder=steps,
        workers=1,
        environment=[{"GLOO_SOCKET_IFNAME": here.interface}],
        warm_steps=warm_steps,
    )


def server_with_keys(host: Host, folder: Path) -> tuple[list[str], Path]:
    """The command that starts our server on a host, with its store and new keys in a folder; the file of the keys."""
    keys = folder / "keys"
    JobKeys.generate().save(keys)
    command = shutil.which("lightning-recsys-server", path=str(Path(sys.executable).parent))
    assert command is not None, "the package is installed with its console scripts"
    bind = f"tcp://{host.address}:{free_port()}"
    return host.command(command, "--folder", str(folder / "store"), "--bind", bind, "--keys", str(keys)), keys
