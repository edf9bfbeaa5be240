"""The data module over folders of prepared rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import Shuffle
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.options import Split, check_option
from lightning_recsys.data.prepared.compatibility import check_encoding, describe_encoding
from lightning_recsys.data.prepared.manifest import Manifest
from lightning_recsys.data.prepared.rows import PreparedRows
from lightning_recsys.data.prepared.service import Reader, ReaderEndedError, receive_batches
from lightning_recsys.data.prepared.stream import PreparedSource, StreamRequest, stream_batches

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

_SPLITS: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


class PreparedReader(CTRDataModule):
    """Base of the data modules whose rows are in Parquet shards: in memory only a window of them at a time.

    Args:
        batch_size: Rows per batch and rank.
        shuffle_window: Training rows are shuffled among at least so many, which are in memory together (156 bytes each
            for 13 dense and 26 single-valued features); the windows are made of row groups from all over the
            files. 0 keeps the order of the raw files.
        reader: ``local``: every rank reads for itself. ``shared``: one process for all ranks of a machine reads, and
            hands batches over through shared memory.
        prefetch_batches: Batches that are made ahead, in the background; small ones in packs of 2,048 rows.
        seed: Seed of the order; a new order each epoch.
        drop_last: Leave out the training rows that do not fill a batch on every rank.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        shuffle_window: int,
        reader: Literal["local", "shared"],
        prefetch_batches: int,
        seed: int | None,
        drop_last: bool,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, drop_last=drop_last)
        check_option("data.batch_size", batch_size, "at least 1", ok=batch_size >= 1)
        check_option("data.shuffle_window", shuffle_window, "at least 0", ok=shuffle_window >= 0)
        check_option("data.prefetch_batches", prefetch_batches, "at least 1", ok=prefetch_batches >= 1)
        check_option("data.reader", reader, "local or shared", ok=reader in ("local", "shared"))
        self.shuffle_window = shuffle_window
        self.reader = reader
        self.prefetch_batches = prefetch_batches
        self._rows: dict[Split, PreparedRows] = {}
        self._without_reader: set[Path] = set()  # folders whose reader has ended
        self._readers: dict[Path, Reader] = {}  # the processes that this rank has started, by the folder they read
        self._addresses: dict[Path, str] = {}  # and where those of this machine listen
        self._compared: set[tuple[Path, Split]] = set()  # of which splits all ranks have the same rows

    def folder(self, split: Split) -> tuple[Path, Manifest]:
        """The folder that holds a split, and what is in it."""
        raise NotImplementedError

    def teardown(self, stage: str | None = None) -> None:
        """End the reader processes that this rank has started; they would also end with this process."""
        self._addresses.clear()
        while self._readers:
            self._readers.popitem()[1].close()
        super().teardown(stage)

    def rows(self, split: Split) -> PreparedRows | None:
        """The rows of a split; ``None`` if it has none."""
        if not self.has(split):
            return None
        if split not in self._rows:
            root, manifest = self.folder(split)
            self._rows[split] = PreparedRows(root, manifest, manifest.splits[self._place(split)])
        return self._rows[split]

    def _source(self, split: Split, shuffle: Shuffle | None) -> PreparedSource | None:
        if (rows := self.rows(split)) is None:
            return None
        root, manifest = self.folder(split)
        self._compare(root, manifest, self._place(split))
        self._connect(root)
        window = self.shuffle_window if shuffle else 0
        return PreparedSource(
            len(rows), self._place(split), window, self.selected_fields, partial(self._stream, root, rows)
        )

    def _place(self, split: Split) -> Split:
        """The split of the folder that has the rows of a split."""
        return split

    def _stream(self, root: Path, rows: PreparedRows, request: StreamRequest) -> Iterator[Batch]:
        if self.reader == "local" or root in self._without_reader:
            return stream_batches(request, rows, ahead=self.prefetch_batches)
        return self._shared_stream(root, rows, request)

    def _shared_stream(self, root: Path, rows: PreparedRows, request: StreamRequest) -> Iterator[Batch]:
        """The batches that the machine's reader makes; where it ends early this worker makes the rest."""
        served = 0
        try:
            for batch in receive_batches(self._addresses[root], request, slots=self.prefetch_batches):
                served += 1
                yield batch
        except ReaderEndedError as error:
            if root not in self._without_reader:
                self._without_reader.add(root)
                log.warning("%s This worker reads %s by itself from now on.", error, root)
            yield from islice(stream_batches(request, rows, ahead=self.prefetch_batches), served, None)

    def _compare(self, root: Path, manifest: Manifest, place: Split) -> None:
        """Refuse ranks whose machines have prepared other rows: each would take its share of other ones.

        Raises:
            ValueError: machines have prepared other rows than each other; it is raised on every rank.
        """
        is_alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        if self.trainer is None or is_alone or (root, place) in self._compared:
            return
        found: list[Any] = [None] * torch.distributed.get_world_size()
        num_rows = sum(shard.rows for shard in manifest.splits[place])
        torch.distributed.all_gather_object(found, (manifest.layout_digest(place), num_rows, str(root)))
        by_digest: dict[str, list[int]] = {}
        for rank, (digest, *_) in enumerate(found):
            by_digest.setdefault(digest, []).append(rank)
        if len(by_digest) > 1:
            told = "; ".join(
                f"rank {', '.join(map(str, ranks))}: {found[ranks[0]][1]:,} rows in {found[ranks[0]][2]} ({digest})"
                for digest, ranks in by_digest.items()
            )
            raise ValueError(
                f"the ranks have prepared different rows of {place!r} (their number, features or order): {told}."
                " Prepare them once, in a folder that all machines see, or from the same files with the same options."
            )
        self._compared.add((root, place))

    def _connect(self, root: Path) -> None:
        """Agree on the reader process of this machine: the first rank on it starts one, the others are told.

        A rank that is alone, as one that takes a dead worker's place is at first, starts its own.
        """
        if self.reader == "local" or root in self._addresses:
            return
        address = None
        group = torch.distributed
        is_alone = group.is_available() and group.is_initialized() and group.get_world_size() == 1
        if self.trainer is None or self.trainer.local_rank == 0 or is_alone:
            self._readers[root] = Reader(root)
            address = self._readers[root].address
        if torch.distributed.is_available() and torch.distributed.is_initialized() and self.trainer is not None:
            known: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(known, (self.trainer.node_rank, address))
            address = next(address for node, address in known if address and node == self.trainer.node_rank)
        assert address is not None
        self._addresses[root] = address


class PreparedDataModule(PreparedReader):
    """Rows that ``recipes/prepare.py`` wrote: any number of them, in memory only a window at a time.

    A checkpoint says how the rows that it was trained on were encoded; :meth:`load_state_dict` refuses a folder whose
    rows are encoded otherwise.

    Args:
        root: The folder that ``recipes/prepare.py`` wrote.
        batch_size: Number of rows in the batch of one rank.
        shuffle_window: Number of rows that are shuffled among each other; see :class:`PreparedReader`, also for what
            follows.
        reader: Whether each worker reads its rows (``local``) or one process of the machine reads for all (``shared``).
        prefetch_batches: Number of batches that are made ahead.
        seed: Seed of the order of the training rows.
        drop_last: Whether training rows that do not fill a batch on every rank are left out.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        root: str | Path,
        batch_size: int = 2048,
        shuffle_window: int = 65_536,
        reader: Literal["local", "shared"] = "local",
        prefetch_batches: int = 4,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            shuffle_window=shuffle_window,
            reader=reader,
            prefetch_batches=prefetch_batches,
            seed=seed,
            drop_last=drop_last,
        )
        self.root = Path(root)

    @cached_property
    def manifest(self) -> Manifest:
        """The folder's manifest."""
        return Manifest.load(self.root)

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return len(self.manifest.dense)

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""
        return self.manifest.num_embeddings

    @cached_property
    def _encoding(self) -> dict[str, Any]:
        """The rules by which raw values became the folder's ids and numbers; read once, for all checkpoints."""
        return describe_encoding(self.root, self.manifest)

    def state_dict(self) -> dict[str, Any]:
        """The encoding of the rows, and the position in the training rows."""
        return {"encoding": self._encoding, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run was whose rows are encoded as these are.

        Raises:
            ValueError: they are encoded otherwise. Checkpoints of earlier versions do not tell.
        """
        if "encoding" in state_dict:
            check_encoding(state_dict["encoding"], self.root, self._encoding)
        super().load_state_dict(state_dict)

    def folder(self, split: Split) -> tuple[Path, Manifest]:
        """See the base class."""
        return self.root, self.manifest

    def setup(self, stage: str | None = None) -> None:
        """Check that the shards of the stage's splits are there and whole; those of others when they are asked for."""
        self._position = None
        self._rows.clear()
        for split in _SPLITS.get(stage, ("train", "validation", "test")):
            self.rows(split)
        super().setup(stage)

    def has(self, split: Split) -> bool:
        """Whether there are rows of a split."""
        return any(shard.rows for shard in self.manifest.splits[split])
