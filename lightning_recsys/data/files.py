"""Files as people have them: which ones a path, folder, pattern or archive names, and the bytes in them.

A file in an archive has the path ``clicks.zip/train.csv``. It is read where it lies, and never unpacked.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from lightning_recsys.data.queries import query_of, written_query

_ZIP = (".zip",)
_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}  # those that pyarrow knows
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)
_HIDDEN = (".", "_")  # how names start that programs leave: .DS_Store, __MACOSX, _SUCCESS
_FINGERPRINT_BYTES = 1 << 20
_CHUNK = 1 << 24


@dataclass(frozen=True)
class InputFile:
    """A raw file as it was found, to notice when a restart finds another one.

    Args:
        path: The file's path, as it was found; one in an archive has the archive's path before its own.
        bytes: Its size; of a file in an archive, its size there.
        fingerprint: A checksum of the first and last mebibyte of the file, or of the archive that holds it.
    """

    path: str
    bytes: int
    fingerprint: str

    @classmethod
    def of(cls, path: Path) -> InputFile:
        """Look at a file."""
        stored, _ = _parts(path)
        size = stored.stat().st_size
        digest = hashlib.blake2b(digest_size=16)
        with stored.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_BYTES))
            file.seek(max(size - _FINGERPRINT_BYTES, 0))
            digest.update(file.read(_FINGERPRINT_BYTES))
        for log in _logs(path):
            digest.update(f"{log} {log.stat().st_size} {log.stat().st_mtime_ns}".encode())
        return cls(str(path), stored_bytes(path), digest.hexdigest())


def stored_bytes(path: Path) -> int:
    """The size of a file as it is stored; of a file in an archive, its size there."""
    stored, member = _parts(path)
    return stored.stat().st_size if member is None or query_of(path) is not None else members(stored)[member]


def _logs(path: Path) -> list[Path]:
    """The files beside a database that hold its last changes, as long as these are not in it."""
    if (query := query_of(path)) is None:
        return []
    logs = [query.file.with_name(query.file.name + ending) for ending in ("-wal", ".wal")]
    return [log for log in logs if log.is_file() and log.stat().st_size]


def file_identities(paths: Iterable[Path]) -> list[Any]:
    """The size and time of files, which tell whether they changed: reading them would take as long as preparing them.

    A file that is written in place within one tick of the clock has the same time, but another content at its ends; a
    copy that keeps the time is the same file, on another machine too.
    """
    return [[asdict(InputFile.of(path)), stored_file(path).stat().st_mtime_ns] for path in paths]


def find_files(patterns: str | Path | Sequence[str | Path], *, name: str = "raw", root: Path = Path()) -> list[Path]:
    """The files that paths, folders, glob patterns and archives name: in the order given, each one's matches sorted.

    Args:
        patterns: A path, a glob pattern (``day_*.gz``), a folder or an archive (all files in it and in its subfolders,
            but for those whose names, or whose subfolder's, start with a dot or an underscore; ``folder/*`` is the
            same), files of an archive (``clicks.zip/day_*.csv``), or a query to a database
            (``sqlite:///clicks.db?query=...``); or a list of those.
        name: What to call the option in an error message.
        root: The folder in which relative paths start.

    Raises:
        FileNotFoundError: nothing matches a pattern.
        ValueError: nothing was named, or a file is named twice, or an archive is damaged or holds another archive, or a
            folder holds what is no file.
    """
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str | os.PathLike) else patterns:
        if (query := written_query(pattern, root=root) or query_of(Path(pattern))) is not None:
            if not query.file.is_file():
                raise FileNotFoundError(f"{name}: there is no database {query.file}.")
            found.append(query.path)
            continue
        path = root / Path(pattern).expanduser()
        matches = [path] if path.exists() else _matches(path)
        # A pattern may match a folder and what is in it.
        files = list(dict.fromkeys(file for match in matches for file in _files_at(match))) or _matching_members(path)
        if inner := [file for file in files if _has_files(file.name) and stored_file(file) != file]:
            raise ValueError(
                f"{name}: {inner[0]} is an archive inside an archive, which is not looked into. Unpack "
                f"{stored_file(inner[0])} and name the folder, or name the other files in it one by one."
            )
        if not files:
            start = "" if root == Path() else f" Relative paths start from data.root, which is {root}."
            raise FileNotFoundError(
                f"{name}: there is no file {path}.{start} It may be a file, a folder, an archive (.zip, .tar.gz), a "
                "file in one (clicks.zip/train.csv), a pattern (day_*.csv) or a list of those."
            )
        found += files
    if not found:
        raise ValueError(f"{name} names no file. It may be a file, a folder, an archive, a pattern or a list of those.")
    if repeated := sorted({str(path) for path in found if found.count(path) > 1}):
        raise ValueError(f"{name} names {repeated[0]} twice.")
    return found


def stored_file(path: Path) -> Path:
    """The file on the disk: the archive or database that holds it, or itself."""
    return _parts(path)[0]


def check_md5(paths: Iterable[Path], checksums: Mapping[str, str]) -> None:
    """Compare files with the MD5 sums that are given for their names; nothing happens where none is.

    Args:
        paths: The files; of those in an archive, the archive counts, and is read once.
        checksums: MD5 sum by file name, in hexadecimal.

    Raises:
        ValueError: a file has another one.
    """
    for path in dict.fromkeys(map(stored_file, paths)):
        if (expected := checksums.get(path.name)) is None:
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != expected.lower():
            raise ValueError(
                f"{path} is not the published file: its MD5 sum is {found}, not {expected}. Fetch it again; for a file "
                "that you changed on purpose, set checksums to null (data.checksums in train, checksums in prepare)."
            )


class ByteSource:
    """The bytes of a file, uncompressed, from its start on. A context manager.

    Args:
        path: The file, plain, compressed by its suffix (``.gz``, ``.bz2``, ``.zst``, ``.lz4``), or in an archive.
        encoding: What its text is written in; it is read in UTF-8.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the archive that the file is in is damaged or encrypted.
    """

    def __init__(self, path: Path, *, encoding: str = "utf-8") -> None:
        self._opened = ExitStack()
        self._raw = self._opened.enter_context(open_stored(path))
        self._stream: Any = self._raw
        if (compression := COMPRESSION.get(path.suffix.lower())) is not None:
            self._stream = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), compression)
        if codecs.lookup(encoding).name != "utf-8":
            self._stream = pa.transcoding_input_stream(pa.PythonFile(self._stream, mode="r"), encoding, "utf-8")

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def consumed(self) -> int:
        """Bytes of the file, as it is stored, that were read."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """The next bytes, none at the end.

        Raises:
            OSError: the file is damaged, or cannot be read.
        """
        with _damage_told():
            found: bytes = self._stream.read(size)
        return found

    def skip(self, count: int) -> None:
        """Leave out the next bytes.

        Raises:
            OSError: the file is damaged, or cannot be read.
        """
        if self._stream is self._raw:
            with _damage_told():
                self._raw.seek(count, os.SEEK_CUR)
            return
        while count and (skipped := len(self.read(min(count, _CHUNK)))):
            count -= skipped


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise OSError(str(error) or type(error).__name__) from error


@contextmanager
def open_stored(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file as it is stored: what is compressed is still that.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the archive that the file is in is damaged or encrypted.
    """
    stored, member = _parts(path)
    if member is None:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        with path.open("rb") as file:
            yield file
        return
    with ExitStack() as opened:
        with _explained(path):
            inside = opened.enter_context(_open_member(opened, stored, member))
        yield inside


def members(archive: Path) -> dict[str, int]:
    """The files in an archive and their sizes, sorted by name, without those that programs leave.

    Raises:
        ValueError: the archive is damaged or cut off.
    """
    about = archive.stat()
    return {name: size for name, (size, _) in _members(archive, about.st_size, about.st_mtime_ns).items()}


@lru_cache(maxsize=64)
def _members(archive: Path, _size: int, _changed: int) -> dict[str, tuple[int, int]]:
    """The files in an archive: the size of the last one of each name, and how many have it."""
    with _explained(archive):
        if archive.name.lower().endswith(_ZIP):
            with zipfile.ZipFile(archive) as zipped:
                listed = [(x.filename, x.file_size) for x in zipped.infolist() if not x.is_dir()]
        else:
            with tarfile.open(archive) as tar:
                listed = [(x.name, x.size) for x in tar if x.isfile()]
    found: dict[str, tuple[int, int]] = {}
    for stored, size in listed:
        parts = (name := _name_in(stored)).split("/")
        if ".." in parts:
            raise ValueError(f"{archive} holds {stored!r}, which lies outside of it. Pack it again without that.")
        if not any(part.startswith(_HIDDEN) for part in parts):
            found[name] = (size, found.get(name, (0, 0))[1] + 1)
    return {name: found[name] for name in sorted(found)}


def _name_in(stored: str) -> str:
    """The name of a file in an archive, where it may stand as ``./x`` or as ``/x``."""
    return stored.removeprefix("./").lstrip("/")


def _open_member(opened: ExitStack, archive: Path, member: str) -> IO[bytes]:
    if archive.name.lower().endswith(_ZIP):
        zipped = opened.enter_context(zipfile.ZipFile(archive))
        return zipped.open([x for x in zipped.infolist() if _name_in(x.filename) == member][-1])
    about = archive.stat()
    _, before_it = _members(archive, about.st_size, about.st_mtime_ns)[member]
    tar = opened.enter_context(tarfile.TarFile.open(archive))
    for info in tar:  # as far as it takes: to list all members would decompress the whole archive first
        if info.isfile() and _name_in(info.name) == member:
            before_it -= 1
            if not before_it and (file := tar.extractfile(info)) is not None:
                return file
    raise FileNotFoundError(f"there is no file {member} in {archive}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (*DAMAGED, NotImplementedError) as error:  # the latter of a compression that Python does not know
        raise ValueError(f"{path}: the archive is damaged, cut off or of another kind ({error}).") from error
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be read ({error}). Unpack it first.") from error


def _parts(path: Path) -> tuple[Path, str | None]:
    """The file on the disk, and the name in it of a path that leads into an archive, or the query to a database."""
    if (query := query_of(path)) is not None:
        return query.file, query.sql
    if not path.exists():
        for parent in path.parents:
            if is_archive(parent) and (member := path.relative_to(parent).as_posix()) in members(parent):
                return parent, member
    return path, None


def is_archive(path: Path) -> bool:
    """Whether a file holds others, by its name."""
    return _has_files(path.name) and path.is_file()


def _has_files(name: str) -> bool:
    return name.lower().endswith(_ZIP + _TAR)


def _matches(pattern: Path) -> list[Path]:
    """The files that match a pattern, without folders that programs leave, unless the pattern names such.

    ``*`` and ``**`` ask for what is in a folder, as naming the folder does; a file that matches anything else
    (``*.csv``) is asked for by its name, and stays.
    """
    first = next((place for place, part in enumerate(pattern.parts) if glob.has_magic(part)), len(pattern.parts))
    found = sorted(map(Path, glob.glob(str(pattern), recursive=True)))
    if any(part.startswith(_HIDDEN) for part in pattern.parts[first:]):
        return found
    by_name = pattern.name not in ("*", "**")

    def is_wanted(match: Path) -> bool:
        parts = match.parts[first:]
        judged = parts[:-1] if by_name and match.is_file() else parts
        return not any(part.startswith(_HIDDEN) for part in judged)

    return [match for match in found if is_wanted(match)]


def _files_at(path: Path, around: tuple[Path, ...] = ()) -> list[Path]:
    """A file, or all files in an archive or folder; ``around`` are the folders that it was found in."""
    if is_archive(path):
        return [path / member for member in members(path)]
    if path.is_file():
        return [path]
    folder = path.resolve() if path.is_dir() else None  # which a link to itself is not, and has no end
    if folder is None or folder in around:
        what = "is no file, or a link that leads nowhere" if folder is None else "leads back to a folder that it is in"
        raise ValueError(f"{path} {what}. Folders are read whole: remove it, or name the other files one by one.")
    inside = sorted(x for x in path.iterdir() if not x.name.startswith(_HIDDEN))
    return [file for x in inside for file in _files_at(x, (*around, folder))]


def _matching_members(path: Path) -> list[Path]:
    """Files of an archive, or of some, that a path through it names."""
    found: list[Path] = []
    for parent in reversed(path.parents):
        for archive in sorted(map(Path, glob.glob(str(parent)))) if parent.suffix else []:
            if is_archive(archive):
                pattern = path.relative_to(parent).as_posix()
                inside = members(archive)
                names = [pattern] if pattern in inside else [x for x in inside if fnmatch(x, pattern)]
                found += [archive / name for name in names]
    return found
