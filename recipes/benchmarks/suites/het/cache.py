"""HET's cache without a model around it: what travels, what it misses, and how long its operations take.

Every step looks a batch up, announces those to come and trains the rows with a fixed gradient, against one server over
a socket of the machine, as a worker would.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.report import Columns, Curves, Result
from benchmarks.harness.turns import Measurement, Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.suites.het.traces import Oracle, Trace, oracle
from benchmarks.suites.kernels import Tables

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.launchers import ServerSpec, Sidecars
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache import CachePolicy
from lightning_recsys.row_cache.backend import CachedBackend
from lightning_recsys.strategies.common.look_ahead import BYTES_PER_ID
from lightning_recsys.strategies.rows.cached import DEFAULT_LOOKAHEAD_BATCHES, DEFAULT_LOOKAHEAD_BYTES

CACHED = 0.1  # of all rows
# Hetu's own C++ cache, milliseconds of lookup and update a step and the share of bytes that it saves at s=100, as
# measured on a Xeon of 2.5 GHz on which FBGEMM's module made 458,000 examples/s of this workload (D=16, B=2048).
HETU_MILLISECONDS = {(16, 2048): 47.0, (128, 2048): 89.0}
HETU_SAVED = {128: 0.850, 2048: 0.747}  # by batch size
HETU_CALIBRATION = 458_000.0
HETU_LIMIT = 0.5  # of their milliseconds


class Worker:
    """A worker's part of training that concerns rows.

    Args:
        backend: Serves them.
        stores: Whose connection counts what travels.
        batch_size: Of every batch; all get the same gradient.
        lookahead_batches: How far ahead batches are announced, unless they take too much memory.
    """

    def __init__(
        self, backend: CachedBackend, stores: RemoteStores, *, batch_size: int, lookahead_batches: int
    ) -> None:
        self.backend = backend
        self._lookahead_batches = lookahead_batches
        self._traffic = stores.connection.traffic
        shape = (batch_size, len(backend.layout.feature_tables), backend.layout.embedding_dim)
        self._gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3

    def steps(self, batches: Iterable[SparseFeatures]) -> Iterator[int]:
        """Train on batch after batch: look up, announce those to come, train. Gives the size of each before it."""
        source, coming, num_bytes = iter(batches), deque[SparseFeatures](), 0
        batch: SparseFeatures | None = next(source)
        while batch is not None:
            yield batch.batch_size
            _, ticket = self.backend.lookup(batch)
            for _ in range(4):
                far = len(coming) >= self._lookahead_batches or num_bytes >= DEFAULT_LOOKAHEAD_BYTES
                if (coming and far) or (later := next(source, None)) is None:
                    break
                if self._lookahead_batches:
                    self.backend.announce(later, ahead=len(coming))
                coming.append(later)
                num_bytes += _bytes_of(later)
            following = coming.popleft() if coming else None
            if following is not None:
                num_bytes -= _bytes_of(following)
                self.backend.prefetch(following)
            self.backend.apply_gradients([ticket], self._gradient[: batch.batch_size], lr=0.01)
            batch = following

    def reads_and_misses(self) -> tuple[float, float]:
        """Distinct rows of all batches so far, and those that were not there."""
        told = self.backend.telemetry()
        return told["cache/reads"], told["cache/reads"] * told["cache/miss_rate"]

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._traffic.sent_bytes, self._traffic.received_bytes


def _bytes_of(sparse: SparseFeatures) -> int:
    return sparse.values.nbytes + BYTES_PER_ID * sparse.values.numel()


@contextmanager
def worker(work: Workload, **options: Any) -> Iterator[Worker]:
    """A worker and its server, a process of its own behind a socket of the machine; options as :func:`worker_at`."""
    with Sidecars([ServerSpec("embedding", 0)]) as sidecars:
        (endpoint,) = sidecars.endpoints["embedding"]
        with worker_at(endpoint, work, **options) as own:
            yield own


@contextmanager
def worker_at(
    endpoint: str,
    work: Workload,
    *,
    dim: int,
    batch_size: int,
    cache_rows: int,
    staleness: int | None,
    policy: CachePolicy = "light_lfu",
    lookahead_batches: int = DEFAULT_LOOKAHEAD_BATCHES,
    keys: Path | None = None,
) -> Iterator[Worker]:
    """A worker whose rows are at a server, which is asked whatever machine it is on."""
    optimizer = RowSGD()
    layout = TableLayout(tuple(EmbeddingBagConfig(name, rows, dim, (name,)) for name, rows in work.fields.items()))
    parts = [TablePart("rows", x.name, x.num_embeddings, server=0) for x in layout.tables]
    with closing(connect(endpoint, transport="tcp", keys=keys)) as stores:
        assert isinstance(stores, RemoteStores)
        store = stores.create_embedding_store("rows", layout, optimizer, seed=0)
        backend = CachedBackend(
            layout, optimizer, stores=[(store, parts)], cache_rows=cache_rows, staleness=staleness, policy=policy
        )
        yield Worker(backend, stores, batch_size=batch_size, lookahead_batches=lookahead_batches)


@dataclass(frozen=True)
class Replay:
    """What a trace cost, per counted step.

    Args:
        num_bytes: Both ways.
        miss_rate: Of distinct rows.
        milliseconds: Of all that concerns rows.
    """

    num_bytes: float
    miss_rate: float
    milliseconds: float


def replay(work: Workload, *, batch_size: int, skip: int, **options: Any) -> Replay:
    """All batches of a workload; the first ``skip`` fill the cache and are not counted."""
    batches = [batch.sparse for batch in work.batches(batch_size)]
    with worker(work, batch_size=batch_size, **options) as own:
        for number, _ in enumerate(own.steps(batches)):
            if number == skip:
                reads, misses = own.reads_and_misses()
                began, num_bytes = time.perf_counter(), sum(own.traffic())
        seconds = time.perf_counter() - began
        steps = len(batches) - skip
        all_reads, all_misses = own.reads_and_misses()
        miss_rate = (all_misses - misses) / (all_reads - reads)
        return Replay((sum(own.traffic()) - num_bytes) / steps, miss_rate, 1e3 * seconds / steps)


def traffic(
    *, rows: int, skip_rows: int, batch_sizes: Sequence[int], staleness: Sequence[int], paper_exponent: float
) -> tuple[list[Result], list[Bar]]:
    """Bytes that the cache saves, against no cache, Hetu's and what oracles could."""
    lines: list[list[str]] = []
    bars: list[Bar] = []
    work = Workload(rows=rows)
    for batch_size in batch_sizes:
        for s in staleness:
            saved, best = _saved(work, batch_size, s, skip=skip_rows // batch_size, name="Zipf 1.1", lines=lines)
            where = f"B={batch_size}, s={s}"
            bars.append(Bar(f"bytes saved, {where}", 100 * saved, "at least", 100 * HETU_SAVED[batch_size], " %"))
            bars.append(Bar(f"points below Belady's, {where}", 100 * (best - saved), "at most", 3.0))
    paper = Workload(rows=rows, zipf_exponent=paper_exponent)
    batch_size, s = batch_sizes[0], staleness[-1]
    saved, _ = _saved(
        paper, batch_size, s, skip=skip_rows // batch_size, name=f"the paper's skew, Zipf {paper_exponent}", lines=lines
    )
    bars.append(Bar(f"bytes saved, the paper's skew, B={batch_size}, s={s}", 100 * saved, "at least", 88.0, " %"))
    header = (
        "trace",
        "10 % take",
        "B",
        "s",
        "MB a step without",
        "with",
        "saved",
        "most frequent",
        "Belady",
        "miss rate",
        "Belady's",
    )
    return [Columns("traffic, cache of 10 %, D=128, SGD", header, lines)], bars


def _saved(
    work: Workload, batch_size: int, s: int, *, skip: int, name: str, lines: list[list[str]]
) -> tuple[float, float]:
    trace = Trace.of(work, batch_size, name=name)
    limit = int(CACHED * trace.num_rows)
    options = {"dim": 128, "batch_size": batch_size, "staleness": s}
    without = replay(work, skip=skip, cache_rows=0, **options)
    cached = replay(work, skip=skip, cache_rows=limit, **options)
    kinds: tuple[Oracle, Oracle] = ("most_frequent", "belady")
    frequent, belady = (oracle(trace, limit=limit, staleness=s, skip=skip, kind=kind) for kind in kinds)
    saved = 1 - cached.num_bytes / without.num_bytes
    lines.append(
        [
            name,
            f"{trace.share_of_most_updated(CACHED):.1%}",
            str(batch_size),
            str(s),
            f"{without.num_bytes / 1e6:.2f}",
            f"{cached.num_bytes / 1e6:.2f}",
            f"{saved:.1%}",
            f"{frequent.saved():.1%}",
            f"{belady.saved():.1%}",
            f"{cached.miss_rate:.3f}",
            f"{belady.miss_rate:.3f}",
        ]
    )
    return saved, belady.saved()


def misses(
    *, rows: int, skip_rows: int, batch_size: int, fractions: Sequence[float], policies: Sequence[CachePolicy]
) -> tuple[list[Result], list[Bar]]:
    """Miss rate against cache size, drawn as in the paper's Figure 8."""
    work = Workload(rows=rows)
    trace = Trace.of(work, batch_size, name="Zipf 1.1")
    skip = skip_rows // batch_size
    lines = []
    for fraction in fractions:
        limit = int(fraction * trace.num_rows)
        options = {"dim": 4, "batch_size": batch_size, "cache_rows": limit, "staleness": 100, "skip": skip}
        rates = [replay(work, policy=policy, lookahead_batches=0, **options).miss_rate for policy in policies]
        best = oracle(trace, limit=limit, staleness=100, skip=skip).miss_rate
        lines.append([f"{fraction:.0%}", *(f"{rate:.3f}" for rate in [*rates, best])])
    header, title = ("cached", *policies, "Belady"), f"miss rate of distinct rows, B={batch_size}"
    return [Curves(title, header, lines, drawn=header[1:], label="miss rate", name="misses")], []


def operations(
    *, shapes: Sequence[tuple[int, int]], rounds: int, seconds: float, staleness: int
) -> tuple[list[Result], list[Bar]]:
    """Time of all that concerns rows in a step, against Hetu's scaled to this machine.

    The kernel that says how fast this machine is runs beside every shape. Its rate depends by half on where its tables
    happen to lie in memory; so the median of all its rounds scales all shapes.
    """
    measured: dict[tuple[int, int], Measurement] = {}
    for dim, batch_size in shapes:
        work = Workload(rows=max(131_072, 64 * batch_size))
        batches = [batch.sparse for batch in work.batches(batch_size)]
        limit = int(CACHED * sum(work.cardinalities))
        with worker(work, dim=dim, batch_size=batch_size, cache_rows=limit, staleness=staleness) as own:

            def cached(turn: Turn, own: Worker = own, batches: list[SparseFeatures] = batches) -> None:
                for num_examples in own.steps(cycle(batches)):
                    turn.step_done(num_examples)

            calibration = Tables(Workload(), 16, 2048).fbgemm_module
            measured[dim, batch_size] = in_turns(
                {"FBGEMM": calibration, "cache": cached}, rounds=rounds, seconds=seconds
            )
    speed = statistics.median(rate for one in measured.values() for rate in one.rates["FBGEMM"]) / HETU_CALIBRATION
    lines = []
    bars = []
    for (dim, batch_size), one in measured.items():
        milliseconds = 1e3 * batch_size / one.median("cache")
        theirs = HETU_MILLISECONDS[dim, batch_size] / speed
        lines.append(
            [f"D={dim}, B={batch_size}", f"{milliseconds:.2f}", f"{theirs:.2f}", f"{milliseconds / theirs:.2f}"]
        )
        bars.append(
            Bar(f"cache operations / Hetu's, D={dim}, B={batch_size}", milliseconds / theirs, "at most", HETU_LIMIT)
        )
    header = ("workload", "ms a step", "Hetu's, scaled", "ratio")
    title = f"lookup and update over a socket, cache of 10 %, s={staleness}; this machine {speed:.2f} times as fast"
    return [Columns(title, header, lines)], bars
