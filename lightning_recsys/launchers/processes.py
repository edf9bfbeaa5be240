"""Processes from the fork server: how they start, end with us, and are ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from lightning_recsys.launchers.folders import SOCKETS, RunFolder
from lightning_recsys.runtime import process_end

GRACE_SECONDS = 5.0  # for a process to end after a signal, before SIGKILL
IN_FORK_SERVER = "lightning_recsys.launchers.in_fork_server"  # imported there and nowhere else
OBJECT_STORES = ("adlfs", "gcsfs", "s3fs")  # which Lightning imports where they are installed, in each first worker
NOT_KNOWN = 255  # multiprocessing's exit code of whatever the fork server started, once that is gone


class ForkedProcess(ForkServerProcess):
    """A process from the fork server, which on Linux can be signalled and awaited when the fork server is gone.

    It is the fork server's child, who tells its exit code. Without a fork server :attr:`exitcode` is 255 at once,
    whatever the process does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._end: list[int] = []  # what process_end gives
        self._fork_server: int | None = None  # its process id

    def start(self) -> None:  # noqa: D102 - inherited
        super().start()
        self._fork_server = _fork_server()._forkserver_pid
        with suppress(ProcessLookupError):  # it has ended already
            self._end = process_end(self.pid or -1)
            for descriptor in self._end:
                weakref.finalize(self, os.close, descriptor)

    def goes_on(self) -> bool:
        """Whether it runs."""
        if self.exitcode == NOT_KNOWN and self._end:
            return not self.has_ended()
        return self.exitcode is None

    def has_ended(self) -> bool:
        """Whether the system says that it has ended; the fork server may tell later how."""
        return bool(self._end and wait(self._end, 0))

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it runs."""
        if self.goes_on():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end[0], number) if self._end else os.kill(self.pid or -1, number)

    def wait_for_end(self, timeout: float | None = None) -> None:
        """Return when it has ended, or after so many seconds."""
        self.join(timeout)
        if self.exitcode == NOT_KNOWN and self._end:
            wait(self._end, timeout)

    def check_fork_server(self) -> None:
        """To be asked when :attr:`exitcode` is 255, which a process may have chosen as well.

        Raises:
            RuntimeError: the fork server has ended.
        """
        if (how := self._fork_server_ending()) is not None:
            hint = " The system ends processes so when memory runs out." if "SIGKILL" in how else ""
            raise RuntimeError(
                f"The fork server of this process (process id {self._fork_server}) {how}, so the workers and servers"
                f" that came from it were ended, too.{hint} The next run starts a new one."
            )

    def _fork_server_ending(self) -> str | None:
        """How it ended, or ``None`` if it runs, or cannot be asked."""
        if self._fork_server is None or not hasattr(os, "waitid"):
            return None
        deadline = time.monotonic() + 1.0  # its pipes are closed a moment before its end can be seen
        while _fork_server()._forkserver_pid == self._fork_server and time.monotonic() < deadline:
            # It stays to be seen: multiprocessing looks whether it needs a new one.
            if end := os.waitid(os.P_PID, self._fork_server, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                return ending(code)
            time.sleep(0.01)
        return None if _fork_server()._forkserver_pid == self._fork_server else "has ended"


def ending(code: int) -> str:
    """How a process ended, by its exit code.

    >>> ending(-9), ending(1)
    ('was ended by SIGKILL', 'ended with exit code 1')
    """
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def start_process(
    target: Callable[..., None], args: Sequence[Any], *, name: str, started: list[ForkedProcess]
) -> ForkedProcess:
    """Fork a process from the fork server, which starts with the first one, and note it in ``started``."""
    fork_server_context()
    with _portable_start_method():
        _ensure_fork_server()  # before signals are held back, which it would inherit
        process = ForkedProcess(target=target, args=tuple(args), name=name)
        with _signals_held_back():
            process.start()
            started.append(process)
    return process


def fork_server_context() -> ForkServerContext:
    """The context of this process's fork server, which will import what this process has, if it is still to start."""
    context = multiprocessing.get_context("forkserver")
    ours = sorted(module for module in sys.modules if module.partition(".")[0] == "lightning_recsys")
    late = [module for module in OBJECT_STORES if module in sys.modules]
    context.set_forkserver_preload(["pytorch_lightning", *ours, *late, IN_FORK_SERVER])
    return context


def end_processes(processes: Iterable[ForkedProcess], number: signal.Signals) -> None:
    """Signal the processes, kill those that go on, and return when none is left."""
    processes = list(processes)
    try:
        for process in processes:
            process.send(number)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.wait_for_end(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.send(signal.SIGKILL)
        for process in processes:
            process.wait_for_end()


def end_with_parent(*folders: Path) -> None:
    """Do not outlive the process that started us, however it dies, and remove these folders then.

    The fork server is who the system would tell, so we watch ourselves. All who use a folder remove it: the last one
    to end finds it empty. That in which multiprocessing keeps its sockets is one of them, as we inherit its name.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    sentinel, pid = parent.sentinel, parent.pid
    ours = [str(folder) for folder in folders]
    if sockets := _config().get("tempdir"):
        ours.append(sockets)

    def watch() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            wait([sentinel, *process_end(pid)])  # what it has forked may keep the pipe behind the sentinel open
        for child in multiprocessing.active_children():  # a data loader's, which would notice seconds later
            child.kill()
        for folder in ours:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _ensure_fork_server() -> None:
    """Start the fork server if there is none; one that we start is gone when this process is.

    By itself it would end a second or two later: it has torch to unload.
    """
    server = _fork_server()
    before = server._forkserver_pid
    _make_folder_for_sockets()
    forkserver.ensure_running()
    if server._forkserver_pid != before:

        def end(pid: int = server._forkserver_pid) -> None:
            if server._forkserver_pid == pid:
                os.kill(pid, signal.SIGKILL)
                server._stop()

        Finalize(None, end, exitpriority=-10)  # after multiprocessing has joined this process's children


def _make_folder_for_sockets() -> None:
    """Have multiprocessing keep its sockets, such as the fork server's, where they are removed if we are killed.

    It removes the folder that it makes itself at a regular end only. Workers and the fork server remove ours where they
    live on; if all are killed at once, the next run does.
    """
    if _config().get("tempdir") is None:
        folder = RunFolder(prefix=SOCKETS)
        Finalize(None, folder.remove, exitpriority=-100)  # last of all, as it would be with its own
        _config()["tempdir"] = str(folder.path)


def _fork_server() -> Any:
    return forkserver._forkserver


def _config() -> dict[str, Any]:
    """The preparation data that multiprocessing hands down from process to process."""
    process: Any = multiprocessing.current_process()
    config: dict[str, Any] = process._config
    return config


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
