"""Training from Ray Data: the shard of each worker, in batches, with a position that a checkpoint keeps."""

# Shape suffixes: B batch, N ids of the batch.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from ray.data import DataIterator
from ray.train import get_dataset_shard

from lightning_recsys.data import Batch
from lightning_recsys.data.hashing import key64
from lightning_recsys.data.loader import Request, Shuffle
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.options import Split, check_option
from lightning_recsys.data.preparation.encoding import Encoding, check_features, describe_features, embedded
from lightning_recsys.data.prepared.manifest import LABEL
from lightning_recsys.data.tables.schema import Schema, feature_name
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.ray.encoding import EncodedDatasets


class RayDataModule(CTRDataModule):
    """Rows of data sets of Ray Data, in the workers of Ray Train.

    Each worker has as many rows as the others, its share of each data set in a fixed order: of ``n`` rows that are not
    a multiple of the workers the last few are left out. Under DES, whose processes have batches in common, each worker
    reads all rows. A checkpoint inside an epoch holds the position, and what was learned of the training rows; as many
    workers go on from it with the very next batch, of the same size where rows are shuffled.

    Args:
        rows: The encoded data sets, as :func:`encode_datasets` made them.
        batch_size: Number of rows in the batch of one rank.
        shuffle_rows: Training rows are shuffled among at least so many, which are in memory; 0 keeps the order of the
            data set. Its blocks come in the same order in each epoch: shuffle them by Ray Data
            (``randomize_block_order(seed=0)``) where that is too little. Without a seed they would come in another
            order each time, and a resumed epoch would have other rows.
        prefetch_batches: Number of batches that Ray fetches ahead.
        seed: Seed of the shuffling, which is another one in each epoch.
        drop_last: Leave out the training rows that do not fill a batch on every rank.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        rows: EncodedDatasets,
        *,
        batch_size: int = 2048,
        shuffle_rows: int = 0,
        prefetch_batches: int = 2,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, drop_last=drop_last)
        check_option("data.batch_size", batch_size, "at least 1", ok=batch_size >= 1)
        check_option("data.shuffle_rows", shuffle_rows, "at least 0", ok=shuffle_rows >= 0)
        check_option("data.prefetch_batches", prefetch_batches, "at least 1", ok=prefetch_batches >= 1)
        self._encoded = rows
        self.shuffle_rows, self.prefetch_batches = shuffle_rows, prefetch_batches

    @property
    def schema(self) -> Schema:
        """The meaning of the columns."""
        return self._encoded.schema

    @property
    def encoding(self) -> Encoding:
        """The vocabularies and statistics of the training rows."""
        return self._encoded.encoding

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return len(self.schema.numeric)

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""
        return self.encoding.fields

    def has(self, split: Split) -> bool:
        """Whether there are rows of a split."""
        return self._num_rows(split) > 0

    def rows(self, split: Split) -> None:
        """Nothing: rows come in one order, and cannot be taken by their numbers."""

    def state_dict(self) -> dict[str, Any]:
        """The vocabularies and statistics of the training rows, and the position in them."""
        features = describe_features(self.schema)
        return {"encoder": self.encoding.state_dict(), "features": features, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run was whose rows were encoded as these are.

        Raises:
            ValueError: they were encoded otherwise, as where the training rows are others.
        """
        super().load_state_dict(state_dict)
        check_features(state_dict["features"], self.schema)
        if Encoding.from_state_dict(self.schema, state_dict["encoder"]) != self.encoding:
            raise ValueError(
                "the checkpoint was trained on rows with other vocabularies or statistics: ids would name other values."
                " Encode the data sets that it was trained on."
            )

    def _num_rows(self, split: Split) -> int:
        return self._encoded.rows_read.get(split, {}).get("used", 0)

    def _source(self, split: Split, shuffle: Shuffle | None) -> Shard | None:
        if not self.has(split):
            return None
        shard = get_dataset_shard(split)
        if shard is None:
            raise RuntimeError(
                f"Ray has no data set {split!r} for this worker: give TorchTrainer(datasets=rows.datasets), or"
                " fit(..., datasets=rows)."
            )
        names = tuple(feature_name(name) for name in embedded(self.schema))
        return Shard(
            shard,
            self._num_rows(split),
            num_dense=self.num_dense,
            names=names,
            has_bags=bool(self.schema.multi_valued),
            features=self.selected_fields,
            shuffle_rows=self.shuffle_rows if shuffle is not None else 0,
            prefetch_batches=self.prefetch_batches,
        )


@dataclass(frozen=True)
class Shard:
    """A worker's part of a data set, as a :class:`~lightning_recsys.data.loader.BatchLoader` asks for its batches.

    Args:
        iterator: Ray's iterator over it.
        num_rows: Rows of the whole data set.
        num_dense: Number of dense features.
        names: Names of the categorical features.
        has_bags: Whether some of them have lists of ids.
        features: Those of them that batches have; ``None`` for all.
        shuffle_rows: Rows that are shuffled among each other; 0 for none.
        prefetch_batches: Batches that are fetched ahead.
    """

    iterator: DataIterator
    num_rows: int
    num_dense: int
    names: tuple[str, ...]
    has_bags: bool
    features: Sequence[str] | None
    shuffle_rows: int
    prefetch_batches: int

    @property
    def num_parts(self) -> int:
        """How many parts the data set was cut into, of which this is one; 1 where each worker has all."""
        world_size = getattr(self.iterator, "world_size", None)
        return 1 if world_size is None else world_size()

    def __len__(self) -> int:
        return self.num_rows - self.num_rows % self.num_parts  # Ray gives each worker equally many

    def batches(self, request: Request) -> Iterator[Batch]:
        """The batches of a rank, from a position of an epoch on.

        Raises:
            ValueError: Ray has dealt the data set to another number of workers than the strategy deals batches to.
            RuntimeError: the data set has fewer rows than when it was encoded.
        """
        if self.num_parts not in (1, request.world_size):
            raise ValueError(
                f"Ray has dealt the rows to {self.num_parts} workers, and the strategy deals batches to"
                f" {request.world_size}: TorchTrainer(dataset_config=rows.data_config(split=False)) gives all rows to"
                " each worker."
            )
        steps = request.steps(len(self))
        slices = [steps.slice(step, rank=request.rank) for step in range(len(steps))]
        if self.num_parts > 1:  # of this part: its rows are this rank's alone
            start = request.start // self.num_parts
            slices = [(start, start := start + stop - first) for first, stop in slices]
        options: dict[str, Any] = {}
        if self.shuffle_rows:
            seed = int(key64(request.seed, request.epoch) >> 33)  # 31 bits, as NumPy takes them
            options = {"local_shuffle_buffer_size": self.shuffle_rows, "local_shuffle_seed": seed}
        tables: Any = self.iterator.iter_batches(
            batch_format="pyarrow",
            batch_size=request.batch_size,
            prefetch_batches=self.prefetch_batches,
            **options,
        )
        with closing(iter(tables)) as found:  # whoever stops inside an epoch lets Ray go on to the next one
            for table in _cut(found, slices):
                batch = self._batch(table)
                yield batch if self.features is None else batch.select(self.features)

    def order(self, request: Request) -> dict[str, int | str | None]:
        """The key that the order depends on beside the seed; Ray draws from its buffer a batch at a time."""
        shuffled = {"batch_size": request.batch_size} if self.shuffle_rows else {}
        return {"parts": self.num_parts, "shuffle_rows": self.shuffle_rows, **shuffled}

    def _batch(self, table: pa.Table) -> Batch:
        columns = [column.combine_chunks() for column in table.columns]
        named = dict(zip(table.column_names, columns, strict=True))
        labels = torch.from_numpy(_array(named[LABEL]))
        dense = [_array(column) for column in columns[1 : 1 + self.num_dense]]
        dense_BI = torch.from_numpy(np.stack(dense, axis=1)) if dense else torch.empty(len(table), 0)
        ids, lengths = [], []
        for name in self.names:
            column = named[name]
            if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                ids.append(_array(column.flatten()))
                lengths.append(np.diff(_array(column.offsets)))
            else:
                ids.append(_array(column))
                lengths.append(np.ones(len(table), dtype=np.int64))
        values_N = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids], dtype=np.int64))
        of_bags = torch.from_numpy(np.concatenate(lengths, dtype=np.int64)) if self.has_bags else None
        return Batch(dense_BI, SparseFeatures(self.names, values_N, of_bags), labels)


def _cut(tables: Iterator[pa.Table], slices: Sequence[tuple[int, int]]) -> Iterator[pa.Table]:
    """The rows of each slice, of tables that come one after the other; the slices rise."""
    rest, position = pa.table({}), 0  # what came and was not taken, and the number of its first row
    for first, stop in slices:
        while (there := position + len(rest)) < stop:
            if (table := next(tables, None)) is None:
                raise RuntimeError(f"a data set of Ray has {there:,} rows of {stop:,} that it had when it was encoded.")
            if there <= first:  # nothing of the rest is wanted
                rest, position = table, there
            else:
                rest = pa.concat_tables([rest, table])
        yield rest.slice(first - position, stop - first)
        rest, position = rest.slice(stop - position), stop


def _array(column: pa.Array) -> np.ndarray:
    array: np.ndarray = np.from_dlpack(column)
    return array if array.flags.writeable else array.copy()
