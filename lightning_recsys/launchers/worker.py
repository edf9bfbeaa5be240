"""The life of a worker process: from its first line to its results or its error."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerStatus

from lightning_recsys.launchers.processes import end_with_parent
from lightning_recsys.launchers.results import save_results
from lightning_recsys.launchers.started import Launched
from lightning_recsys.runtime import ProcessState, configure_worker


@dataclass(frozen=True)
class Job:
    """The job of a launch's workers, the same for all of them.

    Args:
        strategy: The strategy that launches; the trainer's own if there is a trainer.
        trainer: The trainer, or ``None`` where a bare function is launched.
        function: What to call, with ``args`` and ``kwargs``.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
    """

    strategy: DDPStrategy
    trainer: pl.Trainer | None
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """An error of a worker, and when it happened by the machine's monotonic clock, in seconds."""

    error: BaseException
    time: float


def job_path(folder: Path, rank: int | None = None) -> Path:
    """The file from which a worker loads its :class:`Job`, and which it then removes; ``None`` for one that stays."""
    return folder / f"job{'' if rank is None else f'-{rank}'}.pt"


def run_worker(
    rank: int,
    folders: tuple[Path, ...],
    state: bytes,
    failures: Connection,
    num_threads: int,
    replaces: bool = False,
) -> None:
    """Become the worker of a local rank, run the job, leave its results.

    Args:
        rank: Local rank.
        folders: Where the job lies and the results go; then what else is to go with the main process.
        state: The pickled :class:`ProcessState` of the main process.
        failures: Where the pickled :class:`Failure` goes, if there is one.
        num_threads: As in :func:`configure_worker`.
        replaces: This process takes the place of a worker that died.
    """
    end_with_parent(*folders)
    folder = folders[0]
    trainer = None
    try:
        process_state: ProcessState = pickle.loads(state)  # noqa: S301 - written by the main process
        process_state.restore()
        # Ctrl-C reaches us, too: as it is with the main process, which ignores it where its shell put it aside.
        signal.signal(signal.SIGINT, signal.SIG_IGN if process_state.ignores_ctrl_c else signal.default_int_handler)
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        configure_worker(num_threads)
        job = _load_job(job_path(folder, rank))
        trainer = job.trainer
        job.strategy._launcher = None  # this process is one of the launched: nothing in it launches again
        strategy: Any = job.strategy  # ours all have what follows
        strategy.launched = Launched(strategy.run_name, folder, replaces)
        job.strategy.set_world_ranks()
        value = job.function(*job.args, **job.kwargs)
        save_results(value, trainer, folder, rank=rank)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # NCCL warns if nobody does
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        failures.send_bytes(pickle.dumps(Failure(_for_the_main_process(error, rank), time.monotonic())))
        for logger in trainer.loggers if trainer else ():
            with suppress(Exception):
                logger.finalize("failed")  # writes the metrics of the last steps
        if trainer is not None:
            trainer.state.status = TrainerStatus.INTERRUPTED
            with suppress(Exception):
                trainer.strategy.teardown()  # ends threads and closes connections
        sys.exit(1)


def _load_job(path: Path) -> Job:
    """Load the job; nothing in it shares memory with another process, so each worker's tensors are its own."""
    try:
        job: Job = torch.load(path, weights_only=False)
    except AttributeError as error:
        if "_main__" in str(error):  # or __mp_main__, where the main script was imported
            error.add_note(
                "A worker process imports what it is sent. It cannot import classes and functions that were defined in"
                " a notebook cell, at the prompt or under `if __name__ == '__main__':`; move them to a module."
            )
        raise
    path.unlink()
    return job


def _for_the_main_process(error: BaseException, rank: int) -> BaseException:
    """The error with its traceback as a note, of its own type where that survives pickling."""
    note = f"Raised in worker {rank}:\n{''.join(traceback.format_exception(error)).rstrip()}"
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        portable = copy if type(copy) is type(error) else None
    except Exception:
        portable = None
    portable = portable or RuntimeError(f"{type(error).__name__}: {error}")
    portable.add_note(note)
    return portable
