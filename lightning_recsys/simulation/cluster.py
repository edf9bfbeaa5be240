"""A virtual cluster: replicas of the dense part, with workers each, servers, rounds of synchronisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_recsys.data import Batch
from lightning_recsys.placement.communication import FLOAT_BYTES, Network, all_reduce
from lightning_recsys.simulation.events import Meeting, Process, Signal, VirtualClock
from lightning_recsys.simulation.groups import Group, GroupAtWork
from lightning_recsys.simulation.machines import ServerQueues, Servers, Workers, check_at_least, check_whole
from lightning_recsys.simulation.replica import Gradient, end_replicas, make_replicas
from lightning_recsys.simulation.results import Results
from lightning_recsys.sync import (
    ReplicaRounds,
    RoundSchedule,
    ShadowPace,
    StalenessNormalization,
    StalenessRule,
    SyncAlgorithm,
    Topology,
    make_algorithm,
)

Evaluate = Callable[[pl.LightningModule], dict[str, float]]

_T = TypeVar("_T")
_MAX_LOSSES = 100  # of one batch: even where every second try fails, so many in a row do not happen


class _FailedError(Exception):
    """A worker fails before its next event."""


class Learner(Protocol):
    """The interface of a replica to a cluster; :class:`~lightning_recsys.simulation.replica.Replica` has it."""

    flat: Tensor
    dense_bytes: int

    def gradient(self, batch: Batch) -> Gradient:
        """The gradient that a worker would push if it read all parameters now."""
        ...

    def apply(self, gradient: Gradient, normalization: StalenessNormalization | None) -> tuple[int, list[Any]]:
        """Train with it; returns how stale it was."""
        ...


@dataclass(frozen=True)
class Synchronization:
    """The way in which replicas are kept together.

    Args:
        algorithm: ``easgd``, ``ma``, ``bmuf``, or another that :func:`~lightning_recsys.sync.register_algorithm` knows.
        options: Arguments of its constructor: ``alpha``, ``eta``, ``block_momentum``, ``nesterov``.
        rounds: ``background``: beside training, for each replica one round after the other. ``foreground``: between two
            steps of a worker; with an average over all replicas, between two steps of all workers of the cluster.
        gap: In the foreground, a worker's steps from one round to the next.
        interval: Seconds from the end of one round to the begin of the next. In the background 0 is no pause, as in the
            paper; in the foreground ``None`` counts steps.
        servers: With ``easgd``, where the centre lies. With averages there are none, and the workers' links count.

    Raises:
        ValueError: a number is out of its range, or an option unknown.
    """

    algorithm: str = "easgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: Literal["background", "foreground"] = "background"
    gap: int = 5
    interval: float | None = None
    servers: Servers = field(default_factory=Servers)

    def __post_init__(self) -> None:
        if self.rounds not in ("background", "foreground"):
            raise ValueError(f"synchronization.rounds must be background or foreground, got {self.rounds!r}.")
        check_whole("synchronization.gap", self.gap, 1)
        check_at_least("synchronization.interval", 0.0 if self.interval is None else self.interval, 0.0)
        if self.make().topology is Topology.CENTRAL and self.rounds == "foreground" and self.interval is not None:
            raise ValueError("cluster.synchronization.interval: workers that ask a centre count steps; leave it null.")

    def make(self) -> SyncAlgorithm:
        """The algorithm, for one replica."""
        return make_algorithm(self.algorithm, self.options)


@dataclass(frozen=True)
class VirtualCluster:
    """Workers, replicas and servers in virtual time, with the real gradients of a real model.

    A worker takes the next batch, pulls what it needs, computes, pushes, and begins again. Its gradient is computed
    with the parameters of the moment at which the servers answer its pull, and is applied at the moment at which they
    have dealt with its push: whatever others push in between makes it stale. Batches are dealt to whoever asks first.

    One replica whose dense part is on servers is an asynchronous parameter server; replicas that keep theirs are
    ShadowSync's trainers with their Hogwild workers; replicas with a ``group`` are hierarchical training's: their
    workers are the nets of its trainers, and a batch takes what its legs through trainers and group servers take.

    Args:
        num_replicas: Number of copies of the dense part.
        workers_per_replica: Workers that train one copy, without locks; ``None``: 1, or all nets of a ``group``.
        dense_on_servers: Whether the dense part is pulled and pushed with every batch. If not, workers share it in
            memory and it costs nothing to read; rows travel in either case.
        dense_bytes: What the dense part weighs on the network, where that is another model's than the one that is
            trained; ``None``: as many bytes as it has.
        workers: Times, speeds and failures of the workers.
        group: The machines of each replica and a net's way through them, in place of ``workers.compute``.
        link: The link of each worker to the network. (Workers that share a machine's port have their part of it.)
        servers: The servers of the rows, and with ``dense_on_servers`` of the dense part.
        staleness: How much of a stale gradient counts, for the dense part and for each row; ``None``: all of it. A
            rule's name stands for :class:`~lightning_recsys.sync.StalenessNormalization` with its defaults.
        synchronization: The way in which replicas are kept together. Needed where there are several.

    Raises:
        ValueError: there is no worker, nothing keeps several replicas together, a group has another number of nets, or
            there is no such staleness rule.
        TypeError: ``staleness`` is none of these.
    """

    num_replicas: int = 1
    workers_per_replica: int | None = None
    dense_on_servers: bool = True
    dense_bytes: int | None = None
    workers: Workers = field(default_factory=Workers)
    group: Group | None = None
    link: Network = field(default_factory=Network)
    servers: Servers = field(default_factory=Servers)
    staleness: StalenessNormalization | StalenessRule | None = None
    synchronization: Synchronization | None = None

    def __post_init__(self) -> None:
        check_whole("num_replicas", self.num_replicas, 1)
        check_whole("workers_per_replica", self.workers_each, 1)
        check_at_least("dense_bytes", 0 if self.dense_bytes is None else self.dense_bytes, 0)
        if not isinstance(self.normalization, StalenessNormalization | None):
            raise TypeError(
                "cluster.staleness is null, a rule's name such as linear, or a StalenessNormalization with its"
                f" _target_, got {self.staleness!r:.200}."
            )
        if self.num_replicas > 1 and self.synchronization is None:
            raise ValueError(
                f"cluster.synchronization: {self.num_replicas} replicas need one, else each goes its own way."
            )

        if self.group is not None:
            if self.workers_each != self.group.num_nets:
                raise ValueError(
                    f"cluster.workers_per_replica={self.workers_per_replica}, but cluster.group has"
                    f" {self.group.num_nets} nets: leave it null."
                )
            if self.workers.failures is not None or self.workers.cores is not None:
                raise ValueError(
                    "cluster.workers: failures and cores are of workers that compute by themselves; leave them null"
                    " with cluster.group, which has cores of its own."
                )

    @property
    def normalization(self) -> StalenessNormalization | None:
        """The rule for how much of a stale gradient counts."""
        return StalenessNormalization(self.staleness) if isinstance(self.staleness, str) else self.staleness

    @property
    def workers_each(self) -> int:
        """Workers of one replica."""
        if self.workers_per_replica is not None:
            return self.workers_per_replica
        return 1 if self.group is None else self.group.num_nets

    @property
    def num_workers(self) -> int:
        """The workers of all replicas."""
        return self.num_replicas * self.workers_each

    def num_updates(self, num_batches: int) -> int:
        """Updates of one replica in a run of so many batches, each its part; fast ones make a few more."""
        return -(-num_batches // self.num_replicas)

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
        """Train a module as this cluster would. It holds the first replica's dense part afterwards, and the rows.

        Args:
            module: As :class:`~lightning_recsys.tasks.CTRTask`: its training step returns loss and logits.
            batches: In the order in which they are dealt.
            seed: Of all times that are drawn. (What the module draws, such as dropout, follows torch's own seed.)
            mark_every: Examples between two points of the curve; ``None``: only one, at the end.
            evaluate: What a point says of the module besides, by name. It gets the first replica's.
            watch: Called with the results so far after every push.
        """
        try:
            return self.simulate(
                make_replicas(module, self.num_replicas),
                batches,
                seed=seed,
                mark_every=mark_every,
                evaluate=None if evaluate is None else lambda: evaluate(module),
                watch=watch,
            )
        finally:
            end_replicas(module)

    def simulate(
        self,
        replicas: Sequence[Learner],
        batches: Iterable[Batch],
        *,
        seed: int = 0,
        mark_every: int | None = None,
        evaluate: Callable[[], dict[str, float]] | None = None,
        watch: Callable[[Results], None] | None = None,
    ) -> Results:
        """Simulate like :meth:`train`, with learners of the caller's own."""
        run = _Run(self, replicas, iter(batches), seed)
        run.mark_every, run.evaluate, run.watch = mark_every or math.inf, evaluate or dict, watch or (lambda _: None)
        return run.run()


class _Run:
    """One run of a cluster: its processes, and what they share."""

    mark_every: float
    evaluate: Callable[[], dict[str, float]]
    watch: Callable[[Results], None]

    def __init__(
        self, cluster: VirtualCluster, replicas: Sequence[Learner], batches: Iterator[Batch], seed: int
    ) -> None:
        self.cluster, self.replicas, self._batches = cluster, replicas, batches
        self.results = Results()
        self.clock = clock = VirtualClock()
        self.random = np.random.default_rng(seed)
        self.queues = ServerQueues(cluster.servers, cluster.link, clock, self.random)
        self.dense_bytes = replicas[0].dense_bytes if cluster.dense_bytes is None else cluster.dense_bytes
        self._normalization = cluster.normalization
        self._lost: list[tuple[Batch, int]] = []  # batches of workers that failed, and how often, to be dealt again
        self._working = cluster.num_workers
        self._computing_seconds = 0.0
        self._last_push = 0.0
        self._all_have_work = True
        self.groups: list[GroupAtWork] = []
        if (group := cluster.group) is not None:
            self.groups = [GroupAtWork(group, clock, self.random) for _ in replicas]
        self.rule = rule = cluster.synchronization
        self.rounds: list[ReplicaRounds] = []
        if rule is not None:
            self.sync_queues = ServerQueues(rule.servers, cluster.link, clock, self.random)
            for replica in replicas:
                algorithm = rule.make()
                algorithm.start(replica.flat)
                self.rounds.append(ReplicaRounds(algorithm, replica.flat, num_trainers=len(replicas)))
            self._center = replicas[0].flat.clone()
            self._everyone = Meeting(clock, cluster.num_workers, self._average)

    def run(self) -> Results:
        cluster, results = self.cluster, self.results
        self._next_mark = self.mark_every
        slowness = cluster.workers.slowness(cluster.num_workers, cluster.workers_each, self.random)
        for number, factor in enumerate(slowness):
            replica, worker = divmod(number, cluster.workers_each)
            self.clock.start(self._work(replica, worker, factor))
        if (rule := self.rule) is not None and rule.rounds == "background":
            centres = self.rounds[0].algorithm.topology is Topology.CENTRAL
            one_rounds = [partial(self._ask_center, i) for i in range(len(self.rounds))] if centres else [self._average]
            for one_round in one_rounds:
                self.clock.start(self._shadow(ShadowPace(interval=rule.interval or 0.0), one_round))
        self.clock.run()
        if results.examples:
            results.mark(self._last_push, **self.evaluate())
        self._take_stock()
        return results

    # --- Workers -----------------------------------------------------------------------------------------------------

    def _work(self, number: int, worker: int, slowness: float) -> Process:
        workers, replica, group = self.cluster.workers, self.replicas[number], self.cluster.group
        compute_seconds = workers.compute.mean if group is None else group.cycle_seconds
        cycle = slowness * (compute_seconds + workers.elsewhere.mean)
        yield self.random.random() * cycle  # else they would be in step for a long time
        fails_at, settled = self._draw_failure(), False
        schedule = None
        if (rule := self.rule) is not None and rule.rounds == "foreground":
            schedule = RoundSchedule(gap=rule.gap, interval=rule.interval)
        while (dealt := self._next_batch()) is not None:
            batch, losses = dealt
            pushed = False
            try:
                gradient = yield from self._until(fails_at, self._compute(number, worker, slowness, batch))
                pushed = True
                if wait := self.queues.work(self.cluster.servers.push):
                    if self.clock.now + wait > fails_at:  # the servers deal with it, whatever becomes of the worker
                        self.clock.start(self._apply_after(wait, replica, gradient, settled=settled))
                        raise _FailedError
                    yield wait
                self._apply(replica, gradient, settled=settled)
                settled = True
                del gradient  # while the worker waits for others it holds no memory
                yield from self._until(fails_at, self._between(number, slowness, schedule))
            except _FailedError:
                if fails_at > self.clock.now:
                    yield fails_at - self.clock.now
                if not pushed:
                    self._lose(batch, losses + 1)
                self.results.counts["failures"] += 1
                # One that failed while it waited for others in a round was noticed afterwards, and may be back already.
                if (back := fails_at + workers.restart.draw(self.random)) > self.clock.now:
                    yield back - self.clock.now
                fails_at = self._draw_failure()
        self._working -= 1
        if self.rule is not None:
            self._everyone.leave()

    def _until(
        self, fails_at: float, process: Generator[float | Signal, None, _T]
    ) -> Generator[float | Signal, None, _T]:
        """A worker's process, which ends with ``_FailedError`` before an event later than the worker's failure."""
        while True:
            try:
                wait = next(process)
            except StopIteration as end:
                if self.clock.now > fails_at:
                    raise _FailedError from None
                found: _T = end.value
                return found
            if not isinstance(wait, Signal) and self.clock.now + wait > fails_at:
                process.close()
                raise _FailedError
            yield wait

    def _compute(
        self, number: int, worker: int, slowness: float, batch: Batch
    ) -> Generator[float | Signal, None, Gradient]:
        """Pull, compute, and send the gradient to the servers."""
        workers, group = self.cluster.workers, self.cluster.group
        gradient = yield from self._pull(self.replicas[number], batch)
        if group is not None:
            yield from self.groups[number].step(worker // group.nets_per_trainer, slowness)
        else:
            seconds = workers.compute.draw(self.random) * slowness
            yield seconds
            self._computing_seconds += seconds
        if wait := self.queues.send(self._count("pushed", gradient)):
            yield wait
        return gradient

    def _between(self, number: int, slowness: float, schedule: RoundSchedule | None) -> Process:
        """The worker's way from a push to the next pull."""
        if wait := self.cluster.workers.elsewhere.draw(self.random) * slowness:
            yield wait
        yield from self._synchronize(number, schedule)

    def _draw_failure(self) -> float:
        failures = self.cluster.workers.failures
        return math.inf if failures is None else self.clock.now + failures.draw(self.random)

    def _next_batch(self) -> tuple[Batch, int] | None:
        """A batch, and how often it was lost."""
        if self._lost:
            return self._lost.pop()
        batch = next(self._batches, None)
        self._all_have_work = batch is not None
        return None if batch is None else (batch, 0)

    def _lose(self, batch: Batch, losses: int) -> None:
        if losses == _MAX_LOSSES:
            raise ValueError(
                f"cluster.workers.failures: one batch was lost {losses} times in a row, since workers fail before they"
                " have pulled and computed it; the run would not end. Have them fail less often."
            )
        self._lost.append((batch, losses))

    def _pull(self, replica: Learner, batch: Batch) -> Generator[float | Signal, None, Gradient]:
        if wait := self.queues.ask():
            yield wait
        if wait := self.queues.work(self.cluster.servers.pull):
            yield wait
        gradient = replica.gradient(batch)
        if wait := self.queues.answer(self._count("pulled", gradient)):
            yield wait
        return gradient

    def _apply_after(self, wait: float, replica: Learner, gradient: Gradient, *, settled: bool) -> Process:
        yield wait
        self._apply(replica, gradient, settled=settled)

    def _apply(self, replica: Learner, gradient: Gradient, *, settled: bool) -> None:
        dense, rows = replica.apply(gradient, self._normalization)
        results = self.results
        if settled and self._all_have_work:  # before a worker's first push others have not begun, later some have ended
            results.staleness["dense"].add(dense)
            for of_collection in rows:
                results.staleness["rows"].add_all(of_collection)
        results.counts["pushes"] += 1
        results.add_predictions(gradient.logits, gradient.batch.labels)
        self._last_push = self.clock.now
        if results.examples >= self._next_mark:
            results.mark(self.clock.now, **self.evaluate())
            self._next_mark += self.mark_every
        self.watch(results)

    def _count(self, way: str, gradient: Gradient) -> int:
        row_bytes, dense_bytes = gradient.row_bytes, self.dense_bytes if self.cluster.dense_on_servers else 0
        self.results.traffic[f"rows {way}"] += row_bytes
        self.results.traffic[f"dense {way}"] += dense_bytes
        return row_bytes + dense_bytes

    # --- Synchronisation ---------------------------------------------------------------------------------------------

    def _shadow(self, pace: ShadowPace, one_round: Callable[[], Process]) -> Process:
        while self._working:
            before = self.clock.now
            yield pace.pause_after(0.0)
            yield from one_round()
            if self.clock.now == before:
                raise ValueError(
                    "cluster.synchronization: a round takes no time, so there would be no end of them. Give its servers"
                    " or the workers' link a bandwidth or a delay, or set an interval."
                )

    def _synchronize(self, number: int, schedule: RoundSchedule | None) -> Process:
        """The worker's part in it after a step, in the foreground."""
        if schedule is None or not schedule.is_due_after_step(self.clock.now):
            return
        if self.rounds[number].algorithm.topology is Topology.CENTRAL:
            yield from self._ask_center(number)
        else:
            yield from self._everyone.wait()
        schedule.finish_round(self.clock.now)

    def _ask_center(self, number: int) -> Process:
        replica, rounds = self.replicas[number], self.rounds[number]
        sent = replica.flat.clone()
        yield self.sync_queues.send(self.dense_bytes)
        self._center.lerp_(sent, rounds.algorithm.alpha)
        answer = self._center.clone()
        yield self.sync_queues.answer(self.dense_bytes)
        rounds.finish(answer)
        self.results.traffic["synchronisation"] += 2 * self.dense_bytes

    def _average(self) -> Process:
        mean = torch.stack([replica.flat for replica in self.replicas]).mean(0)
        ring = all_reduce(self.dense_bytes / FLOAT_BYTES, num_processes=len(self.replicas))
        yield ring.seconds(self.cluster.link)
        for rounds in self.rounds:
            rounds.finish(mean.clone())
        self.results.traffic["synchronisation"] += 2 * (len(self.replicas) - 1) * self.dense_bytes

    def _take_stock(self) -> None:
        results, seconds = self.results, self.results.seconds or math.inf
        if self.groups:
            results.utilization |= self.groups[0].busy_shares(seconds)
        else:
            results.utilization["workers"] = self._computing_seconds / seconds / self.cluster.num_workers
        queues = {"servers": self.queues}
        if self.rule is not None:
            queues["sync servers"] = self.sync_queues
            results.counts["rounds"] = rounds = sum(each.count for each in self.rounds)
            results.metrics |= {"sync/rounds": rounds, "sync/gap": results.counts["pushes"] / max(rounds, 1)}
        for name, queue in queues.items():
            results.utilization |= queue.busy_shares(name, seconds)
        results.finish()
