"""Raw text files as blocks of whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from lightning_recsys.data.files import ByteSource


class Position(NamedTuple):
    """Where in a file reading goes on.

    Args:
        offset: What is before it, in a unit of the format's own: bytes of uncompressed text, say.
        line: Number of the line that starts there, from 1.
        row: Number of the row that starts there, from 1, in formats where not every line is a row.
    """

    offset: int = 0
    line: int = 1
    row: int = 1


class Block(Protocol):
    """Some rows of a file, not parsed yet."""

    @property
    def position(self) -> Position:
        """Where they start."""
        ...

    @property
    def next_position(self) -> Position:
        """Where the next block starts."""
        ...

    @property
    def consumed(self) -> int:
        """How much of the file, as it lies on the disk, was read for this block and those before it, in bytes."""
        ...


@dataclass(frozen=True)
class TextBlock:
    """Some whole lines of a file.

    Args:
        data: The lines, each ending in a newline (the last one of a file gets one).
        start: Offset of the first byte in the uncompressed text.
        first_line: Number of the first line in the file, from 1.
        consumed: How much of the file (as it lies on the disk) was read for this block and those before it, in bytes.
    """

    data: bytes
    start: int
    first_line: int
    consumed: int

    @property
    def position(self) -> Position:
        """Where it starts."""
        return Position(self.start, self.first_line)

    @property
    def next_position(self) -> Position:
        """Where the next one starts."""
        return Position(self.start + len(self.data), self.first_line + self.data.count(b"\n"))


def text_blocks(path: Path, *, block_bytes: int, start: int = 0, first_line: int = 1) -> Iterator[TextBlock]:
    """Read a file in blocks of whole lines.

    A block is what is whole in the ``block_bytes`` from its start on, so that reading again from there gives the same
    blocks.

    Args:
        path: A text file, also a compressed one or one in an archive.
        block_bytes: How much to read at a time; a longer line makes a longer block.
        start: Offset of the first line to read, in the uncompressed text. (A compressed file is decompressed up to it.)
        first_line: Its number.

    Raises:
        ValueError: a compressed file is damaged or ends early.
    """
    with ByteSource(path) as file:
        file.skip(start)
        rest = b""
        while True:
            try:
                chunk = file.read(block_bytes - len(rest) if len(rest) < block_bytes else block_bytes)
            except OSError as error:
                raise ValueError(f"{path}, after line {first_line - 1}: the file is damaged ({error}).") from error
            end = chunk.rfind(b"\n") + 1
            if chunk and not end:
                rest += chunk
                continue
            data = rest + (chunk[:end] if chunk else b"\n" if rest else b"")
            rest = chunk[end:]
            if data:
                block = TextBlock(data, start, first_line, file.consumed)
                start, first_line, _ = block.next_position
                yield block
            if not chunk:
                return
