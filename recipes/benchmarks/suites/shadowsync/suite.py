"""Suite ``shadowsync``: what synchronisation in the background costs, how it scales, and what it does to quality."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.bars import Bar
from benchmarks.harness.jobs.hosts import NoLinkError, free_port, linked_hosts
from benchmarks.harness.jobs.job import ran_in_turns
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.processes import python
from benchmarks.harness.report import Columns, Result, Row
from benchmarks.harness.turns import Measurement
from benchmarks.suites.shadowsync import stores
from benchmarks.suites.shadowsync.quality import measure as measure_quality
from benchmarks.suites.shadowsync.requests import measure as measure_requests

Part = Literal["link", "overhead", "scale", "straggler", "store", "requests", "quality"]

TRAINING = "benchmarks.suites.shadowsync.training"
NOT_SYNCHRONISED = "not synchronised"
NEVER = {"rounds": "foreground", "gap": 10**9}  # the same processes and servers, and no round
LINK_DIM = 4  # of rows, so that it is synchronisation that fills the link
BACKGROUND: dict[str, Any] = {"rounds": "background"}
SLOWED = (1, 5)  # a trainer, and how many times slower it is
ALL_FAST = "no straggler"  # S-EASGD

log = logging.getLogger("benchmark")


Told = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Variant -> telemetry of each trainer, which its strategy told in the end."""


def longest_gap(told: Told, variant: str) -> float:
    """Steps from one round to the next, of the trainer that waited longest; infinite where one made no round."""
    return max(telemetry.get("sync/gap", math.inf) for telemetry in told[variant].values())


def table_of_gaps(workload: str, told: Told) -> Columns:
    """How often each variant synchronised: the gaps of all trainers, and rounds per second."""
    lines = []
    for variant, by_rank in told.items():
        trainers = [by_rank[rank] for rank in sorted(by_rank)]
        gaps = (f"{x['sync/gap']:.1f}" if "sync/gap" in x else "no round" for x in trainers)
        lines.append([variant, ", ".join(gaps), ", ".join(f"{x.get('sync/rounds', 0.0):.1f}" for x in trainers)])
    header = ("variant", "sync gap of each trainer", "rounds/s of each")
    return Columns(f"sync gaps, {workload}", header, lines, {"telemetry": {name: dict(x) for name, x in told.items()}})


def run(
    *,
    parts: list[Part],
    batch_size: int,
    rounds: int,
    seconds: float,
    rate: str,
    store: Mapping[str, Any],
    requests: Mapping[str, Any],
    quality: Mapping[str, Any],
    cache: str,
    data: str,
) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/shadowsync.yaml`` for the arguments."""
    suite = Suite(batch_size=batch_size, rounds=rounds, seconds=seconds)
    measures = {
        "link": lambda: suite.link(rate),
        "overhead": suite.overhead,
        "scale": suite.scale,
        "straggler": suite.straggler,
        "store": lambda: stores.measure(**store),
        "requests": lambda: measure_requests(**requests),
        "quality": lambda: measure_quality(**quality, cache=Path(cache), root=data),
    }
    return measure_parts(parts, measures)


@dataclass(frozen=True)
class Suite:
    """The parts that train DLRM with a million dense parameters, two trainers of one worker.

    Args:
        batch_size: Examples of a step of a worker.
        rounds: Of each measurement.
        seconds: Of each variant in each round.
    """

    batch_size: int
    rounds: int
    seconds: float

    def overhead(self) -> Measured:
        """With and without rounds, which go to a sync server over a socket; rows are in shared memory."""
        variants = {NOT_SYNCHRONISED: NEVER, "S-EASGD": BACKGROUND}
        jobs = {name: self._on_one_machine(how, sync_over_tcp=True) for name, how in variants.items()}
        # 3 percent are asked for, and that is what the ratio of one round is off by.
        row, told = replace(self, rounds=4 * self.rounds)._measure("one machine", jobs)
        bars = [
            Bar("S-EASGD / not synchronised", row.measured.ratio("S-EASGD", NOT_SYNCHRONISED), "at least", 0.97),
            Bar(f"sync gap of S-EASGD, {row.workload}", longest_gap(told, "S-EASGD"), "at most", 10, " steps"),
        ]
        return [row, table_of_gaps(row.workload, told)], bars

    def scale(self) -> Measured:
        """Two trainers, and two processes that know nothing of each other, started together."""
        alone = {
            "launchers": [python(), python()],
            "settings": [{"batch_size": self.batch_size, "strategy": None, "start": start} for start in (0.0, 0.5)],
            "workers": 2,
        }
        jobs = {"two processes": alone, "two trainers": self._on_one_machine(BACKGROUND)}
        row, _ = self._measure("one machine", jobs, base="two processes")
        bar = Bar("two trainers / two processes", row.measured.ratio("two trainers", "two processes"), "at least", 0.95)
        return [row], [bar]

    def straggler(self) -> Measured:
        """What trainer 0 does while trainer 1 is slow, and while it is not."""
        variants = {
            ALL_FAST: self._on_one_machine(BACKGROUND),
            "S-EASGD": self._on_one_machine(BACKGROUND, slowed=SLOWED),
            "S-MA": self._on_one_machine({**BACKGROUND, "algorithm": "ma"}, slowed=SLOWED),
            "FR-MA-5": self._on_one_machine({"rounds": "foreground", "gap": 5, "algorithm": "ma"}, slowed=SLOWED),
        }
        with ran_in_turns(variants, rounds=self.rounds, seconds=self.seconds, training=TRAINING) as jobs:
            first, slowed = (
                Measurement({name: job.rates(self.batch_size, rank=rank) for name, job in jobs.items()})
                for rank in (0, SLOWED[0])
            )
        rows = [
            Row(f"trainer 0 beside a straggler, B={self.batch_size}", first, base=ALL_FAST),
            Row(f"the straggler, B={self.batch_size}", slowed, base=ALL_FAST),
        ]
        bars = [
            Bar(f"trainer 0 beside a straggler / without one, {name}", first.ratio(name, ALL_FAST), "at least", 0.9)
            for name in ("S-EASGD", "S-MA")
        ]
        return list(rows), bars

    def link(self, rate: str) -> Measured:
        """A trainer on each of two hosts."""
        variants = {
            NOT_SYNCHRONISED: NEVER,
            "FR-EASGD-5": {"rounds": "foreground", "gap": 5},
            "FR-EASGD-30": {"rounds": "foreground", "gap": 30},
            "S-EASGD": BACKGROUND,
        }
        try:
            with linked_hosts(rate) as hosts:
                jobs = {name: self._on_two_hosts(how, hosts) for name, how in variants.items()}
                row, told = self._measure(f"{rate} link", jobs)
            results = [row, table_of_gaps(row.workload, told)]
            ratio, gap = row.measured.ratio("S-EASGD", "FR-EASGD-5"), longest_gap(told, "S-EASGD")
        except NoLinkError as error:
            log.warning("The link is left out: %s.", error)
            results, ratio, gap = [], None, None
        bars = [
            Bar(f"S-EASGD / FR-EASGD-5, {rate} link", ratio, "at least", 1.0, " x"),
            Bar(f"sync gap of S-EASGD, {rate} link", gap, "at most", 29.9, " steps"),
        ]
        return results, bars

    def _measure(
        self, workload: str, jobs: Mapping[str, Mapping[str, Any]], *, base: str = NOT_SYNCHRONISED
    ) -> tuple[Row, Told]:
        with ran_in_turns(jobs, rounds=self.rounds, seconds=self.seconds, training=TRAINING) as named:
            measured = Measurement({name: job.rates(self.batch_size) for name, job in named.items()})
        told = {name: job.telemetry for name, job in named.items() if name != base}
        return Row(f"{workload}, B={self.batch_size}", measured, base=base), told

    def _on_one_machine(self, how: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        settings |= {"batch_size": self.batch_size, "strategy": {"num_trainers": 2, **how}}
        return {"launchers": [python()], "settings": [settings], "workers": 2}

    def _on_two_hosts(self, how: Mapping[str, Any], hosts: tuple[Any, Any]) -> dict[str, Any]:
        """Rows lie half on each host, the centre on the first one."""
        port = free_port()
        strategy = {"num_trainers": 2, "num_embedding_servers": 2, "transport": "tcp", **how}
        settings = {"batch_size": self.batch_size, "dim": LINK_DIM, "strategy": strategy, "num_nodes": 2}
        return {
            "launchers": [
                [
                    *host.command(*python("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")),
                    f"--node-rank={rank}",
                    f"--master-addr={hosts[0].address}",
                    f"--master-port={port}",
                ]
                for rank, host in enumerate(hosts)
            ],
            "settings": [settings, settings],
            "workers": 2,
            "environment": [{"GLOO_SOCKET_IFNAME": host.interface} for host in hosts],
        }
