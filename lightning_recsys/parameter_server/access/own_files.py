"""Folders and files that are this user's alone, opened so that nobody's link leads elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_own_folder(folder: Path) -> None:
    """Make a folder for this user alone, where it is not there; one that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def check_own_folder(folder: Path) -> None:
    """Refuse a folder that others could write to, read, or have put there.

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: it is a link, another user's, or open to others.
    """
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{folder} is a link; name the folder that it leads to.")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to the user with the number {found.st_uid}, not to {os.geteuid()}, who serves it. "
            "Name a folder of your own, or one that is not there yet."
        )
    if mode & 0o077:
        raise PermissionError(f"{folder} is open to others (mode {mode:o}): chmod 700 {folder}")


def open_own(path: Path) -> int:
    """A descriptor to read and write a file of this user's, made for it alone where it is not there.

    Raises:
        PermissionError: the path is a link, or another user's file, or one with a second name elsewhere.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise PermissionError(f"{path} is a link, which is not followed: remove it.") from error
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not a file of this user alone: remove it.")
