"""The second pass: a segment of the raw text becomes one shard of each split, and a record that says so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from lightning_recsys.data.options import Split
from lightning_recsys.data.preparation.shards import Rows, ShardWriter
from lightning_recsys.data.preparation.splits import SPLITS
from lightning_recsys.data.prepared.manifest import Shard, write_atomically
from lightning_recsys.data.raw import Position, RawColumns
from lightning_recsys.data.raw.columns import SkippedRows


class Segment:
    """A segment that is being written; used in a ``with`` statement, which removes unfinished shards on an error.

    Args:
        root: The folder of prepared rows.
        number: Number of the segment, which is part of the names of its shards.
        file: The raw file that its rows come from.
        schema: The columns of its shards.
        compression: How shards are compressed: ``none`` or ``zstd``.
    """

    def __init__(self, root: Path, number: int, file: Path, *, schema: pa.Schema, compression: str) -> None:
        self._root = root
        self._file = file
        self._number = number
        self._schema = schema
        self._compression = compression
        self._writers: dict[Split, ShardWriter] = {}
        self._statistics = Counter[str]()
        self._skipped = SkippedRows()

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            writer.abandon()

    def write(self, rows: RawColumns, parts: Mapping[Split, Rows], missing: Mapping[str, int]) -> None:
        """Append the rows of a block.

        Args:
            rows: The rows of the block, whose bad ones are counted.
            parts: They by split, as they are to be stored.
            missing: Number of missing values in each column.
        """
        for split, part in parts.items():
            if split not in self._writers:
                path = f"{split}/{self._number:06d}.parquet"
                self._writers[split] = ShardWriter(self._root, path, schema=self._schema, compression=self._compression)
            self._writers[split].write(part)
            self._statistics[f"positives/{split}"] += int(part.labels_N.sum())
        self._statistics.update({f"missing/{name}": count for name, count in missing.items() if count})
        self._skipped.add(self._file, len(rows), rows.bad, on_bad_row="skip")

    def finish(self) -> dict[str, Any]:
        """Complete the shards; what a record holds about them."""
        shards = {split: asdict(self._writers[split].finish()) for split in SPLITS if split in self._writers}
        self._writers.clear()
        return {
            "shards": shards,
            "statistics": dict(self._statistics),
            "file": str(self._file),
            "skipped": asdict(self._skipped),
        }


class Records:
    """The records of the finished segments, in order: what a restart goes by.

    Args:
        folder: The working folder of the preparation, with one file for each finished segment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = list(self._load())

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)

    @property
    def position(self) -> tuple[int, Position]:
        """Where the raw files go on: number of the file, and position in it."""
        if not self._records:
            return 0, Position()
        file, *position = self._records[-1]["position"]
        return file, Position(*position)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; once this returns, the segment counts as finished."""
        write_atomically(self._path(len(self)), json.dumps(record))
        self._records.append(record)

    def shards(self, split: Split) -> tuple[Shard, ...]:
        """All shards of a split."""
        return tuple(Shard(**record["shards"][split]) for record in self if split in record["shards"])

    def statistics(self) -> dict[str, Any]:
        """Sums over all segments."""
        total = Counter[str]()
        for record in self:
            total.update(record["statistics"])
        nested: dict[str, Any] = {"positives": {}, "missing": {}}
        for name, count in total.items():
            kind, _, column = name.partition("/")
            nested[kind][column] = count
        return nested

    def rows(self) -> dict[Path, SkippedRows]:
        """The rows that were read, good and bad, by raw file."""
        files: dict[Path, SkippedRows] = {}
        for record in self:
            path = Path(record["file"])
            files[path] = files.get(path, SkippedRows()).merge(SkippedRows(**record["skipped"]))
        return files

    def _load(self) -> Iterator[dict[str, Any]]:
        number = 0
        while (path := self._path(number)).is_file():
            yield json.loads(path.read_text(encoding="utf-8"))
            number += 1

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:06d}.json"
