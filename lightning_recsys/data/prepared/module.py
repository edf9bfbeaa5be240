"""The data module over a folder of prepared rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.module import CTRDataModule, Split
from lightning_recsys.data.prepared.loader import PreparedLoader
from lightning_recsys.data.prepared.manifest import Manifest
from lightning_recsys.data.prepared.rows import PreparedRows
from lightning_recsys.data.prepared.service import Reader, receive_batches
from lightning_recsys.data.prepared.stream import StreamRequest, read_batches, stream_batches

_SPLITS: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


class PreparedDataModule(CTRDataModule):
    """Rows that ``recipes/prepare.py`` wrote: any number of them, in memory only a window at a time.

    Args:
        root: The folder that was written.
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
        root: str | Path,
        batch_size: int = 2048,
        shuffle_window: int = 65_536,
        reader: Literal["local", "shared"] = "local",
        prefetch_batches: int = 4,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, drop_last=drop_last)
        _check("batch_size", batch_size, "at least 1", ok=batch_size >= 1)
        _check("shuffle_window", shuffle_window, "at least 0", ok=shuffle_window >= 0)
        _check("prefetch_batches", prefetch_batches, "at least 1", ok=prefetch_batches >= 1)
        _check("reader", reader, "local or shared", ok=reader in ("local", "shared"))
        self.root = Path(root)
        self.shuffle_window = shuffle_window
        self.reader = reader
        self.prefetch_batches = prefetch_batches
        self._train_loader: PreparedLoader | None = None
        self._position: dict[str, Any] | None = None
        self._reader: Reader | None = None
        self._address: str | None = None

    @cached_property
    def manifest(self) -> Manifest:
        """What is in the folder."""
        return Manifest.load(self.root)

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return len(self.manifest.dense)

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""
        return {name: feature.num_embeddings for name, feature in self.manifest.features.items()}

    def setup(self, stage: str | None = None) -> None:
        """Check that the shards of the stage's splits are there and whole; those of others when they are asked for."""
        self._position = None
        self._rows: dict[str, PreparedRows] = {}
        for split in _SPLITS.get(stage, ("train", "validation", "test")):
            self.rows(split)
        super().setup(stage)

    def teardown(self, stage: str | None = None) -> None:
        """End the reader process, if this rank has started one; it would also end with this process."""
        self._address = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        super().teardown(stage)

    def has(self, split: Split) -> bool:
        """Whether there are rows of a split."""
        return any(shard.rows for shard in self.manifest.splits[split])

    def rows(self, split: Split) -> PreparedRows | None:
        """The rows of a split; ``None`` if it has none."""
        if not self.has(split):
            return None
        if split not in self._rows:
            self._rows[split] = PreparedRows(self.root, self.manifest, self.manifest.splits[split])
        return self._rows[split]

    def sample_batches(self, count: int) -> list[Batch]:
        """The first rows of the first shard, read in this process."""
        if (rows := self.rows("train")) is None:
            return []
        request = StreamRequest(
            split="train",
            seed=self.seed,
            epoch=0,
            window=0,
            start=0,
            batch_size=self.batch_size,
            drop_last=False,
            rank=0,
            world_size=1,
        )
        return list(islice(read_batches(request, rows), count))

    def train_dataloader(self) -> PreparedLoader | list[PreparedLoader]:  # type: ignore[override]
        """Batches of the training rows in a new order each epoch (always the same one under ``overfit_batches``)."""
        loader: PreparedLoader = super().train_dataloader()  # type: ignore[assignment]
        self._train_loader = loader
        if self._position is not None:
            usual = len(loader)
            loader.load_state_dict(self._position)
            self._position = None
            if self.trainer is not None and len(loader) != usual:
                # The epoch being resumed has another number of batches than those to come, and Lightning asks for the
                # number only where it asks for the loader.
                self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The position in the training rows."""
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next training loader begin at a position: before Lightning asks it for its number of batches."""
        self._position = state_dict

    def _loader(  # type: ignore[override]
        self, split: Split, *, shuffle: Literal["rows", "batches"] | None = None, drop_last: bool = False
    ) -> PreparedLoader | list[PreparedLoader]:
        rows = self.rows(split)
        if rows is None:
            return []
        self._connect()
        share = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
        first = StreamRequest(
            split=split,
            seed=self.seed,
            epoch=0,
            window=self.shuffle_window if shuffle else 0,
            start=0,
            batch_size=self.batch_size,
            drop_last=drop_last,
            rank=share["rank"],
            world_size=share["num_replicas"],
            features=self.selected_fields,
        )
        return PreparedLoader(len(rows), first, stream=self._stream)

    def _stream(self, request: StreamRequest) -> Iterator[Batch]:
        if self.reader == "local":
            return stream_batches(request, self._rows[request.split], ahead=self.prefetch_batches)
        assert self._address is not None
        return receive_batches(self._address, request, slots=self.prefetch_batches)

    def _connect(self) -> None:
        """Agree on the reader process of this machine: the first rank on it starts one, the others are told."""
        if self.reader == "local" or self._address is not None:
            return
        local_rank = 0 if self.trainer is None else self.trainer.local_rank
        if local_rank == 0:
            self._reader = Reader(self.root)
            self._address = self._reader.address
        if torch.distributed.is_available() and torch.distributed.is_initialized() and self.trainer is not None:
            known: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(known, (self.trainer.node_rank, self._address))
            self._address = next(address for node, address in known if address and node == self.trainer.node_rank)


def _check(name: str, value: object, allowed: str, *, ok: bool) -> None:
    if not ok:
        raise ValueError(f"data.{name} must be {allowed}, got {value!r}.")
