"""Files with their sizes and digests, taken when they are written and again when they are read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from lightning_recsys.serving.manifest import FileEntry


def digest_file(path: Path) -> FileEntry:
    """Size and digest of a file that is there; of a link's target none, which may lie anywhere."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return _digest(file)


def write_file(folder: Path, name: str, write: Callable[[IO[bytes]], object]) -> FileEntry:
    """Make a file in a folder, and bring it to the disk; returns its size and digest."""
    with (folder / name).open("x+b") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return _digest(file)


def _digest(file: IO[bytes]) -> FileEntry:
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # a file of `open` in either case
    return FileEntry(file.tell(), digest.hexdigest())
