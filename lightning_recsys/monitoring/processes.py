"""The resources that the processes of a machine have used, as Linux tells them in ``/proc``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def descendants(*roots: int) -> list[int]:
    """Processes and all that they started, directly or not, by their ids."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            children.setdefault(int(_behind_command(path)[1]), []).append(int(path.parent.name))
    found = list(dict.fromkeys(roots))
    for pid in found:
        found += [child for child in children.get(pid, ()) if child not in found]
    return found


def processor_seconds(pid: int) -> float:
    """Processor time of a process, all its threads together, in hundredths; 0 where there is none any more."""
    with suppress(OSError):
        behind = _behind_command(Path(f"/proc/{pid}/stat"))
        return (int(behind[11]) + int(behind[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_bytes(pid: int) -> int:
    """Memory of a process that is there now, shared pages among it; 0 where there is no such process."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _behind_command(path: Path) -> list[str]:
    """The fields behind the command, which may have any character: state, parent, and so on."""
    return path.read_text().rpartition(")")[2].split()
