"""Several servers of one machine under one command, each in a process of its own with a part of the rows.

A server's thread holds Python's lock for a good part of its time, and its pushes follow each other so that each counts
once. Processes share neither: as many of them answer as many times the requests, and none has to know of the others.
For clients they are servers like any, at ports that follow each other; rows are striped over them, so each is asked in
every step.

Invariant: process *k* has the folder ``FOLDER/k`` and the port ``first + k`` for as long as the command runs. One that
ends is started again with both, and goes on as any server does that is started again: no push is lost or counted twice.
A command that is killed takes its processes with it; started again it finds each one's folder.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from lightning_recsys.parameter_server.access.keys import KeyFile, Token
from lightning_recsys.parameter_server.access.own_files import check_own_folder, make_own_folder
from lightning_recsys.parameter_server.endpoints import as_range
from lightning_recsys.parameter_server.journal import JOURNAL
from lightning_recsys.parameter_server.server import check_bind, ends_of_parent, serve, waking_on_signals

MAX_PROCESSES = 256
_RESTARTS, _WITHIN_SECONDS = 5, 60.0  # more restarts in this time are no accident
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Ending = socket.socket | int  # readable once it is time to end

log = logging.getLogger(__name__)


def serve_in_processes(
    folder: Path,
    *,
    processes: int,
    bind: str,
    keys: Path | None = None,
    ready: Callable[[str], None] = lambda endpoints: None,
    monitored: Callable[[str], None] = lambda url: None,
    metrics_port: int | None = None,
    **options: Any,
) -> None:
    """Run servers in processes until told to stop by SIGTERM or SIGINT; requests that have arrived are answered then.

    Args:
        folder: Has a folder for each process: ``0``, ``1`` and so on.
        processes: Number of servers, 1 to 256; a folder keeps the number that it was made with.
        bind: ``tcp://host:port`` of the first; the others have the ports above.
        keys: Key file of the job. Default: none, on loopback, where the token in ``folder`` lets in.
        ready: Called once all listen, with the range of their endpoints (``tcp://host:5790-5797``).
        monitored: Called with the URL of each one's metrics.
        metrics_port: Port of the first one's metrics; the others have those above. Default: none.
        options: Further options of :func:`~lightning_recsys.parameter_server.server.serve`.

    Raises:
        ValueError: there is no such address or number of processes.
        RuntimeError: the folder is of another number of processes, one could not start, or one ended again and again.
        OSError: the folder cannot be made, or its token or the key file not be read.
    """
    binds = _binds(bind, processes)
    key_file = None if keys is None else KeyFile(keys)
    check_bind(bind, key_file)
    make_own_folder(folder)
    check_own_folder(folder)
    _check_number(folder, processes)
    let_in = key_file or Token.of_folder(folder)  # one that is started again needs no file that may be gone by then

    def run(number: int, say: Connection) -> None:
        for given, handler in zip(_SIGNALS, (signal.SIG_DFL, signal.SIG_IGN), strict=True):
            signal.signal(given, handler)  # Ctrl-C reaches us as well; the process that started us decides
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            serve(
                folder / str(number),
                bind=binds[number],
                keys=let_in,
                ready=lambda endpoint: say.send(("ready", endpoint)),
                monitored=lambda url: say.send(("monitored", url)),
                metrics_port=metrics_port and metrics_port + number,  # 0: each has a free one
                **options,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            with suppress(OSError):
                say.send(("failed", str(error)))
            os._exit(1)  # without a traceback: who started us says why

    with _told_to_stop() as told, _Running(run, processes) as running:
        if running.wait_until_ready(told, monitored):
            ready(as_range(binds))
            running.keep(told)


class _Running:
    """The processes, from their start to their end."""

    def __init__(self, run: Callable[[int, Connection], None], number: int) -> None:
        self._run = run
        self._context = multiprocessing.get_context("fork")  # at once, with all that this process has imported
        self._processes: list[ForkProcess] = []
        self._said: list[Connection] = []
        self._ended: deque[float] = deque(maxlen=_RESTARTS + 1)  # when, of the last that ended by themselves
        self._number = number

    def __enter__(self) -> _Running:
        # Before a process is there, the handlers of its parent would run in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for number in range(self._number):
                process, said = self._start(number)
                self._processes.append(process)
                self._said.append(said)
        except OSError:  # the system has no room for another one
            self.__exit__()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def _start(self, number: int) -> tuple[ForkProcess, Connection]:
        said, say = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self._run, args=(number, say), name=f"server-{number}")
        process.start()
        say.close()  # theirs alone, so that its end can be read
        return process, said

    def wait_until_ready(self, told: Sequence[Ending], monitored: Callable[[str], None]) -> bool:
        """Return once all listen; ``False`` where they are told to stop before.

        Raises:
            RuntimeError: one of them cannot.
        """
        waiting = dict(zip(self._said, range(self._number), strict=True))
        while waiting:
            for source in wait([*waiting, *told]):
                if source in told:
                    return False
                assert isinstance(source, Connection)
                number = waiting[source]
                kind, text = self._read(source, number)
                if kind == "failed":
                    raise RuntimeError(f"process {number}: {text}")
                if kind == "monitored":
                    monitored(text)
                else:
                    del waiting[source]
        return True

    def _read(self, said: Connection, number: int) -> tuple[str, str]:
        try:
            kind, text = said.recv()
        except EOFError:
            self._processes[number].join()
            return "failed", f"it ended with exit code {self._processes[number].exitcode}"
        return kind, text

    def keep(self, told: Sequence[Ending]) -> None:
        """Start again what ends, until told to stop.

        Raises:
            RuntimeError: they end again and again.
        """
        while True:
            ready = wait([*told, *(process.sentinel for process in self._processes)])
            if any(ending in ready for ending in told):
                return
            for number, process in enumerate(self._processes):
                if process.sentinel in ready:
                    self._start_again(number, process)

    def _start_again(self, number: int, ended: ForkProcess) -> None:
        ended.join()
        why = "".join(text for kind, text in _rest_of(self._said[number]) if kind == "failed")
        code = ended.exitcode or 0
        how = why or (f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")
        self._ended.append(time.monotonic())
        if len(self._ended) > _RESTARTS and self._ended[-1] - self._ended[0] < _WITHIN_SECONDS:
            raise RuntimeError(f"process {number}: {how}, after {_RESTARTS} restarts in a minute.")
        log.warning("The server's process %d %s. It is started again, and goes on where it was.", number, how)
        self._said[number].close()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._processes[number], self._said[number] = self._start(number)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process, said in zip(self._processes, self._said, strict=True):
            process.join()
            process.close()
            said.close()


def _rest_of(said: Connection) -> Iterator[tuple[str, str]]:
    with suppress(EOFError, OSError):
        while said.poll():
            yield said.recv()


@contextmanager
def _told_to_stop() -> Iterator[Sequence[Ending]]:
    """Sources that are readable once a signal has come, also between two waits, or once who started us has ended."""
    told, wake = socket.socketpair()
    wake.setblocking(False)
    with told, wake, waking_on_signals(wake):
        yield [told, *ends_of_parent()]


def _binds(bind: str, processes: int) -> list[str]:
    """Where each process listens."""
    if not 1 <= processes <= MAX_PROCESSES:
        raise ValueError(f"processes must be 1 to {MAX_PROCESSES}, got {processes}.")
    host, _, port = bind.rpartition(":")
    if not bind.startswith("tcp://") or not port.isdecimal() or not 1 <= int(port) <= 65536 - processes:
        raise ValueError(
            f"{processes} processes listen at ports that follow each other: bind must be tcp://host:port with the first"
            f" of them, such as tcp://0.0.0.0:5790, got {bind!r}."
        )
    return [f"{host}:{int(port) + number}" for number in range(processes)]


def _check_number(folder: Path, processes: int) -> None:
    """Refuse a folder whose rows are cut for another number of servers."""
    if (folder / JOURNAL).exists():
        raise RuntimeError(f"{folder} has the stores of one server: serve it without --processes, or name another one.")
    there = sum(1 for path in folder.iterdir() if path.name.isdecimal())
    if there not in (0, processes):
        raise RuntimeError(
            f"{folder} has the stores of {there} processes, whose rows are cut for so many: --processes {there}, or "
            "another folder."
        )
