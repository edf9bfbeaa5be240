"""The raw files of a preparation: read in blocks, parsed, each row with its split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.module import Split
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule, Survey
from lightning_recsys.data.raw import Block, InputFile, Position, RawColumns, RawFormat


@dataclass(frozen=True)
class ParsedBlock:
    """The rows of a block.

    Args:
        block: Where they come from.
        rows: The rows.
        split_N: Position of each row's split in ``SPLITS``, int8.
        wrong: A message for each line that was skipped.
    """

    block: Block
    rows: RawColumns
    split_N: NDArray[np.int8]
    wrong: Sequence[str]


class RawSource:
    """Raw files and how to read them.

    Args:
        raw_format: How to read lines.
        files: The files whose rows the rule splits.
        split: The rule; may bring files of its own.
        on_bad_row: ``error`` or ``skip``.
        block_bytes: Text that is read at a time.

    Where the rule has to know all rows first, :attr:`survey` is what it goes by.
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
        self._on_bad_row = on_bad_row
        self._block_bytes = block_bytes
        own_files = split.files()
        self._paths = [*files, *(path for path, _ in own_files)]
        self.splits: list[Split | None] = [*(None for _ in files), *(name for _, name in own_files)]
        self.files = [InputFile.of(path) for path in self._paths]
        for file in self.files:
            if not file.bytes:
                raise ValueError(f"{file.path} is empty.")

    def read(self, file: int, position: Position = Position()) -> Iterator[Block]:  # noqa: B008 - immutable
        """The blocks of a file, by its number, from a position on."""
        return self.format.blocks(self._paths[file], block_bytes=self._block_bytes, position=position)

    def rows(self, file: int, block: Block) -> tuple[RawColumns, list[str]]:
        """The rows of a block of a file, and a message for each line that was skipped.

        Raises:
            ValueError: a line holds no row, unless such lines are skipped; or the header is wrong.
        """
        path = self._paths[file]
        rows = self.format.parse_block(path, block)
        wrong = []
        for line in rows.bad:
            column = "" if line.column is None else f", column {line.column!r}"
            wrong.append(f"{path}, {line.place}{column}: {line.message}.")
            if self._on_bad_row == "error":
                raise ValueError(f"{wrong[0]} (on_bad_row=skip leaves out such rows and counts them.)")
        return rows, wrong

    def parse(self, file: int, block: Block) -> ParsedBlock:
        """The rows of a block of a file, each with its split. See :meth:`rows`."""
        rows, wrong = self.rows(file, block)
        name = self.splits[file]
        if name is None:
            first = None if self.survey is None else self.survey.rows_before(file, block.position)
            split = self.split.assign(file=file, line_N=rows.lines_N, time_N=rows.time_N, first_row=first)
        else:
            split = np.full(len(rows), SPLITS.index(name), dtype=np.int8)
        return ParsedBlock(block, rows, split, wrong)
