"""Folders of runs on this machine, which go with the process that made them: at once, or with the next run."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "lightning_recsys"
SOCKETS = "pymp"  # as multiprocessing begins the name of such a folder; short, for a socket's path has 107 letters


class RunFolder:
    """A folder of this process's own, whose name has its process id. A context manager; gone after it.

    Other processes that use it remove it if this one is killed. Where all of them were killed at once, the next run of
    the same user does: it removes the folders whose process is gone and which nobody holds locked. (A process id says
    little where containers with ids of their own share a folder; a lock holds there, too.)

    Args:
        parent: Where it is made; made as well where it is missing. By default the folder of temporary files.
        prefix: What its name begins with, and those of the folders that the next run removes.

    Attributes:
        path: The folder.

    Raises:
        OSError: there is no way to make a folder there.
    """

    def __init__(self, parent: Path | None = None, *, prefix: str = PREFIX) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(parent, prefix=prefix)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))
        except OSError as error:
            raise OSError(
                error.errno,
                f"no folder can be made in {parent} ({error.strerror}). Choose another place: strategy.store_folder for"
                " the files of servers, TMPDIR for temporary ones",
            ) from None
        self._lock = os.open(self.path, os.O_RDONLY)  # the system unlocks it when we die
        with suppress(OSError):  # a network's file system may have no locks: then nobody else can lock it either
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it; to be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path, *, prefix: str = PREFIX) -> None:
    """Remove the folders of this user's runs in ``parent`` of which no process is left."""
    for path in parent.glob(f"{prefix}-*"):
        with suppress(OSError):  # it has just gone, or belongs to somebody else
            pid = re.match(rf"{prefix}-(\d+)-", path.name)
            if pid and path.is_dir() and path.lstat().st_uid == os.getuid() and not is_running(int(pid[1])):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a folder, or raise ``BlockingIOError`` if its process lives where process ids are others."""
    folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def is_running(pid: int) -> bool:
    """Whether a process of this machine has not ended, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
