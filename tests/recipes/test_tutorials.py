"""Tutorials of docs/tutorials, followed word by word: every block of a page, in its order, in an empty folder.

They are shrunk by the replacements below, and ``lightning-recsys`` runs in forks of one process, which start at once,
unless ``LIGHTNING_RECSYS_TUTORIALS=full`` asks for them as they stand. A block of code with a title is a file of that
name. A block of commands is typed into the first terminal, or into the one that its title names, which goes on beside
the others. A block without a language is the output of the commands above.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from ports import free_port, let_go
from recipe_helpers import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FULL = os.environ.get("LIGHTNING_RECSYS_TUTORIALS") == "full"
TIMEOUT = 600 if FULL else 120  # seconds that a block of commands may take
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)

ENVIRONMENT = [("./scripts/train.sh", "lightning-recsys train"), ("source .venv/bin/activate", "true")]
BATCHES = "trainer.limit_train_batches=10 trainer.limit_val_batches=2 trainer.limit_test_batches=2"
SMALL = " model.bottom_hidden=[8] model.top_hidden=[8]"
# For each page, texts in its blocks and what stands there instead in a shrunk run.
SHRUNK: dict[str, list[tuple[str, str]]] = {
    "first_run": [("data.train_rows=200000", "data.train_rows=4000 data.val_rows=1000 data.test_rows=1000")],
    "own_rows": [("data.batch_size=512", f"data.batch_size=512 {BATCHES}"), ("max_epochs=1,2", "max_epochs=1")],
    "own_module": [("max_epochs=2", "max_epochs=1")],
    "several_machines": [
        ("data.train_rows=100000", f"data.train_rows=8192 data.val_rows=512 data.test_rows=512{SMALL}")
    ],
    "publish_and_serve": [("model=deepfm", f"model=deepfm {BATCHES}"), ("trainer.max_epochs=2", "")],
    "graphs": [("range(3_000)", "range(600)"), ("trainer.max_epochs=3", "trainer.max_epochs=1")],
    "simulate": [
        ("examples=200_000 evaluation.every=50_000", "examples=8_000 evaluation.every=4_000 data.val_rows=500"),
        ("workers_per_replica=1,20,200", "workers_per_replica=1,4"),
        ("workers_per_replica=200", "workers_per_replica=8"),
        ("workers_per_replica=20 ", "workers_per_replica=4 "),
    ],
}
# Pages that begin in the folder of another one, and the heading before which that one has made the files.
BEGINS_IN = {"own_module": ("own_rows", "## 3."), "publish_and_serve": ("own_rows", "## 3.")}
SHOWS_WORKERS = ["several_machines"]  # pages with words of workers, which a shared fork server would say elsewhere
INSTALLED = Path(sys.executable).parent
FREE_PORTS = ["8000", "29500"]  # of pages; a test takes others


@dataclass(frozen=True)
class Block:
    """A block of code of a page: its language, its title, its text."""

    language: str
    title: str
    text: str


def blocks_of(page: Path, before: str | None = None) -> list[Block]:
    """All of a page, or those before a heading."""
    text = page.read_text(encoding="utf-8")
    assert before is None or f"\n{before}" in text
    return [Block(*found) for found in BLOCK.findall(text.split(f"\n{before}")[0])]


def followed(page: Path) -> list[Block]:
    """The blocks of a page, behind those that made the files which it begins with, all as this run has them."""
    other, before = BEGINS_IN.get(page.stem, ("", ""))
    shrunk = [*SHRUNK.get(other, []), *SHRUNK[page.stem]]
    made = blocks_of(page.with_stem(other), before) if other else []
    ports = [(port, str(free_port())) for port in FREE_PORTS]
    let_go()  # of the ports: the page's own processes are to listen there
    replaced = [*ENVIRONMENT, *ports, *([] if FULL else shrunk)]
    blocks = []
    for block in [*made, *blocks_of(page)]:
        text = block.text
        for old, new in replaced:
            text = text.replace(old, new)
        blocks.append(replace(block, text=text))
    return blocks


def words(text: str) -> set[str]:
    """Words of an output, but for folders, numbers and what is drawn around them."""
    return set(re.findall(r"(?<![\w./~-])[A-Za-z]{3,}(?![\w./~-])", text))


class Terminals:
    """The terminals of a reader: the first one, where each block ends before the next, and those that go on.

    Args:
        home: Where they begin.
        commands: A folder whose commands come before those that are installed.
    """

    def __init__(self, home: Path, commands: Path) -> None:
        self.outputs: dict[str, Path] = {}
        self._home, self._state = home, home.parent / "folder"
        self._going_on: dict[str, subprocess.Popen[bytes]] = {}
        self._typed = 0
        folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
        path = os.pathsep.join([str(commands), str(INSTALLED), os.environ["PATH"]])
        self._environment = {**os.environ, **folders, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    @property
    def folder(self) -> Path:
        """The first terminal's current one."""
        return Path(self._state.read_text().strip()) if self._state.exists() else self._home

    def type(self, text: str, terminal: str) -> str:
        """Run commands; those of the first terminal to their end.

        Returns:
            The output of the first terminal's commands.
        """
        script = f"set -euo pipefail\ntrap 'pwd > {self._state}' EXIT\n{text}" if not terminal else text
        self._typed += 1
        output = self._home.parent / f"{self._typed}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if terminal:
            self._going_on[terminal], self.outputs[terminal] = process, output
            return ""
        try:
            assert process.wait(TIMEOUT) == 0, f"{text}\n{output.read_text()}"
        finally:
            end(process)
        return output.read_text()

    def wait_for(self, expected: set[str], terminal: str) -> None:
        """Until a terminal that goes on has written all of these words."""
        until = time.monotonic() + TIMEOUT
        while expected - words(said := self.outputs[terminal].read_text()):
            assert time.monotonic() < until, said
            assert self._going_on[terminal].poll() is None, said
            time.sleep(0.1)

    def close(self) -> None:
        """End what goes on; commands that have ended by themselves have done so without an error."""
        statuses = {terminal: process.poll() for terminal, process in self._going_on.items()}
        for process in self._going_on.values():
            end(process)
        for terminal, status in statuses.items():
            assert status in (None, 0), self.outputs[terminal].read_text()


def write_forked_command(path: Path, address: str) -> None:
    """A command like the installed one of its name, which the server of recipes runs."""
    script = Path(__file__).with_name("forked_command_script.py")
    words = [sys.executable, "-I", "-S", str(script), address, str(INSTALLED / path.name)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a terminal's command to end; kill its processes that do not."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        everything = [root, *root.children(recursive=True)]
        for each in root.children() if root.name() == "bash" else [root]:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        _, alive = psutil.wait_procs(everything, timeout=20)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait(20)


def test_pages_then_each_can_be_shrunk():
    assert {page.stem for page in PAGES} - {"index"} == SHRUNK.keys()
    for page in PAGES:
        code = "".join(block.text for block in blocks_of(page))
        assert [old for old, _ in SHRUNK.get(page.stem, []) if old not in code] == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("page", [x for x in PAGES if x.stem != "index"], ids=lambda page: page.stem)
def test_tutorial_when_followed_then_its_commands_work_and_print_what_it_shows(page, tmp_path, run_forked):
    home, commands = tmp_path / "home", tmp_path / "commands"
    home.mkdir()
    commands.mkdir()
    if not FULL and page.stem not in SHOWS_WORKERS:
        write_forked_command(commands / "lightning-recsys", run_forked.address)
    terminals, terminal, printed = Terminals(home, commands), "", ""
    with ExitStack() as stack:
        stack.callback(terminals.close)
        for block in followed(page):
            if block.language == "bash":
                terminal, printed = block.title, terminals.type(block.text, block.title)
            elif block.title:
                (terminals.folder / block.title).write_text(block.text)
            elif terminal:
                terminals.wait_for(words(block.text), terminal)
            else:
                assert words(block.text) - words(printed) == set(), printed
