"""What a job of part ``requests`` asks for."""

# Shape suffixes: U rows wanted, V rows pushed, D width of a row.

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from benchmarks.harness.jobs.hosts import counted_by
from benchmarks.harness.jobs.training import TRAFFIC
from benchmarks.harness.workload import Workload
from benchmarks.peers import bare_link, torch_rpc
from benchmarks.suites.het.cache import CACHED, worker_at
from benchmarks.suites.het.training import running
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect

BYTES_PER_ID, BYTES_PER_NUMBER = 8, 4

Step = Callable[[], tuple[float, float]]
"""Asks for what a step needs and waits for it; gives the bytes that this is to put on the link, sent and received."""


@dataclass(frozen=True)
class Asked:
    """What a step asks for, and where.

    Args:
        endpoint: Where the server listens, ``tcp://HOST:PORT``.
        interface: Of this host, to the server.
        keys: The file with the keys of our server; ``None`` where it is on this machine and needs none.
        work: Whose rows are asked for.
        batch_size: Examples of a step.
        staleness: Of the cache whose exchanges are made; ``None`` for plain lookups.
        sent: Bytes of a step's requests, for those who only imitate them.
        received: Bytes of the answers.
    """

    endpoint: str
    interface: str
    keys: Path | None
    work: Workload
    batch_size: int
    staleness: int | None
    sent: int
    received: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of float32."""
        return BYTES_PER_NUMBER * self.work.dim


def train(
    *,
    folder: Path,
    asker: int,
    by: str,
    server: Sequence[str],
    interface: str,
    keys: str,
    batch_size: int,
    dim: int,
    rows: int,
    staleness: int | None,
    sent: int,
    received: int,
) -> None:
    """Ask until told to stop; nothing is trained.

    After each step it writes what :class:`benchmarks.suites.het.training.CrossedBytes` does.

    Args:
        folder: Where the times of steps and their bytes are written, and where a file ``stop`` ends this.
        asker: Process id of the benchmark; when that has ended, so does this.
        by: Who asks: a name in :data:`WAYS`.
        server: Command of the server to start beside this, on another host.
        interface: Where bytes are counted after each step.
        keys: Path of the file with the keys of our server.
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples held in memory; their batches are asked for again and again.
        staleness: Of the cache whose exchanges are made; ``None`` for plain lookups.
        sent: Bytes of a step's requests, for those who only imitate them.
        received: Bytes of the answers to these.
    """
    work = Workload(rows=rows, dim=dim)
    total = (0.0, 0.0)
    with (
        running(server) as endpoint,
        WAYS[by](Asked(str(endpoint), interface, Path(keys), work, batch_size, staleness, sent, received)) as step,
        (folder / f"steps-0-{os.getpid()}").open("wb", buffering=0) as times,
        (folder / f"{TRAFFIC}-0-{os.getpid()}").open("wb", buffering=0) as traffic,
    ):
        while Path(f"/proc/{asker}").exists() and not (folder / "stop").exists():
            sent_now, received_now = step()
            total = (total[0] + sent_now, total[1] + received_now)
            times.write(struct.pack("d", time.monotonic()))
            traffic.write(struct.pack("6d", *counted_by(interface), *total))


@contextmanager
def over_the_bare_link(asked: Asked) -> Iterator[Step]:
    """So many bytes there and back."""
    with bare_link.exchanges(asked.endpoint, asked.sent, asked.received) as exchange:

        def step() -> tuple[float, float]:
            exchange()
            return asked.sent, asked.received

        yield step


@contextmanager
def by_torch_rpc(asked: Asked) -> Iterator[Step]:
    """The same lookups; for a cache one call a step that pushes and pulls as many rows as its exchanges do."""
    with torch_rpc.client(asked.endpoint, interface=asked.interface):
        if asked.staleness is None:
            yield _lookups(asked, torch_rpc.look_up)
            return
        pulled = asked.received // asked.row_bytes
        pushed = (asked.sent - BYTES_PER_ID * pulled) // (BYTES_PER_ID + asked.row_bytes)
        num_rows = sum(asked.work.cardinalities)
        updates_VD = torch.zeros(pushed, asked.work.dim)

        def step() -> tuple[float, float]:
            pushed_V, wanted_U = torch.randint(num_rows, (pushed,)), torch.randint(num_rows, (pulled,))
            torch_rpc.push_and_pull(pushed_V, updates_VD, wanted_U)
            return asked.sent, asked.received

        yield step


@contextmanager
def by_ours(asked: Asked) -> Iterator[Step]:
    """Lookups in a store behind a server, or a worker's cache that exchanges rows with it; with the job's keys."""
    if asked.staleness is None:
        fields = asked.work.fields.items()
        layout = TableLayout(tuple(EmbeddingBagConfig(name, rows, asked.work.dim, (name,)) for name, rows in fields))
        with closing(connect(asked.endpoint, transport="tcp", keys=asked.keys)) as stores:
            yield _lookups(asked, stores.create_embedding_store("rows", layout, RowSGD(), seed=0).lookup)
        return
    limit = int(CACHED * sum(asked.work.cardinalities))
    options = {"dim": asked.work.dim, "batch_size": asked.batch_size, "cache_rows": limit, "keys": asked.keys}
    with worker_at(asked.endpoint, asked.work, staleness=asked.staleness, **options) as own:  # type: ignore[arg-type]
        batches = own.steps(cycle([batch.sparse for batch in asked.work.batches(asked.batch_size)]))
        next(batches)  # stands before its first step now
        before = own.traffic()

        def step() -> tuple[float, float]:
            nonlocal before
            next(batches)
            before, (sent, received) = own.traffic(), before
            return before[0] - sent, before[1] - received

        yield step


def _lookups(asked: Asked, look_up: Callable[[Tensor], Tensor]) -> Step:
    """One request at a time, each for the rows of a batch, every id of it, without pooling."""
    sizes = torch.tensor(asked.work.cardinalities)
    starts = (sizes.cumsum(0) - sizes).unsqueeze(1)
    batches = asked.work.batches(asked.batch_size)
    wanted = cycle([(batch.sparse.values.view(len(sizes), -1) + starts).flatten() for batch in batches])

    def step() -> tuple[float, float]:
        rows_U = next(wanted)
        rows_UD = look_up(rows_U)
        return rows_U.nbytes, rows_UD.nbytes

    return step


WAYS: dict[str, Callable[[Asked], AbstractContextManager[Step]]] = {
    "bare link": over_the_bare_link,
    "torch RPC": by_torch_rpc,
    "ours": by_ours,
}
