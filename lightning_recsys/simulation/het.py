"""HET in virtual time: workers that train the dense part in step, with the caches that real workers have."""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.placement.communication import FLOAT_BYTES, Network, all_reduce
from lightning_recsys.row_cache.index import CachePolicy
from lightning_recsys.simulation.cached_rows import CachedRows, Message
from lightning_recsys.simulation.events import Meeting, Process, Signal, VirtualClock
from lightning_recsys.simulation.machines import ServerQueues, Servers, Workers, check_at_least, check_whole
from lightning_recsys.simulation.replica import Gradient, Replica, end_replicas
from lightning_recsys.simulation.results import Results
from lightning_recsys.sync import ClockName, ClockRule

Evaluate = Callable[[pl.LightningModule], dict[str, float]]


@dataclass(frozen=True)
class HETCluster:
    """Workers that average the dense part's gradients in every step, and whose rows are on servers, cached or not.

    The caches, their clocks and what they say to servers are those of ``strategy=het``: the same objects. A step: the
    rows of the batch arrive, gradients are computed, the dense ones are averaged by all workers, and each worker trains
    its copies. The message for the next batch travels meanwhile, as with the strategy's ``prefetch``.

    Args:
        num_workers: Each has the whole dense part, and a cache of every collection.
        algorithm: ``het``, or ``hybrid``: the same without caches, in step.
        cache_fraction: Rows of a cache, as a share of its collection's.
        staleness: ``s``, in updates of a row; 0 is in step, ``None`` is no bound.
        policy: Which rows leave a full cache: ``lru``, ``lfu`` or ``light_lfu``.
        clock: What a push makes of a row's clock at the servers: ``max`` or ``sum``.
        prefetch: Ask for the next batch's rows while the present one computes.
        lookahead_batches: Batches of each worker whose rows stay while there is room; 0 leaves all to the policy.
        dense_bytes: What the dense part weighs on the network, where that is another model's; ``None``: as it is.
        embedding_dim: Numbers that a row of the widest collections has on the network, likewise.
        workers: Times of a batch. A worker's times begin when its rows are there.
        link: The link of each worker to the servers.
        peer_link: The link of each worker to the others, over which dense gradients go round, and in step those of rows
            to their owners; ``None``: ``link``.
        servers: The servers of the rows.

    Raises:
        ValueError: a number is out of its range, or workers are to fail or to share cores.
    """

    num_workers: int = 8
    algorithm: Literal["het", "hybrid"] = "het"
    cache_fraction: float = 0.1
    staleness: int | None = 100
    policy: CachePolicy = "light_lfu"
    clock: ClockName = "max"
    prefetch: bool = True
    lookahead_batches: int = 0
    dense_bytes: int | None = None
    embedding_dim: int | None = None
    workers: Workers = field(default_factory=Workers)
    link: Network = field(default_factory=Network)
    peer_link: Network | None = None
    servers: Servers = field(default_factory=Servers)

    def __post_init__(self) -> None:
        check_whole("num_workers", self.num_workers, 1)
        check_at_least("dense_bytes", 0 if self.dense_bytes is None else self.dense_bytes, 0)
        check_whole("embedding_dim", 1 if self.embedding_dim is None else self.embedding_dim, 1)
        check_whole("lookahead_batches", self.lookahead_batches, 0)
        if self.algorithm not in ("het", "hybrid"):
            raise ValueError(f"cluster.algorithm must be het or hybrid, got {self.algorithm!r}.")
        if self.policy not in get_args(CachePolicy):
            raise ValueError(f"cluster.policy must be one of {list(get_args(CachePolicy))}, got {self.policy!r}.")
        if isinstance(self.cache_fraction, bool) or not 0 < self.cache_fraction <= 1:
            raise ValueError(
                f"cluster.cache_fraction must be in (0, 1], got {self.cache_fraction}. algorithm=hybrid has no cache."
            )
        check_whole("staleness", 0 if self.staleness is None else self.staleness, 0)
        ClockRule(staleness=self.staleness, clock=self.clock)  # which refuses what it cannot be
        if self.workers.failures is not None or self.workers.cores is not None:
            raise ValueError(
                "cluster.workers: HET's workers go in step, one on each machine, and a run ends with the first that "
                "dies; leave failures and cores null."
            )

    @property
    def in_step(self) -> bool:
        """Whether all see every update of a step in the next one."""
        return self.num_workers > 1 and (self.algorithm == "hybrid" or self.staleness == 0)

    def num_updates(self, num_batches: int) -> int:
        """Updates of the dense part in a run of so many batches: one for each step of all workers."""
        return num_batches // self.num_workers

    def train(
        self,
        module: pl.LightningModule,
        batches: Iterable[Batch],
        *,
        seed: int = 0,
        mark_every: int | None = None,
        evaluate: Evaluate | None = None,
        watch: Callable[[Results], None] | None = None,
    ) -> Results:
        """Train a module as this cluster would.

        Args:
            module: The module to train; see :meth:`VirtualCluster.train`.
            batches: The batches, dealt in turn, one to each worker in every step; the last ones are left out where they
                are too few for a step.
            seed: Seed of all times that are drawn.
            mark_every: Examples between two points of the curve; ``None``: only one, at the end.
            evaluate: What a point says of the module besides. All workers push what they owe before it, which takes no
                time; but for the last point it is counted, as a validation's is.
            watch: Called with the results so far after every step.

        Raises:
            ValueError: the batches are too few for one step.
        """
        with tempfile.TemporaryDirectory() as folder:
            rows = self._bind(module, Path(folder))
            try:
                run = _Run(self, module, rows, iter(batches), seed)
                run.mark_every = mark_every or float("inf")
                run.evaluate = (lambda: evaluate(module)) if evaluate is not None else dict
                run.watch = watch or (lambda _: None)
                return run.run()
            finally:
                end_replicas(module)
                for each in rows:
                    each.store.close()

    def _bind(self, module: pl.LightningModule, folder: Path) -> list[CachedRows]:
        collections = [part for part in module.modules() if isinstance(part, EmbeddingBagCollection)]
        widest = max((collection.embedding_dim for collection in collections), default=0)
        caches = self.algorithm == "het"
        rows = []
        for index, collection in enumerate(collections):
            backend = CachedRows(
                folder / str(index),
                collection.layout,
                collection.optimizer,
                num_workers=self.num_workers,
                cache_fraction=self.cache_fraction if caches else 0.0,
                wire_dim=self.embedding_dim if collection.embedding_dim == widest else None,
                staleness=self.staleness if caches else 0,
                policy=self.policy,
                clock=self.clock,
                in_step=self.in_step,
                any_rule=not caches,
            )
            collection.bind(backend, gradient_scale=1 / self.num_workers)
            backend.take_messages()
            rows.append(backend)
        return rows


class _Run:
    """One run: the workers' processes, and what they share."""

    mark_every: float
    evaluate: Callable[[], dict[str, float]]
    watch: Callable[[Results], None]

    def __init__(
        self,
        cluster: HETCluster,
        module: pl.LightningModule,
        rows: Sequence[CachedRows],
        batches: Iterator[Batch],
        seed: int,
    ) -> None:
        self.cluster, self.rows, self._batches = cluster, rows, batches
        self.peer_link = cluster.peer_link or cluster.link
        self.collections = [part for part in module.modules() if isinstance(part, EmbeddingBagCollection)]
        self.replica = Replica(module)
        self.results = Results()
        self.clock = clock = VirtualClock()
        self.random = np.random.default_rng(seed)
        self.queues = ServerQueues(cluster.servers, cluster.link, clock, self.random)
        self.dense_bytes = self.replica.dense_bytes if cluster.dense_bytes is None else cluster.dense_bytes
        workers = range(cluster.num_workers)
        self._coming: list[deque[Batch]] = [deque() for _ in workers]  # dealt, and not trained on
        self._asked: list[Signal | None] = [None for _ in workers]  # the message ahead of a batch, while it travels
        self._told = [0 for _ in workers]  # batches of `_coming` that the caches were told of
        self._gradients: list[Gradient] = []  # of the step at hand
        self._step = Meeting(clock, cluster.num_workers, self._finish_step)
        self._seconds = {"workers": 0.0, "rows": 0.0, "step": 0.0}  # of all workers, by what they did
        self._steps = 0

    def run(self) -> Results:
        cluster, results = self.cluster, self.results
        self._next_mark = self.mark_every
        slowness = cluster.workers.slowness(cluster.num_workers, 1, self.random)
        for worker, factor in enumerate(slowness):
            self.clock.start(self._work(worker, factor))
        self.clock.run()
        steps = results.traffic.copy()
        if not self._steps:
            raise ValueError(
                f"nothing was trained: a step takes a batch for each of {cluster.num_workers} workers, and there were "
                "fewer. Give more examples, or smaller batches."
            )
        self._mark()
        results.traffic = steps  # the last flush is no part of them
        self._take_stock()
        return results

    # --- Workers -----------------------------------------------------------------------------------------------------

    def _work(self, worker: int, slowness: float) -> Process:
        workers = self.cluster.workers
        while (batch := self._peek(worker, 0)) is not None:
            begin = self.clock.now
            if (asked := self._asked[worker]) is not None:
                yield asked
            self._coming[worker].popleft()
            self._told[worker] = max(self._told[worker] - 1, 0)
            gradient = self._learn(worker, batch)
            messages, ahead = self._take_messages(), self._ask_ahead(worker)
            if ahead:
                self._asked[worker] = Signal()
                self.clock.start(self._travel_ahead(worker, ahead))
            for message in messages:
                yield from self._travel(message)
            self._seconds["rows"] += self.clock.now - begin
            seconds = workers.compute.draw(self.random) * slowness
            self._seconds["workers"] += seconds
            yield seconds
            begin = self.clock.now
            self._gradients.append(gradient)
            yield from self._step.wait()
            self._seconds["step"] += self.clock.now - begin
            if wait := workers.elsewhere.draw(self.random) * slowness:
                yield wait

    def _peek(self, worker: int, ahead: int) -> Batch | None:
        """The batch that a worker trains on after so many others; ``None`` where there is none."""
        while len(self._coming[worker]) <= ahead:
            dealt = list(islice(self._batches, self.cluster.num_workers))
            if len(dealt) < self.cluster.num_workers:
                self._batches = iter(())
                return None
            for coming, batch in zip(self._coming, dealt, strict=True):
                coming.append(batch)
        return self._coming[worker][ahead]

    def _learn(self, worker: int, batch: Batch) -> Gradient:
        """Look up, and compute; messages that it takes are done at this moment, and travel afterwards."""
        for rows in self.rows:
            rows.worker = worker
        return self.replica.gradient(batch)

    def _ask_ahead(self, worker: int) -> list[Message]:
        """Tell the caches of coming batches, and have the next one's rows sent."""
        cluster = self.cluster
        if cluster.algorithm == "hybrid":
            return []
        while self._told[worker] < cluster.lookahead_batches:
            if (batch := self._peek(worker, self._told[worker])) is None:
                break
            for collection in self.collections:
                collection.announce(batch.sparse, ahead=self._told[worker])
            self._told[worker] += 1
        if cluster.prefetch and not cluster.in_step and (batch := self._peek(worker, 0)) is not None:
            for collection in self.collections:
                collection.prefetch(batch.sparse)
        return self._take_messages()

    def _take_messages(self) -> list[Message]:
        messages = [message for rows in self.rows for message in rows.take_messages()]
        for message in messages:
            self.results.traffic.update(message.kinds)
        return messages

    def _travel_ahead(self, worker: int, messages: Sequence[Message]) -> Process:
        signal = self._asked[worker]
        assert signal is not None
        for message in messages:
            yield from self._travel(message)
        self._asked[worker] = None
        self.clock.fire(signal)

    def _travel(self, message: Message) -> Process:
        queues, servers = self.queues, self.cluster.servers
        if wait := queues.send(message.sent):
            yield wait
        if wait := queues.work(servers.pull if message.answered else servers.push):
            yield wait
        if message.answered and (wait := queues.answer(message.answered)):
            yield wait

    # --- What all do together ----------------------------------------------------------------------------------------

    def _finish_step(self) -> Process:
        """Average the dense gradients, train the rows, and in step have all updates at the servers."""
        cluster, results = self.cluster, self.results
        if cluster.num_workers > 1:
            ring = all_reduce(self.dense_bytes / FLOAT_BYTES, num_processes=cluster.num_workers)
            yield ring.seconds(self.peer_link)
            results.traffic["dense"] += 2 * (cluster.num_workers - 1) * self.dense_bytes
        gradients, self._gradients = self._gradients, []
        rows = [part for gradient in gradients for part in gradient.rows]
        self.replica.apply(Gradient(gradients[0].batch, gradients[0].logits, _mean(gradients), rows, self._steps), None)
        self._steps += 1
        if cluster.in_step:
            yield from self._meet_at_owners()
        self._take_flushed()
        for gradient in gradients:
            results.add_predictions(gradient.logits, gradient.batch.labels)
        if results.examples >= self._next_mark:
            self._mark()
            self._next_mark += self.mark_every
        self.watch(results)

    def _meet_at_owners(self) -> Process:
        """Sum each row's gradients at one worker, and have its update at the servers."""
        moved = np.array([rows.finish_step() for rows in self.rows]).sum(axis=0)
        self.results.traffic["gradients"] += int(moved.sum()) // 2  # each byte was sent once and received once
        yield self.peer_link.latency + float(moved.max()) / 2 / self.peer_link.bandwidth
        for rows in self.rows:
            rows.flush()
        messages = self._take_messages()
        if messages:  # all workers send at once
            yield max(self.queues.send(message.sent) for message in messages)
            if wait := max(self.queues.work(self.cluster.servers.push) for _ in messages):
                yield wait

    def _take_flushed(self) -> None:
        """Count what rides on no later message: a worker without a cache pushes as soon as it has trained."""
        for message in self._take_messages():
            self.clock.start(self._travel(message))

    def _mark(self) -> None:
        for rows in self.rows:
            rows.flush()
        self._take_messages()
        self.results.mark(self.clock.now, **self.evaluate())

    def _take_stock(self) -> None:
        results, cluster = self.results, self.cluster
        results.counts["steps"] = self._steps
        workers_seconds = cluster.num_workers * results.seconds or float("inf")
        results.utilization["workers"] = self._seconds["workers"] / workers_seconds
        results.utilization["waiting for rows"] = self._seconds["rows"] / workers_seconds
        results.utilization["waiting for each other"] = self._seconds["step"] / workers_seconds
        results.utilization |= self.queues.busy_shares("servers", results.seconds or float("inf"))
        counts: Counter[str] = Counter()
        for rows in self.rows:
            counts.update(rows.counts())
        reads = max(counts["reads"], 1)
        results.metrics |= {f"cache/{name}_rate": counts[name] / reads for name in ("miss", "stale", "refresh")}
        results.metrics["cache/hit_rate"] = 1 - results.metrics["cache/miss_rate"]
        worker_steps = max(self._steps * cluster.num_workers, 1)
        results.metrics |= {
            f"comm/{kind}_bytes_per_step": results.traffic[kind] / worker_steps
            for kind in ("rows", "clocks", "gradients", "dense")
        }
        results.finish()


def _mean(gradients: Sequence[Gradient]) -> list[Tensor | None]:
    """The mean of each dense parameter's gradients; a worker whose batch did not need it counts as 0."""
    means: list[Tensor | None] = []
    for parts in zip(*(gradient.dense for gradient in gradients), strict=True):
        there = [part for part in parts if part is not None]
        means.append(torch.stack(there).sum(0).div_(len(parts)) if there else None)
    return means
