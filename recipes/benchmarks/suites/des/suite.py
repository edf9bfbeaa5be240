"""Suite ``des``: what DES sends and how fast it is, against servers and all-reduce, and what synchrony is worth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmarks.harness.bars import Bar
from benchmarks.harness.choices import check_choices, check_numbers
from benchmarks.harness.jobs.hosts import HEADERS, Host, NoLinkError, free_port, linked_hosts
from benchmarks.harness.jobs.job import ran_in_turns
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.processes import python
from benchmarks.harness.report import Columns, Result, Row
from benchmarks.harness.turns import Measurement
from benchmarks.suites.des.prediction import ALL_REDUCE, DES, PS, Prediction, predict
from benchmarks.suites.des.processors import PAPER, Share, encryption_seconds, table_of_shares
from benchmarks.suites.des.quality import measure as measure_quality
from benchmarks.suites.des.rows import ROWS, distinct, join
from benchmarks.suites.des.training import MODELS

from lightning_recsys.placement.communication import Network, saving

Part = Literal["rows", "link", "quality"]

HOSTS = 2
DISTINCT_AT_512 = 147_664  # Rong et al. 2019, Table 2
FEATURES = 950  # of an example, section 6
LINK = Network(bandwidth=125e6, latency=1e-4)  # 1 Gbit/s

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    DES: {"name": "des"},
    PS: {
        "name": "het",
        "algorithm": "hybrid",
        "num_embedding_servers": HOSTS,
        "transport": "tcp",
        "table_placement": "size",
    },
    ALL_REDUCE: {"name": "ddp_forkserver"},
}

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Sent:
    """What one process sends in a step, as counted on its host's interface and as expected.

    Args:
        workload: Model and rows.
        counted: Variant -> bytes, those of packets' headers left out.
        expected: The cost model.
    """

    workload: str
    counted: Mapping[str, float]
    expected: Prediction

    def error(self, variant: str) -> float:
        """Percent by which more is counted than expected."""
        return 100 * (self.counted[variant] / self.expected.traffic[variant].sent_bytes - 1)

    def savings(self) -> dict[str, float]:
        """Percent of the servers' bytes that DES does not send: counted, expected, and by the paper's formula."""
        des, servers = (self.expected.traffic[name] for name in (DES, PS))
        return {
            "counted": 100 * (1 - self.counted[DES] / self.counted[PS]),
            "expected": 100 * saving(des, servers),
            "paper": 100 * saving(self.expected.paper[DES], self.expected.paper[PS]),
        }


@dataclass(frozen=True)
class Forecast:
    """Whom DES is faster than, from what the link alone takes, and whom it was.

    Args:
        workload: Model and rows.
        link: Variant -> milliseconds of a step that the link takes, by the cost model.
        steps: Variant -> milliseconds of a step, measured.
    """

    workload: str
    link: Mapping[str, float]
    steps: Mapping[str, float]

    def beaten(self) -> tuple[list[str], list[str]]:
        """By DES, as foretold and as measured."""
        told, seen = ([name for name in x if x[name] > x[DES]] for x in (self.link, self.steps))
        return told, seen


def table_of_bytes(counted: Sequence[Sent]) -> Columns:
    """A line for each model and rows, bytes in thousands with what was expected."""
    lines, details = [], {}
    for sent in counted:
        pairs = [(sent.counted[name], sent.expected.traffic[name].sent_bytes) for name in STRATEGIES]
        savings = sent.savings()
        cells = [f"{seen / 1e3:,.1f} ({told / 1e3:,.1f})" for seen, told in pairs]
        lines.append([sent.workload, *cells, *(f"{value:.2f} %" for value in savings.values())])
        details[sent.workload] = {**asdict(sent), "saving_percent": savings}
    header = ("", *STRATEGIES, "saved", "by formula", "by the paper's")
    return Columns("kB that a process sends in a step (expected)", header, lines, {"sent_bytes": details})


def table_of_forecasts(forecasts: Sequence[Forecast]) -> Columns:
    """The link's milliseconds and a step's."""
    lines, details = [], {}
    for each in forecasts:
        cells = (f"{each.link[name]:.1f} / {each.steps[name]:.0f}" for name in STRATEGIES)
        lines.append([each.workload, *cells, *(", ".join(names) or "none" for names in each.beaten())])
        details[each.workload] = {**asdict(each), "beaten": each.beaten()}
    title = "ms of a step that the link takes by the cost model / ms of a step"
    header = ("", *STRATEGIES, "DES beats, foretold", "DES beats")
    return Columns(title, header, lines, {"forecasts": details})


@dataclass(frozen=True)
class Measure:
    """One workload in all variants.

    Args:
        rates: Of a global batch's examples.
        sent: Variant -> bytes that a process sends in a step.
        servers: Seconds of processor time that a host's server takes in a step.
        encrypted: Bytes that a host's worker encrypts or decrypts in a step over servers.
    """

    rates: Measurement
    sent: Mapping[str, float]
    servers: float
    encrypted: float


def run(
    *,
    parts: list[Part],
    batch_sizes: Mapping[str, int],
    models: list[str],
    rounds: int,
    seconds: float,
    quality: Mapping[str, Any],
    cache: str,
    data: str,
) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/des.yaml`` for the arguments.

    Raises:
        ValueError: rows or a model that there are not.
    """
    if "link" in parts:
        check_choices("suite.batch_sizes", list(batch_sizes), ROWS)
        check_choices("suite.models", models, MODELS)
        check_numbers("suite.rounds", rounds)
    suite = Suite(batch_sizes=batch_sizes, models=models, rounds=rounds, seconds=seconds)
    measures: dict[str, Callable[[], Measured]] = {
        "rows": count_rows,
        "link": suite.link,
        "quality": lambda: measure_quality(**quality, cache=Path(cache), root=data),
    }
    return measure_parts(parts, measures)


def count_rows() -> Measured:
    """Whether the rows are such as the paper counted."""
    pieces = ROWS["paper"].pieces(8, 512)
    features = np.mean([piece.sparse.values.numel() / 512 for piece in pieces])
    found = np.mean([distinct(piece) for piece in pieces])
    log.info(
        "Distinct features of 1024 and 2048 examples: %d, %d", distinct(join(pieces[:2])), distinct(join(pieces[:4]))
    )
    return [], [
        Bar("features of an example, off the paper's", 100 * abs(features / FEATURES - 1), "at most", 2, " %"),
        Bar("distinct features of 512, off the paper's", 100 * abs(found / DISTINCT_AT_512 - 1), "at most", 2, " %"),
    ]


@dataclass(frozen=True)
class Suite:
    """The part that trains on two hosts.

    Args:
        batch_sizes: Rows (of ``des_data.ROWS``) -> examples of a step of both hosts together.
        models: Some of ``des_training.MODELS``.
        rounds: Of each measurement.
        seconds: Of each variant in each round.
        rate: Of the link.
    """

    batch_sizes: Mapping[str, int]
    models: Sequence[str]
    rounds: int
    seconds: float
    rate: str = "1gbit"

    def link(self) -> Measured:
        """Rates and bytes of each model on each rows."""
        workloads = [(model, rows) for rows in self.batch_sizes for model in self.models]
        measured: dict[tuple[str, str], Measure] = {}
        try:
            with linked_hosts(self.rate) as hosts:
                for workload in workloads:
                    measured[workload] = self._measure(*workload, hosts)
        except NoLinkError as error:
            log.warning("The link is left out: %s.", error)
        if not measured:
            return [], [bar for workload in workloads for bar in self._bars(*workload, None, None)]
        expected = self._expected()
        encryption = encryption_seconds() / 2  # of a byte, one way: half of what both ends take together
        results: list[Result] = []
        bars: list[Bar] = []
        sent, forecasts, shares = [], [], []
        for (model, rows), each in measured.items():
            title, prediction = self._title(model, rows), expected[model, rows]
            results.append(Row(title, each.rates, base=PS))
            steps = {name: 1e3 * self.batch_sizes[rows] / each.rates.median(name) for name in STRATEGIES}
            link = {name: 1e3 * traffic.seconds(LINK) for name, traffic in prediction.traffic.items()}
            sent.append(Sent(title, each.sent, prediction))
            forecasts.append(Forecast(title, link, steps))
            paper = PAPER[model] if rows == "paper" else None
            shares.append(Share(title, steps, link, 1e3 * each.servers, 1e3 * encryption * each.encrypted, paper))
            bars += self._bars(model, rows, sent[-1], forecasts[-1])
        return [*results, table_of_bytes(sent), table_of_forecasts(forecasts), table_of_shares(shares)], bars

    def _title(self, model: str, rows: str) -> str:
        return f"{model}, {rows}, B={self.batch_sizes[rows]}"

    def _expected(self) -> dict[tuple[str, str], Prediction]:
        found = {}
        for rows, batch_size in self.batch_sizes.items():
            pieces = ROWS[rows].pieces(4 * HOSTS, batch_size // HOSTS)
            for model in self.models:
                found[model, rows] = predict(model, ROWS[rows], pieces, num_processes=HOSTS)
        return found

    def _bars(self, model: str, rows: str, sent: Sent | None, forecast: Forecast | None) -> list[Bar]:
        """Their values are missing where nothing was measured."""
        title = self._title(model, rows)
        off = sent and abs(sent.savings()["counted"] - sent.savings()["expected"])
        bars = [
            Bar(f"bytes of {name} off the cost model's, {title}", sent and abs(sent.error(name)), "at most", 2, " %")
            for name in STRATEGIES
        ]
        bars.append(Bar(f"saved bytes off the formula's, {title}", off, "at most", 2, " %"))
        wrong = forecast and float(len(set(forecast.beaten()[0]) ^ set(forecast.beaten()[1])))
        return [*bars, Bar(f"baselines that DES beats or not, foretold wrongly, {title}", wrong, "at most", 0)]

    def _measure(self, model: str, rows: str, hosts: tuple[Host, Host]) -> Measure:
        batch_size = self.batch_sizes[rows]
        settings = {"model": model, "data": rows, "batch_size": batch_size}
        variants = {
            name: {"settings": [{**settings, "strategy": strategy}] * HOSTS, "environment": environments(hosts)}
            for name, strategy in STRATEGIES.items()
        }
        common: dict[str, Any] = {
            "launchers": [host.command(*python()) for host in hosts],
            "training": "benchmarks.suites.des.training",
            "workers": HOSTS,
        }
        with ran_in_turns(variants, rounds=self.rounds, seconds=self.seconds, **common) as jobs:
            rates = {name: job.rates(batch_size // HOSTS) for name, job in jobs.items()}
            sent = {name: sent_per_step(job.folder) for name, job in jobs.items()}
            encrypted = jobs[PS].told_per_step("comm/sent_bytes", "comm/received_bytes")
            return Measure(Measurement(rates), sent, jobs[PS].processor_per_step()[1], encrypted)


def sent_per_step(folder: Path) -> float:
    """Bytes of a step without packets' headers, mean over hosts; in each the median over the steps of its turns."""
    return float(np.mean([_of_one_host(np.fromfile(path).reshape(-1, 3)) for path in folder.glob("traffic-*")]))


def _of_one_host(readings: np.ndarray) -> float:
    """Of time, bytes and packets after every step; a step that was interrupted has others' bytes as well."""
    seconds, sent, packets = np.diff(readings, axis=0).T
    whole = seconds < 3 * np.median(seconds)
    return float(np.median((sent - HEADERS * packets)[whole]))


def environments(hosts: tuple[Host, Host]) -> list[dict[str, str]]:
    """What ``torchrun`` would tell a process on each host; itself it would take seconds to start."""
    port = free_port()
    return [
        {
            "GLOO_SOCKET_IFNAME": host.interface,
            "TORCHELASTIC_RUN_ID": "benchmark",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(HOSTS),
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        for rank, host in enumerate(hosts)
    ]
