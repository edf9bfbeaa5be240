"""``recipes/benchmark.py`` whose Python processes are forks of it, on rows of few ids; run as a recipe, never imported.

A suite starts dozens of processes, each of which would take seconds to import torch and this package. A fork has both.
It is otherwise what the command asked for: a child of the process that starts it, in the network namespace, folder,
group and environment that the command names, with its own files and its own fork server, which is a fork as well.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.workload import Workload
from benchmarks.suites.des.rows import ROWS, PaperRows
from hydra.core.global_hydra import GlobalHydra
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

RECIPE = Path(sys.argv[0]).parents[2] / "recipes" / "benchmark.py"
_spawn = util.spawnv_passfds


class Command(NamedTuple):
    """A command of Python's: where it runs, and what it gives to Python."""

    namespace: str | None
    processor: int | None
    arguments: list[str]


def python_command(words: list[str]) -> Command | None:
    """What a command asks for; ``None`` where it is another program."""
    words, namespace, processor = list(words), None, None
    if words[:3] == ["ip", "netns", "exec"]:
        namespace, words = words[3], words[4:]
    if Path(words[0]).name == "taskset" and words[1] == "-c":
        processor, words = int(words[2]), words[3:]
    if words[0] == sys.executable:
        return Command(namespace, processor, words[1:])
    return Command(namespace, processor, words) if words[0].endswith("lightning-recsys-server") else None


def run(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` does."""
    while arguments[0] == "-u":
        arguments = arguments[1:]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


def forget_parent() -> None:
    """Know nothing of the parent's children, fork server and clean-up."""
    atexit._clear()
    atexit.register(util._exit_function)
    util._finalizer_registry.clear()
    process._children.clear()
    process.current_process()._config.pop("tempdir", None)
    server = forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = server._inherited_fds = None
    server.ensure_running = forkserver.ensure_running = forkserver.ForkServer.ensure_running.__get__(server)
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    GlobalHydra.instance().clear()
    tempfile.tempdir = None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


def close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # that of the folder which was listed
                os.close(descriptor)


def leave(work) -> None:
    """Do the work, and end as Python would."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkedPopen(subprocess.Popen):
    """Forks for a command of Python's; other programs are started as ever."""

    def _execute_child(self, args, *rest) -> None:
        names = "executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell"
        names += " p2cread p2cwrite c2pread c2pwrite errread errwrite restore_signals gid gids uid umask"
        given = dict(zip([*names.split(), "start_new_session", "process_group"], rest, strict=True))
        command = None if isinstance(args, str) else python_command([os.fspath(x) for x in args])
        if command is None:
            super()._execute_child(args, *rest)
            return
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            leave(lambda: self._become(command, given))
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in names.split()[9:15]))

    @staticmethod
    def _become(command: Command, given: dict) -> None:
        if given["process_group"] >= 0:
            os.setpgid(0, given["process_group"])
        if given["start_new_session"]:
            os.setsid()
        forget_parent()
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if given[name] not in (-1, number):
                os.dup2(given[name], number)
        if command.namespace is not None:
            there = os.open(f"/var/run/netns/{command.namespace}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(there, 0):
                raise OSError(ctypes.get_errno(), f"setns to {command.namespace}")
        if command.processor is not None:
            os.sched_setaffinity(0, [command.processor])
        close_all_but({0, 1, 2, *given["pass_fds"]})
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, buffering=1, closefd=False)  # noqa: SIM115 - as long as the process runs
            for number, mode in enumerate(("r", "w", "w"))
        )
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update(given["env"])
        sys.path[:0] = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and x not in sys.path]
        run(command.arguments)


def spawn(path, arguments: list, passed) -> int:
    """A fork server is a fork, too."""
    if "forkserver" not in str(arguments[-1]):
        return _spawn(path, arguments, passed)
    pid = os.fork()
    if pid:
        return pid

    def serve() -> None:
        forget_parent()
        close_all_but({0, 1, 2, *passed})
        run(["-c", arguments[-1]])

    leave(serve)
    raise AssertionError


subprocess.Popen = subprocess_handler.Popen = ForkedPopen  # torchrun's agents have imported it by its name
util.spawnv_passfds = spawn
Workload.__init__.__defaults__ = ((50,) * 26, 13, 16, 2048, 1.1)
Workload.cardinalities, Workload.rows = (50,) * 26, 2048
ROWS["paper"] = PaperRows(num_fields=26, ids=50)
sys.argv[0] = str(RECIPE)
runpy.run_path(str(RECIPE), run_name="__main__")
