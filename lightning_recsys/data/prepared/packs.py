"""Batches packed into one piece of memory: many small ones cost no more to hand over than one that is large."""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.batch import Batch


def take_apart(batches: Sequence[Batch]) -> tuple[bytes, list[memoryview]]:
    """A pickle of batches without the numbers in their tensors, and these, one piece for each tensor.

    >>> from lightning_recsys.embeddings import SparseFeatures
    >>> batch = Batch(torch.ones(2, 3), SparseFeatures(("a", "b"), torch.arange(4)), torch.zeros(2))
    >>> head, pieces = take_apart([batch, batch])
    >>> sizes = [piece.nbytes for piece in pieces]
    >>> with mmap.mmap(-1, padded(sizes)) as memory:
    ...     write(pieces, memory, 0)
    ...     _, copy = put_together(head, sizes, np.frombuffer(bytes(memory), dtype=np.uint8).copy())
    >>> copy.sparse.keys, copy.sparse.values.tolist(), copy.dense.shape
    (('a', 'b'), [0, 1, 2, 3], torch.Size([2, 3]))
    """
    head, pieces = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickle.Pickler(head, protocol=5, buffer_callback=pieces.append)
    pickler.dispatch_table = {Tensor: lambda tensor: (_tensor, (tensor.numpy(),))}  # numbers of arrays are left out
    pickler.dump(batches)
    return head.getvalue(), [piece.raw() for piece in pieces]


def put_together(head: bytes, sizes: Sequence[int], memory: NDArray[np.uint8]) -> list[Batch]:
    """The batches that were taken apart, which share the memory that their numbers were written to.

    Args:
        head: The pickle of :func:`take_apart`.
        sizes: Number of bytes of each piece.
        memory: The numbers, as :func:`write` laid them out: each piece begins at a multiple of eight.
    """
    starts = accumulate((padded([size]) for size in sizes), initial=0)
    pieces = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    batches: list[Batch] = pickle.loads(head, buffers=pieces)  # noqa: S301 - of a process that this one has started
    return batches


def write(pieces: Sequence[memoryview], memory: mmap.mmap, start: int) -> None:
    """Write pieces into memory, one after the other, from an offset on that is a multiple of eight."""
    for piece in pieces:
        memory[start : start + piece.nbytes] = piece
        start += padded([piece.nbytes])


def padded(sizes: Sequence[int]) -> int:
    """Bytes that pieces of these sizes take, each of which begins at a multiple of eight."""
    return sum(-(-size // 8) * 8 for size in sizes)


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array)
