"""What crosses a link between a worker and its server, request by request: lookups, and the exchanges of HET's cache.

Worker and server are on two hosts, as in :mod:`benchmarks.suites.het.link`, and ours have the job's keys. The same is
asked of torch RPC and of a plain socket, which shows what the link allows; neither encrypts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.choices import check_choices
from benchmarks.harness.jobs.hosts import Host, NoLinkError, free_port, linked_hosts
from benchmarks.harness.jobs.job import Job
from benchmarks.harness.parts import Measured
from benchmarks.harness.processes import python
from benchmarks.harness.report import Columns, Result, Row
from benchmarks.harness.turns import Measurement
from benchmarks.harness.workload import Workload
from benchmarks.suites.des.processors import encryption_seconds
from benchmarks.suites.het.cache import CACHED, worker
from benchmarks.suites.het.link import PER_STEP, Told, measure_on_links, server_with_keys
from benchmarks.suites.shadowsync.requesting import BYTES_PER_ID, BYTES_PER_NUMBER, WAYS

BARE, RPC, OURS = WAYS
WARM_STEPS = 20  # of whoever has no cache to fill
COUNTED_STEPS = 200  # of the cache, whose bytes the others imitate

log = logging.getLogger("benchmark")


def measure(*, asked: Sequence[str], rates: Sequence[str], rounds: int, seconds: float, **workload: Any) -> Measured:
    """Requests at each rate, by us, by torch RPC and over the bare link.

    Args:
        asked: What is asked for: ``lookups``, and a ``cache``'s exchanges.
        rates: Of the link, in the words of ``tc``.
        rounds: How many turns each variant has at each rate; medians are taken over them.
        seconds: Of each variant in each round.
        workload: As in :class:`Requests`.

    Raises:
        ValueError: something else is asked for.
    """
    check_choices("suite.requests.asked", asked, ("lookups", "cache"))
    requests = Requests(**workload)
    results: list[Result] = []
    bars: list[Bar] = []
    times: list[list[str]] = []
    lines: list[list[str]] = []
    try:
        with linked_hosts():
            pass  # there can be links: it is worth measuring what the requests across them are
        encryption = encryption_seconds()
        for what, settings in (requests.lookups() if each == "lookups" else requests.exchanges() for each in asked):
            makes = {by: partial(_job, by, settings, requests.warm_steps_of(by, settings)) for by in WAYS}
            batch_size = requests.batch_size
            measured, told = measure_on_links(
                makes, rates, batch_size=batch_size, rounds=rounds, seconds=seconds, read=Told.read
            )
            results += [Row(f"{what}, {rate}", measured[rate], base=BARE) for rate in rates]
            if settings["staleness"] is None:
                bars += [_bar(rate, measured[rate]) for rate in rates]
            encrypted = encryption * (settings["sent"] + settings["received"])
            for rate in rates:
                seconds_each = [*(batch_size / measured[rate].median(by) for by in WAYS), encrypted]
                times.append([f"{what}, {rate}", *(f"{1e3 * x:.2f}" for x in seconds_each)])
            for by, job in told.items():
                lines.append(job.crossed.line(f"{what}, {by}"))
                bars.append(job.crossed.bar(f"{what}, {by}", "expected"))
    except NoLinkError as error:
        log.warning("Requests over a link are left out: %s.", error)
        return results, [_bar(rate, None) for rate in rates if "lookups" in asked]
    header = (*PER_STEP[:-1], "MB a step expected")
    return [
        *results,
        Columns("Milliseconds a step", ("", *WAYS, "of ours to encrypt and decrypt"), times),
        Columns("Bytes between worker and server, both ways", header, lines),
    ], bars


def _bar(rate: str, measured: Measurement | None) -> Bar:
    ratio = None if measured is None else measured.ratio(OURS, RPC)
    return Bar(f"lookups, ours with keys / torch RPC, {rate}", ratio, "at least", 0.9)


@dataclass(frozen=True)
class Requests:
    """What is asked for.

    Args:
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples in memory.
        staleness: Of the cache.
        warm_steps: Steps until the cache is full.
    """

    batch_size: int
    dim: int
    rows: int
    staleness: int
    warm_steps: int

    @property
    def work(self) -> Workload:
        """The rows."""
        return Workload(rows=self.rows, dim=self.dim)

    def lookups(self) -> tuple[str, dict[str, Any]]:
        """All rows of a batch: what this is called, and what its jobs are told."""
        num_rows = self.work.num_fields * self.batch_size
        sent, received = BYTES_PER_ID * num_rows, BYTES_PER_NUMBER * self.dim * num_rows
        return f"lookups of {num_rows:,} rows, D={self.dim}", self._settings(None, sent, received)

    def exchanges(self) -> tuple[str, dict[str, Any]]:
        """What a step with a cache pushes and pulls, whose bytes a cache on this machine counts beforehand."""
        work = self.work
        limit = int(CACHED * sum(work.cardinalities))
        options = {"dim": self.dim, "batch_size": self.batch_size, "cache_rows": limit, "staleness": self.staleness}
        with worker(work, **options) as own:
            steps = own.steps(cycle([batch.sparse for batch in work.batches(self.batch_size)]))
            before, after = (
                next(own.traffic() for _ in islice(steps, number, None))
                for number in (self.warm_steps, COUNTED_STEPS - 1)
            )
        sent, received = ((b - a) // COUNTED_STEPS for a, b in zip(before, after, strict=True))
        name = f"cache operations, B={self.batch_size}, D={self.dim}, s={self.staleness}"
        return name, self._settings(self.staleness, sent, received)

    def warm_steps_of(self, by: str, settings: Mapping[str, Any]) -> int:
        """Steps before the first turn of a job."""
        return self.warm_steps if by == OURS and settings["staleness"] is not None else WARM_STEPS

    def _settings(self, staleness: int | None, sent: int, received: int) -> dict[str, Any]:
        size = {"batch_size": self.batch_size, "dim": self.dim, "rows": self.rows}
        return {**size, "staleness": staleness, "sent": sent, "received": received}


def _job(by: str, settings: Mapping[str, Any], warm_steps: int, hosts: tuple[Host, Host], folder: Path) -> Job:
    """Who asks on the first host, and starts on the second one whoever answers."""
    here, there = hosts
    steps, (ours, keys) = folder / "steps", server_with_keys(there, folder)
    steps.mkdir()
    endpoint = f"tcp://{there.address}:{free_port()}"
    server = {
        BARE: ("-m", "benchmarks.peers.bare_link", endpoint, str(settings["sent"]), str(settings["received"])),
        RPC: (
            *("-m", "benchmarks.peers.torch_rpc", endpoint),
            *(str(sum(Workload().cardinalities)), str(settings["dim"]), there.interface),
        ),
    }
    return Job(
        f"{by}, {'lookups' if settings['staleness'] is None else 'cache operations'}",
        [here.command(*python())],
        training="benchmarks.suites.shadowsync.requesting",
        settings=[
            {
                **settings,
                "by": by,
                "server": ours if by == OURS else there.command(*python(*server[by])),
                "interface": here.interface,
                "keys": str(keys),
            }
        ],
        folder=steps,
        workers=1,
        warm_steps=warm_steps,
    )
