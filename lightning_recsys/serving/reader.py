"""Opens published versions, follows the one that counts, and scores requests by it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures
from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.serving.encoders import RequestEncoder, encoder_from
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import CURRENT, Link, Manifest, TableRows
from lightning_recsys.serving.program import load_program, with_weights
from lightning_recsys.serving.rows.files import Integers, RowFile, read_ids
from lightning_recsys.serving.rows.packing import num_words
from lightning_recsys.serving.rows.tables import PublishedRows

DENSE = "model.safetensors"
PROGRAM = "model.pt2"
ENCODER = "encoder.json"
ENCODER_TENSORS = "encoder.safetensors"
_ATTEMPTS = 3  # to open a version that was removed for a newer one meanwhile
_WRONG = (ValueError, KeyError, TypeError, ArithmeticError, MemoryError, OSError, RuntimeError, SafetensorError)
_NO_IDS: Integers = torch.empty(0, dtype=torch.int64).numpy()

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """The scores of a request, all by one version.

    Args:
        version: Number of the version that answered.
        probabilities: The predicted probability of each row.
    """

    version: int
    probabilities: list[float]


@dataclass(frozen=True)
class Look:
    """How a reader's latest look for a new version went.

    Args:
        seen: When a look last succeeded, in seconds since 1970.
        failures: Number of looks in a row that failed, up to this one.
        error: Why this one failed; ``None`` where it did not.
        opening: Whether it has found another version and opens it now, which may take a while; it is told of again when
            it has ended.
    """

    seen: float
    failures: int
    error: str | None
    opening: bool = False


class PublishedModel:
    """One version of a model, complete: nothing of it ever changes, so any number of threads may ask it.

    Attributes:
        manifest: The manifest that it was opened from.
        link: Number and digest of the version.
        rows: The rows of each collection, by its path.
        dense_part: The program with these weights: ``(dense, {path of a collection: [B, F, D]}) -> logits [B]``.
        weights: The tensors of the dense part.
        encoder: Makes numbers and ids of requests.
        digests: Those of all files that it was opened from, as those of the base.
    """

    def __init__(
        self,
        manifest: Manifest,
        link: Link,
        *,
        program: nn.Module,
        weights: Mapping[str, Tensor],
        rows: Mapping[str, PublishedRows],
        encoder: RequestEncoder,
        digests: frozenset[str],
    ) -> None:
        self.manifest, self.link, self.rows, self.weights, self.encoder = manifest, link, rows, weights, encoder
        self.program, self.digests = program, digests
        self.dense_part = with_weights(program, weights)
        self._collections = {path: _collection(published) for path, published in rows.items()}

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    @torch.no_grad()
    def logits(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits ``[B]`` of rows that are encoded.

        Raises:
            IndexError: an id is in no table.
        """
        logits: Tensor = self.dense_part(dense, self.pooled(sparse))
        return logits

    @torch.no_grad()
    def pooled(self, sparse: SparseFeatures) -> dict[str, Tensor]:
        """The pooled rows of each collection by its path, ``[B, F, D]``: what :attr:`dense_part` takes.

        Raises:
            IndexError: an id is in no table.
        """
        return {path: collection(sparse) for path, collection in self._collections.items()}

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> Prediction:
        """Scores of raw rows.

        Raises:
            ValueError: a row lacks a feature or has a value that cannot be one.
        """
        if not rows:
            return Prediction(self.version, [])
        return Prediction(self.version, self.logits(*self.encoder.encode(rows)).sigmoid().tolist())

    def rows_of(self, path: str, table: str, ids: Tensor) -> Tensor:
        """The rows of some ids of a table, float32 ``[N, D]``.

        Raises:
            KeyError: there is no such collection, or no such table in it.
            IndexError: an id is not in the table.
        """
        return self.rows[path].rows_of(table, ids)


class ModelReader:
    """Opens the version that counts, and swaps to later ones while it answers.

    A version is opened as a whole beside the present one, and only then takes its place: a request is answered by one
    version, and none waits for a swap. Whatever is wrong with a version is an error that names it, and changes nothing.

    Args:
        url: Where versions are published: a folder, or a URL that fsspec knows.
        cache: Where files of a remote folder are kept; see :class:`~lightning_recsys.serving.files.VersionFolder`.
        version: Open this version and stay with it; without one, follow what counts.

    Attributes:
        model: The version that is open.

    Raises:
        FileNotFoundError: nothing was published there yet.
        PublishedVersionError: the version cannot be used.
    """

    def __init__(self, url: str | Path, *, cache: str | Path | None = None, version: int | None = None) -> None:
        self.folder = VersionFolder(url, cache=cache)
        self._swapping = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._model: PublishedModel | None = None
        self._pinned = None if version is None else self.folder.find(version)[0]
        self.refresh()
        if self._model is None:
            raise FileNotFoundError(f"{url}: nothing was published there yet (there is no current.json).")

    @property
    def model(self) -> PublishedModel:
        """The version that is open; whoever makes several calls for one request keeps it."""
        assert self._model is not None
        return self._model

    @property
    def version(self) -> int:
        """The number of the version that is open."""
        return self.model.version

    @property
    def age_seconds(self) -> float:
        """Time since the version that is open was cut."""
        return time.time() - self.model.manifest.created

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> Prediction:
        """Scores of raw rows, by the version that is open when the call begins."""
        return self.model.predict(rows)

    def refresh(self) -> bool:
        """Open the version that counts now; nothing happens where it is open already.

        Returns:
            Whether another version is open now.

        Raises:
            PublishedVersionError: it, or one that it builds on, is missing, torn, foreign or damaged.
        """
        return self._refresh()

    def _refresh(self, found: Callable[[], None] = lambda: None) -> bool:
        """Do as :meth:`refresh`; ``found`` is called before a version is opened."""
        with self._swapping:
            for attempt in range(_ATTEMPTS):
                current = self._pinned or self.folder.counting()
                if current is None and self._model is not None:
                    raise PublishedVersionError(f"{self.folder.url}/{CURRENT}", "it is not there any more")
                if current is None or (self._model is not None and current == self._model.link):
                    self._keep_downloads()
                    return False
                found()
                try:
                    self._model = self._open(current)
                except PublishedVersionError:
                    if attempt == _ATTEMPTS - 1 or (self._pinned or self.folder.counting()) == current:
                        raise
                else:
                    self._keep_downloads()
                    return True
        return False

    def _keep_downloads(self) -> None:
        if self._model is not None:
            self.folder.keep_downloads(self._model.digests)

    def follow(
        self,
        seconds: float = 1.0,
        *,
        warn_after: int = 3,
        tell: Callable[[PublishedModel], None] = lambda model: None,
        looked: Callable[[Look], None] = lambda look: None,
    ) -> None:
        """Look for a new version every so many seconds from now on, until :meth:`close`.

        Args:
            seconds: Seconds between two looks.
            warn_after: Number of looks in a row that fail before a warning is logged: one may fail by chance.
            tell: Is called with the version that is open, and with each that takes its place.
            looked: Is called after each look, and before a version that it has found is opened.

        Raises:
            ValueError: ``seconds`` is not above 0.
        """
        if not seconds > 0:
            raise ValueError(f"a reader follows every so many seconds, above 0; got {seconds}.")
        if self._thread is None:
            self._ended.clear()
            arguments = (seconds, warn_after, tell, looked)
            self._thread = threading.Thread(target=self._follow, args=arguments, name="model-reader", daemon=True)
            self._thread.start()

    def _follow(
        self, seconds: float, warn_after: int, tell: Callable[[PublishedModel], None], looked: Callable[[Look], None]
    ) -> None:
        told: PublishedModel | None = None
        logged: str | None = None
        why: str | None = None
        seen, failures = time.time(), 0

        def found() -> None:
            with suppress(OSError):
                looked(Look(seen, failures, why, opening=True))

        while True:
            try:
                try:
                    if self._refresh(found):
                        log.info("serving version %d of %s", self.version, self.folder.url)
                finally:  # the one that is open is told of, whatever is wrong with a later one
                    if (model := self.model) is not told:
                        tell(model)
                        told = model
                if failures >= warn_after:
                    log.warning("%s can be read again.", self.folder.url)
                seen, failures, why, logged = time.time(), 0, None, None
            except Exception as error:  # the next version may be whole again, or a disk have room
                failures, why = failures + 1, str(error)
                if failures >= warn_after and why != logged:
                    gone = time.time() - seen
                    log.warning("%d looks for a new version have failed in a row, for %.0f s: %s", failures, gone, why)
                    logged = why
            with suppress(OSError):  # a full disk; the next look is told of again
                looked(Look(seen, failures, why))
            if self._ended.wait(seconds):
                return

    def close(self) -> None:
        """Follow no more. What is open can be asked further on."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> ModelReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- Opening -----------------------------------------------------------------------------------------------------

    def _open(self, current: Link) -> PublishedModel:
        """The version of a link: from the one that is open if that is on the way to it, else from its base."""
        model = self._model
        for link, manifest in self.folder.chain(current, None if model is None else model.link):
            model = open_version(self.folder, link, manifest, model)
        assert model is not None
        return model


def open_version(
    folder: VersionFolder, link: Link, manifest: Manifest, model: PublishedModel | None = None
) -> PublishedModel:
    """Open a version, from its own files and the version before.

    A compaction is opened from its own files as well: whoever follows for weeks lets go of all that came before.

    Args:
        folder: The folder of versions.
        link: Number and digest of the version.
        manifest: The version's manifest.
        model: The version that is open already, if any.

    Raises:
        PublishedVersionError: it does not follow the version that is open, or a file is damaged.
    """
    try:
        return _opened(folder, link, manifest, model)
    except PublishedVersionError:
        raise
    except _WRONG as error:
        raise PublishedVersionError(folder.name(link.version), str(error)) from error


def _opened(folder: VersionFolder, link: Link, manifest: Manifest, model: PublishedModel | None) -> PublishedModel:
    follows = not manifest.is_base and model is not None and manifest.previous == model.link
    before = model if follows else None
    rows = open_rows(folder, manifest, None if before is None else (before.manifest, before.rows))
    if model is not None and model.manifest.lineage == manifest.lineage:
        program, encoder = model.program, model.encoder
    else:
        program = load_program(folder.file(manifest, PROGRAM))
        plain = json.loads(folder.file(manifest, ENCODER).read_bytes())
        encoder = encoder_from(plain, load_file(folder.file(manifest, ENCODER_TENSORS)))
    weights = load_file(folder.file(manifest, DENSE))
    digests = frozenset(x.sha256 for x in manifest.files.values()) | (before.digests if before else frozenset())
    return PublishedModel(manifest, link, program=program, weights=weights, rows=rows, encoder=encoder, digests=digests)


def open_rows(
    folder: VersionFolder, manifest: Manifest, before: tuple[Manifest, Mapping[str, PublishedRows]] | None = None
) -> Mapping[str, PublishedRows]:
    """The rows of a version by the paths of its collections.

    Args:
        folder: The folder of versions.
        manifest: The version's manifest.
        before: The version that it follows, with its rows; without it only a base can be opened.

    Raises:
        ValueError: it does not follow that version, or a file is damaged.
    """
    if before is None:
        if not manifest.is_base:
            raise ValueError("it does not follow the version before")
        return {
            x.path: PublishedRows(x, [_file(folder, manifest, t) for t in x.tables], manifest.rows)
            for x in manifest.collections
        }
    manifest_before, rows = before
    if manifest.lineage != manifest_before.lineage:
        raise ValueError("it does not follow the version before: its lineage is another")
    if _tables(manifest_before) != _tables(manifest):
        raise ValueError("it has other tables than the version before")
    return {
        x.path: rows[x.path].changed(
            [_file(folder, manifest, t) for t in x.tables], [_gone(folder, manifest, t) for t in x.tables]
        )
        for x in manifest.collections
    }


def _file(folder: VersionFolder, manifest: Manifest, table: TableRows) -> RowFile | None:
    config, with_ids = table.config, not (manifest.is_base and table.drawing is None)
    if not with_ids and table.num_rows != config.num_embeddings:
        raise ValueError(f"table {config.name!r} has {table.num_rows} of {config.num_embeddings} rows")
    if table.file is None:
        return None
    width, packed = num_words(config.embedding_dim, manifest.rows), manifest.rows != "float32"
    path = folder.file(manifest, table.file)
    rows = RowFile(path, width, table.num_rows, packed=packed, with_ids=with_ids)
    for ids in rows.ids if table.drawing is None else ():
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < config.num_embeddings:
            raise ValueError(f"{table.file} has rows that table {config.name!r} has not")
    return rows


def _gone(folder: VersionFolder, manifest: Manifest, table: TableRows) -> Integers:
    return _NO_IDS if table.gone_file is None else read_ids(folder.file(manifest, table.gone_file), table.num_gone)


def _tables(manifest: Manifest) -> list[Any]:
    tables = [(x.path, [(t.config, t.drawing) for t in x.tables]) for x in manifest.collections]
    return [manifest.num_dense, manifest.rows, *tables]


def _collection(published: PublishedRows) -> EmbeddingBagCollection:
    """The collection as the model had it, which checks ids and divides means, over published rows."""
    collection = EmbeddingBagCollection(published.tables, device="meta").requires_grad_(False).eval()
    collection.embedding_bags = published
    return collection
