"""Starts the worker processes of a run on this machine from a fork server."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.launchers.loopback import keep_store
from lightning_recsys.launchers.pickling import parts_of, save_job
from lightning_recsys.launchers.processes import NOT_KNOWN, ForkedProcess, end_processes, ending, start_process
from lightning_recsys.launchers.results import load_results, results_path
from lightning_recsys.launchers.sidecars import ServerLostError, Sidecars
from lightning_recsys.launchers.worker import Failure, Job, job_path, run_worker
from lightning_recsys.runtime import ProcessState

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.0  # for the other workers to notice a failure by themselves


class ForkserverLauncher(_MultiProcessingLauncher):
    """Launches each run in new processes that a fork server forks, and brings the results back.

    The fork server starts with the first launch and imports torch and this package once; later launches take a fraction
    of a second. Nothing runs ``sys.argv`` again, so sweeps are safe, and the main process keeps no trace of a launch:
    no environment variable, no process group, no shared memory.

    * **There**: workers start from the main process's environment, random generators, warning filters, log levels and
      torch settings. Model, data and callbacks are pickled once; every worker loads a copy of its own. (Lightning's
      ``forkserver`` leaves parameters in memory that all workers write to.)
    * **Back**: weights, metrics, callback states, epochs and steps, the return value, predictions of all workers. Not
      the optimizer's state: to continue a run, pass a checkpoint's path to ``fit``.
    * **Errors**: the first worker's error is raised in the main process, of its own type, with the worker's traceback
      as a note; the other workers are ended.
    * **Signals**: Ctrl-C, unless the main process ignores it, and SIGTERM end the workers, then the run; SIGKILL of the
      main process ends them as well, and so does the end of the fork server, which the error then names.
    * **Data loaders**: their worker processes start as they would in the main process (forked, on Linux with Python
      below 3.14), whatever this launcher uses for its own.

    The fork server and multiprocessing's resource tracker live until the main process ends, however it ends.

    Args:
        strategy: The strategy that launches.
        num_threads: Threads per worker, as in :func:`lightning_recsys.runtime.configure_worker`.
        serving: Makes the context in which the workers run: servers beside them, or none.
        survive: Asked about a worker that died without an error, or was ended because a server that only it and others
            need is lost: with the trainer, its rank and how many workers are left. ``None`` where the others go on
            without it; else why they cannot. Default: none can.

    Raises:
        ValueError: this platform has no fork server (Windows).
    """

    _strategy: DDPStrategy

    def __init__(
        self,
        strategy: DDPStrategy,
        *,
        num_threads: int = 1,
        serving: Callable[[], AbstractContextManager[Sidecars]] = lambda: Sidecars(()),
        survive: Callable[[pl.Trainer | None, int, int], str | None] = lambda *_: "",
    ) -> None:
        super().__init__(strategy, start_method="forkserver")
        self.num_threads = num_threads
        self._serving = serving
        self._survive = survive
        self.failed = False  # the last launch did: what the main process holds is from before it

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks may launch what they import; what they define in a cell is refused with a hint."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run the function in ``strategy.num_processes`` workers and wait for them.

        Args:
            function: What each worker calls, with ``args`` and ``kwargs``.
            *args: Positional arguments.
            trainer: The trainer to which the results are given.
            **kwargs: Keyword arguments.

        Returns:
            What the function returned in rank 0, or the first rank that is left; the predictions of all ranks if the
            trainer predicts.

        Raises:
            RuntimeError: called while a worker imports the main script.
            TypeError: a ``Tuner`` calls, whose results would stay in the workers, or something cannot be pickled.
            ProcessExitedException: a worker died without an error (a signal, the system's memory).
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "Worker processes import the script that starts them, and this one starts training when imported."
                " Start it under `if __name__ == '__main__':`."
            )
        if trainer is not None:
            _refuse_tuner(trainer)
        for logger in trainer.loggers if trainer else ():
            getattr(logger, "log_dir", None)  # a version number is chosen here, so that all processes know it
        self.failed = True
        job = Job(self._strategy, trainer, function, args, kwargs)
        with (
            _sigterm_raises(),
            self._store_kept(),
            RunFolder() as folder,
            self._serving() as sidecars,
        ):
            self._save_job(job, folder)
            try:
                workers = self._start(folder, sidecars)
                _join(workers, sidecars, partial(self._survive, trainer), _signal_for_workers())
            finally:
                self._end()
            value = load_results(trainer, folder, ranks=[x.rank for x in workers if x.succeeded])
        self.failed = False
        return value

    @contextmanager
    def _store_kept(self) -> Iterator[None]:
        """The store by which the workers of one machine meet, at a free port of each launch; workers may die.

        Of several machines rank 0 keeps it, as torch has it.
        """
        environment = self._strategy.cluster_environment
        assert environment is not None
        if isinstance(environment, LightningEnvironment):
            environment._main_port = -1
        store = keep_store(environment.main_port) if self._strategy.num_nodes == 1 else None
        try:
            yield
        finally:
            del store  # also where an error holds on to this frame

    def _save_job(self, job: Job, folder: Path) -> None:
        """One file under one name per worker: each removes its name, and the last one frees the space."""
        save_job(job, job_path(folder, 0), parts=parts_of(job.trainer, job.function, job.args))
        for rank in range(1, self._strategy.num_processes):
            os.link(job_path(folder, 0), job_path(folder, rank))

    def _start(self, folder: Path, sidecars: Sidecars) -> list[_Worker]:
        folders = (folder, *sidecars.folders)
        state = pickle.dumps(ProcessState.capture())
        workers = []
        started: list[ForkedProcess] = []
        self.procs = started  # type: ignore[assignment]  # declared for the other start methods
        for rank in range(self._strategy.num_processes):
            receiver, sender = Pipe(duplex=False)
            process = start_process(
                run_worker, (rank, folders, state, sender, self.num_threads), name=f"rank {rank}", started=started
            )
            sender.close()
            workers.append(_Worker(rank, process, receiver, results_path(folder, rank)))
        return workers

    def _end(self) -> None:
        """Whatever happened: no worker is left."""
        try:
            end_processes(self.procs, _signal_for_workers())  # type: ignore[arg-type]  # ours, see above
        finally:
            self.procs = []


def _signal_for_workers() -> signal.Signals:
    """The signal that ends workers: they unwind, and write their logs; one that trains no model dies of SIGTERM."""
    return signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT


def _refuse_tuner(trainer: pl.Trainer) -> None:
    """``Tuner.lr_find`` fits with a callback of its own and reads what that has found; the one in a worker has it.

    Raises:
        TypeError: a ``Tuner`` calls. Its callback is taken out, which it does not do itself after an error.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, LearningRateFinder) and callback._early_exit:
            callbacks.remove(callback)
            raise TypeError(
                "Tuner.lr_find finds nothing where training runs in worker processes: what they find stays there. Find"
                " the learning rate on one device, with Trainer(devices=1, strategy='auto'), and set it."
            )


@dataclass
class _Worker:
    """A worker as the main process sees it.

    Args:
        rank: Local rank.
        process: The process.
        receiver: Brings the worker's failure, if it lives to tell.
        results: Where its results are once it has succeeded.
        succeeded: It has ended, and its results are there.
        failure: What went wrong; time 0 if it died without a word, which makes it the cause of what others tell.
        is_lost: It died, and the others go on without it.
    """

    rank: int
    process: ForkedProcess
    receiver: Connection
    results: Path
    succeeded: bool = False
    failure: Failure | None = None
    is_lost: bool = False

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


def _join(
    workers: list[_Worker],
    sidecars: Sidecars,
    survive: Callable[[int, int], str | None],
    number: signal.Signals,
) -> None:
    """Wait until every worker has succeeded; raise the first error, once the others had time to tell theirs.

    A worker that died is no error where the others can do without it, and neither is a server that only such workers
    need.
    """
    deadline = math.inf
    while (busy := [x for x in workers if x.is_busy]) and time.monotonic() < deadline:
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        wait([*(x.process.sentinel for x in busy), *(x.receiver for x in busy), *sidecars.sentinels], timeout)
        try:
            sidecars.look()
        except ServerLostError as lost:
            _do_without(lost, workers, survive, number)
            sidecars.give_up(lost.spec)
        for worker in (x for x in busy if x.is_busy):
            worker.look()
            if worker.failure is not None and worker.failure.time == 0.0:
                _try_to_lose(worker, sum(not x.is_lost for x in workers) - 1, survive)
        sidecars.end_needless([x.rank for x in workers if x.is_lost])
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


def _do_without(
    lost: ServerLostError,
    workers: list[_Worker],
    survive: Callable[[int, int], str | None],
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
    left = sum(not x.is_lost for x in workers) - len(doomed)
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


def _try_to_lose(worker: _Worker, left: int, survive: Callable[[int, int], str | None]) -> None:
    """Go on without a worker that died, if so many others can; otherwise its death says why they cannot."""
    assert worker.failure is not None
    death = worker.failure.error
    why_not = survive(worker.rank, left)
    if why_not is None:
        worker.failure, worker.is_lost = None, True
        log.warning("%s The other %d go on. What worker %d had not pushed is lost.", death, left, worker.rank)
    elif why_not:
        death.add_note(why_not)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Unwind this process on SIGTERM as on Ctrl-C, unless somebody handles the signal already."""

    def unwind(number: int, _: FrameType | None) -> None:
        raise SIGTERMException(128 + number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
