"""The folder of published versions, on this machine or behind any fsspec URL: their files, and one pointer."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_recsys.errors import PublishedVersionError, PublisherReplacedError, network_errors
from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.serving.digested_files import digest_file, write_file
from lightning_recsys.serving.manifest import (
    CURRENT,
    HELD,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    ForeignFormatError,
    Link,
    Manifest,
    current_from_json,
    current_to_json,
    digest_of,
    is_written_here,
)
from lightning_recsys.serving.publishing.claims import Claim, locked, shut, words_of

_VERSIONS = "versions"
_HOLD_LOCK = ".held.lock"
_NUMBER = re.compile(r"[1-9]\d{0,17}")
_LONGEST_CHAIN = 100_000
_UNUSED_SECONDS = 3600.0  # a downloaded file that nobody has in use any more is kept for so long
_NOTE_SECONDS = 600.0  # between two notes that files are in use


class VersionFolder:
    """Where versions are published.

    Args:
        url: A folder, or a URL that fsspec knows, such as ``s3://bucket/model``.
        cache: Where files of a remote folder are kept on this machine, by their digests, so that processes share them;
            default: ``~/.cache/lightning_recsys/versions`` (or below ``$XDG_CACHE_HOME``).

    Raises:
        ImportError: fsspec needs a package for this URL.
        ValueError: fsspec does not know its scheme.
    """

    def __init__(self, url: str | Path, *, cache: str | Path | None = None) -> None:
        self.url = str(url)
        self._fs, root = fsspec.core.url_to_fs(self.url)
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._root = str(root).rstrip("/")
        self._claim: Claim | None = None  # on a remote folder, while it is locked
        self._noted: Set[str] = frozenset()  # digests of the downloads in use, as last noted
        self._noted_at = 0.0
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.cache = Path(cache) if cache is not None else home / "lightning_recsys" / "versions"

    # --- Reading -----------------------------------------------------------------------------------------------------

    def counting(self) -> Link | None:
        """The version that readers open: the one that is held, else the latest; ``None`` where there is neither.

        Raises:
            PublishedVersionError: a pointer is damaged.
        """
        return self.held() or self.current()

    def current(self) -> Link | None:
        """The latest version that was published as a whole; ``None`` where nothing was published yet.

        Raises:
            PublishedVersionError: the pointer is damaged.
        """
        return self._pointer(CURRENT)

    def held(self) -> Link | None:
        """The version that somebody has gone back to, and that counts until it is released; ``None`` without one.

        Raises:
            PublishedVersionError: the pointer is damaged.
        """
        return self._pointer(HELD)

    def _pointer(self, name: str) -> Link | None:
        try:
            return current_from_json(self._read(name, 1 << 16))
        except FileNotFoundError:
            return None
        except ForeignFormatError as error:
            raise PublishedVersionError(f"{self.url}/{name}", str(error)) from error
        except ValueError as error:
            raise PublishedVersionError(f"{self.url}/{name}", f"is damaged: {error}") from error

    def manifest(self, link: Link) -> Manifest:
        """The manifest that a link names.

        Raises:
            PublishedVersionError: it is missing, another one, or no manifest.
        """
        found, manifest = self.find(link.version)
        if found != link:
            reason = "its manifest is another one than the version after it was made for"
            raise PublishedVersionError(self.name(link.version), reason)
        return manifest

    def find(self, version: int) -> tuple[Link, Manifest]:
        """The manifest of a number, whatever it is, and what would name it.

        Raises:
            PublishedVersionError: the manifest is missing, or is none.
        """
        name = self.name(version)
        try:
            data = self._read(f"{_VERSIONS}/{version}/{MANIFEST}", MAX_MANIFEST_BYTES)
        except OSError as error:
            raise PublishedVersionError(name, f"its manifest is missing ({error.strerror or error})") from error
        try:
            manifest = Manifest.from_json(data)
        except ForeignFormatError as error:
            raise PublishedVersionError(name, str(error)) from error
        except ValueError as error:
            raise PublishedVersionError(name, f"its manifest is damaged: {error}") from error
        if manifest.version != version:
            raise PublishedVersionError(name, f"its manifest is that of version {manifest.version}")
        return Link(version, digest_of(data)), manifest

    def chain(self, link: Link, opened: Link | None = None) -> list[tuple[Link, Manifest]]:
        """The versions that one builds on, in order: from its base on, or from the one behind ``opened``; itself last.

        Raises:
            PublishedVersionError: one of them is missing, damaged or another, or there is no base.
        """
        chain: list[tuple[Link, Manifest]] = []
        before: Link | None = link
        while before is not None and before != opened:
            manifest = self.manifest(before)
            chain.insert(0, (before, manifest))
            if len(chain) > _LONGEST_CHAIN:
                raise PublishedVersionError(self.name(link.version), "it has no base")
            before = None if manifest.is_base else manifest.previous
        return chain

    def file(self, manifest: Manifest, name: str) -> Path:
        """A file of a version on this machine, compared with its digest.

        Raises:
            PublishedVersionError: it is missing, or has other bytes.
        """
        version, entry = self.name(manifest.version), manifest.files.get(name)
        if entry is None:
            raise PublishedVersionError(version, f"it has no file {name}")
        place = self.place(manifest.version, name)
        try:
            if not self.is_local:
                return self._download(place, entry)
            path = self._local(place)
            found = digest_file(path)
        except OSError as error:
            raise PublishedVersionError(version, f"{name} cannot be read ({error.strerror or error})") from error
        if found != entry:
            raise PublishedVersionError(version, f"{name} is torn or damaged: {found} and not {entry}")
        return path

    def place(self, version: int, name: str) -> str:
        """Where a file of a version lies, from the folder on."""
        return f"{_VERSIONS}/{version}/{name}"

    def name(self, version: int) -> str:
        """The name of a version in errors."""
        return f"{self.url}/{_VERSIONS}/{version}"

    @network_errors()
    def _read(self, place: str, most: int) -> bytes:
        if self.is_local:
            with open(os.open(self._local(place), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                return file.read(most)
        data: bytes = self._fs.cat_file(f"{self._root}/{place}", start=0, end=most)
        return data

    @network_errors()
    def _write_remote(self, place: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{place}", data)  # object stores replace an object in one step

    @network_errors()
    def _remove_remote(self, place: str) -> None:
        self._fs.rm_file(f"{self._root}/{place}")

    def _local(self, place: str) -> Path:
        """A path below the root, of which no part is a link to somewhere else."""
        path = Path(self._root)
        for part in place.split("/"):
            path = path / part
            if path.is_symlink():
                raise OSError(f"{path} is a link, which may lead out of the folder")
        return path

    @network_errors()
    def _download(self, place: str, entry: FileEntry) -> Path:
        """The file in the cache, named by its digest and compared with it; its suffix stays."""
        target = self.cache / f"{entry.sha256}{Path(place).suffix}"
        if target.is_file() and digest_file(target) == entry:  # else the machine went down while it was written
            os.utime(target)
            return target
        self.cache.mkdir(parents=True, exist_ok=True)
        partial = self.cache / f".{uuid.uuid4().hex}"
        try:
            self._fs.get_file(f"{self._root}/{place}", str(partial))
            if digest_file(partial) != entry:
                raise OSError("the download is torn or damaged")
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def keep_downloads(self, digests: Set[str]) -> None:
        """Note that files of the cache are in use, and remove those that nobody has noted for an hour.

        So a process that is started again finds the files of what it had open, and processes that follow different
        folders keep theirs in one cache. Where nothing is new, it does its work every ten minutes.
        """
        if self.is_local or not self.cache.is_dir():
            return
        now = time.time()
        if digests == self._noted and now - self._noted_at < _NOTE_SECONDS:
            return
        self._noted, self._noted_at = digests, now
        for path in self.cache.iterdir():
            with suppress(OSError):
                if path.stem in digests:
                    os.utime(path)
                elif path.stat().st_mtime < now - _UNUSED_SECONDS:
                    path.unlink()

    # --- Publishing --------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, holder: str) -> Iterator[None]:
        """Be the only publisher.

        Args:
            holder: Who publishes, for others that are refused meanwhile.

        Raises:
            ValueError: another one publishes there, whom the message names, or ``versions`` is a link.
        """
        if self.is_local:
            if (versions := Path(self._root) / _VERSIONS).is_symlink():
                raise ValueError(
                    f"{versions} is a link, and readers open nothing behind a link in the folder. Let {self.url} itself"
                    f" be the link, or publish into the folder above {versions.resolve()}."
                )
            with locked(Path(self._root), self.url, words_of(holder)):
                yield
            return
        claim = Claim(
            lambda name: self._read(name, 1 << 16),
            self._write_remote,
            self._remove_remote,
            url=self.url,
            holder=words_of(holder),
        )
        with claim:
            self._claim = claim
            try:
                yield
            finally:
                self._claim = None

    def _check_claim(self, version: int) -> None:
        if self._claim is not None:
            try:
                self._claim.check()
            except ValueError as error:
                raise PublisherReplacedError(self.name(version), str(error).rstrip(".")) from error

    @network_errors()
    def versions(self) -> list[int]:
        """The numbers of all versions that are there, whole or not, rising."""
        try:
            entries = self._fs.ls(f"{self._root}/{_VERSIONS}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = (str(entry).rstrip("/").rpartition("/")[2] for entry in entries)
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def lacking(self, versions: Iterable[int]) -> list[int]:
        """Those of some versions that are not there any more, or have lost their manifest on this machine."""
        there = set(self.versions())
        if self.is_local:
            there = {x for x in there if (Path(self._root) / self.place(x, MANIFEST)).is_file()}
        return [version for version in versions if version not in there]

    @contextmanager
    def writing(self, version: int) -> Iterator[Path]:
        """A new folder on this machine for the files of a version; in the end they are where they belong.

        Raises:
            PublisherReplacedError: another publisher has taken this one for dead, and publishes there now.
        """
        self._check_claim(version)  # else the files of this number may be the other's
        self.remove(version)
        if self.is_local:
            folder = Path(self._root) / _VERSIONS / str(version)
            folder.mkdir(parents=True)
            try:
                yield folder
                _sync(folder)
                _sync(folder.parent)
            except BaseException:
                self.remove(version)  # the disk may be full of it
                raise
            return
        with RunFolder() as folder:
            yield folder
            try:
                for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):  # the manifest last
                    self._check_claim(version)
                    self._put_file(path, version)
            except BaseException:
                with suppress(OSError, PublishedVersionError):
                    self._check_claim(version)
                    self.remove(version)
                raise

    @network_errors()
    def _put_file(self, path: Path, version: int) -> None:
        self._fs.put_file(str(path), f"{self._root}/{self.place(version, path.name)}")

    def set_current(self, link: Link) -> None:
        """Let a version count from now on, in one step: its files must be there.

        Raises:
            PublisherReplacedError: another publisher has taken this one for dead, and publishes there now.
        """
        if not self.is_local:
            self._check_claim(link.version)
        self._point(CURRENT, link)

    def hold(self, link: Link | None) -> None:
        """Let a version count, in one step, whatever is published; ``None`` releases the one that does."""
        if link is not None:
            self._point(HELD, link)
        elif self.is_local:
            (Path(self._root) / HELD).unlink(missing_ok=True)
            _sync(Path(self._root))
        else:
            with suppress(FileNotFoundError):
                self._remove_remote(HELD)

    def keeping_still(self) -> AbstractContextManager[None]:
        """In a local folder no version is removed, held or released meanwhile; elsewhere nothing is locked."""
        return shut(Path(self._root) / _HOLD_LOCK) if self.is_local else nullcontext()

    def _point(self, name: str, link: Link) -> None:
        data = current_to_json(link)
        if not self.is_local:
            self._write_remote(name, data)
            return
        target = Path(self._root) / name
        temporary = target.with_name(f".{name}.{uuid.uuid4().hex}")
        try:
            write_file(temporary.parent, temporary.name, lambda file: file.write(data))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)  # it is there still where the disk is full
        _sync(target.parent)

    @network_errors()
    def remove(self, version: int) -> None:
        """Delete a version's files, if there are any; the manifest first, so that no half of it counts as one."""
        place = f"{self._root}/{_VERSIONS}/{version}"
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{place}/{MANIFEST}")
        if self.is_local:
            shutil.rmtree(place, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                self._fs.rm(place, recursive=True)

    def clear_leftovers(self) -> None:
        """Remove what a killed publisher has left: versions without a whole manifest, and unfinished pointers.

        A whole version above the latest one that counted stays: a publisher was killed before it let it count.

        Raises:
            ValueError: a folder that would be removed holds what no publisher has written; then nothing is removed.
        """
        current = self.current()
        leftovers = [version for version in self.versions() if self._is_leftover(version, current)]
        for version in leftovers:
            self._check_own(version)
        for version in leftovers:
            self.remove(version)
        if self.is_local:
            with self.keeping_still() if Path(self._root).is_dir() else nullcontext():  # nobody writes a hold just now
                for name in (CURRENT, HELD):
                    for path in Path(self._root).glob(f".{name}.*"):
                        path.unlink(missing_ok=True)

    def _is_leftover(self, version: int, current: Link | None) -> bool:
        try:
            Manifest.from_json(self._read(f"{_VERSIONS}/{version}/{MANIFEST}", MAX_MANIFEST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except (OSError, ForeignFormatError):  # a network that fails for a moment must not cost a version
            return False
        except ValueError:
            return current is None or version > current.version
        return False

    def _check_own(self, version: int) -> None:
        place = f"{self._root}/{_VERSIONS}/{version}"
        with network_errors():
            entries = self._fs.ls(place, detail=True, refresh=True)
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            is_marker = str(entry["name"]).rstrip("/") == place and entry["type"] == "directory"  # of an object store
            if not is_marker and not (entry["type"] == "file" and is_written_here(name)):
                raise ValueError(
                    f"{self.name(version)} has no whole manifest, and holds {name}, which no publisher has written."
                    f" Files of others are not removed: publish into another folder than {self.url}, or move them away."
                )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
