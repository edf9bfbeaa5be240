"""Writes versions: bases and increments, compaction, and what is kept of them.

The order of the steps is what a kill at any moment leaves whole: first a version's files, then its manifest, then
``current.json`` in one step, and only then older versions go, their manifests first. A version without a manifest is a
leftover, which the next writer removes. No number is given twice while its version is there.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.serving.digested_files import write_file
from lightning_recsys.serving.encoders import RequestEncoder
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import MANIFEST, Collection, FileEntry, Link, Manifest, TableRows, digest_of
from lightning_recsys.serving.publishing.retention import Retention
from lightning_recsys.serving.publishing.snapshots import Backend, Rows, TableSnapshot
from lightning_recsys.serving.reader import DENSE, ENCODER, ENCODER_TENSORS, PROGRAM, open_rows
from lightning_recsys.serving.rows.files import RowWriter, block_rows, write_ids
from lightning_recsys.serving.rows.packing import RowFormat, num_words, pack_rows
from lightning_recsys.serving.rows.tables import PublishedRows
from lightning_recsys.stores.backend import StoreBackend

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

_SMALL_BYTES = 64 << 20  # of increments: they are opened in a moment, and small tables change as a whole


@dataclass(frozen=True)
class Skeleton:
    """The part that all versions of a run have in common.

    Args:
        program: The dense part's program, a file of :func:`~lightning_recsys.serving.dense.export_apart`.
        encoder: Makes numbers and ids of requests.
        num_dense: Number of numeric features of the model.
        tables: What was published so far of each collection's tables, by the collection's path in the model.
        rows: Format in which rows are stored.
        buffers: Names of the dense part's buffers, which may hold infinity; its parameters may not.
    """

    program: Path
    encoder: RequestEncoder
    num_dense: int
    tables: Mapping[str, Sequence[TableSnapshot]]
    rows: RowFormat = "float32"
    buffers: Set[str] = frozenset()


@dataclass(frozen=True)
class Cut:
    """The model at one moment, as far as it does not lie in tables, which are read after it.

    Args:
        dense: The dense part's parameters and buffers, copied.
        position: Where in the training data: plain values.
        taken: When it was copied, in seconds since 1970.
        backends: Where the rows of each collection are, by its path.
        lag: By how many updates of a worker a row may lack behind what that worker has, by collection; ``None`` where
            nothing bounds it.
        counters: The backends that are trained, by collection: they count updates. Those of an averaged copy do not.
        updates: The updates that each server of a collection had seen before the dense part was copied.
        weights: For the manifest: which replica, and which average, the dense part is of.
    """

    dense: Mapping[str, Tensor]
    position: Mapping[str, Any]
    taken: float
    backends: Mapping[str, Backend]
    lag: Mapping[str, int | None]
    counters: Mapping[str, Backend]
    updates: Mapping[str, Sequence[int]]
    weights: Mapping[str, Any] = field(default_factory=dict)


class VersionWriter:
    """Publishes versions into a folder, one after the other.

    Args:
        folder: The folder that versions are published into.
        run: Id of the run that the versions belong to.
        keep: How many versions of this run can be opened, the latest ones, with what they build on.
        keep_runs: The versions of so many runs stay, this one included; ``None`` for all.
        compact_share: Increments are compacted into a new base once they take this share of its bytes, and 64 MiB.
        max_increments: Increments are compacted as well once there are so many since the last base.
    """

    def __init__(
        self,
        folder: VersionFolder,
        *,
        run: str,
        keep: int,
        keep_runs: int | None,
        compact_share: float,
        max_increments: int,
    ) -> None:
        self.folder, self._run = folder, run
        self._compact_share, self._max_increments = compact_share, max_increments
        folder.clear_leftovers()
        self._last = folder.current()
        self._retention = Retention(folder, run, keep=keep, keep_runs=keep_runs)
        self._last_manifest: Manifest | None = None  # of this writer's latest version; without one a base comes next
        self._base_bytes = self._increment_bytes = 0
        # Numbers of the versions that the latest one builds on, from the base on; it is the last of them.
        self._numbers: list[int] = []
        self._held: Link | None = None  # the version that counted in place of what was published, as last seen

    def publish(self, skeleton: Skeleton, cut: Cut) -> Manifest:
        """Write the next version and let it count; behind it, perhaps, a compaction as a version of its own.

        Where it fails, nothing has changed for readers, and the next version is a base. Where somebody has gone back to
        another version, which counts until it is released, a warning says so.

        Raises:
            FloatingPointError: the model has diverged: no reader is to open that.
        """
        # Until this version counts there is none to build on: tables note what they have handed over as it is read, so
        # an increment behind one that failed would lack those rows. A base has all of them.
        before, self._last_manifest = self._last_manifest, None
        if before is not None and not self._is_as_left():
            before = None
        is_base = before is None or self._last is None
        version, clock = self._next, _Clock(cut)
        # 1. The files, the manifest last. Killed in here, the publisher leaves a folder without a whole manifest, which
        #    the next one removes.
        with self.folder.writing(version) as folder:
            files = _Files(folder, skeleton.rows)
            if is_base:
                files.write_skeleton(skeleton)
            files.write_dense(cut.dense, skeleton.buffers)
            collections = []
            for number, (path, tables) in enumerate(skeleton.tables.items()):
                read = cut.backends[path]
                with clock.reading(path, tables):
                    rows = [files.write_table(f"{number}-{i}", x, read, is_base=is_base) for i, x in enumerate(tables)]
                collections.append(Collection(path, tuple(rows)))
            manifest = Manifest(
                version=version,
                kind="base" if is_base else "increment",
                run=self._run,
                lineage=uuid.uuid4().hex if before is None else before.lineage,
                previous=None if is_base else self._last,
                files=files.entries,
                num_dense=skeleton.num_dense,
                collections=tuple(collections),
                rows=skeleton.rows,
                created=cut.taken,
                position=cut.position,
                cut=clock.to_plain(),
            )
            link = _write_manifest(folder, manifest)
        # 2. One file names the version: from here on readers open it. Killed before that, the publisher leaves a whole
        #    version that does not count, and the next one takes a number above it. 3. Only then may old ones go.
        self._let_count(link, manifest)
        if not is_base and self._is_due_for_compaction():
            self._compact(skeleton, manifest)
        self._retention.clear_old()
        if self._last == link:
            self._last_manifest = manifest
        self._tell_of_hold(link)
        return manifest

    def _tell_of_hold(self, link: Link) -> None:
        """Warn, once for each, of another version that counts; whatever goes wrong in here, this one is published."""
        url, before = self.folder.url, self._held
        try:
            self._held = self.folder.held()
        except (OSError, PublishedVersionError) as error:
            log.warning(
                "Version %d of %s is published, and whether it counts cannot be told: %s", link.version, url, error
            )
            return
        if self._held is not None and self._held not in (before, link):
            log.warning(
                "Version %d of %s counts, and not version %d, which is published now, nor those after it, until it is"
                " released: lightning-recsys versions %s --release",
                self._held.version,
                url,
                link.version,
                url,
            )

    @property
    def _next(self) -> int:
        return max([0 if self._last is None else self._last.version, *self.folder.versions()]) + 1

    def _is_as_left(self) -> bool:
        """Whether the folder has all that an increment would build on; somebody may have moved or cleared it."""
        try:
            changed = self.folder.current() != self._last
        except PublishedVersionError:
            changed = True
        lacking = self.folder.lacking(self._numbers)
        if changed or lacking:
            what = f"lacks versions {lacking}" if lacking else "names another version as the one that counts"
            log.warning("%s %s: somebody has changed it. The next version is a base.", self.folder.url, what)
        return not changed and not lacking

    def _let_count(self, link: Link, manifest: Manifest) -> None:
        self.folder.set_current(link)
        self._last = link
        size = sum(entry.size for entry in manifest.files.values())
        if manifest.is_base:
            self._base_bytes, self._increment_bytes, self._numbers = size, 0, [manifest.version]
        else:
            self._increment_bytes += size
            self._numbers.append(manifest.version)

    def _is_due_for_compaction(self) -> bool:
        is_large = self._increment_bytes > max(self._compact_share * self._base_bytes, _SMALL_BYTES)
        return is_large or len(self._numbers) > self._max_increments

    def _compact(self, skeleton: Skeleton, before: Manifest) -> None:
        """Publish what counts once more, as a base: from its files, so that nothing can have changed meanwhile."""
        assert self._last is not None
        chain = [manifest for _, manifest in self.folder.chain(self._last)]
        base, version = chain[0], self._next
        with RunFolder() as downloads, self.folder.writing(version) as folder:
            source = VersionFolder(self.folder.url, cache=downloads)  # nobody would clear a cache that lasts
            opened = open_rows(source, base)
            for last, following in pairwise(chain):
                opened = open_rows(source, following, (last, opened))
            files = _Files(folder, skeleton.rows)
            for name in (PROGRAM, ENCODER, ENCODER_TENSORS):
                files.copy(source.file(base, name), name)
            files.copy(source.file(before, DENSE), DENSE)
            collections = []
            for number, (path, tables) in enumerate(skeleton.tables.items()):
                rows = [files.write_compacted(f"{number}-{i}", x, opened[path]) for i, x in enumerate(tables)]
                collections.append(Collection(path, tuple(rows)))
            manifest = replace(
                before,
                version=version,
                kind="base",
                previous=self._last,
                files=files.entries,
                collections=tuple(collections),
            )
            link = _write_manifest(folder, manifest)
        self._let_count(link, manifest)
        self._last_manifest = manifest


class _Clock:
    """How far the parts of a version lie apart."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._parts: dict[str, Any] = {}

    @contextmanager
    def reading(self, path: str, tables: Sequence[TableSnapshot]) -> Iterator[None]:
        """The tables of a collection are read meanwhile."""
        cut, began = self._cut, time.time()
        first = _steps(cut.counters[path])
        yield
        self._parts[path] = {
            "dense_updates": list(cut.updates[path]),
            "updates": [list(x) for x in zip(first, _steps(cut.counters[path]), strict=True)],  # of each server
            "from_ms": round(1e3 * (began - cut.taken), 3),
            "to_ms": round(1e3 * (time.time() - cut.taken), 3),
            "moving_rows": sum(table.moving for table in tables),
            "lag_updates": cut.lag[path],
        }

    def to_plain(self) -> dict[str, Any]:
        """For the manifest; ``apart`` is the distance between the oldest and the newest part.

        The dense part is the oldest one: it is copied first, and the updates of each server are counted from there.
        """
        parts = self._parts.values()
        updates = [
            high - dense for x in parts for dense, (_, high) in zip(x["dense_updates"], x["updates"], strict=True)
        ]
        milliseconds = [part["to_ms"] for part in parts]
        apart = {"updates": max(updates, default=0), "ms": max(milliseconds, default=0.0)}
        return {"apart": apart, "dense": dict(self._cut.weights), "collections": self._parts}


def counts_of(backends: Mapping[str, Backend]) -> dict[str, list[int]]:
    """The updates that each server of each collection has seen."""
    return {path: _steps(backend) for path, backend in backends.items()}


def _steps(backend: Backend) -> list[int]:
    return [store.step for store in backend.stores] if isinstance(backend, StoreBackend) else [backend.step]


class _Files:
    """The files of a version that is being written.

    Args:
        folder: Where they are made.
        rows: Format in which rows are stored.

    Attributes:
        entries: Size and digest of each file so far, by its name.
    """

    def __init__(self, folder: Path, rows: RowFormat) -> None:
        self._folder, self._row_format = folder, rows
        self.entries: dict[str, FileEntry] = {}

    def write(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Make a file; returns when it is on the disk."""
        self.entries[name] = write_file(self._folder, name, write)

    def copy(self, source: Path, name: str) -> None:
        """Make a file with the bytes of another one."""
        with source.open("rb") as content:
            self.write(name, partial(copyfileobj, content))

    def write_skeleton(self, skeleton: Skeleton) -> None:
        """Write the part that all versions of a run have in common."""
        plain, tensors = skeleton.encoder.to_files()
        self.copy(skeleton.program, PROGRAM)
        self.write(ENCODER, _bytes(json.dumps(plain).encode()))
        self.write(ENCODER_TENSORS, _bytes(save(tensors)))

    def write_dense(self, tensors: Mapping[str, Tensor], buffers: Set[str]) -> None:
        """The dense part.

        Raises:
            FloatingPointError: it has diverged.
        """
        for name, tensor in tensors.items():
            wrong = tensor.isnan() if name in buffers else ~tensor.isfinite()  # a mask holds infinity for good
            if bool(wrong.any()):
                raise FloatingPointError(f"{name} of the model has {tensor[wrong][0].item()}: it has diverged")
        self.write(DENSE, _bytes(save({name: x.contiguous() for name, x in tensors.items()})))

    def write_table(self, name: str, table: TableSnapshot, backend: Backend, *, is_base: bool) -> TableRows:
        """The rows of a table that a version has: all of them, or those that changed."""
        rows = table.all_rows(backend) if is_base else table.changed_rows(backend)
        packed = ((ids, self._packed(table, x)) for ids, x in rows)
        written = self._write_rows(name, table, packed, with_ids=not (is_base and table.drawing is None))
        gone = torch.empty(0, dtype=torch.int64) if is_base else table.forgotten_ids()
        if not gone.numel():
            return written
        self.write(gone_file := f"gone-{name}.arrow", lambda file: write_ids(file, gone))
        return replace(written, gone_file=gone_file, num_gone=gone.numel())

    def write_compacted(self, name: str, table: TableSnapshot, opened: PublishedRows) -> TableRows:
        """All rows of a table as a published model has them."""
        has_ids = table.drawing is not None
        blocks = torch.split(table.published_ids(), block_rows(table.config.embedding_dim))
        rows = ((ids if has_ids else None, opened.stored_rows(table.config.name, ids)) for ids in blocks if ids.numel())
        return self._write_rows(name, table, rows, with_ids=has_ids)

    def _packed(self, table: TableSnapshot, rows_UD: Tensor) -> Tensor:
        if not all(x.isfinite() for x in rows_UD.aminmax()):  # of a NaN both are NaN; one pass, and no copy
            raise FloatingPointError(f"rows of table {table.config.name!r} are not finite: they have diverged")
        return pack_rows(rows_UD, self._row_format)

    def _write_rows(self, name: str, table: TableSnapshot, rows: Iterable[Rows], *, with_ids: bool) -> TableRows:
        """Write rows, packed already, to a file, which is not there where there are none."""
        count, width = 0, num_words(table.config.embedding_dim, self._row_format)

        def write(file: IO[bytes]) -> None:
            nonlocal count
            with RowWriter(file, width, packed=self._row_format != "float32", with_ids=with_ids) as writer:
                for ids_U, rows_UW in rows:
                    writer.write(rows_UW, ids_U)
            count = writer.num_rows

        self.write(file_name := f"rows-{name}.arrow", write)
        if not count:
            (self._folder / file_name).unlink()
            del self.entries[file_name]
            return TableRows(table.config, None, 0, drawing=table.drawing)
        return TableRows(table.config, file_name, count, drawing=table.drawing)


def _bytes(data: bytes) -> Callable[[IO[bytes]], object]:
    """The function that writes these bytes to a file."""
    return lambda file: file.write(data)


def _write_manifest(folder: Path, manifest: Manifest) -> Link:
    data = manifest.to_json()
    write_file(folder, MANIFEST, _bytes(data))
    return Link(manifest.version, digest_of(data))
