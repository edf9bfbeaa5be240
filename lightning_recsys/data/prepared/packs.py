"""Batches packed into one piece of memory: many small ones cost no more to hand over than one that is large."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.batch import Batch
from lightning_recsys.embeddings import SparseFeatures

_PACK_BYTES = 1 << 19
_MOST_BATCHES = 64


def packs(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """The batches in packs of half a megabyte; one with an error behind it comes before the error."""
    pack: list[Batch] = []
    size = 0
    try:
        for batch in batches:
            pack.append(batch)
            size += sum(tensor.nbytes for tensor in _tensors(batch))
            if size >= _PACK_BYTES or len(pack) == _MOST_BATCHES:
                yield pack
                pack, size = [], 0
    except ValueError:
        if pack:
            yield pack
        raise
    if pack:
        yield pack


@dataclass(frozen=True)
class PackLayout:
    """How batches lie in memory: number of batches, rows and ids of each, then their numbers, eight bytes aligned.

    Args:
        keys: Names of the features.
        num_dense: Dense features.
        has_lengths: Whether features are bags.
        has_weights: Whether their ids have weights.

    >>> sparse = SparseFeatures(("a",), torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
    >>> batch = Batch(torch.ones(2, 3), sparse, torch.zeros(2))
    >>> layout = PackLayout.of(batch)
    >>> with mmap.mmap(-1, layout.size([batch, batch])) as memory:
    ...     layout.write([batch, batch], memory, 0)
    ...     _, copy = layout.unpack(np.frombuffer(bytes(memory), dtype=np.uint8).copy())
    >>> copy.sparse.values.tolist(), copy.sparse.lengths.tolist(), copy.dense.shape
    ([7, 8, 9], [1, 2], torch.Size([2, 3]))
    """

    keys: Sequence[str]
    num_dense: int
    has_lengths: bool
    has_weights: bool

    @classmethod
    def of(cls, batch: Batch) -> PackLayout:
        """That of batches like this one."""
        sparse = batch.sparse
        return cls(sparse.keys, batch.dense.shape[1], sparse.lengths is not None, sparse.weights is not None)

    def size(self, pack: Sequence[Batch]) -> int:
        """Bytes that a pack takes."""
        return 8 * (1 + 2 * len(pack)) + sum(_padded(x.nbytes) for batch in pack for x in _tensors(batch))

    def write(self, pack: Sequence[Batch], memory: mmap.mmap, start: int) -> None:
        """Write a pack into memory, from an offset on that is a multiple of eight."""
        head = [len(pack), *(count for batch in pack for count in (len(batch), len(batch.sparse.values)))]
        place = np.frombuffer(memory, np.uint8, self.size(pack), start)
        place[: 8 * len(head)].view(np.int64)[:] = head
        end = 8 * len(head)
        for batch in pack:
            for tensor in _tensors(batch):
                numbers = tensor.numpy()
                place[end : end + numbers.nbytes].view(numbers.dtype)[:] = numbers.reshape(-1)
                end += _padded(numbers.nbytes)

    def unpack(self, pack: NDArray[np.uint8]) -> Iterator[Batch]:
        """The batches of a pack, which share its memory."""
        buffer = torch.from_numpy(pack)
        integers, floats = buffer.view(torch.int64), buffer.view(torch.float32)
        num_batches = int(integers[0])
        counts = integers[1 : 1 + 2 * num_batches].tolist()
        end = 1 + 2 * num_batches  # in units of eight bytes
        keys, width = tuple(self.keys), self.num_dense

        def take(count: int, *, wide: bool) -> Tensor:
            nonlocal end
            start = end
            if wide:
                end += count
                return integers[start:end]
            end += (count + 1) // 2
            return floats[2 * start : 2 * start + count]

        for rows, ids in zip(counts[::2], counts[1::2], strict=True):
            dense = take(rows * width, wide=False).view(rows, width)
            labels = take(rows, wide=False)
            values = take(ids, wide=True)
            lengths = take(rows * len(keys), wide=True) if self.has_lengths else None
            weights = take(ids, wide=False) if self.has_weights else None
            yield Batch(dense, SparseFeatures(keys, values, lengths=lengths, weights=weights), labels)


def _tensors(batch: Batch) -> list[Tensor]:
    """In the order in which they lie in memory."""
    sparse = batch.sparse
    return [x for x in (batch.dense, batch.labels, sparse.values, sparse.lengths, sparse.weights) if x is not None]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
