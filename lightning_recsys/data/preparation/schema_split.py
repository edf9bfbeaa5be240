"""The split that a schema asks for, and the pass over all rows that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.hashing import key64, mix64
from lightning_recsys.data.options import Split
from lightning_recsys.data.preparation.source import RawSource
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule, Times, parted
from lightning_recsys.data.raw import RawFormat, TabularFormat

_CHUNK = 1 << 20

Keys = NDArray[np.uint64]


class BySchema(SplitRule):
    """Parts rows as the schema says.

    By share, the rows with the largest keys are held back, where a row's key is a hash of the seed and its number: the
    same rows wherever and whenever the seed and the number of rows are the same. By time, the latest are; rows of one
    time stay together, in the later split. So the number of rows, and the times, have to be known first.

    Args:
        raw_format: The format whose schema says how rows are split.
        own_files: Whether splits that have files of their own are prepared together with the training files.

    Raises:
        ValueError: the format has no schema.
    """

    by = "schema"

    def __init__(self, raw_format: RawFormat, *, own_files: bool = True) -> None:
        if not isinstance(raw_format, TabularFormat):
            raise ValueError(
                f"split.by=schema is for data=tabular; data={raw_format.name} has no schema. Use share, time or file."
            )
        self._format = raw_format
        self._own_files = own_files
        self._schema = raw_format.schema
        self._shares = {"validation": self._schema.share("validation"), "test": self._schema.share("test")}
        self.surveys = any(self._shares.values())
        self.by_time = self.surveys and self._schema.split.by == "time"
        self.bounds: tuple[int | None, ...] = (None, None)

    def files(self) -> list[tuple[Path, Split]]:
        """See the base class."""
        splits = SPLITS[1:] if self._own_files else ()
        return [(path, split) for split in splits for path in self._format.files(split)]

    def options(self) -> dict[str, object]:
        """See the base class; the schema stands among the options of the format."""
        return {"by": self.by}

    def find_bounds(self, num_rows: int, chunks: Callable[[], Iterable[Times]]) -> list[int | None]:
        """Keys from which on rows are held back, and tested; ``None`` where no row is.

        Args:
            num_rows: Number of rows that are split.
            chunks: Reads the times of all rows, if the split goes by time.

        Raises:
            ValueError: a split is left without rows.
        """

        def keys() -> Iterator[Keys]:
            if self.by_time:
                yield from map(sortable, chunks())
            else:
                yield from (self._drawn(i, min(_CHUNK, num_rows - i)) for i in range(0, num_rows, _CHUNK))

        middle, last = (round(num_rows * share) for share in self._shares.values())
        bounds = [smallest(keys, k) if k < num_rows else None for k in (num_rows - middle - last, num_rows - last)]
        found = np.zeros(3, dtype=np.int64)
        for key_N in keys():
            found += np.bincount(_assign(key_N, bounds), minlength=3)
        for split, rows in zip(SPLITS, found, strict=True):
            if not rows and self._shares.get(split, 1):
                raise ValueError(f"schema.split leaves no {split} rows of {num_rows}. Use more rows or other shares.")
        return bounds

    def assign(
        self, *, file: int, line_N: NDArray[np.int64], time_N: Times | None, first_row: int | None = None
    ) -> NDArray[np.int8]:
        """See the base class."""
        if not self.surveys:
            return np.zeros(len(line_N), dtype=np.int8)
        if self.by_time:
            assert time_N is not None
            return _assign(sortable(time_N), self.bounds)
        assert first_row is not None
        return _assign(self._drawn(first_row, len(line_N)), self.bounds)

    def _drawn(self, first: int, count: int) -> Keys:
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return mix64(numbers + key64(self._schema.split.seed, "split"))


def survey_rows(source: RawSource, rule: BySchema, *, spill: Path) -> dict[str, Any]:
    """Look at all rows that are split.

    Args:
        source: The raw files.
        rule: The rule by which their rows are split.
        spill: A file for the times of the rows, if they are needed: eight bytes each.

    Returns:
        ``rows_before`` each block in all files, as :attr:`RawSource.rows_before` has them; and the rule's ``bounds``.

    Raises:
        ValueError: a row is bad (unless bad ones are skipped), or a split is left without rows.
    """
    rows_before: dict[str, int] = {}
    num_rows = 0
    surveyed = [i for i, split in enumerate(source.splits) if split is None]
    with spill.open("wb") as times:
        for file, block, rows, _ in source.pass_over("survey", surveyed, lambda *_: None):
            rows_before[f"{file}:{block.position.offset}"] = num_rows
            num_rows += len(rows)
            if rule.by_time and rows.time_N is not None:
                rows.time_N.astype(np.float64).tofile(times)

    def chunks() -> Iterator[Times]:
        with spill.open("rb") as file:
            while len(chunk := np.fromfile(file, dtype=np.float64, count=_CHUNK)):
                yield chunk

    bounds = rule.find_bounds(num_rows, chunks)
    spill.unlink()
    return {"rows_before": rows_before, "bounds": bounds}


def sortable(numbers: Times) -> Keys:
    """Unsigned integers in the order of the numbers.

    >>> np.argsort(sortable(np.array([3.0, -1.0, 0.0, -2.0]))).tolist()
    [3, 1, 2, 0]
    """
    bits = (numbers.astype(np.float64) + 0.0).view(np.uint64)  # which makes -0.0 the same as 0.0
    return np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))


def smallest(chunks: Callable[[], Iterable[Keys]], k: int) -> int:
    """The number that comes at place ``k``, from 0, once all are in order: 16 bits in each of four passes.

    >>> smallest(lambda: [np.array([7, 1], dtype=np.uint64), np.array([1 << 40], dtype=np.uint64)], 1)
    7
    """
    found = 0
    for shift in (48, 32, 16, 0):
        counts = np.zeros(1 << 16, dtype=np.int64)
        for keys in chunks():
            digits = keys >> np.uint64(shift)
            if shift < 48:
                digits = digits[digits >> np.uint64(16) == found]
            counts += np.bincount((digits & np.uint64(0xFFFF)).astype(np.int64), minlength=1 << 16)
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, k, side="right"))
        k -= int(ends[digit - 1]) if digit else 0
        found = found << 16 | digit
    return found


def _assign(key_N: Keys, bounds: Iterable[int | None]) -> NDArray[np.int8]:
    return parted(key_N, (None if bound is None else np.uint64(bound) for bound in bounds))
