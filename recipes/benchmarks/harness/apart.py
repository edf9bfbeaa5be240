"""Peers as their users run them: each in a process of its own, which has none of this package's settings.

``configure_worker`` tells the C library to keep freed memory, for the whole process. A program that does not call it
pays for fresh pages at every step, and would not in a process that this package has set up. What takes no such call, a
peer gets: one thread (``OMP_NUM_THREADS``), and denormals taken as zero.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import IO

from benchmarks.harness.processes import environment, python
from benchmarks.harness.turns import Stopped, Turn
from benchmarks.harness.workload import Workload

Make = Callable[[Workload, str, int], Callable[[Turn], None]]


@dataclass(frozen=True)
class Apart:
    """Makes variants of :func:`benchmarks.harness.turns.in_turns` that run in another process.

    Args:
        make: Makes the variant there; a function of a module.
    """

    make: Make

    def __call__(self, work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
        """A variant that hands its turns on."""

        def run(turn: Turn) -> None:
            command = python("-m", "benchmarks.harness.apart", self.make.__module__, self.make.__qualname__)
            with (
                tempfile.TemporaryFile("w+") as said,
                subprocess.Popen(  # noqa: S603 - this module, in this interpreter
                    [*command, json.dumps(asdict(work)), model, str(batch_size)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    env=environment(),
                ) as process,
            ):
                assert process.stdin is not None
                assert process.stdout is not None
                while True:
                    process.stdin.write(f"{turn.seconds}\n")
                    process.stdin.flush()
                    if not (examples := process.stdout.readline()):
                        said.seek(0)
                        raise RuntimeError(f"{' '.join(command)} failed:\n{said.read()}")
                    turn.step_done(int(examples))

        return run


class HandedOn(Turn):
    """The other side: a line with seconds begins a turn, one with the number of examples ends it."""

    def __init__(self, begins: IO[str], ends: IO[str]) -> None:
        super().__init__(0)
        self._begins, self._ends = begins, ends
        self.wait()

    def step_done(self, num_examples: int) -> None:
        """Count a step; blocks from a turn's end to the next one's begin."""
        self._examples += num_examples
        if time.perf_counter() - self._started >= self.seconds:
            self._ends.write(f"{self._examples}\n")
            self._ends.flush()
            self.wait()

    def wait(self) -> None:
        """Block until the next turn."""
        if not (line := self._begins.readline()):
            raise Stopped
        self.seconds = float(line)
        self._examples, self._started = 0, time.perf_counter()


def main(module: str, function: str, work: str, model: str, batch_size: str) -> None:
    """Train whenever it is this process's turn."""
    import torch
    from recipe_tools.quiet import be_quiet

    be_quiet()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    ends = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a peer prints is no number of examples
    make: Make = getattr(import_module(module), function)
    variant = make(Workload(**json.loads(work)), model, int(batch_size))
    with suppress(Stopped):
        variant(HandedOn(sys.stdin, ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
