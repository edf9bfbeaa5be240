"""Files with their sizes and digests, taken while they are written and again when they are read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from lightning_recsys.serving.manifest import FileEntry


class DigestedFile(io.RawIOBase):
    """A new file that is written from beginning to end, and digested meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file: IO[bytes] = path.open("xb")
        self._digest, self._size = hashlib.sha256(), 0

    def writable(self) -> bool:  # noqa: D102 - inherited
        return True

    def write(self, data: Any) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:  # noqa: D102 - inherited
        return self._size

    def flush(self) -> None:  # noqa: D102 - inherited
        if not self._file.closed:
            self._file.flush()

    def finish(self) -> FileEntry:
        """Bring it to the disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return FileEntry(self._size, self._digest.hexdigest())

    def close(self) -> None:  # noqa: D102 - inherited
        super().close()
        self._file.close()


def digest_file(path: Path) -> FileEntry:
    """Size and digest of a file that is there; of a link's target none, which may lie anywhere."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileEntry(file.tell(), digest.hexdigest())


def write_file(folder: Path, name: str, write: Callable[[DigestedFile], object]) -> FileEntry:
    """Make a file in a folder; returns its size and digest."""
    file = DigestedFile(folder / name)
    try:
        write(file)
        return file.finish()
    finally:
        file.close()
