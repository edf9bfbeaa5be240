"""Raw text files as blocks of whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.files import ByteSource


class Position(NamedTuple):
    """The place in a file where reading goes on.

    Attributes:
        offset: What is before it, in a unit of the format's own: bytes of uncompressed text, say.
        line: Number of the line that starts there, from 1.
        row: Number of the row that starts there, from 1, in formats where not every line is a row.
    """

    offset: int = 0
    line: int = 1
    row: int = 1


@dataclass(frozen=True)
class Block:
    """Some rows of a file, not parsed yet.

    Args:
        data: Whole lines of text, each ending in a newline (the last one of a file gets one); or columns.
        position: Where the first of these rows starts in the file.
        next_position: Where the next block starts in the file; reading goes on from there after a restart.
        consumed: How much of the file, as it lies on the disk, was read for this block and those before it, in bytes.
        lines: Line of each row in ``data``, from 0, where not every line is a row.
    """

    data: bytes | pa.RecordBatch
    position: Position
    next_position: Position
    consumed: int
    lines: NDArray[np.int64] | None = None


def text_blocks(
    path: Path,
    *,
    block_bytes: int,
    position: Position = Position(),  # noqa: B008 - immutable
    encoding: str = "utf-8",
) -> Iterator[Block]:
    """Read a file in blocks of whole lines.

    A block is what is whole in the ``block_bytes`` from its start on, so that reading again from there gives the same
    blocks.

    Args:
        path: A text file, also a compressed one or one in an archive.
        block_bytes: How much to read at a time; a longer line makes a longer block.
        position: Of the first line to read, by its offset in the uncompressed text. (A compressed file is decompressed
            up to it.)
        encoding: What the text is written in; blocks are in UTF-8.

    Raises:
        ValueError: a compressed file is damaged or ends early.
    """
    with ByteSource(path, encoding=encoding) as file:
        file.skip(position.offset)
        rest = b""
        while True:
            try:
                chunk = file.read(block_bytes - len(rest) if len(rest) < block_bytes else block_bytes)
            except OSError as error:
                raise ValueError(f"{path}, after line {position.line - 1}: the file is damaged ({error}).") from error
            end = chunk.rfind(b"\n") + 1
            if chunk and not end:
                rest += chunk
                continue
            data = rest + (chunk[:end] if chunk else b"\n" if rest else b"")
            rest = chunk[end:]
            if data:
                following = Position(position.offset + len(data), position.line + data.count(b"\n"))
                yield Block(data, position, following, file.consumed)
                position = following
            if not chunk:
                return
