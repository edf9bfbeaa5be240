"""The raw files of a preparation: read in blocks, parsed in threads, each row with its split."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.files import InputFile
from lightning_recsys.data.options import Split
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule
from lightning_recsys.data.raw import Block, Position, RawColumns, RawFormat
from lightning_recsys.data.raw.columns import OnBadRow, SkippedRows

KEPT_BYTES = 64 << 20
Phase = Literal["survey", "learn", "write"]
T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The progress of the work.

    Args:
        phase: ``survey`` while all rows are read to know how they are split, where that is needed; ``learn`` while the
            training rows are read for statistics and vocabularies; then ``write``.
        rows: Rows that this process has read in this phase.
        bytes: Bytes of raw files that are done in this phase, by earlier runs too.
        total_bytes: Bytes of raw files that this phase reads.
    """

    phase: Phase
    rows: int
    bytes: int
    total_bytes: int


class RawSource:
    """Raw files and how to read them, in passes: one for each phase of a preparation, while there are :meth:`threads`.

    Args:
        raw_format: The format of the files, which parses their lines.
        files: The files whose rows the rule splits.
        split: The rule; may bring files of its own.
        on_bad_row: ``error`` raises ``ValueError`` at the first bad row, ``skip`` counts bad rows and leaves them out.
        block_bytes: Text that is read at a time.
        num_threads: Number of threads that parse.
        on_progress: Told when a pass begins, and after every block.

    Where the rule has to know all rows first, it goes by :attr:`rows_before`. Small files are parsed once for all
    passes: the rows that were parsed first stay in memory, up to :data:`KEPT_BYTES`, until the last pass takes them.
    """

    def __init__(
        self,
        raw_format: RawFormat,
        *,
        files: Sequence[Path],
        split: SplitRule,
        on_bad_row: OnBadRow,
        block_bytes: int,
        num_threads: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        split.check(raw_format)
        self.format = raw_format
        self.split = split
        self.rows_before: Mapping[str, int] = {}
        """Good rows before each block, in files before its own too; by `file:offset`, where the rule surveys."""
        self._on_bad_row: OnBadRow = on_bad_row
        self._block_bytes = block_bytes
        self._num_threads = num_threads
        self._on_progress = on_progress
        own_files = split.files()
        trained_on = set(map(Path.resolve, files))
        for path, name in own_files:
            if path.resolve() in trained_on:
                log.warning("%s is among the training files and among those of %s: its rows are in both.", path, name)
        self._paths = [*files, *(path for path, _ in own_files)]
        self.splits: list[Split | None] = [*(None for _ in files), *(name for _, name in own_files)]
        self.files = [InputFile.of(path) for path in self._paths]
        for file in self.files:
            if not file.bytes:
                raise ValueError(f"{file.path} is empty.")
        for path in self._paths:
            raw_format.check_file(path, on_bad_row=on_bad_row)
        # Of the pass that goes on: its phase, what was found in each of its files, by number, the bytes of those before
        # each, and of all of them, and the good rows so far.
        self._phase: Phase = "write"
        self._seen: dict[int, SkippedRows] = {}
        self._before: dict[int, int] = {}
        self._total = self._num_rows = 0
        self._kept: dict[tuple[int, int], RawColumns] = {}  # by file and offset; changed in all threads
        self._room = KEPT_BYTES

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Have threads that parse for as long as this lasts, however it ends."""
        with ThreadPoolExecutor(self._num_threads) as self._pool:
            yield

    def pass_over(
        self, phase: Phase, files: Sequence[int], work: Callable[[int, Block, RawColumns], R]
    ) -> Iterator[tuple[int, Block, RawColumns, R]]:
        """All rows of some files, block by block and in order, with what ``work`` makes of each block in a thread.

        Raises:
            ValueError: as of :meth:`through` and :meth:`end_pass`.
        """
        self.begin_pass(phase, files)
        for file in files:
            for block, rows, made in self.through(file, self.read(file), partial(work, file)):
                yield file, block, rows, made
        self.end_pass()

    def begin_pass(self, phase: Phase, files: Sequence[int], *, first: int = 0) -> None:
        """Some files are read from now on, those before ``first`` by an earlier run.

        In the last pass, which writes, rows that were kept are let go as they are taken.
        """
        sizes = [self.files[file].bytes for file in files]
        self._phase, self._seen = phase, {file: SkippedRows() for file in files}
        self._before = dict(zip(files, accumulate(sizes, initial=0), strict=False))
        self._total, self._num_rows = sum(sizes), 0
        if phase == "write":
            self._room = 0
        self._report(self._before.get(first, 0))

    def end_pass(self) -> None:
        """All files of the pass were read.

        Raises:
            ValueError: one has no rows, or no good ones, or the format finds that this cannot be what was meant.
        """
        for file, seen in self._seen.items():
            seen.check(self._paths[file])
        self.format.check_read()

    def read(self, file: int, position: Position = Position()) -> Iterator[Block]:  # noqa: B008 - immutable
        """The blocks of a file, by its number, from a position on."""
        return self.format.blocks(self._paths[file], block_bytes=self._block_bytes, position=position)

    def through(
        self, file: int, blocks: Iterable[Block], work: Callable[[Block, RawColumns], R]
    ) -> Iterator[tuple[Block, RawColumns, R]]:
        """The rows of some blocks of a file, in order, with what ``work`` makes of each block in a thread.

        Raises:
            ValueError: a line holds no row, unless such lines are skipped; or the header is wrong, or another thing
                that concerns more than a row.
        """

        def parse(block: Block) -> tuple[Block, RawColumns, R]:
            rows = self._rows(file, block)
            return block, rows, work(block, rows)

        for block, rows, made in ordered_map(self._pool, parse, blocks, ahead=self._num_threads + 1):
            self._seen[file].add(self._paths[file], len(rows), rows.bad, on_bad_row=self._on_bad_row)
            yield block, rows, made
            self._num_rows += len(rows)
            self._report(self._before[file] + block.consumed)

    def assign(self, file: int, block: Block, rows: RawColumns) -> NDArray[np.int8]:
        """Position in ``SPLITS`` of each row of a block of a file."""
        if (name := self.splits[file]) is not None:
            return np.full(len(rows), SPLITS.index(name), dtype=np.int8)
        first = self.rows_before.get(f"{file}:{block.position.offset}")
        return self.split.assign(file=file, line_N=rows.lines_N, time_N=rows.time_N, first_row=first)

    def _rows(self, file: int, block: Block) -> RawColumns:
        """The rows of a block of a file, which an earlier pass may have kept. Called in any thread."""
        place = file, block.position.offset
        rows = self._kept.get(place) if self._room else self._kept.pop(place, None)
        if rows is None:
            rows = self.format.parse_block(self._paths[file], block)
            if rows.nbytes < self._room:
                self._room -= rows.nbytes  # two threads at once may spend a little of it twice
                self._kept[place] = rows
        return rows

    def _report(self, done: int) -> None:
        self._on_progress(Progress(self._phase, self._num_rows, done, self._total))


def ordered_map(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """``map`` in the threads of a pool, with at most ``ahead`` results waiting, so that memory stays bounded.

    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(ordered_map(pool, abs, [-1, -2, -3], ahead=2))
    [1, 2, 3]
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
