"""Runs of the real command line, and configs as the recipes use them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
RECIPES, CONF = ROOT / "recipes", ROOT / "conf"
sys.path.insert(0, str(RECIPES))

from recipe_tools.build import self_contained  # noqa: E402 - from the path above
from recipe_tools.jobs.training import train  # noqa: E402
from recipe_tools.quiet import be_quiet  # noqa: E402
from recipe_tools.record import RunRecord, isolated_job  # noqa: E402

MARK = "LIGHTNING_RECSYS_TEST_RUN"
TCP_LISTEN = "0A"  # in /proc/net/tcp
TINY_DATA = ("data.train_rows=1000", "data.val_rows=400", "data.test_rows=400", "data.batch_size=100")
TINY = (*TINY_DATA, "model.embedding_dim=4", "model.bottom_hidden=[8]", "model.top_hidden=[8]")


def run_recipe(
    recipe: str, *arguments: str, folder: Path, timeout: int = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in ``folder`` as a user would, every warning shown."""
    return subprocess.run(
        [sys.executable, "-W", "default", str(RECIPES / recipe), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@dataclass
class RecipeServer:
    """As :func:`run_recipe`, but in forks of one process, which start at once: for runs whose start does not matter.

    Their workers do, too: all runs share a fork server. A script may also be named by its whole path.

    Args:
        address: The socket at which the process listens (``recipe_server_script.py``).
        environment: The variables of a run, but for those that it has of its own.
    """

    address: str
    environment: dict[str, str]

    def __call__(self, recipe: str, *arguments: str, folder: Path, **own: str) -> subprocess.CompletedProcess[str]:
        """Run a recipe to its end."""
        request = [str(RECIPES / recipe), arguments, str(folder), {**self.environment, **own}]
        with (
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as errors,
            Path(os.devnull).open() as nothing,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.connect(self.address)
            streams = [nothing.fileno(), out.fileno(), errors.fileno()]
            socket.send_fds(connection, [json.dumps(request).encode()], streams)
            status = int(connection.recv(16))
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(request[:2], status, out.read(), errors.read())


@contextmanager
def recipe_server(site: Path = ROOT) -> Iterator[RecipeServer]:
    """A server of recipes.

    Args:
        site: The folder of the library: the repository, or an unpacked wheel.
    """
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder, "socket"))
        command = [sys.executable, "-W", "default", str(Path(__file__).with_name("recipe_server_script.py")), address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as server:
            assert server.stdout.readline() == "ready\n"
            yield RecipeServer(address, environment)


@dataclass
class Traces:
    """What a command line made besides its output.

    Args:
        folder: Where it ran; ``out`` is its output folder.
        processes: Its processes that still run.
        shared_memory: Entries of ``/dev/shm`` that were not there before, but for those with another
            process's id in their names, as everything there has one.
        temporary: Files in its folder for temporary files.
        ports_meanwhile: Ports that its processes listened on while it ran.
        ports: Those of them whose socket a process still listens at; somebody else's new one may have the same number.
    """

    folder: Path
    processes: list[str]
    shared_memory: set[str]
    temporary: list[str]
    ports_meanwhile: set[int]
    ports: set[int]

    def left_behind(self) -> dict[str, Any]:
        """Kind -> what is left of it; empty if the machine is as it was."""
        files = sorted(path.name for path in self.folder.iterdir() if path.name != "out")
        found = {name: getattr(self, name) for name in ("processes", "shared_memory", "temporary", "ports")}
        return {name: left for name, left in {**found, "files": files}.items() if left}


def run_watched(*arguments: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], Traces]:
    """Run ``train.py`` in ``folder``, with a place of its own for temporary files; look at what is left of it."""
    mark = uuid.uuid4().hex
    shared_memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as temporary, _watching(mark) as (sockets, others):
        done = run_recipe("train.py", *arguments, folder=folder, timeout=560, **{MARK: mark, "TMPDIR": temporary})
        deadline = time.monotonic() + 10  # the fork server ends when it notices that its main process has
        while (left := _marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        new = set(os.listdir("/dev/shm")) - shared_memory
        return done, Traces(
            folder,
            processes=[" ".join(process.cmdline())[:100] for process in left],
            shared_memory={name for name in new if not others & {int(x) for x in re.findall(r"\d+", name)}},
            temporary=os.listdir(temporary),
            ports_meanwhile=set(sockets.values()),
            ports={port for _, port in sockets.items() & _listening().items()},
        )


def _marked(mark: str) -> list[psutil.Process]:
    """Processes of a command: they inherit its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _listening() -> dict[str, int]:
    """The sockets of this machine at which somebody listens, as ``/proc`` names them, and their ports."""
    lines = [line.split() for path in Path("/proc/net").glob("tcp*") for line in path.read_text().splitlines()[1:]]
    return {f"socket:[{line[9]}]": int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == TCP_LISTEN}


def _open_files(process: psutil.Process) -> set[str]:
    found = set()
    with suppress(OSError):
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(path))
    return found


@contextmanager
def _watching(mark: str) -> Iterator[tuple[dict[str, int], set[int]]]:
    """Sockets at which the marked processes listen, and ids of other processes: some put theirs into names."""
    sockets: dict[str, int] = {}
    own: set[int] = set()
    others: set[int] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            marked = _marked(mark)
            open_files = set().union(*map(_open_files, marked))
            sockets.update((name, port) for name, port in _listening().items() if name in open_files)
            own.update(process.pid for process in marked)
            others.update(psutil.pids())
            others.difference_update(own)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sockets, others
    finally:
        stop.set()
        thread.join()


def train_here(config: DictConfig, folder: Path) -> RunRecord:
    """What train.py does with the config, in this process."""
    container = plain(config)
    with isolated_job():
        be_quiet()
        with RunRecord(folder, config=container, overrides=[]) as record:
            train(container, record)
    return record


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as the recipes use it."""
    return self_contained(OmegaConf.to_container(config, resolve=True))
