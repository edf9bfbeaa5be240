"""Processes from the fork server: how they start, end with us, and are ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from lightning_recsys.runtime import process_end

GRACE_SECONDS = 5.0  # for a process to end after a signal, before SIGKILL


def start_process(
    target: Callable[..., None], args: Sequence[Any], *, name: str, started: list[ForkServerProcess]
) -> ForkServerProcess:
    """Fork a process from the fork server, which starts with the first one, and note it in ``started``."""
    context = multiprocessing.get_context("forkserver")
    # What this process has imported of ours the others need as well. (Before the server's first start only.)
    ours = sorted(module for module in sys.modules if module.partition(".")[0] == "lightning_recsys")
    context.set_forkserver_preload(["pytorch_lightning", *ours])
    with _portable_start_method():
        _ensure_fork_server()  # before signals are held back, which it would inherit
        process = context.Process(target=target, args=tuple(args), name=name)
        with _signals_held_back():
            process.start()
            started.append(process)
    return process


def end_processes(processes: Iterable[Any], number: signal.Signals) -> None:
    """Signal the processes, kill those that go on, and return when none is left."""
    processes = list(processes)
    try:
        _signal(processes, number)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.join()


def end_with_parent(*folders: Path) -> None:
    """Do not outlive the process that started us, however it dies, and remove these folders then.

    The fork server is who the system would tell, so we watch ourselves. All who use a folder remove it: the last one
    to end finds it empty.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    sentinel, pid = parent.sentinel, parent.pid

    def watch() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            wait([sentinel, *process_end(pid)])  # what it has forked may keep the pipe behind the sentinel open
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _ensure_fork_server() -> None:
    """Start the fork server if there is none; one that we start is gone when this process is.

    By itself it would end a second or two later: it has torch to unload.
    """
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    forkserver.ensure_running()
    if server._forkserver_pid != before:

        def end(pid: int = server._forkserver_pid) -> None:
            if server._forkserver_pid == pid:
                os.kill(pid, signal.SIGKILL)
                server._stop()

        Finalize(None, end, exitpriority=-10)  # after multiprocessing has joined this process's children


def _signal(processes: Iterable[Any], number: signal.Signals) -> None:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM arrive afterwards: between a process's birth and its entry in our list they would lose it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _portable_start_method() -> Iterator[None]:
    """A start method that workers know: they are told ours, and joblib's ``loky`` exists in its own processes only."""
    own = multiprocessing.get_start_method(allow_none=True)
    if own is None or own in ("fork", "forkserver", "spawn"):
        yield
        return
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(own, force=True)
