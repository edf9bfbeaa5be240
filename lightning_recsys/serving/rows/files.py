"""Rows in Arrow IPC files: written block by block, and mapped by any number of processes, which then share them.

A file has a column ``weight`` (lists of float32 of one length; of packed rows, of int32 words) and, unless row ``i`` is
that of id ``i``, a column ``id`` (int64, rising as unsigned numbers). Every record batch but the last has the same
number of rows, a power of two.
"""

# Shape suffixes: U rows, W numbers or words of a row.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

BLOCK_BYTES = 1 << 24
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def block_rows(width: int) -> int:
    """Rows of each record batch but the last, each of so many words of 4 bytes.

    >>> block_rows(16)
    262144
    """
    return 1 << max((BLOCK_BYTES // (4 * width)).bit_length() - 1, 0)


class RowWriter:
    """Writes the rows of one table; a context manager.

    Args:
        file: The file to write to.
        width: Number of elements of a row: floats, or words of a packed row.
        packed: Whether rows are packed into words.
        with_ids: Whether each row is stored with its id.
    """

    def __init__(self, file: IO[bytes], width: int, *, packed: bool, with_ids: bool) -> None:
        self._schema = _schema(width, packed=packed, with_ids=with_ids)
        self._writer = pa.ipc.new_file(file, self._schema)
        self._size, self._with_ids = block_rows(width), with_ids
        self._waiting: list[tuple[Integers | None, NDArray[Any]]] = []  # less than a block
        self._num_waiting = 0
        self.num_rows = 0

    def write(self, rows_UW: Tensor, ids_U: Tensor | None = None) -> None:
        """Add rows."""
        values, ids = rows_UW.contiguous().numpy(), None if ids_U is None else ids_U.contiguous().numpy()
        while len(values):
            room = self._size - self._num_waiting
            self._waiting.append((None if ids is None else ids[:room], values[:room]))
            self._num_waiting += len(values[:room])
            values, ids = values[room:], None if ids is None else ids[room:]
            if self._num_waiting == self._size:
                self._write_batch()
        self.num_rows += len(rows_UW)

    def _write_batch(self) -> None:
        values = _joined([x for _, x in self._waiting]).reshape(-1)
        columns = [pa.FixedSizeListArray.from_arrays(pa.array(values), type=self._schema.field("weight").type)]
        if self._with_ids:
            columns.insert(0, pa.array(_joined([x for x, _ in self._waiting if x is not None])))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._waiting, self._num_waiting = [], 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None and self._num_waiting:
            self._write_batch()
        self._writer.close()


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class RowFile:
    """The rows of a file, mapped.

    Args:
        path: Path of the file.
        width: Number of elements of a row: floats, or words of a packed row.
        num_rows: Number of rows in the file.
        packed: Whether rows are packed into words.
        with_ids: Whether the file has the id of each row.

    Attributes:
        blocks: The rows, float32 or words, ``[U, W]`` each.
        ids: The ids of each block; empty arrays where the file has none.

    Raises:
        ValueError: the file is another.
    """

    def __init__(self, path: Path, width: int, num_rows: int, *, packed: bool, with_ids: bool) -> None:
        self.num_rows = num_rows
        self.blocks: list[NDArray[Any]] = []
        self.ids: list[Integers] = []
        size = block_rows(width)
        for number, batch in enumerate(_batches(path, _schema(width, packed=packed, with_ids=with_ids))):
            if batch.num_rows != min(size, num_rows - number * size):
                raise ValueError(f"{path.name} has blocks of other sizes")
            weight = batch.column("weight")
            values = weight.flatten().to_numpy(zero_copy_only=True)
            self.blocks.append(values.reshape(-1, width))
            self.ids.append(batch.column("id").to_numpy(zero_copy_only=True) if with_ids else np.empty(0, np.int64))
        if sum(map(len, self.blocks)) != num_rows:
            raise ValueError(f"{path.name} has {sum(map(len, self.blocks))} rows and not {num_rows}")


def write_ids(file: IO[bytes], ids_U: Tensor) -> None:
    """Write ids alone, of rows that are no more."""
    schema = pa.schema([_ID])
    with pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(ids_U.numpy())], schema=schema))


def read_ids(path: Path, count: int) -> Integers:
    """The ids of a file of :func:`write_ids`.

    Raises:
        ValueError: the file is another.
    """
    found = [batch.column("id").to_numpy(zero_copy_only=True) for batch in _batches(path, pa.schema([_ID]))]
    ids: Integers = np.concatenate([np.empty(0, np.int64), *found])
    if len(ids) != count:
        raise ValueError(f"{path.name} has {len(ids)} ids and not {count}")
    return ids


def _batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            if reader.schema != schema:
                raise ValueError(f"{path.name} has columns {reader.schema.names} of other types")
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate()
                if any(column.null_count for column in _flat(batch.columns)):
                    raise ValueError(f"{path.name} has missing values")
                yield batch
    except pa.ArrowException as error:
        raise ValueError(f"{path.name} cannot be read ({error!s:.120})") from error


def _flat(columns: Sequence[pa.Array]) -> Iterator[pa.Array]:
    for column in columns:
        yield column
        if pa.types.is_fixed_size_list(column.type):
            yield column.values


_ID = pa.field("id", pa.int64(), nullable=False)


def _schema(width: int, *, packed: bool, with_ids: bool) -> pa.Schema:
    item = pa.field("item", pa.int32() if packed else pa.float32(), nullable=False)
    weight = pa.field("weight", pa.list_(item, width), nullable=False)
    return pa.schema([_ID, weight] if with_ids else [weight])
