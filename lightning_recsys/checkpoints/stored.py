"""Tensors of a state dict that no process holds: their rows lie in stores, and are read and written in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

BLOCK_BYTES = 64 << 20  # what a process holds of a table while it saves or loads it


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that is read and written a stretch of rows at a time.

    In a state dict it stands for this process's share of the rows.

    Args:
        shape: Its whole shape; rows first.
        dtype: Its element type.
        read: ``read(first_row, num_rows)`` returns a copy or a view of that stretch.
        write: ``write(first_row, values)`` overwrites a stretch.
        rank: This process, of those that share the work.
        world_size: How many share it.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor] = field(repr=False)
    write: Callable[[int, Tensor], None] = field(repr=False)
    rank: int = 0
    world_size: int = 1

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each block that this process saves or loads."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        rows = max(1, min(BLOCK_BYTES // max(row_bytes, 1), -(-self.shape[0] // self.world_size)))
        for first in range(rows * self.rank, self.shape[0], rows * self.world_size):
            yield first, min(rows, self.shape[0] - first)

    def chunk(self, first: int, num_rows: int) -> ChunkStorageMetadata:
        """A stretch of rows in torch's words."""
        offsets = (first, *(0 for _ in self.shape[1:]))
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size((num_rows, *self.shape[1:])))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What this process writes; by this name torch's planner asks its own distributed tensors."""
        properties = TensorProperties(dtype=self.dtype)
        chunks = [self.chunk(*block) for block in self.blocks()]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in chunks
        ]

    def block_at(self, index: MetadataIndex) -> Tensor:
        """The block of this process that torch's plan names."""
        assert index.offset is not None
        first = index.offset[0]
        return self.read(first, dict(self.blocks())[first])
