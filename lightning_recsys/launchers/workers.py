"""The workers of a launch, as the main process sees them: how they start, are watched, and are replaced."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torch.multiprocessing.spawn import ProcessExitedException

from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.launchers.processes import NOT_KNOWN, ForkedProcess, end_processes, ending, start_process
from lightning_recsys.launchers.results import results_path
from lightning_recsys.launchers.sidecars import ServerLostError, Sidecars
from lightning_recsys.launchers.worker import Failure, job_path, run_worker
from lightning_recsys.runtime import ProcessState

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.0  # for the other workers to notice a failure by themselves

Survive = Callable[[int, int], str | None]
"""Asked about a worker that died: with its rank, and how many are left. ``None`` where they go on; else why not."""


@dataclass
class Worker:
    """A worker as the main process sees it.

    Args:
        rank: Local rank.
        process: The process.
        receiver: Brings the worker's failure, if it lives to tell.
        results: Where its results are once it has succeeded.
        replaces: It takes the place of another one, which died.
        joins: It does so, and does not take part yet, as far as we know.
        succeeded: It has ended, and its results are there.
        failure: What went wrong; time 0 if it died without a word, which makes it the cause of what others tell.
        is_lost: It died, and the others go on without it.
    """

    rank: int
    process: ForkedProcess
    receiver: Connection
    results: Path
    replaces: bool = False
    joins: bool = False
    succeeded: bool = False
    failure: Failure | None = None
    is_lost: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether the others train with it, or have to its end."""
        return not (self.is_lost or self.joins)

    @property
    def is_busy(self) -> bool:
        """Whether it has not come to an end, as far as we know."""
        return not self.succeeded and self.failure is None and not self.is_lost

    def look(self) -> None:
        """Bring ``succeeded`` and ``failure`` up to date.

        Raises:
            RuntimeError: the fork server has ended, so nobody tells how this worker is.
        """
        code = self.process.exitcode  # before the receiver: a worker tells first and ends then
        with suppress(EOFError, ConnectionError):
            if self.receiver.poll():
                self.failure = pickle.loads(self.receiver.recv_bytes())  # noqa: S301 - from our own worker
                return
        if self.has_finished(code):
            self.succeeded = True
        elif code is not None:
            if code == NOT_KNOWN:
                self.process.check_fork_server()
            self.failure = Failure(self._death(code), time=0.0)

    def has_finished(self, code: int | None) -> bool:
        """Whether a worker that ended with this code had done all of its work, and left its results."""
        return code == 0 and self.results.exists()

    def _death(self, code: int) -> ProcessExitedException:
        name = signal.Signals(-code).name if code < 0 else None
        hint = " The system ends processes so when memory runs out." if name == "SIGKILL" else ""
        return ProcessExitedException(
            f"Worker {self.rank} {ending(code)} before it could tell why; see what it printed above.{hint}",
            error_index=self.rank,
            error_pid=self.process.pid or -1,
            exit_code=code,
            signal_name=name,
        )


class WorkerStart:
    """Starts the workers of a launch, which are all alike.

    Args:
        folders: The folder of the launch, then what else is to go with the main process.
        num_threads: Threads per worker.

    Attributes:
        started: The processes that were started so far.
    """

    def __init__(self, folders: tuple[Path, ...], num_threads: int) -> None:
        self._folders, self._num_threads = folders, num_threads
        self._state = pickle.dumps(ProcessState.capture())
        self.started: list[ForkedProcess] = []

    def worker(self, rank: int, *, replaces: bool = False) -> Worker:
        """Start the worker of a local rank, whose job lies ready."""
        receiver, sender = Pipe(duplex=False)
        arguments = rank, self._folders, self._state, sender, self._num_threads, replaces
        process = start_process(run_worker, arguments, name=f"rank {rank}", started=self.started)
        sender.close()
        results = results_path(self._folders[0], rank)
        return Worker(rank, process, receiver, results, replaces=replaces, joins=replaces)

    def replacement(self, rank: int) -> Worker:
        """Start a process in the place of a worker that died."""
        folder = self._folders[0]
        with suppress(FileExistsError):  # it died before it had read its own
            os.link(job_path(folder), job_path(folder, rank))
        return self.worker(rank, replaces=True)


class Replacing:
    """Replaces workers that died, as often as it may in a launch.

    Args:
        start: Starts workers.
        at_most: How many may be replaced.
        lost: Tells the ranks that take part no more.
    """

    def __init__(self, start: WorkerStart, at_most: int, lost: Callable[[], Collection[int]]) -> None:
        self._start, self._at_most, self._lost = start, at_most, lost
        self._count = 0

    def replace(self, worker: Worker) -> list[Worker]:
        """The process that is to take the place of a lost worker; none where enough were replaced."""
        if self._count == self._at_most:
            return []
        self._count += 1
        told = "Another process is to take the place of worker %d (replacement %d of at most %d)."
        log.warning(told, worker.rank, self._count, self._at_most)
        return [self._start.replacement(worker.rank)]

    def look(self, workers: Sequence[Worker]) -> None:
        """Take note of those that take part by now; where nobody can be asked, none more does."""
        joining = [x for x in workers if x.joins]
        with suppress(ServerUnreachableError, RequestRefusedError):
            lost = self._lost() if joining else ()
            for worker in joining:
                worker.joins = worker.rank in lost


def join(
    workers: list[Worker], sidecars: Sidecars, survive: Survive, number: signal.Signals, replacing: Replacing
) -> None:
    """Wait until every worker has succeeded; raise the first error, once the others had time to tell theirs.

    A worker that died is no error where the others can do without it, and neither is a server that only such workers
    need, or a process that fails before it has taken the place of another.

    Args:
        workers: The workers; those that replace others are added.
        sidecars: The servers beside them.
        survive: Asked whether the others can do without one.
        number: The signal that ends workers.
        replacing: Starts those that replace others.
    """
    deadline = math.inf
    while (busy := [x for x in workers if x.is_busy]) and time.monotonic() < deadline:
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        wait([*(x.process.sentinel for x in busy), *(x.receiver for x in busy), *sidecars.sentinels], timeout)
        try:
            sidecars.look()
        except ServerLostError as lost:
            replacing.look(workers)
            _do_without(lost, workers, survive, number)
            sidecars.give_up(lost.spec)
        for worker in (x for x in busy if x.is_busy):
            worker.look()
            if worker.failure is not None:
                _look_at_failure(worker, workers, sidecars, survive, replacing)
        _end_who_came_too_late(workers, replacing, number)
        _end_who_would_lack_servers(workers, sidecars, survive, number)
        sidecars.end_needless(_lost_ranks(workers))
        if deadline == math.inf and any(x.failure for x in workers):
            deadline = time.monotonic() + SETTLE_SECONDS
    for worker in (x for x in workers if x.is_busy and x.process.has_ended()):
        worker.process.join()  # the fork server, which tells how it ended, may have had no turn yet
        worker.look()
    if failures := sorted((x.failure for x in workers if x.failure), key=lambda failure: failure.time):
        first, *others = (failure.error for failure in failures)
        for other in others:
            first.add_note(f"After that, another worker failed: {type(other).__name__}: {other}")
        raise first


def _look_at_failure(
    worker: Worker, workers: list[Worker], sidecars: Sidecars, survive: Survive, replacing: Replacing
) -> None:
    """Go on without a worker that died, and replace it, where that is possible."""
    assert worker.failure is not None
    replacing.look(workers)
    has_died = worker.failure.time == 0.0
    left = sum(x is not worker and x.takes_part for x in workers)
    if worker.joins:
        _give_up(worker, left, survive)
    elif has_died:
        _try_to_lose(worker, left, survive)
    if worker.is_lost and has_died and not sidecars.serves_only(worker.rank, _lost_ranks(workers)):
        workers += replacing.replace(worker)


def _lost_ranks(workers: Sequence[Worker]) -> set[int]:
    """The ranks in whose places nobody takes part."""
    return {x.rank for x in workers} - {x.rank for x in workers if x.takes_part}


def _do_without(
    lost: ServerLostError,
    workers: list[Worker],
    survive: Survive,
    number: signal.Signals,
) -> None:
    """End the workers that need a lost server, and go on without them; those that have finished need it no more.

    Raises:
        ServerLostError: the others cannot, or there are none.
    """
    needing = lost.spec.ranks
    if needing is None:
        raise lost
    busy = [x for x in workers if x.rank in needing and x.is_busy]
    # They end before their share of the data is given to others, who would train it beside them.
    end_processes([x.process for x in busy], number)
    doomed = [x for x in busy if not x.has_finished(x.process.exitcode)]  # or it came to its end meanwhile
    left = sum(x.takes_part and x not in doomed for x in workers)
    for worker in doomed:
        if (why_not := survive(worker.rank, left)) is not None:
            if why_not:
                lost.add_note(why_not)
            raise lost
        worker.is_lost = True
    if doomed:
        log.warning(
            "%s The workers that need it end, too (%s); the other %d go on. What those had not pushed is lost.",
            lost,
            ", ".join(str(x.rank) for x in doomed),
            left,
        )


def _try_to_lose(worker: Worker, left: int, survive: Survive) -> None:
    """Go on without a worker that died, if so many others can; otherwise its death says why they cannot."""
    assert worker.failure is not None
    death = worker.failure.error
    why_not = survive(worker.rank, left)
    if why_not is None:
        worker.failure, worker.is_lost = None, True
        log.warning("%s The other %d go on. What worker %d had not pushed is lost.", death, left, worker.rank)
    elif why_not:
        death.add_note(why_not)


def _give_up(worker: Worker, left: int, survive: Survive) -> None:
    """Go on without a process that failed before it took part; the place that it was to take stays empty so far."""
    assert worker.failure is not None
    error = worker.failure.error
    log.warning("No process has taken the place of worker %d: %s: %s", worker.rank, type(error).__name__, error)
    survive(worker.rank, left)  # nobody leaves anything for it any more
    worker.failure, worker.is_lost = None, True


def _end_who_came_too_late(workers: Sequence[Worker], replacing: Replacing, number: signal.Signals) -> None:
    """End processes that wait to take part where all others have come to their end."""
    busy = [x for x in workers if x.is_busy]
    if not (busy and all(x.joins for x in busy)):
        return
    replacing.look(busy)
    late = [x for x in busy if x.joins]
    end_processes([x.process for x in late], number)
    for worker in late:
        worker.is_lost = True


def _end_who_would_lack_servers(
    workers: Sequence[Worker], sidecars: Sidecars, survive: Survive, number: signal.Signals
) -> None:
    """End processes that wait to take part where servers that they need are about to end: nobody else needs these."""
    lost = _lost_ranks(workers)
    waiting = [x for x in workers if x.joins and x.is_busy and sidecars.serves_only(x.rank, lost)]
    end_processes([x.process for x in waiting], number)
    for worker in waiting:
        # It may have begun to take part since we looked. It has not trained: its servers are needed by it alone.
        survive(worker.rank, sum(x.takes_part for x in workers))
        worker.is_lost = True
