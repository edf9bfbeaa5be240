"""Folders of prepared rows that are made once and found again: by any process, until room is needed.

An entry is a folder named by its key, and a lock file beside it. Whoever looks an entry up holds the lock meanwhile,
and makes the folder if it is not whole; so one process prepares, and the others wait and find what it made. The folder
is whole once its manifest is there, which is written last: a process that is killed leaves an unfinished folder, and
the next one goes on where that was. Whoever reads an entry holds a lease, a shared lock on a file in the folder, which
the kernel drops when the process ends. Only an entry whose two locks are free is removed, its manifest first. A cache
belongs to one user; what others may have put there counts as in use.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_recsys.data.prepared.manifest import MANIFEST, Manifest

_LEASE = ".lease"
_LOCK = ".lock"
_KEY = re.compile("[0-9a-f]{32}")  # as those of tables are
_PRIVATE = 0o700  # the raw file may be one that only its owner reads
_OF_THE_DISK = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """The cache's record of an entry.

    Args:
        key: Names the entry in the cache; see :meth:`RowCache.look_up`.
        folder: The folder with its manifest and shards; it may be unfinished.
        bytes: Number of bytes that it takes on the disk.
        used: When it was last looked up, in seconds since 1970.
        rows: How many rows it holds; ``None`` if it is not finished.
        files: The raw files that it was made from.
        in_use: Whether a process reads it, or is preparing it.
    """

    key: str
    folder: Path
    bytes: int
    used: float
    rows: int | None
    files: tuple[str, ...]
    in_use: bool


class Lease:
    """Keeps an entry from being removed for as long as this object lives, or a copy in another process.

    Args:
        folder: The entry's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        descriptor = os.open(folder / _LEASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.close = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def __reduce__(self) -> tuple[type[Lease], tuple[Path]]:
        return Lease, (self._folder,)


class RowCache:
    """A folder of prepared rows.

    Args:
        folder: Where it is; ``None`` for ``lightning_recsys`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.
        max_bytes: Once it takes more, the entries that were not used for longest go, unless a process uses them.

    Raises:
        TypeError: ``folder`` is no path.
        ValueError: ``max_bytes`` is negative.
    """

    def __init__(self, folder: str | Path | None = None, *, max_bytes: float = 50e9) -> None:
        if folder is not None and not isinstance(folder, str | Path):
            raise TypeError(
                f"data.cache must be a folder, or null for ~/.cache/lightning_recsys, got {folder!r}. Rows are always "
                "read from there; name a folder in /dev/shm to have them in memory."
            )
        if max_bytes < 0:
            raise ValueError(f"data.cache_gigabytes must be at least 0, got {max_bytes / 1e9:g}.")
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        self.folder = (home / "lightning_recsys" if folder is None else Path(folder)).expanduser().absolute()
        self._max_bytes = max_bytes

    def look_up(self, key: str, prepare: Callable[[Path], None]) -> tuple[Path, Lease]:
        """An entry, made if it is not there: by this process, or by another one that this one then waits for.

        Args:
            key: Names the rows: another one for whatever would be other rows.
            prepare: Fills a folder that only its owner reads, or goes on with it; called where none is whole.

        Raises:
            OSError: the folder cannot be written to, or there is no room.
        """
        folder = self.folder / key
        try:
            self.folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
            with _locked(self._lock(key)):
                made = not self._is_whole(folder)
                if made:
                    self._make_room()
                    folder.mkdir(_PRIVATE, exist_ok=True)
                    (folder / _LEASE).touch()  # which tells that it is ours
                    (folder / MANIFEST).unlink(missing_ok=True)  # of a damaged one
                    self._prepare(folder, prepare)
                lease = self._lease(folder)
        except OSError as error:
            if error.errno not in _OF_THE_DISK and not self._is_ours(error.filename):
                raise  # of the input
            place = "" if error.filename is None else f": {error.filename!r}"
            raise OSError(
                error.errno,
                f"{error.strerror}{place}. Prepared rows are kept in {self.folder}: name a folder that can be written "
                "to, on a disk with room, as data.cache, or remove what is in this one "
                "(lightning-recsys prepare cache --clear).",
            ) from error
        if made:
            self._make_room()
        return folder, lease

    def find(self, key: str) -> tuple[Path, Lease] | None:
        """An entry that is there and whole; ``None`` where there is none.

        Args:
            key: Names the entry, as for :meth:`look_up`.
        """
        folder = self.folder / key
        with suppress(OSError):
            if self._is_whole(folder):
                with _locked(self._lock(key)):
                    if self._is_whole(folder):
                        return folder, self._lease(folder)
        return None

    def entries(self) -> list[Entry]:
        """All entries, the one that was not used for longest first."""
        keys: list[str] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            keys = [name.removesuffix(_LOCK) for name in os.listdir(self.folder) if name.endswith(_LOCK)]
        return sorted(map(self._entry, filter(self._is_entry, keys)), key=lambda entry: entry.used)

    def shrink(self, max_bytes: float | None = None) -> list[Entry]:
        """Remove entries that no process uses until all take at most so many bytes.

        Those that are larger by themselves go first; while one of them is used, the others may take so many bytes
        beside it.

        Args:
            max_bytes: ``None`` for the cache's own limit; 0 removes all, what takes no room too.

        Returns:
            The entries that were removed.
        """
        limit, removed = self._max_bytes if max_bytes is None else max_bytes, []
        entries = sorted(self.entries(), key=lambda entry: entry.bytes <= limit)  # which keeps their order otherwise
        total = sum(entry.bytes for entry in entries if entry.bytes <= limit or not entry.in_use)
        for entry in entries:
            if total <= limit and limit:
                break
            if self._remove(entry.key):
                total -= entry.bytes
                removed.append(entry)
        return removed

    def _make_room(self) -> None:
        """Keep the cache's limit; that it cannot be kept ends no run."""
        try:
            self.shrink()
        except OSError as error:
            log.warning("Could not make room in %s: %s", self.folder, error)

    def _prepare(self, folder: Path, prepare: Callable[[Path], None]) -> None:
        try:
            prepare(folder)
        except (ValueError, FileNotFoundError):  # of the input: what was begun is of no use
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _remove(self, key: str) -> bool:
        """Remove an entry, unless somebody uses it; whether it was."""
        folder, lock = self.folder / key, self._lock(key)
        with suppress(BlockingIOError, PermissionError), _locked(lock, wait=False):
            if folder.is_dir():
                Lease(folder).close()  # so that there is the file
                with _locked(folder / _LEASE, wait=False):
                    (folder / MANIFEST).unlink(missing_ok=True)  # what is left of it is not taken for whole any more
                    shutil.rmtree(folder)
            lock.unlink()  # whoever waits for it looks whether it is still there
            return True
        return False

    def _is_entry(self, key: str) -> bool:
        """Whether a lock file and a folder of one name are ours: others have such in the folder that a user names."""
        folder = self.folder / key
        with suppress(OSError):
            named = _KEY.fullmatch(key) is not None or not folder.exists()
            return (named or _LEASE in os.listdir(folder)) and self._lock(key).stat().st_size == 0
        return False

    def _entry(self, key: str) -> Entry:
        folder = self.folder / key
        rows, files, size, used = None, (), 0, 0.0
        with suppress(ValueError, OSError):
            manifest = Manifest.load(folder)
            rows = sum(shard.rows for part in manifest.splits.values() for shard in part)
            files = tuple(about["path"] for about in manifest.details.get("inputs", ()))
        # Another process may remove what is listed here: os.walk passes over folders that have gone.
        inside = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
        for path in (self._lock(key), *inside):
            with suppress(FileNotFoundError, PermissionError):
                about = path.stat()
                size += about.st_size
                used = about.st_mtime if path.name == _LEASE or not used else used
        return Entry(key, folder, size, used, rows, files, self._in_use(key))

    def _in_use(self, key: str) -> bool:
        lease = self.folder / key / _LEASE
        try:
            with _locked(self._lock(key), wait=False):
                if lease.exists():
                    with _locked(lease, wait=False):
                        pass
        except (BlockingIOError, PermissionError):
            return True
        return False

    def _lease(self, folder: Path) -> Lease:
        lease = Lease(folder)
        os.utime(folder / _LEASE)
        return lease

    def _is_ours(self, path: object) -> bool:
        """Whether a path is in this cache, or leads to it."""
        if not isinstance(path, str | os.PathLike):
            return False
        return Path(path).is_relative_to(self.folder) or self.folder.is_relative_to(path)

    def _lock(self, key: str) -> Path:
        return self.folder / f"{key}{_LOCK}"

    @staticmethod
    def _is_whole(folder: Path) -> bool:
        with suppress(ValueError):
            return Manifest.load(folder).is_whole(folder)
        return False


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a file's lock, alone.

    Raises:
        BlockingIOError: somebody else holds it, and ``wait`` is false.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                log.info("Waiting for the process that holds %s", path)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # else it was removed while we waited for it
                yield
                return
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has it open too
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
