"""Tensors of a state dict that no process holds: their rows lie in stores, and are read and written in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
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
        shape: The shape of the whole tensor; the first dimension counts rows.
        dtype: The element type of what ``read`` returns and ``write`` takes.
        read: ``read(first_row, num_rows)`` returns a copy or a view of that stretch.
        write: ``write(first_row, values)`` overwrites a stretch.
        rank: The number of this process among those that share the work, from 0.
        world_size: The number of processes that share the work; each saves and loads blocks of its own.
        optional: A checkpoint may lack it, and loading that changes nothing.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor] = field(repr=False)
    write: Callable[[int, Tensor], None] = field(repr=False)
    rank: int = 0
    world_size: int = 1
    optional: bool = False

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
        """The tensors that this process writes; by this name torch's planner asks its own distributed tensors."""
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


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Tables of which only some rows exist: they are saved with their ids, under ``<table>.ids``.

    In a state dict it stands, under their common prefix, for all of its tables. The first of the processes that share
    them saves them, for rows may come and go meanwhile; all of those share the loading.

    Args:
        tables: The tables' names, which are parts of the keys.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        live_ids: The ids of the rows that exist, by table.
        read: ``read(table, name, ids)`` returns ``weight`` or a state of rows.
        write: ``write(table, name, ids, values)`` overwrites it, and makes the rows that do not exist.
        clear: ``clear()`` lets no row exist, before those of a checkpoint are written.
        rank: The number of this process among those that share the work, from 0.
        world_size: The number of processes that share the work.
        optional: The states that a checkpoint may lack; they are then those of new rows.
        weight_dtype: The dtype of ``weight``; states are float32.
    """

    tables: tuple[str, ...]
    row_shapes: Mapping[str, tuple[int, ...]]
    live_ids: Callable[[], Mapping[str, Tensor]] = field(repr=False)
    read: Callable[[str, str, Tensor], Tensor] = field(repr=False)
    write: Callable[[str, str, Tensor, Tensor], None] = field(repr=False)
    clear: Callable[[], None] = field(repr=False)
    rank: int = 0
    world_size: int = 1
    optional: Set[str] = frozenset()
    weight_dtype: torch.dtype = torch.float32

    def to_save(self, prefix: str) -> dict[str, Tensor | StoredTensor]:
        """The tensors that this process saves, by keys of the state dict."""
        saved: dict[str, Tensor | StoredTensor] = {}
        for table, ids in self.live_ids().items() if self.rank == 0 else ():
            saved[f"{prefix}.{table}.ids"] = ids
            if ids.numel():
                saved |= self._tensors(prefix, table, ids, rank=0, world_size=1)
        return saved

    def to_load(self, prefix: str, table: str, ids: Tensor) -> dict[str, StoredTensor]:
        """The targets of this process's share of the saved rows of a table, by keys of the state dict."""
        return self._tensors(prefix, table, ids, rank=self.rank, world_size=self.world_size) if ids.numel() else {}

    def _tensors(self, prefix: str, table: str, ids: Tensor, *, rank: int, world_size: int) -> dict[str, StoredTensor]:
        return {
            f"{prefix}.{table}.{name}": StoredTensor(
                shape=torch.Size((ids.numel(), *shape)),
                dtype=self.weight_dtype if name == "weight" else torch.float32,
                read=partial(self._read_stretch, table, name, ids),
                write=partial(self._write_stretch, table, name, ids),
                rank=rank,
                world_size=world_size,
                optional=name in self.optional,
            )
            for name, shape in self.row_shapes.items()
        }

    def _read_stretch(self, table: str, name: str, ids: Tensor, first: int, num_rows: int) -> Tensor:
        return self.read(table, name, ids[first : first + num_rows])

    def _write_stretch(self, table: str, name: str, ids: Tensor, first: int, values: Tensor) -> None:
        self.write(table, name, ids[first : first + values.shape[0]], values)
