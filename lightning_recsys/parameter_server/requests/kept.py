"""Bytes of a server that are replaced as a whole, whatever is killed and however full the file system is."""

from __future__ import annotations

import os
import struct
import weakref
import zlib
from pathlib import Path

from lightning_recsys.parameter_server.access.own_files import open_own
from lightning_recsys.stores.folders.room import reserve

_HEADER = struct.Struct("<qqq")  # number of the write, length of what follows, and the sum of both and of that
_ROOM = 1 << 16  # bytes that are set aside in pieces of this size, at first one for each file
_LASTING_ROOM = 1 << 22  # bytes of each file that stay set aside when less is written again


class KeptBytes:
    """The record that was written last, in one of two files whose pages are set aside.

    Writes are numbered from 1, and take turns: those with even numbers go to one file, the others to the other one. So
    a write, in place, touches nothing of the write before it. It goes through three steps:

    1. the file's header is cleared, and with it what was in the file, which was two writes old;
    2. the bytes are written behind the header;
    3. the header gets the number, the length and a sum.

    Killed before the end of step 3, the server leaves the write before this one, as the sum tells; killed later, it
    leaves this one, which has the higher number.

    Both files are opened once, here: later, a process may have no descriptor to spare.

    Args:
        path: Path of both files, but for their endings.
        what: What the bytes are, as the sentence names them that says that there is no room.

    Raises:
        OSError: there is no room for the files; the message says how many bytes are missing.
        PermissionError: one of them is a link, or not this user's.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        self._what = what
        self._paths = [path.with_name(f"{path.name}.{turn}") for turn in range(2)]
        self._room = [0, 0]  # bytes of each file that are known to be set aside
        self._files: list[int] = []  # their descriptors, until this is closed or goes
        self._close_files = weakref.finalize(self, _close, self._files)
        for turn, own in enumerate(self._paths):
            self._files.append(open_own(own))
            self._make_room(turn, _ROOM)
        self._number = max(self._read(turn)[0] for turn in range(2))  # of the last write; 0 before the first

    def read(self) -> bytes | None:
        """The record that was written last; ``None`` before the first write."""
        return self._read(self._number % 2)[1] if self._number else None

    def write(self, *parts: bytes) -> None:
        """Let all of these bytes, one behind the other, take the place of what was written last.

        Raises:
            OSError: there is no room; the message says how many bytes are missing. What was written last is as it was.
        """
        number, size = self._number + 1, sum(map(len, parts))
        turn = number % 2
        self._make_room(turn, _HEADER.size + size)
        end, sum_of_all = _HEADER.size, zlib.crc32(_HEADER.pack(number, size, 0))
        _write(self._files[turn], bytes(_HEADER.size), 0)
        for part in parts:
            _write(self._files[turn], part, end)
            end, sum_of_all = end + len(part), zlib.crc32(part, sum_of_all)
        _write(self._files[turn], _HEADER.pack(number, size, sum_of_all), 0)
        self._number = number

    def remove(self) -> None:
        """Delete both files."""
        self.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files, which stay."""
        self._close_files()

    def _make_room(self, turn: int, size: int) -> None:
        room, descriptor = -(-size // _ROOM) * _ROOM, self._files[turn]
        if room > self._room[turn]:
            reserve(descriptor, self._room[turn], room, what=self._what, folder=self._paths[turn].parent)
            self._room[turn] = room
        elif room <= _LASTING_ROOM < self._room[turn]:
            os.ftruncate(descriptor, _LASTING_ROOM)
            self._room[turn] = _LASTING_ROOM

    def _read(self, turn: int) -> tuple[int, bytes]:
        """Number and bytes of the write that a file has; 0 where it has none, or none that is whole."""
        file = self._files[turn]
        number, size, sum_of_all = _HEADER.unpack(os.pread(file, _HEADER.size, 0))
        content = os.pread(file, size, _HEADER.size) if 0 <= size <= os.fstat(file).st_size else b""
        is_whole = number > 0 and sum_of_all == zlib.crc32(content, zlib.crc32(_HEADER.pack(number, size, 0)))
        return (number, content) if is_whole else (0, b"")


def _write(descriptor: int, content: bytes, at: int) -> None:
    left = memoryview(content)
    while left:  # the system may take a part
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
