"""Room for files that are mapped: how much there is, how it is set aside, and the sentence where it is missing."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MEMORY = Path("/dev/shm")  # noqa: S108 - asked about, not written to
_CONTROL_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BLOCK_BYTES = 512  # of `st_blocks`, whatever a file system's own blocks are
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


class _Names(NamedTuple):
    """Files of a control group that limits memory, and which numbers of its ``memory.stat`` are caches of files."""

    limit: str
    used: str
    caches: tuple[str, str]


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_VERSION_2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))


def free_bytes(folder: Path) -> int:
    """Bytes that new files in a folder can have.

    Where files are memory, it is as much of it as processes can still have, on the machine and by the limits of the
    control groups (of a container, say) that this process is in.
    """
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    with suppress(OSError):  # where the system is not Linux
        if folder.stat().st_dev == os.stat(_MEMORY).st_dev:
            told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
            free = min(free, 1024 * int(told["MemAvailable"].split()[0]), *_left_by_control_groups())
    return free


def used_bytes(path: Path) -> int:
    """Bytes of memory or disk that a file takes; 0 where it is not there."""
    try:
        return _BLOCK_BYTES * path.stat().st_blocks
    except FileNotFoundError:
        return 0


def _left_by_control_groups() -> list[int]:
    """Bytes of memory that each control group with a limit still lets this process have.

    A group's limit holds for all groups within it, so those around this process's own count as well. A container may
    see its own group as the root, and the path of the machine's.
    """
    left = []
    for line in _OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (_CONTROL_GROUPS / "memory", _VERSION_1) if controllers else (_CONTROL_GROUPS, _VERSION_2)
        group = root.joinpath(path.lstrip("/"))
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                with suppress(OSError, ValueError):  # the group is not to be seen here, or its limit is "max"
                    left.append(_left_by(folder, names))
    return left


def _left_by(group: Path, names: _Names) -> int:
    limit, used = int((group / names.limit).read_text()), int((group / names.used).read_text())
    numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    caches = sum(int(numbers[name]) for name in names.caches)  # which the system gives up when memory is asked for
    return max(0, limit - used + caches)


def check_room(folder: Path, needed: int, *, what: str) -> None:
    """Refuse what a folder has no room for, before any of it is taken from others.

    Raises:
        OSError: fewer than ``needed`` bytes are there; the message says how many are missing.
    """
    if needed > (there := free_bytes(folder)):
        raise no_room(errno.ENOSPC, what, folder, needed, there)


def reserve(descriptor: int, first: int, stop: int, *, what: str, folder: Path) -> None:
    """Have the file system set aside the pages of a file's bytes ``first`` to ``stop``; the file becomes so long.

    Room that was free a moment ago may be somebody else's by the time that a mapped page is written to, which ends the
    process with a bus error. So a file is mapped as far as this was called for it. A file system that cannot set pages
    aside, as some of networks, has a zero written to each of its blocks instead, by the C library: nobody else may
    write to these bytes meanwhile.

    Raises:
        OSError: there is no room; the message says how many bytes are missing.
    """
    there = free_bytes(folder)
    try:
        if stop > first:
            os.posix_fallocate(descriptor, first, stop - first)
    except OSError as error:
        raise no_room(error.errno or errno.ENOSPC, what, folder, stop - first, there) from error


def has_holes(status: os.stat_result, stop: int) -> bool:
    """Whether a file has fewer bytes on its file system than ``stop``, and so pages that nobody has set aside."""
    return status.st_blocks * _BLOCK_BYTES < stop


def fill_holes(descriptor: int, stop: int, *, what: str, folder: Path) -> None:
    """Have the file system set aside the pages that a file lacks of its first ``stop`` bytes, where it lacks any.

    Files lack pages that an earlier version made without setting them aside, or that were copied without their zeros
    (``cp --sparse=always``). What the file has, and what others write to it meanwhile, stays: the C library's way of
    writing to each block is not taken. So a file system that cannot set pages aside leaves the file as it is.

    Raises:
        OSError: there is no room; the message says how many bytes are missing.
    """
    status = os.fstat(descriptor)
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if not has_holes(status, stop) or fallocate is None:
        return
    there, number = free_bytes(folder), errno.EINTR
    while number == errno.EINTR:  # a signal came
        done = fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(stop)) == 0
        number = 0 if done else ctypes.get_errno()
    if number and number not in _CANNOT:
        raise no_room(number, what, folder, stop - status.st_blocks * _BLOCK_BYTES, there)


def is_for_want_of_room(error: BaseException) -> bool:
    """Whether an error says that there was no room, in memory or on the disk."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _FULL)


def no_room(number: int, what: str, folder: Path, needed: int, there: int) -> OSError:
    """The error that says which bytes are missing, and what to do.

    Args:
        number: The system's number of the error.
        what: What needs the room, in words.
        folder: The folder that has none.
        needed: Bytes that it needs.
        there: Bytes that were there before.
    """
    missing = f"{needed - there:,} are missing" if needed > there else f"they were refused ({os.strerror(number)})"
    return OSError(
        number,
        f"{what} needs {needed:,} bytes in {folder}, and {there:,} are there: {missing}. Name a folder with room, on "
        "disk if need be: store_folder=/path (or a smaller num_embeddings, or more servers on other machines)",
    )
