"""The fork server launcher in main processes of its own: signals, joblib around it, scripts without a guard."""

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SHARED_MEMORY = Path("/dev/shm")
SCRIPTS = Path(__file__).with_name("launcher_scripts.py")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short path: those of sockets end after 107 letters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def main_process(*command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A main process that ends with the test; its standard error goes where the test's goes."""
    environment = {**os.environ, **variables}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The next line, which is to match."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.match(pattern, line)
    assert match, f"expected {pattern!r}, got {line!r}"
    return match


def start_run(process: subprocess.Popen[str], strategy: str) -> list[int]:
    """The process ids of two workers of a new run."""
    assert process.stdin is not None
    process.stdin.write(f"{strategy}\n")
    process.stdin.flush()
    return [int(read(process, r"worker (\d+)")[1]) for _ in range(2)]


def goes_on(pid: int) -> bool:
    """Whether a process runs; one that awaits its parent's attention has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_in(temporary: Path) -> list[str]:
    """Folders of ours and of multiprocessing, without the random end of their names."""
    return [path.name.rpartition("-")[0] for path in temporary.glob("*-*")]


def all_end(pids: list[int]) -> bool:
    """Whether these processes end soon."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(map(goes_on, pids)):
            return True
        time.sleep(0.05)
    return False


def test_main_process_when_signalled_then_no_process_and_no_file_is_left(temporary):
    with main_process(str(SCRIPTS), "signals", TMPDIR=str(temporary)) as process:

        def stores():
            return list(SHARED_MEMORY.glob(f"lightning_recsys-{process.pid}-*"))

        def run(strategy):
            """All that runs below the main process but for the fork server."""
            num_servers = {"plain": 0, "served": 3}[strategy]
            workers = start_run(process, strategy)
            below = psutil.Process(psutil.Process(workers[0]).ppid()).children()
            assert len(below) == len(workers) + num_servers
            assert sum(x.is_dir() for folder in stores() for x in folder.iterdir()) == num_servers  # and their sockets
            return [x.pid for x in below]

        processes = run("served")
        os.kill(psutil.Process(processes[0]).ppid(), signal.SIGKILL)
        read(process, r"raised RuntimeError The fork server .* \(process id \d+\) was ended by SIGKILL, so the workers")
        assert not any(map(goes_on, processes))  # by the time that the error is raised
        terminated = "SIGTERMException 143"
        signals = (
            ("plain", os.kill, signal.SIGINT, "KeyboardInterrupt"),
            ("served", os.kill, signal.SIGINT, "KeyboardInterrupt"),
            ("served", os.kill, signal.SIGTERM, terminated),
            ("served", os.killpg, signal.SIGTERM, terminated),
        )
        for strategy, send, number, said in signals:
            processes = run(strategy)
            send(process.pid, number)
            raised = read(process, rf"raised {said} server (\d+) (\d+)")
            assert all_end(processes)
            assert list(temporary.glob("lightning_recsys-*")) == stores() == []
        processes = run("served")
        assert len(list(temporary.glob("lightning_recsys-*"))) == 1
        process.kill()
        assert all_end([*processes, int(raised[1]), int(raised[2])])
    assert not left_in(temporary)
    assert stores() == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell of a pipe's end only")
def test_main_process_when_killed_and_survived_by_what_it_forked_then_its_workers_end_all_the_same(temporary):
    with main_process(str(SCRIPTS), "forks", TMPDIR=str(temporary)) as process:
        worker, forked = map(int, read(process, r"worker (\d+) (\d+)").groups())
        process.kill()
        assert all_end([worker])
        assert not (temporary / "used").exists()
        os.kill(forked, signal.SIGKILL)  # it is still there


IN_JOBLIB = """
import os
from joblib.externals.loky import get_reusable_executor

def run():
    from launcher_scripts import launch, pids
    return launch(pids)

executor = get_reusable_executor(max_workers=1)
worker, server = executor.submit(run).result()
executor.shutdown(wait=True)
assert len({os.getpid(), worker, server}) == 3
print("done")
"""


def test_joblib_when_a_run_starts_in_its_process_then_it_works():
    """Its start method is one that workers do not know."""
    with main_process("-c", IN_JOBLIB, PYTHONPATH=os.pathsep.join([str(SCRIPTS.parent), *sys.path])) as process:
        read(process, "done")
        assert process.wait(timeout=60) == 0


def test_script_when_it_trains_on_import_then_the_error_says_what_to_do(tmp_path, temporary):
    script = tmp_path / "unguarded.py"
    script.write_text("from launcher_scripts import launch, pids\nlaunch(pids)\n")
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent), "TMPDIR": str(temporary)}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 1
    assert "RuntimeError: Worker processes import the script that starts them" in result.stderr
    assert "Worker 0 ended with exit code 1 before it could tell why" in result.stderr
    assert not list(temporary.glob("lightning_recsys-*"))


def test_package_when_imported_then_registers_its_strategies_and_nothing_else():
    code = (
        "import functools, importlib, logging, os, sys, threading, warnings\n"
        "def state():\n"
        "    return [*warnings.filters], [*logging.root.handlers], {**os.environ}, threading.enumerate()\n"
        "modules, before = set(sys.modules), state()\n"
        "import lightning_recsys\n"
        "assert state() == before\n"
        "print(sorted({x.partition('.')[0] for x in set(sys.modules) - modules} - set(sys.stdlib_module_names)))\n"
        "importlib.reload(lightning_recsys)\n"
        "import pytorch_lightning as pl\n"
        "registry = pl.strategies.StrategyRegistry\n"
        "late = [name for name in registry if isinstance(registry[name]['strategy'], functools.partial)]\n"
        "print(sorted(late))\n"
        "assert not [x for x in sys.meta_path if type(x).__module__.startswith('lightning_recsys')]\n"
        "for name in late:\n"
        "    registry.remove(name)\n"
        "before = set(registry)\n"
        "importlib.reload(lightning_recsys)\n"
        "print(sorted(set(registry) - before))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.stderr == ""
    imported, registered, registered_at_once = map(ast.literal_eval, result.stdout.splitlines())
    # No torch, store, compiled loop, reader: they come with what is used.
    assert imported == ["lightning_recsys"]
    algorithms = ("bmuf", "easgd", "ma")
    names = ["async_ps", "ddp_forkserver", "ddp_free", "des", "het", "het_hybrid", "hierarchical"]
    assert registered == [*names, "shadowsync", *(f"shadowsync_{algorithm}" for algorithm in algorithms)]
    assert registered_at_once == registered, "where Lightning was imported first"
