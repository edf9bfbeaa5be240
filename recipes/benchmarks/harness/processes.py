"""How benchmarks start Python in another process, with the recipes on its path, and what that takes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECIPES = Path(__file__).parents[2]
_LOOK = 0.2  # seconds between two looks at a process's memory


def python(*arguments: str) -> list[str]:
    """This interpreter."""
    return [sys.executable, *arguments]


def environment() -> dict[str, str]:
    """This process's own variables, and the recipes first in ``PYTHONPATH``."""
    search = os.pathsep.join([str(RECIPES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": search}


@dataclass(frozen=True)
class Run:
    """What a process took.

    Args:
        name: What the process did, for the table.
        seconds: The time from its start to its end.
        gib: The peak of its resident set; ``None`` where the system does not tell.
    """

    name: str
    seconds: float
    gib: float | None


def watched(name: str, command: Sequence[str]) -> tuple[str, Run]:
    """What a process printed, how long it ran, and the peak of its resident set, which is looked at meanwhile.

    Raises:
        RuntimeError: the process failed; has what it wrote to its standard error.
    """
    gib: float | None = None
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=printed, stderr=said, env=environment())  # noqa: S603 - our own
        try:
            while process.poll() is None:
                gib = _peak_gib(process.pid) or gib
                time.sleep(_LOOK)
        finally:
            process.kill()
            process.wait()
        taken = time.perf_counter() - began
        printed.seek(0)
        said.seek(0)
        if process.returncode:
            raise RuntimeError(f"{name} failed:\n{said.read()}")
        return printed.read(), Run(name, taken, gib)


def _peak_gib(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM")), None)
