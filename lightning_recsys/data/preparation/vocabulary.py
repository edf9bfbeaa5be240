"""Counts the values of categorical features in bounded memory, and numbers the frequent ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lightning_recsys.data.prepared.manifest import publish
from lightning_recsys.data.raw.kernels import KeyTable, hash_values, one_chunk

_SCHEMA = pa.schema([("value", pa.binary()), ("count", pa.int64())])
_PARTITIONS = 64
_TOP_COUNT = 1 << 16


class ValueCounter:
    """Counts how often each value of each feature occurs, exactly.

    Counts live in memory up to ``max_entries`` distinct values of all features together. Beyond that they move to
    files, cut into 64 parts by a hash of the value, so that later one part at a time is merged in memory.

    Args:
        names: Names of the features whose values are counted.
        folder: Where the files may go; made and removed as needed.
        max_entries: Distinct values in memory, 100 to 200 bytes each while they are merged.
    """

    def __init__(self, names: Sequence[str], *, folder: Path, max_entries: int = 3_000_000) -> None:
        self._pending: dict[str, list[pa.Table]] = {name: [] for name in names}
        self._entries = 0
        self._folder = folder
        self._max_entries = max_entries
        self._spills = 0
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, counts: Mapping[str, pa.Table]) -> None:
        """Add the counts of some rows, as :func:`count_values` gives them."""
        for name, table in counts.items():
            self._pending[name].append(table)
            self._entries += len(table)
        if self._entries > self._max_entries:
            for name, tables in self._pending.items():
                self._pending[name] = [_merged(tables)]
            self._entries = sum(len(table) for (table,) in self._pending.values())
            if self._entries > self._max_entries // 2:
                self._spill()

    def write(self, folder: Path, *, min_count: Mapping[str, int], max_vocabulary: int) -> tuple[dict[str, int], int]:
        """Write the vocabularies: a Parquet file per feature with its values and counts, the most frequent first.

        Args:
            folder: The folder that the files are written to; see :func:`vocabulary_file`.
            min_count: Rarer values of each feature are left out.
            max_vocabulary: How many values to keep at most; the smallest of ``min_count`` is raised until they fit.

        Returns:
            Number of values by feature, and the smallest ``min_count``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._spills:
            self._spill()
        at_least = np.zeros(_TOP_COUNT + 1, dtype=np.int64)  # how many values remain if all must occur that often
        for name in self._pending:
            histogram = np.zeros(_TOP_COUNT + 1, dtype=np.int64)
            for table in self._parts(name):
                counts = np.minimum(table["count"].to_numpy(), _TOP_COUNT)
                histogram += np.bincount(counts, minlength=_TOP_COUNT + 1)
            remaining = np.cumsum(histogram[::-1])[::-1]
            at_least += np.minimum(remaining, remaining[min(min_count[name], _TOP_COUNT)])
        least = min(min_count.values())
        while least < _TOP_COUNT and at_least[least] > max_vocabulary:
            least += 1
        sizes = {}
        for name in self._pending:
            needed = max(min_count[name], least)
            frequent = [table.filter(pc.greater_equal(table["count"], needed)) for table in self._parts(name)]
            table = pa.concat_tables([_SCHEMA.empty_table(), *frequent])
            del frequent
            table = table.sort_by([("count", "descending"), ("value", "ascending")])
            _write(folder, name, table)
            sizes[name] = len(table)
        shutil.rmtree(self._folder, ignore_errors=True)
        return sizes, least

    def _spill(self) -> None:
        """Move all counts to files: one for each feature, with a record batch for each part."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, tables in self._pending.items():
            table = _merged(tables)
            part = (hash_values(one_chunk(table["value"])) >> np.uint64(58)).astype(np.int64)
            table = table.take(pa.array(np.argsort(part, kind="stable")))
            ends = np.cumsum(np.bincount(part, minlength=_PARTITIONS))
            with pa.ipc.new_file(self._spill_file(name, self._spills), _SCHEMA) as writer:
                for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
                    piece = table.slice(start, end - start)
                    writer.write_batch(pa.record_batch([one_chunk(column) for column in piece.columns], schema=_SCHEMA))
            self._pending[name] = []
        self._entries = 0
        self._spills += 1

    def _parts(self, name: str) -> Iterator[pa.Table]:
        if not self._spills:
            self._pending[name] = [_merged(self._pending[name])]
            yield self._pending[name][0]
            return
        for part in range(_PARTITIONS):
            tables = []
            for spill in range(self._spills):
                with pa.memory_map(str(self._spill_file(name, spill))) as file:
                    tables.append(pa.Table.from_batches([pa.ipc.open_file(file).get_batch(part)]))
            yield _merged(tables)

    def _spill_file(self, name: str, spill: int) -> Path:
        return self._folder / f"{quote(name, safe='')}-{spill}.arrow"


def count_values(values: pa.Array) -> pa.Table:
    """Distinct values and how often each occurs; those that are null do not count.

    >>> count_values(pa.array([b"a", b"b", b"a", None])).to_pydict()
    {'value': [b'a', b'b'], 'count': [2, 1]}
    >>> count_values(pa.array([b"a", b"b", b"a", None]).dictionary_encode()).to_pydict()
    {'value': [b'a', b'b'], 'count': [2, 1]}
    """
    if pa.types.is_dictionary(values.type):
        counted = np.bincount(values.indices.drop_null().to_numpy(), minlength=len(values.dictionary))
        table = pa.Table.from_arrays([values.dictionary, pa.array(counted)], schema=_SCHEMA)
        return table.filter(pc.greater(table["count"], 0))
    counts = values.drop_null().value_counts()
    return pa.Table.from_arrays([counts.field("values"), counts.field("counts")], schema=_SCHEMA)


def write_values(folder: Path, name: str, values: pa.Array) -> None:
    """Write the vocabulary of a feature from its values in order; how often they occur is not known."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = pa.nulls(len(values), pa.int64())
    _write(folder, name, pa.Table.from_arrays([values.cast(pa.binary()), counts], schema=_SCHEMA))


def vocabulary_file(name: str) -> str:
    """Name of the file that holds a feature's vocabulary."""
    return f"{quote(name, safe='')}.parquet"


def load_table(path: Path) -> KeyTable:
    """The look-up table of a vocabulary: the value in row ``i`` has id ``i + 1``."""
    column = pq.read_table(path, columns=["value"], use_threads=False)["value"]
    hashes: list[NDArray[np.uint64]] = [hash_values(chunk) for chunk in column.chunks]
    return KeyTable(np.concatenate([*hashes, np.empty(0, dtype=np.uint64)]))


def _write(folder: Path, name: str, table: pa.Table) -> None:
    path = folder / vocabulary_file(name)
    temporary = path.with_name(f"{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd", write_statistics=False)
    publish(temporary, path)


def _merged(tables: Sequence[pa.Table]) -> pa.Table:
    table = pa.concat_tables([_SCHEMA.empty_table(), *tables])
    if len(tables) < 2:
        return table
    merged = table.group_by("value", use_threads=False).aggregate([("count", "sum")])
    return pa.Table.from_arrays([merged["value"], merged["count_sum"]], schema=_SCHEMA)
