"""The raw files of a preparation: read in blocks, parsed, each row with its split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.module import Split
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule
from lightning_recsys.data.raw import InputFile, RawColumns, RawFormat, TextBlock, text_blocks


@dataclass(frozen=True)
class ParsedBlock:
    """The rows of a block.

    Args:
        block: Where they come from.
        rows: The rows.
        split_N: Position of each row's split in ``SPLITS``, int8.
        wrong: A message for each line that was skipped.
    """

    block: TextBlock
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
        self._split = split
        self._on_bad_row = on_bad_row
        self._block_bytes = block_bytes
        own_files = split.files()
        self._paths = [*files, *(path for path, _ in own_files)]
        self.splits: list[Split | None] = [*(None for _ in files), *(name for _, name in own_files)]
        self.files = [InputFile.of(path) for path in self._paths]
        for file in self.files:
            if not file.bytes:
                raise ValueError(f"{file.path} is empty.")

    def read(self, file: int, *, start: int = 0, first_line: int = 1) -> Iterator[TextBlock]:
        """The blocks of a file, by its number, from an offset on."""
        return text_blocks(self._paths[file], block_bytes=self._block_bytes, start=start, first_line=first_line)

    def parse(self, file: int, block: TextBlock) -> ParsedBlock:
        """The rows of a block of a file.

        Raises:
            ValueError: a line holds no row, unless such lines are skipped; or the header is wrong.
        """
        path, data, first_line = self._paths[file], block.data, block.first_line
        if self.format.header and block.start == 0:
            header, _, data = data.partition(b"\n")
            try:
                self.format.check_header(header.rstrip(b"\r"))
            except ValueError as error:
                raise ValueError(f"{path}, line 1: {error}") from None
            first_line += 1
        rows = self.format.parse(data)
        wrong = []
        for line in rows.bad:
            column = "" if line.column is None else f", column {line.column!r}"
            number = first_line + line.line
            wrong.append(f"{path}, row {number - self.format.header} (line {number}){column}: {line.message}.")
            if self._on_bad_row == "error":
                raise ValueError(f"{wrong[0]} (on_bad_row=skip leaves out such rows and counts them.)")
        name = self.splits[file]
        if name is None:
            split = self._split.assign(file=file, line_N=rows.lines_N + first_line, time_N=rows.time_N)
        else:
            split = np.full(len(rows), SPLITS.index(name), dtype=np.int8)
        return ParsedBlock(block, rows, split, wrong)
