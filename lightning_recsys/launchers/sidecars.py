"""Server processes beside the workers: started before them, watched, started again, and gone afterwards."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.launchers.processes import (
    NOT_KNOWN,
    ForkedProcess,
    end_processes,
    end_with_parent,
    ending,
    start_process,
)
from lightning_recsys.runtime import ProcessState

if TYPE_CHECKING:
    from lightning_recsys.parameter_server.access.keys import ServerKeys

START_SECONDS = 120.0  # for a server to be ready; a fork server that has imported everything takes a third of one
STORE_SERVER = "lightning_recsys.parameter_server.server"  # imported when there is one to run: it takes a while
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, named by our process id

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSpec:
    """A server that a strategy wants beside its workers.

    Args:
        kind: What for; the strategy's word.
        index: Which of its kind, from 0.
        program: Module that a server runs: its function ``serve`` is called with the server's folder, the keyword
            arguments ``bind``, ``keys`` and ``ready`` of :func:`lightning_recsys.parameter_server.server.serve`, and
            ``options``. Default: the server of stores.
        options: More keyword arguments, which travel by pickle.
        node: The node that the server runs on. Default: ``index`` modulo the number of nodes.
        ranks: Who needs it. Where it is lost for good, or they are, a run that can do without them goes on. Default:
            all.
    """

    kind: str
    index: int
    program: str = STORE_SERVER
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    node: int | None = None
    ranks: frozenset[int] | None = None

    def node_among(self, num_nodes: int) -> int:
        """The node that the server runs on.

        >>> ServerSpec("group", 5).node_among(2), ServerSpec("group", 5, node=0).node_among(2)
        (1, 0)
        """
        return self.index % num_nodes if self.node is None else self.node

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"


class ServerLostError(RuntimeError):
    """A server has died more often than it is started again.

    Args:
        spec: What the lost server was started by; its ``ranks`` are the workers that cannot go on without it.
        text: How the server ended, where it listened, and that its restarts are used up, as one message for the user.
    """

    def __init__(self, spec: ServerSpec, text: str) -> None:
        super().__init__(spec, text)  # all of them, so that it can be pickled
        self.spec = spec
        self.text = text

    def __str__(self) -> str:
        return self.text


class Sidecars:
    """The servers of a run on this machine. A context manager: they run inside, and nothing of them is left after it.

    Each server is a process that keeps its stores in files below one folder. One that dies is started again with the
    same files at the same address. If this process dies, however it does, the servers end and the folder goes; if all
    are killed at once, with the next run (:class:`~lightning_recsys.launchers.folders.RunFolder`).

    Args:
        specs: The servers; with none, nothing happens.
        address: This machine's, where they listen on TCP; needs ``keys``. Default: sockets in a folder that nobody but
            its owner may enter.
        keys: The servers' half of the job's keys.
        store_folder: Where the folder is made; default: shared memory.
        max_restarts: How often each server is started again.

    Attributes:
        folder: The folder of all their files.
        folders: All that goes with them: that one, and where their sockets are.

    Raises:
        RuntimeError: a server did not start (on entering).
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        *,
        address: str | None = None,
        keys: ServerKeys | None = None,
        store_folder: str | Path | None = None,
        max_restarts: int = 3,
    ) -> None:
        self.specs = tuple(specs)
        self.address = address
        self.keys = keys
        self.store_folder = store_folder
        self.max_restarts = max_restarts
        self.folder: Path | None = None
        self._run_folders: list[RunFolder] = []
        self._servers: list[_Server] = []
        self._processes: list[ForkedProcess] = []  # all that were ever started

    def __enter__(self) -> Sidecars:
        if self.specs:
            try:
                self._run_folders.append(RunFolder(folder_for_stores(self.store_folder)))
                self.folder = self._run_folders[0].path
                if self.store_folder is not None:  # its path may be too long for a socket
                    self._run_folders.append(RunFolder(folder_for_stores()))
                self._start()
            except BaseException:
                self.stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def folders(self) -> tuple[Path, ...]:  # noqa: D102 - in the class
        return tuple(folder.path for folder in self._run_folders)

    @property
    def endpoints(self) -> dict[str, list[str]]:
        """``ipc:///socket`` or ``tcp://host:port`` of the servers by kind, in the order of the specs."""
        found: dict[str, list[str]] = {}
        for server in self._servers:
            found.setdefault(server.spec.kind, []).append(server.endpoint)
        return found

    @property
    def by_name(self) -> dict[str, str]:
        """The endpoints by the names of the specs."""
        return {str(server.spec): server.endpoint for server in self._servers}

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers, in the order of the specs."""
        return [server.process.pid for server in self._servers if server.process.pid is not None]

    @property
    def sentinels(self) -> list[int]:
        """Objects that become ready when a server dies, for :func:`multiprocessing.connection.wait`."""
        return [server.process.sentinel for server in self._servers if not server.is_over]

    def look(self) -> None:
        """Start the dead again.

        Raises:
            ServerLostError: a server has died once too often.
            RuntimeError: the fork server has died, who tells how they are.
        """
        for server in self._servers:
            while not server.is_over and (code := server.process.exitcode) is not None:
                if code == NOT_KNOWN:
                    server.process.check_fork_server()
                self._restart(server, code)

    def end_needless(self, lost: Collection[int]) -> None:
        """End the servers that nobody needs but ranks that are lost, and remove their files."""
        self._end([x for x in self._servers if x.spec.ranks is not None and x.spec.ranks <= set(lost)])

    def serves_only(self, rank: int, lost: Collection[int]) -> bool:
        """Whether this rank needs a server that nobody needs but ranks that are lost, which therefore ends."""
        needed = [spec.ranks for spec in self.specs if spec.ranks is not None and rank in spec.ranks]
        return any(ranks <= set(lost) for ranks in needed)

    def give_up(self, spec: ServerSpec) -> None:
        """Look no more at a server that is lost for good, and remove its files: the run goes on without it."""
        self._end([x for x in self._servers if x.spec == spec])

    def stop(self) -> None:
        """End the servers and remove their files; nothing happens a second time."""
        try:
            end_processes(self._processes, signal.SIGTERM)
        finally:
            self._servers, self._processes = [], []
            for folder in self._run_folders:
                folder.remove()
            self._run_folders, self.folder = [], None

    def _end(self, servers: Sequence[_Server]) -> None:
        """End servers that nobody needs any more, and remove their files; nothing happens a second time."""
        needless = [server for server in servers if not server.is_over]
        end_processes([server.process for server in needless], signal.SIGTERM)
        for server in needless:
            server.is_over = True
            assert self.folder is not None
            shutil.rmtree(self.folder / str(server.spec), ignore_errors=True)

    def _start(self) -> None:
        """All at once: each takes a while before it is ready."""
        for program in dict.fromkeys(spec.program for spec in self.specs):
            import_module(program)  # for the fork server to have it, too
        starting = [(spec, *self._fork(spec, bind=self._address_of(spec))) for spec in self.specs]
        for spec, process, receiver in starting:
            endpoint = _await_ready(spec, process, receiver)
            self._servers.append(_Server(spec, process, endpoint))

    def _address_of(self, spec: ServerSpec) -> str:
        if self.address is not None:
            return f"tcp://{_bracketed(self.address)}:0"  # a free port
        return f"ipc://{self.folders[-1] / str(spec)}.socket"

    def _fork(self, spec: ServerSpec, *, bind: str) -> tuple[ForkedProcess, Connection]:
        assert self.folder is not None
        own = self.folder / str(spec)
        own.mkdir(mode=0o700, exist_ok=True)
        receiver, sender = Pipe(duplex=False)
        state = pickle.dumps(ProcessState.capture())
        arguments = (spec, own, self.folders, bind, self.keys, state, sender)
        process = start_process(run_server, arguments, name=str(spec), started=self._processes)
        sender.close()
        return process, receiver

    def _restart(self, server: _Server, code: int) -> None:
        if server.restarts == self.max_restarts:
            raise ServerLostError(
                server.spec,
                f"Server {server.spec} at {server.endpoint} {ending(code)}, and max_restarts={self.max_restarts} of"
                " the strategy are used up; see what it printed above.",
            )
        server.restarts += 1
        times = f"{server.restarts} of {self.max_restarts} times"
        log.warning("Server %s %s; starting it again with the same files (%s).", server.spec, ending(code), times)
        server.process, receiver = self._fork(server.spec, bind=server.endpoint)
        with suppress(_NotReadyError):  # the next look sees that it is dead
            _await_ready(server.spec, server.process, receiver)


def folder_for_stores(chosen: str | Path | None = None) -> Path:
    """The folder that was chosen; otherwise shared memory, or where there is none that of temporary files."""
    if chosen is not None:
        return Path(chosen).absolute()
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


@dataclass
class _Server:
    spec: ServerSpec
    process: ForkedProcess
    endpoint: str
    restarts: int = 0
    is_over: bool = False  # nobody needs it any more


class _NotReadyError(RuntimeError):
    """A server did not start."""


def _await_ready(spec: ServerSpec, process: ForkedProcess, receiver: Connection) -> str:
    """The endpoint of a server that is ready."""
    with receiver:
        ready = wait([receiver, process.sentinel], START_SECONDS)
        try:
            told = receiver.recv_bytes().decode() if receiver in ready else ""
        except EOFError:
            told = ""
    kind, _, text = told.partition(" ")
    if kind == "ready":
        return text
    if not ready:
        end_processes([process], signal.SIGTERM)
        raise _NotReadyError(f"Server {spec} was not ready within {START_SECONDS:.0f} s.")
    process.join()
    if process.exitcode == NOT_KNOWN:
        process.check_fork_server()
    why = f":\n{text}" if text else f": it {ending(process.exitcode or 0)} before it could tell why."
    raise _NotReadyError(f"Server {spec} did not start{why}")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def run_server(
    spec: ServerSpec,
    folder: Path,
    all_folders: tuple[Path, ...],
    bind: str,
    keys: ServerKeys | None,
    state: bytes,
    sender: Connection,
) -> None:
    """Become a server, tell where it listens or why it does not, serve until SIGTERM.

    Args:
        spec: Which server to become: the program that it runs, and with which options.
        folder: Folder in which the server keeps its stores.
        all_folders: Folders to remove if the process that started us dies.
        bind: ``ipc:///socket`` or ``tcp://host:port``.
        keys: Whom to let in over TCP.
        state: The pickled :class:`ProcessState` of the process that started us.
        sender: Gets ``ready <endpoint>`` or ``failed <traceback>``.
    """
    end_with_parent(*all_folders)
    # Ctrl-C and torchrun signal the whole process group; who started us decides when we end.
    os.setpgid(0, 0)
    try:
        process_state: ProcessState = pickle.loads(state)  # noqa: S301 - written by who started us
        process_state.restore()
        import_module(spec.program).serve(
            folder,
            bind=bind,
            keys=keys,
            ready=lambda endpoint: sender.send_bytes(f"ready {endpoint}".encode()),
            **spec.options,
        )
    except BaseException:
        with suppress(OSError):  # nobody listens once it was ready
            sender.send_bytes(f"failed {traceback.format_exc().rstrip()}".encode())
        traceback.print_exc()
        sys.exit(1)
    finally:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():  # the watching thread ends with us, done or not
            for doomed in all_folders:
                shutil.rmtree(doomed, ignore_errors=True)


class Watch:
    """Looks after servers in a thread, for a process that has other things to do.

    A byte wakes the thread, not the end of its pipe: processes that this one forks, such as a data loader's workers,
    have copies of both ends, so there is no end of file while they live.
    """

    def __init__(self, sidecars: Sidecars) -> None:
        self._sidecars = sidecars
        self._wake, self._waker = Pipe(duplex=False)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watch-servers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong, if something did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Look no longer."""
        self._waker.send_bytes(b"stop")
        self._thread.join()
        self._waker.close()
        self._wake.close()

    def _run(self) -> None:
        while self._wake not in wait([self._wake, *self._sidecars.sentinels]):
            try:
                self._sidecars.look()
            except Exception as error:  # a server may be lost for good, and one may not start for want of memory
                self._error = error
                return
