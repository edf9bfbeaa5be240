"""How others find the processes of a run that tell how they are doing: a small file for each in the run's folder."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "monitoring"  # in the run's folder


@dataclass(frozen=True)
class Monitored:
    """A process that can be asked.

    Args:
        name: Its name in the run, such as ``worker-0`` or ``embedding-1``: letters, digits, ``_`` and ``-``.
        endpoint: Where it is asked: ``http://host:port`` of a :class:`~lightning_recsys.monitoring.MonitoringEndpoint`,
            or a server's own ``ipc:///socket`` or ``tcp://host:port``.
        keys: File with the keys to a server on TCP, or its token.
    """

    name: str
    endpoint: str
    keys: str | None = None


def announce(run: Path, process: Monitored) -> Path:
    """Write the file of a process; one that is there is replaced as a whole.

    Args:
        run: The run's folder, which is made where it is not there.
        process: The process and where it can be asked.

    Returns:
        The file. Whoever wrote it removes it when the process ends; one that was killed leaves it.

    Raises:
        ValueError: the name would be no file's.
    """
    if not re.fullmatch(r"[\w-]+", process.name):
        raise ValueError(f"a process's name has letters, digits, _ and - only, got {process.name!r:.100}")
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{process.name}.json"
    new = folder / f".{process.name}-{os.getpid()}"
    new.write_text(json.dumps(asdict(process)))
    new.rename(path)  # whole or not at all
    return path


def monitored_in(run: Path) -> list[Monitored]:
    """The processes that a run's folder names, servers first, each kind by number.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a file is not one of these.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"there is no folder {run}")
    found = []
    for path in (run / FOLDER).glob("*.json"):
        with suppress(FileNotFoundError):  # its process has just ended
            try:
                found.append(Monitored(**json.loads(path.read_text())))
            except (ValueError, TypeError):
                raise ValueError(f"{path} does not say where a process is asked") from None
    return sorted(found, key=lambda x: (x.name.startswith("worker"), *_by_number(x.name)))


def _by_number(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition("-")
    return (kind, int(number)) if number.isdecimal() else (name, 0)
