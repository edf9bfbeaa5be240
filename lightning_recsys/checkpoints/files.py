"""Files of a folder checkpoint: what is written is summed on its way, and what is read is compared with the sums."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile, ZipFile

import torch
from torch.serialization import get_crc32_options, set_crc32_options
from typing_extensions import Buffer
from upath import UPath

from lightning_recsys.checkpoints.places import Place, is_remote, place_of, remove
from lightning_recsys.errors import DamagedCheckpointError, network_errors

POINTER = "current"  # in a folder that is a checkpoint: the name of the version that counts
_OLD, _FILE_DRAFT, _FOLDER_DRAFT = "old", "file", "folder"  # what lies beside a checkpoint while it is replaced
PIECE_BYTES = 1 << 20  # that are read at a time to be summed


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file, and their sum.

    CRC-32 finds what disks and copies do by accident: any damage within 4 successive bytes, and all but one in four
    thousand million of the others. Whoever changes a file on purpose can change its sum as well.

    Args:
        file: Name of the file in its version's folder.
        start: The number of bytes before the stretch.
        length: The number of bytes of the stretch.
        crc32: :func:`zlib.crc32` of those bytes.
    """

    file: str
    start: int
    length: int
    crc32: int


class SummedFile(io.RawIOBase):
    """A file that is written from beginning to end, and sums up each stretch between two calls of :meth:`tell`.

    :mod:`torch.distributed.checkpoint` asks for the place before and after each tensor; nothing is read again to be
    summed.

    Args:
        path: The file to make; opening fails where it exists, on this machine.

    Attributes:
        stretches: The stretches that are finished, by their starts.
        error: What the system said when a write failed. ``torch.save`` forgets it, and raises what follows from it.
    """

    def __init__(self, path: Place) -> None:
        super().__init__()
        self.stretches: dict[int, Stretch] = {}
        self.error: OSError | None = None
        self._path = path
        self._file = cast(BinaryIO, path.open("wb" if is_remote(path) else "xb"))
        self._start = self._position = self._crc32 = 0  # of the stretch that is being written, and where it ends so far

    def writable(self) -> bool:  # noqa: D102 - inherited
        return True

    def write(self, data: Buffer) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        self._crc32 = zlib.crc32(view, self._crc32)
        self._position += len(view)
        return len(view)

    def tell(self) -> int:
        """Where the next byte goes; one stretch ends here, and another begins."""
        if self._position > self._start:
            length = self._position - self._start
            self.stretches[self._start] = Stretch(self._path.name, self._start, length, self._crc32)
            self._start, self._crc32 = self._position, 0
        return self._position

    def fileno(self) -> int:  # noqa: D102 - inherited
        return self._file.fileno()

    def flush(self) -> None:  # noqa: D102 - inherited
        if not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self.error = error
                raise

    def close(self) -> None:  # noqa: D102 - inherited
        try:
            super().close()  # flushes
        finally:
            self._file.close()


@contextmanager
def summed_file(path: Place) -> Iterator[SummedFile]:
    """A new file to write, in the end on the disk.

    Raises:
        OSError: the file cannot be written, as where the disk is full; it names the file.
    """
    file: SummedFile | None = None
    try:
        with network_errors() if is_remote(path) else nullcontext(), SummedFile(path) as file:
            yield file
            if not file.closed and not is_remote(path):
                file.flush()
                os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        noted = None if file is None else file.error
        cause = error if isinstance(error, OSError) else noted
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error


@contextmanager
def summing_once() -> Iterator[None]:
    """Meanwhile ``torch.save`` takes no sums of its own: they take as long as ours, and ``torch.load`` ignores them."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def write_object(path: Place, value: Any) -> Stretch:
    """Write something by :func:`torch.save`; the stretch is the whole file.

    Raises:
        OSError: as :func:`summed_file`.
    """
    with summed_file(path) as file:
        torch.save(value, file)  # type: ignore[arg-type]  # all that it calls is there
        file.tell()
    return file.stretches[0]


def write_file(path: Path, value: Any) -> None:
    """Write a checkpoint of one file by :func:`torch.save`, in the place of whatever checkpoint lies there.

    It is written beside that, on the same file system, and is on the disk before it counts. Who is killed meanwhile
    leaves the old one as it was, and a draft, which the next save removes.

    Raises:
        OSError: the file cannot be written, as where the disk is full, or a folder of something else lies there; what
            was there is as it was.
    """
    if path.is_dir() and not (path / POINTER).is_file():
        raise IsADirectoryError(errno.EISDIR, "a folder lies there that is no checkpoint", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    begin_from_whole(path)
    draft = _beside(path, _FILE_DRAFT)
    try:
        write_object(draft, value)
        put_in_place(draft, path)
    finally:
        remove(draft)


def open_own_file(path: Place) -> BinaryIO:
    """A file to be read, but for a link, whose target may lie anywhere.

    Raises:
        OSError: the file cannot be read, or is a link.
    """
    if is_remote(path):
        return path.open("rb")
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def read_pieces(folder: Place, stretch: Stretch, *, checkpoint: Place) -> Iterator[bytes]:
    """The bytes of a stretch, a piece at a time; once all were taken, they are those that were written.

    Args:
        folder: The folder of the stretch's file.
        stretch: The file's name, which of its bytes to read, and their sum.
        checkpoint: The checkpoint that an error names.

    Raises:
        DamagedCheckpointError: the file is missing, too short, a link, or other bytes than were written.
    """
    crc32, left = 0, stretch.length
    end = stretch.start + stretch.length
    try:
        with network_errors(), open_own_file(folder / stretch.file) as file:
            file.seek(stretch.start)
            while left and (piece := file.read(min(PIECE_BYTES, left))):
                crc32 = zlib.crc32(piece, crc32)
                left -= len(piece)
                yield piece
    except OSError as error:
        raise DamagedCheckpointError(
            str(checkpoint), stretch.file, f"cannot be read ({error.strerror or error})"
        ) from error
    if left:
        raise DamagedCheckpointError(str(checkpoint), stretch.file, f"ends after {end - left} bytes, of {end} at least")
    if crc32 != stretch.crc32:
        place = f"bytes {stretch.start} to {end} are not those that were written"
        raise DamagedCheckpointError(str(checkpoint), stretch.file, f"is damaged: {place}")


def read_object(folder: Place, stretch: Stretch, *, checkpoint: Place, weights_only: bool = True) -> Any:
    """Read what :func:`torch.save` wrote to a stretch, onto the CPU.

    Args:
        folder: The folder that the file is in. Errors are those of :func:`read_pieces`.
        stretch: Which bytes of which file, and their sum.
        checkpoint: The checkpoint, as errors name it.
        weights_only: Whether everything but tensors and plain containers is refused, as by :func:`torch.load`.
    """
    data = io.BytesIO()
    data.writelines(read_pieces(folder, stretch, checkpoint=checkpoint))
    data.seek(0)
    return torch.load(data, map_location="cpu", weights_only=weights_only)


def load_file(path: str | os.PathLike[str], *, weights_only: bool = True) -> Any:
    """Load a checkpoint of one file; its tensors are mapped from the disk, and those at a URL are read into memory.

    Args:
        path: The file, or a URL that fsspec knows.
        weights_only: As for :func:`torch.load`.

    Raises:
        OSError: there is none, or it cannot be read.
        RuntimeError: it is no file of torch's.
    """
    place = place_of(path)
    if not is_remote(place):
        return torch.load(place, map_location="cpu", mmap=True, weights_only=weights_only)
    with network_errors():
        data = place.read_bytes()
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def check_file(path: str | os.PathLike[str]) -> None:
    """Compare a single file of :func:`torch.save` with the sums that torch put into it, and does not look at itself.

    A file without sums passes, such as one of torch before 1.6 or one that was written with
    ``torch.serialization.set_crc32_options(False)``, and so does a path that is none of this machine's.

    Raises:
        DamagedCheckpointError: the file is cut short, or has other bytes than were written.
    """
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        begin = file.read(2)
    if not begin:
        raise DamagedCheckpointError(os.fspath(path), "the file", "is empty: its writing was cut off")
    if begin != b"PK":  # it is no archive
        return
    try:
        with ZipFile(path) as archive:
            has_sums = any(part.CRC for part in archive.infolist())
            damaged = archive.testzip() if has_sums else None
    except (BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error, zlib.error) as error:
        raise DamagedCheckpointError(os.fspath(path), "the file", f"is damaged or cut short ({error})") from error
    if damaged is not None:
        raise DamagedCheckpointError(os.fspath(path), damaged, "is damaged: its bytes are not those that were written")


def standing(path: str | os.PathLike[str] | UPath) -> Place:
    """Where a checkpoint lies: there, or beside it, where :func:`put_in_place` was killed on its way."""
    place = place_of(path)
    if is_remote(place) or os.path.lexists(place):  # which may have no name, such as the present folder
        return place
    aside = _beside(place, _OLD)
    return aside if aside.exists() else place


def draft_of_folder(path: Path) -> Path:
    """Where the folder is made that is to take the place of a file."""
    return _beside(path, _FOLDER_DRAFT)


def begin_from_whole(path: Path) -> None:
    """Undo what a save that was killed has left: put back what it had put aside, and remove its drafts.

    For the process that is about to save there: what lies at ``path`` afterwards is what :func:`standing` found. Only
    names that this module makes are touched: ``last.ckpt.old`` is somebody's copy.
    """
    if not is_remote(found := standing(path)) and found != path:
        found.rename(path)
    for what in (_OLD, _FILE_DRAFT, _FOLDER_DRAFT):
        remove(_beside(path, what))


def put_in_place(new: Path, goal: Path) -> None:
    """Let a finished file or folder take the place of whatever file or folder lies at ``goal``, and remove that.

    One of the two lies at ``goal``, whole, at every moment. Where both are files the one replaces the other in one
    step. Where one of them is a folder they change places in one step; who is killed then leaves the old one under the
    name of the new one, which the next save removes. Where the file system cannot do that (it is Linux's
    ``renameat2``), the old one is put aside first: who is killed between the two steps leaves it there, whole, where
    :func:`standing` finds it and the next save begins from.

    Args:
        new: What is complete and on the disk, in the folder of ``goal``.
        goal: Where it goes.

    Raises:
        OSError: it cannot be put there; what was there is as it was.
    """
    aside = _beside(goal, _OLD)
    if not goal.is_dir() and (not goal.exists() or not new.is_dir()):
        new.replace(goal)
    elif _exchange(new, goal):
        sync_folder(goal.parent)  # before the old one is gone
        remove(new)
    else:
        remove(aside)  # of a save that was killed at the end of this: `goal` counts
        goal.rename(aside)
        new.rename(goal)
    sync_folder(goal.parent)
    remove(aside)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _beside(path: Path, what: str) -> Path:
    """A name beside a checkpoint that nobody gives to a file of their own: it is hidden, and says whose it is."""
    return path.with_name(f".{path.name}.lightning-recsys-{what}")


_AT_WORKING_FOLDER, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h and fs.h
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def _exchange(first: Path, second: Path) -> bool:
    """Let two files or folders change places in one step; returns whether the file system can.

    Raises:
        OSError: it can, and did not.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (_AT_WORKING_FOLDER, os.fsencode(first), _AT_WORKING_FOLDER, os.fsencode(second))
    if renameat2(*paths, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    if (number := ctypes.get_errno()) in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
