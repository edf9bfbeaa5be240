"""Row groups of prepared shards, from memory-mapped files into windows of rows."""

# Shape suffixes: W rows of a window, B batch, K batches, R rows of all of them, N ids, F features, I dense features.

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.prepared.manifest import LABEL, WEIGHTS_SUFFIX, Manifest, Shard
from lightning_recsys.embeddings import SparseFeatures

_COLUMNS_AT_ONCE = 8  # decoded together: a megabyte

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Bag:
    """Ids of a multi-valued feature in a window.

    Args:
        ids: The ids of all rows, one after the other.
        offsets: Where each row's ids start, and the last one's end; int64, shape ``[W + 1]``.
        weights: One for each id, float32.
    """

    ids: NDArray[np.integer]
    offsets: Positions
    weights: NDArray[np.float32] | None

    def take(self, rows: Positions) -> tuple[NDArray[np.int64], Positions, NDArray[np.float32] | None]:
        """Ids, lengths and weights of some rows."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        shift = self.offsets[rows] - (np.cumsum(lengths) - lengths)
        places = np.arange(int(lengths.sum())) + np.repeat(shift, lengths)
        return self.ids[places].astype(np.int64), lengths, None if self.weights is None else self.weights[places]


@dataclass(frozen=True)
class Window:
    """Rows in memory, column by column.

    Args:
        labels_W: Float32.
        dense_WI: Float32.
        ids_FW: Ids of the single-valued features, int32, or int64 where that is too small.
        bags: The multi-valued ones.
        features: Names of all features, in the order of the batches; those in ``bags`` among them.
    """

    labels_W: NDArray[np.float32]
    dense_WI: NDArray[np.float32]
    ids_FW: NDArray[np.integer]
    bags: Mapping[str, Bag]
    features: tuple[str, ...]

    def take(self, rows: Positions) -> Batch:
        """Some rows as a batch in that order; positions int64, shape ``[B]``."""
        return self.take_many(rows[None])[0]

    def take_many(self, rows_KB: Positions) -> list[Batch]:
        """Some rows as ``K`` batches, for little more than one of them costs; they share memory."""
        if self.bags:
            return [self._with_bags(rows) for rows in rows_KB]
        (num_batches, size), rows = rows_KB.shape, rows_KB.ravel()
        ids_FR = np.empty((len(self.ids_FW), len(rows)), dtype=self.ids_FW.dtype)
        self.ids_FW.take(rows, axis=1, out=ids_FR, mode="clip")
        ids_KFB = ids_FR.reshape(len(ids_FR), num_batches, size).swapaxes(0, 1).astype(np.int64, order="C")
        dense_KBI = torch.from_numpy(self.dense_WI.take(rows, axis=0)).view(num_batches, size, self.dense_WI.shape[1])
        labels_KB = torch.from_numpy(self.labels_W.take(rows)).view(num_batches, size)
        return [
            Batch(dense_BI, SparseFeatures(self.features, ids_N), labels_B)
            for dense_BI, ids_N, labels_B in zip(
                dense_KBI.unbind(), torch.from_numpy(ids_KFB).flatten(1).unbind(), labels_KB.unbind(), strict=True
            )
        ]

    def _with_bags(self, rows: Positions) -> Batch:
        values, lengths, weights, single = [], [], [], iter(self.ids_FW)
        weighted = any(bag.weights is not None for bag in self.bags.values())
        for name in self.features:
            bag_weights: NDArray[np.float32] | None = None
            if name in self.bags:
                ids, counts, bag_weights = self.bags[name].take(rows)
            else:
                ids, counts = next(single).take(rows).astype(np.int64), np.ones(len(rows), dtype=np.int64)
            values.append(ids)
            lengths.append(counts)
            weights.append(np.ones(len(ids), dtype=np.float32) if bag_weights is None else bag_weights)
        sparse = SparseFeatures(
            self.features,
            torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            weights=torch.from_numpy(np.concatenate(weights)) if weighted else None,
        )
        dense_BI, labels_B = self.dense_WI.take(rows, axis=0), self.labels_W.take(rows)
        return Batch(torch.from_numpy(dense_BI), sparse, torch.from_numpy(labels_B))


class PreparedRows:
    """The rows of one split of a folder of prepared rows.

    Files are memory-mapped; a page of a column is checked against its checksum when it is read.

    Args:
        root: The folder of prepared rows.
        manifest: What was prepared: the columns, and the size and checksums of each shard.
        shards: The shards of the split, in their order.

    Raises:
        ValueError: a shard is missing or has another size than the manifest says.
    """

    def __init__(self, root: Path, manifest: Manifest, shards: Sequence[Shard]) -> None:
        self._root = root
        self._manifest = manifest
        self._shards = tuple(shards)
        weighted = [name + WEIGHTS_SUFFIX for name, feature in manifest.features.items() if feature.weighted]
        self._columns = [LABEL, *manifest.dense, *manifest.features, *weighted]
        for shard in self._shards:
            path = root / shard.path
            if not path.is_file():
                raise ValueError(f"{path} is missing. Prepare the rows again.")
            if path.stat().st_size != shard.bytes:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes where {shard.bytes} were written: it is truncated or was "
                    "changed. Prepare the rows again."
                )
        size = manifest.group_rows
        starts = [(shard, start) for shard in self._shards for start in range(0, shard.rows, size)]
        self._groups = [(shard, start // size) for shard, start in starts]  # the shard of each, and its number there
        self.group_rows = np.array([min(size, shard.rows - start) for shard, start in starts], dtype=np.int64)
        """Rows of each row group, in the order of the shards."""

    def __len__(self) -> int:
        return int(self.group_rows.sum())

    def select(self, features: Sequence[str]) -> PreparedRows:
        """The same rows with some of the categorical features only: no other column is read."""
        kept = {name: self._manifest.features[name] for name in features}
        return PreparedRows(self._root, replace(self._manifest, features=kept), self._shards)

    def take(self, rows: Tensor) -> Batch:
        """The rows with these numbers (int64, shape ``[B]``), as one batch in that order.

        Reads every row group that one of them is in: good for a look at the data, not for training.
        """
        starts = np.concatenate([[0], np.cumsum(self.group_rows)])
        group = np.searchsorted(starts, rows.numpy(), side="right") - 1
        groups, place = np.unique(group, return_inverse=True)
        window_starts = np.concatenate([[0], np.cumsum(self.group_rows[groups])])
        return self.window(groups).take(rows.numpy() - starts[group] + window_starts[place])

    def window(self, groups: NDArray[np.integer]) -> Window:
        """Read some row groups, one after the other.

        Raises:
            ValueError: a shard is damaged; the message names it.
        """
        size = int(self.group_rows[groups].sum())
        dense, features = self._manifest.dense, self._manifest.features
        single = [name for name, feature in features.items() if not feature.bag]
        small = all(features[name].num_embeddings <= 1 << 31 for name in single)
        labels_W = _pages((size,), np.float32)
        dense_WI = _pages((size, len(dense)), np.float32)
        ids_FW = _pages((len(single), size), np.int32 if small else np.int64)
        bag_names = [name for name, feature in features.items() if feature.bag]
        lists: dict[str, list[pa.ListArray]] = {
            name: []
            for bag in bag_names
            for name in (bag, bag + WEIGHTS_SUFFIX)
            if name == bag or features[bag].weighted
        }
        places = {
            LABEL: labels_W,
            **{name: dense_WI[:, i] for i, name in enumerate(dense)},
            **{name: ids_FW[f] for f, name in enumerate(single)},
        }
        stop = 0
        for group in groups.tolist():
            start, stop = stop, stop + int(self.group_rows[group])
            for table in self._read(group):
                for name in table.column_names:
                    if name in lists:
                        lists[name] += table[name].chunks
                    else:
                        places[name][start:stop] = _numbers(table, name)
        bags = {
            name: _bag(lists[name], lists.get(name + WEIGHTS_SUFFIX) if features[name].weighted else None)
            for name in bag_names
        }
        pa.default_memory_pool().release_unused()  # what decoding took, which Arrow would keep for later
        return Window(labels_W, dense_WI, ids_FW, bags, tuple(features))

    def _read(self, group: int) -> Iterator[pa.Table]:
        """A row group, a few columns at a time.

        Pages of a file count as this process's memory for as long as it is mapped, so it is for one row group only.
        """
        shard, number = self._groups[group]
        path = self._root / shard.path
        try:
            file = pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
            with closing(file):
                for first in range(0, len(self._columns), _COLUMNS_AT_ONCE):
                    columns = self._columns[first : first + _COLUMNS_AT_ONCE]
                    table = file.read_row_group(number, columns=columns, use_threads=False)
                    if len(table) != self.group_rows[group]:
                        raise ValueError(
                            f"{path} is damaged: row group {number} has {len(table)} rows where "
                            f"the manifest expects {self.group_rows[group]}. Prepare the rows again."
                        )
                    yield table
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} is damaged: {error} Prepare the rows again.") from error


def _pages(shape: tuple[int, ...], kind: type[Any]) -> NDArray[Any]:
    """An uninitialised array that goes back to the system when it is let go.

    The C library keeps freed memory of this size for later, where smaller pieces cut it up: ten megabytes nobody uses.
    """
    size = math.prod(shape) * np.dtype(kind).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), kind, math.prod(shape)).reshape(shape)


def _numbers(table: pa.Table, name: str) -> NDArray[Any]:
    chunks = table[name].chunks
    return _array(chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks))


def _array(values: pa.Array) -> NDArray[Any]:
    """The same memory; ``to_numpy`` would import pandas where that is installed, which takes 16 MiB."""
    array: NDArray[Any] = np.from_dlpack(values)
    return array


def _bag(ids: Sequence[pa.ListArray], weights: Sequence[pa.ListArray] | None) -> Bag:
    lengths = np.concatenate([np.diff(_array(part.offsets)) for part in ids]).astype(np.int64)
    flat = np.concatenate([_array(part.flatten()) for part in ids])
    flat_weights = None if weights is None else np.concatenate([_array(part.flatten()) for part in weights])
    return Bag(flat, np.concatenate([[0], np.cumsum(lengths)]), flat_weights)
