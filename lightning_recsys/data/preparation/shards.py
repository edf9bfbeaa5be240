"""Writes rows into Parquet shards that are either whole or not there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lightning_recsys.data.prepared.manifest import LABEL, WEIGHTS_SUFFIX, Feature, Shard, publish
from lightning_recsys.data.raw.columns import Bags

GROUP_ROWS = 32_768
_ONE_PAGE = 1 << 30  # a column chunk is one page: plain values one after the other, with one checksum

Ids: TypeAlias = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows as they are stored.

    Args:
        labels_N: Float32.
        dense_IN: Float32.
        ids: Ids of each single-valued feature, shape ``[N]``.
        bags: Ids of each multi-valued one, as arrays.
    """

    labels_N: NDArray[np.float32]
    dense_IN: NDArray[np.float32]
    ids: Mapping[str, Ids]
    bags: Mapping[str, Bags]

    def to_table(self, schema: pa.Schema) -> pa.Table:
        """The shard as an arrow table."""
        columns: list[pa.Array] = [pa.array(self.labels_N), *(pa.array(x_N) for x_N in self.dense_IN)]
        columns += [pa.array(ids_N) for ids_N in self.ids.values()]
        for bags in self.bags.values():
            offsets = pa.array(np.concatenate([[0], np.cumsum(bags.lengths_N)]).astype(np.int32))
            columns += [
                pa.ListArray.from_arrays(offsets, pa.array(items))
                for items in (bags.values, bags.weights)
                if items is not None
            ]
        return pa.Table.from_arrays([x.cast(t) for x, t in zip(columns, schema.types, strict=True)], schema=schema)


def shard_schema(dense: Sequence[str], features: Mapping[str, Feature]) -> pa.Schema:
    """Columns of a shard: label, dense features, single-valued features, bags, each bag followed by its weights."""
    fields = [pa.field(name, pa.float32(), nullable=False) for name in (LABEL, *dense)]
    for name, feature in features.items():
        id_type = pa.int32() if feature.num_embeddings <= 1 << 31 else pa.int64()
        if not feature.bag:
            fields.append(pa.field(name, id_type, nullable=False))
            continue
        fields.append(pa.field(name, pa.list_(pa.field("element", id_type, nullable=False)), nullable=False))
        if feature.weighted:
            weights = pa.list_(pa.field("element", pa.float32(), nullable=False))
            fields.append(pa.field(name + WEIGHTS_SUFFIX, weights, nullable=False))
    return pa.schema(fields)


class ShardWriter:
    """Writes one shard: under a temporary name until :meth:`finish`.

    Plain values without dictionaries or statistics: ids are close to random, and what is not encoded need not be
    decoded. Row groups have :data:`GROUP_ROWS` rows, the last one what is left.

    Args:
        root: The folder of prepared rows.
        path: The shard's path in it.
        schema: Columns of the shard; see :func:`shard_schema`.
        compression: ``none`` or ``zstd``.
    """

    def __init__(self, root: Path, path: str, *, schema: pa.Schema, compression: str) -> None:
        self._path = path
        self._final = root / path
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self._final.with_name(f"{self._final.name}.tmp")
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._num_pending = self._num_rows = 0
        self._writer = pq.ParquetWriter(
            self._temporary,
            schema,
            compression=compression,
            use_dictionary=False,
            write_statistics=False,
            data_page_size=_ONE_PAGE,
            max_rows_per_page=GROUP_ROWS,
            write_page_checksum=True,
        )

    def write(self, rows: Rows) -> None:
        """Append rows."""
        table = rows.to_table(self._schema)
        self._pending.append(table)
        self._num_pending += len(table)
        if self._num_pending >= GROUP_ROWS:
            self._write_groups(self._num_pending - self._num_pending % GROUP_ROWS)

    def finish(self) -> Shard:
        """Write what is left, sync it to the disk, and give the file its name."""
        if self._num_pending:
            self._write_groups(self._num_pending)
        self._writer.close()
        with self._temporary.open("rb") as file:
            checksum = hashlib.file_digest(file, "blake2b").hexdigest()
        size = self._temporary.stat().st_size
        publish(self._temporary, self._final)
        return Shard(self._path, self._num_rows, size, checksum)

    def abandon(self) -> None:
        """Close and remove the unfinished file."""
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _write_groups(self, num_rows: int) -> None:
        table = pa.concat_tables(self._pending)
        self._writer.write_table(table.slice(0, num_rows).combine_chunks(), row_group_size=GROUP_ROWS)
        self._pending = [table.slice(num_rows)]
        self._num_rows += num_rows
        self._num_pending -= num_rows
