"""The raw files of a preparation: read in blocks, parsed, each row with its split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.files import InputFile
from lightning_recsys.data.module import Split
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule, Survey
from lightning_recsys.data.raw import Block, Position, RawColumns, RawFormat
from lightning_recsys.data.raw.columns import SkippedRows

KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class ParsedBlock:
    """The rows of a block.

    Args:
        block: The block of a raw file that was parsed.
        rows: The good rows of the block, as columns.
        split_N: Position of each row's split in ``SPLITS``, int8.
    """

    block: Block
    rows: RawColumns
    split_N: NDArray[np.int8]


class RawSource:
    """Raw files and how to read them.

    Args:
        raw_format: The format of the files, which parses their lines.
        files: The files whose rows the rule splits.
        split: The rule; may bring files of its own.
        on_bad_row: ``error`` raises ``ValueError`` at the first bad row, ``skip`` counts bad rows and leaves them out.
        block_bytes: Text that is read at a time.

    Where the rule has to know all rows first, :attr:`survey` is what it goes by. Small files are parsed once for all
    passes: the rows that were parsed first stay in memory, up to :data:`KEPT_BYTES`, until the last pass takes them.
    """

    def __init__(
        self,
        raw_format: RawFormat,
        *,
        files: Sequence[Path],
        split: SplitRule,
        on_bad_row: Literal["error", "skip"],
        block_bytes: int,
    ) -> None:
        split.check(raw_format)
        self.format = raw_format
        self.split = split
        self.survey: Survey | None = None
        self._on_bad_row: Literal["error", "skip"] = on_bad_row
        self._block_bytes = block_bytes
        own_files = split.files()
        self._paths = [*files, *(path for path, _ in own_files)]
        self.splits: list[Split | None] = [*(None for _ in files), *(name for _, name in own_files)]
        self.files = [InputFile.of(path) for path in self._paths]
        for file in self.files:
            if not file.bytes:
                raise ValueError(f"{file.path} is empty.")
        for path in self._paths:
            raw_format.check_file(path, on_bad_row=on_bad_row)
        self._seen: dict[int, SkippedRows] = {}  # by file, of the pass that goes on; changed in one thread
        self._kept: dict[tuple[int, int], RawColumns] = {}  # by file and offset; changed in all threads of the pool
        self._room = KEPT_BYTES

    def begin_pass(self, *, last: bool = False) -> None:
        """The files are read from now on; in the last pass rows that were kept are let go as they are taken."""
        self._seen = {}
        if last:
            self._room = 0

    def end_pass(self, files: Iterable[int]) -> None:
        """All of these files were read, by number.

        Raises:
            ValueError: one has no rows, or no good ones, or the format finds that this cannot be what was meant.
        """
        for file in files:
            self._seen.get(file, SkippedRows()).check(self._paths[file])
        self.format.check_read()

    def read(self, file: int, position: Position = Position()) -> Iterator[Block]:  # noqa: B008 - immutable
        """The blocks of a file, by its number, from a position on."""
        return self.format.blocks(self._paths[file], block_bytes=self._block_bytes, position=position)

    def rows(self, file: int, block: Block) -> RawColumns:
        """The rows of a block of a file. May be called in any thread.

        Raises:
            ValueError: the header is wrong, or another thing that concerns more than a row.
        """
        place = file, block.position.offset
        rows = self._kept.get(place) if self._room else self._kept.pop(place, None)
        if rows is None:
            rows = self.format.parse_block(self._paths[file], block)
            if rows.nbytes < self._room:
                self._room -= rows.nbytes  # two threads at once may spend a little of it twice
                self._kept[place] = rows
        return rows

    def count(self, file: int, rows: RawColumns) -> None:
        """Note how many rows of a block are good, and what is wrong with the others.

        Raises:
            ValueError: a line holds no row, unless such lines are skipped.
        """
        seen = self._seen.setdefault(file, SkippedRows())
        seen.add(self._paths[file], len(rows), rows.bad, on_bad_row=self._on_bad_row)

    def parse(self, file: int, block: Block) -> ParsedBlock:
        """The rows of a block of a file, each with its split. See :meth:`rows`."""
        rows = self.rows(file, block)
        name = self.splits[file]
        if name is None:
            first = None if self.survey is None else self.survey.rows_before(file, block.position)
            split = self.split.assign(file=file, line_N=rows.lines_N, time_N=rows.time_N, first_row=first)
        else:
            split = np.full(len(rows), SPLITS.index(name), dtype=np.int8)
        return ParsedBlock(block, rows, split)
