"""Suite ``servers``: the processor time that a parameter server takes for a worker's step, and for a cluster's.

A step is a pooled lookup of a batch and a push of its gradients, over TCP on this machine. Servers that answer the same
bytes and do nothing with them take turns with ours, one for each transport.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import torch
from benchmarks.harness.bars import Bar, Bars
from benchmarks.harness.choices import check_numbers
from benchmarks.harness.processes import environment, python
from benchmarks.harness.report import Columns, Result
from benchmarks.harness.workload import Workload
from benchmarks.peers.echoes import TRANSPORTS, asking, make_credentials

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.monitoring.processes import processor_seconds
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.placement.queueing import closed_network_seconds

OURS = "server"
_HANDLER = re.compile(r"^lightning_recsys_server_request_seconds_sum\{.*\} (\S+)$", re.MULTILINE)

Step = Callable[[], None]


@dataclass
class Turns:
    """The readings of one server's turns, each a mean over the steps of a turn, in seconds of processors."""

    server: list[float] = field(default_factory=list)
    handler: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)

    def ms(self, name: str) -> float:
        """Median of the turns, in milliseconds."""
        return 1e3 * median(getattr(self, name))


@dataclass(frozen=True)
class Served:
    """A server that runs, and a client's step at it.

    Args:
        step: A lookup and a push, by a client in this process.
        pid: Process id of the server, whose processor time is counted.
        handler_seconds: Tells how long the server has worked on requests so far; ``None`` of an echo.
    """

    step: Step
    pid: int
    handler_seconds: Callable[[], float] | None = None

    def take_turn(self, turns: Turns, seconds: float) -> None:
        """Make steps for some seconds, and write down what they took."""
        self.step()
        steps, worked = 0, self.handler_seconds
        began, own, other = time.perf_counter(), time.process_time(), processor_seconds(self.pid)
        answered = 0.0 if worked is None else worked()
        while not steps or time.perf_counter() - began < seconds:
            self.step()
            steps += 1
        turns.client.append((time.process_time() - own) / steps)
        turns.server.append((processor_seconds(self.pid) - other) / steps)
        turns.handler.append(0.0 if worked is None else (worked() - answered) / steps)


@dataclass(frozen=True)
class Requests:
    """The requests of a worker's step.

    Args:
        work: Fields and ids that are asked for.
        batch_size: Examples of a step.
    """

    work: Workload
    batch_size: int

    @contextmanager
    def at_server(self, folder: Path, credentials: Path | None) -> Iterator[Served]:
        """Our server, as it is started by hand."""
        keys = None if credentials is None else credentials / "keys"
        tables = [EmbeddingBagConfig(name, rows, self.work.dim, (name,)) for name, rows in self.work.fields.items()]
        collection = EmbeddingBagCollection(tables, optimizer=RowWiseAdagrad())
        bind = ("--folder", str(folder), "--bind", "tcp://127.0.0.1:0", "--metrics-port", "0")
        command = python("-m", "lightning_recsys.parameter_server.cli", *bind, *(["--keys", str(keys)] if keys else []))
        with running(command, lines=2) as (pid, (metrics, ready)), ExitStack() as opened:
            stores = connect(ready.split()[-1], keys=keys or folder / ".token", transport="tcp")
            opened.callback(stores.close)
            store = stores.create_embedding_store("rows", TableLayout(tables), RowWiseAdagrad(), seed=0)
            batches = cycle([collection.resolve(x.sparse) for x in self.work.batches(self.batch_size)])
            gradient = torch.randn(self.batch_size, self.work.num_fields, self.work.dim) * 1e-3

            def step() -> None:
                sparse = next(batches)
                store.pooled_lookup(sparse)
                store.apply_gradients(sparse, gradient.clone(), lr=0.01)  # which belongs to the connection from now on

            yield Served(step, pid, lambda: _handler_seconds(metrics.split()[-1]))

    @contextmanager
    def at_echo(self, transport: str, credentials: Path | None) -> Iterator[Served]:
        """The same bytes, answered by a server that does nothing with them."""
        given = [] if credentials is None else [str(credentials)]
        command = python("-m", "benchmarks.peers.echoes", transport, *given)
        ids, rows = (memoryview(bytearray(size)) for size in (self.id_bytes, self.row_bytes))
        with (
            running(command, lines=1) as (pid, (ready,)),
            asking(transport, ready.split()[-1], credentials) as ask,
        ):

            def step() -> None:
                ask([ids], len(rows))
                ask([ids, rows], 0)

            yield Served(step, pid)

    @property
    def id_bytes(self) -> int:
        """The bytes of a batch's ids."""
        return 8 * self.batch_size * self.work.num_fields

    @property
    def row_bytes(self) -> int:
        """The bytes of its pooled rows, and of their gradients."""
        return 4 * self.batch_size * self.work.num_fields * self.work.dim


def run(
    *,
    batch_sizes: Sequence[int],
    dim: int,
    rows: int,
    rounds: int,
    seconds: float,
    cluster: dict[str, float],
    servers: Sequence[int],
) -> list[Result]:
    """Measure each batch size, with keys and without.

    Args:
        batch_sizes: Examples of a step.
        dim: Width of the rows.
        rows: Number of examples in memory, which steps go round and round.
        rounds: How many turns each server has.
        seconds: Length of a turn.
        cluster: A cluster that is foretold from it: ``workers``, and ``worker_ms``, the time that a worker computes
            between its requests.
        servers: How many servers it may have, for each of which there is a forecast.

    Raises:
        ValueError: a number too small to measure anything with.
    """
    check_numbers("suite.batch_sizes", batch_sizes)
    check_numbers("suite.rounds", rounds)
    check_numbers("suite.servers", servers)
    work = Workload(rows=rows, dim=dim)
    lines: list[list[str]] = []
    echoes: list[list[str]] = []
    forecasts: list[list[str]] = []
    bars: list[Bar] = []
    for batch_size in batch_sizes:
        requests = Requests(work, batch_size)
        for with_keys in (False, True):
            measured = _measure(requests, with_keys=with_keys, rounds=rounds, seconds=seconds)
            ours = measured[OURS]
            name = f"B={batch_size}, {'with' if with_keys else 'without'} keys"
            megabytes = 2 * (requests.id_bytes + requests.row_bytes) / 1e6
            core = 1e3 / ours.ms("server") if ours.ms("server") else 0.0  # a short turn has no hundredth of a second
            taken = [f"{ours.ms(part):.2f}" for part in ("server", "handler", "client")]
            lines.append([name, *taken, f"{core:,.0f}", f"{megabytes:.1f}"])
            echoes.append([name, *(f"{measured[by].ms(end):.2f}" for by in TRANSPORTS for end in ("server", "client"))])
            if with_keys:
                forecasts.append([name, *_forecast(ours.ms("server") / 1e3, batch_size, cluster, servers)])
            elif batch_size in _MOST_MS:
                most = _MOST_MS[batch_size]
                bars.append(Bar(f"work on a step's requests, {name}", ours.ms("handler"), "at most", most, " ms"))
    step = f"of a step of {work.num_fields} fields, D={dim}: ms of processors"
    foretold = f"Examples/s of {cluster['workers']:,.0f} workers that compute {cluster['worker_ms']:g} ms, by servers"
    ends = [f"{by}, {end}" for by in TRANSPORTS for end in ("server", "client")]
    return [
        Columns(f"Requests {step}", ("", OURS, "of it work", "client", "steps/s of a core", "MB a step"), lines),
        Columns(f"The bytes {step}, answered without work", ("", *ends), echoes),
        Columns(foretold, ("", *map(str, servers)), forecasts),
        Bars(tuple(bars)),
    ]


_MOST_MS = {512: 1.1, 2048: 5.0}  # half of what they took before rows were summed once


def _measure(requests: Requests, *, with_keys: bool, rounds: int, seconds: float) -> dict[str, Turns]:
    """All servers in turns."""
    turns = {by: Turns() for by in (OURS, *TRANSPORTS)}
    with tempfile.TemporaryDirectory(prefix="lightning-recsys-servers-", dir=_memory()) as name, ExitStack() as opened:
        credentials = Path(name) / "credentials" if with_keys else None
        if credentials is not None:
            make_credentials(credentials)
        served = {OURS: opened.enter_context(requests.at_server(Path(name) / "stores", credentials))}
        for by in TRANSPORTS:
            served[by] = opened.enter_context(requests.at_echo(by, credentials))
        names = list(served)
        for number in range(rounds):
            for by in names[number % len(names) :] + names[: number % len(names)]:
                served[by].take_turn(turns[by], seconds)
    return turns


def _forecast(server: float, batch_size: int, cluster: dict[str, float], servers: Sequence[int]) -> list[str]:
    """Examples a second of a cluster whose rows are striped evenly: a closed queueing network."""
    workers, wait = int(cluster["workers"]), cluster["worker_ms"] / 1e3
    cycles = [closed_network_seconds([(server / number, 1)], wait, workers) for number in servers]
    return [f"{batch_size * workers / cycle:,.0f}" for cycle in cycles]


def _handler_seconds(url: str) -> float:
    with urlopen(url) as answer:  # noqa: S310 - of the server that we have started
        return sum(float(found) for found in _HANDLER.findall(answer.read().decode()))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - where a run's servers have their stores


@contextmanager
def running(command: Sequence[str], *, lines: int) -> Iterator[tuple[int, list[str]]]:
    """A process that says when it is ready, in so many lines; it is gone afterwards.

    Raises:
        RuntimeError: it has ended before.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())  # noqa: S603 - our own
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        if not all(said):
            raise RuntimeError(f"{command} has ended before it was ready.")
        yield process.pid, said
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
