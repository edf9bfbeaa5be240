"""Starts the worker processes of a run on this machine from a fork server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.launchers.loopback import keep_store
from lightning_recsys.launchers.pickling import parts_of, save_job
from lightning_recsys.launchers.processes import end_processes
from lightning_recsys.launchers.results import load_results
from lightning_recsys.launchers.sidecars import Sidecars
from lightning_recsys.launchers.worker import Job, job_path
from lightning_recsys.launchers.workers import Replacing, WorkerStart, join


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
        max_replacements: How many workers that the others go on without are replaced by other processes, in all.
        lost: Tells the ranks that take part no more. A process that replaces one of them takes part once it is none.

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
        max_replacements: int = 0,
        lost: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        super().__init__(strategy, start_method="forkserver")
        self.num_threads = num_threads
        self._serving = serving
        self._survive = survive
        self._max_replacements, self._lost = max_replacements, lost
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
            start = WorkerStart((folder, *sidecars.folders), self.num_threads)
            self.procs = start.started  # type: ignore[assignment]  # declared for the other start methods
            try:
                workers = [start.worker(rank) for rank in range(self._strategy.num_processes)]
                replacing = Replacing(start, self._max_replacements, self._lost)
                join(workers, sidecars, partial(self._survive, trainer), _signal_for_workers(), replacing)
            finally:
                self._end()
            by_age = sorted(workers, key=lambda x: x.replaces)  # who was there from the start knows most
            value = load_results(trainer, folder, ranks=[x.rank for x in by_age if x.succeeded])
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
        """One file under one name per worker: each removes its name, and the last one frees the space.

        One more name is for those that replace others.
        """
        save_job(job, job_path(folder, 0), parts=parts_of(job.trainer, job.function, job.args))
        for rank in range(1, self._strategy.num_processes):
            os.link(job_path(folder, 0), job_path(folder, rank))
        if self._max_replacements:
            os.link(job_path(folder, 0), job_path(folder))

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
