"""Raw text files, plain or gzip, as blocks of whole lines."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol

_FINGERPRINT_BYTES = 1 << 20


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
        start: Offset of the first byte in the text; of a ``.gz`` file: in the uncompressed text.
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


@dataclass(frozen=True)
class InputFile:
    """A raw file as it was found, to notice when a restart finds another one.

    Args:
        path: Where it is.
        bytes: Its size.
        fingerprint: A checksum of its first and last mebibyte.
    """

    path: str
    bytes: int
    fingerprint: str

    @classmethod
    def of(cls, path: Path) -> InputFile:
        """Look at a file."""
        size = path.stat().st_size
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_BYTES))
            file.seek(max(size - _FINGERPRINT_BYTES, 0))
            digest.update(file.read(_FINGERPRINT_BYTES))
        return cls(str(path), size, digest.hexdigest())


def find_files(patterns: str | Sequence[str], *, name: str = "raw") -> list[Path]:
    """The files that paths, folders and glob patterns name: in the order given, each pattern's matches sorted.

    Args:
        patterns: A path, a glob pattern (``day_*.gz``) or a folder (all its files); or a list of those.
        name: What to call the option in an error message.

    Raises:
        ValueError: nothing was named, or nothing matches a pattern, or a file is named twice.
    """
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str | os.PathLike) else patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(x for x in path.iterdir() if x.is_file() and not x.name.startswith("."))
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(x) for x in glob.glob(str(pattern), recursive=True) if Path(x).is_file())
        if not matches:
            raise ValueError(f"{name}: no file at {pattern}. It may be a file, a folder, a pattern or a list of those.")
        found += matches
    if not found:
        raise ValueError(f"{name} names no file. It may be a file, a folder, a pattern or a list of those.")
    if repeated := sorted({str(path) for path in found if found.count(path) > 1}):
        raise ValueError(f"{name} names {repeated[0]} twice.")
    return found


def text_blocks(path: Path, *, block_bytes: int, start: int = 0, first_line: int = 1) -> Iterator[TextBlock]:
    """Read a file in blocks of whole lines.

    A block is what is whole in the ``block_bytes`` from its start on, so that reading again from there gives the same
    blocks.

    Args:
        path: A text file, or a gzip-compressed one named ``.gz``.
        block_bytes: How much to read at a time; a longer line makes a longer block.
        start: Offset of the first line to read, in the uncompressed text. (A ``.gz`` file is decompressed up to it.)
        first_line: Its number.

    Raises:
        ValueError: a ``.gz`` file is damaged or ends early.
    """
    with path.open("rb") as raw, _text(path, raw) as file:
        file.seek(start)
        rest = b""
        while True:
            try:
                chunk = file.read(block_bytes - len(rest) if len(rest) < block_bytes else block_bytes)
            except (EOFError, OSError, zlib.error) as error:
                if path.suffix != ".gz":
                    raise
                raise ValueError(f"{path}, after line {first_line - 1}: the gzip file is damaged ({error}).") from error
            end = chunk.rfind(b"\n") + 1
            if chunk and not end:
                rest += chunk
                continue
            data = rest + (chunk[:end] if chunk else b"\n" if rest else b"")
            rest = chunk[end:]
            if data:
                block = TextBlock(data, start, first_line, raw.tell())
                start, first_line, _ = block.next_position
                yield block
            if not chunk:
                return


def _text(path: Path, raw: IO[bytes]) -> IO[bytes]:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[return-value]
