"""The journal that makes a push count once: which pushes of each client are applied, and how to undo one cut short.

All of it is in files that outlive the process. A push goes through four steps, each a write to mapped memory:

1. the rows that it will touch are copied to the undo record;
2. the header says that the push ``(slot, sequence)`` is in progress;
3. the push is applied, in place;
4. the client's slot gets its sequence number: one store of 8 bytes, the moment from which the push counts.

A server killed before step 2 has changed nothing; killed before step 4 its successor puts the copied rows back; killed
after it the push is in. Whichever it was, the slot tells a client that asks again. A machine that loses power loses
what the kernel had not written to disk: this is about processes.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import time
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.parameter_server.access.own_files import open_own
from lightning_recsys.parameter_server.messages.wire import MAX_WINDOW
from lightning_recsys.stores.folders.locality import boot_id
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays
from lightning_recsys.stores.folders.room import reserve

JOURNAL = ".journal"  # a name that no store can have
UNDO = ".undo"
LEASE_SECONDS = 600.0  # a client that said goodbye, or was cut off, keeps its slot so long: no request travels longer

_MAGIC = 0x4C52_5332_4A4F_5552
_WORDS = 8  # 64 bytes for the header and for each slot
_HEADER_MAGIC, _HEADER_SLOT, _HEADER_SEQUENCE = 0, 3, 4
_HEADER_NONCE, _HEADER_BOOT, _HEADER_STARTS = slice(1, 3), slice(5, 7), 7
_ID = slice(0, 2)
_APPLIED, _REFUSED, _SEEN_SECONDS, _CLOSED = 2, 3, 4, 5
_ALIGNMENT = 64
_UNDO_BYTES = 1 << 40  # of addresses, for the undo record that may become so long; they take no room
_INT64 = np.dtype("<i8")
_COUNTERS = "counters"
_ROWS = ""  # in the undo record: which rows are there, if not all

_Saved = tuple[str, np.dtype[Any], Sequence[int]]  # name, dtype and shape of an array in the undo record
_Copy = tuple[NDArray[Any], NDArray[Any]]  # an array and its place there


@dataclass(frozen=True)
class Undo:
    """The places that a push will touch.

    Args:
        arrays: The arrays of a store, which has the name of its folder.
        names: Those that the push writes to; the counters are kept in any case.
        rows: The rows that it touches, int64 ``[U]``, the same in all arrays; ``None`` for all of them.
    """

    arrays: MappedArrays
    names: Sequence[str]
    rows: Tensor | None


class Journal:
    """The clients of one folder and how far each has come.

    Args:
        folder: The folder of stores; the journal is two files in it.
        max_clients: Slots. A folder whose journal has more keeps them.

    Attributes:
        restarts: How often a server has started on this folder before.
        nonce: Drawn when the journal was made: who can read it from the folder is on the same machine as the folder.

    Both files are opened once, here: later, a process may have no descriptor to spare.

    Raises:
        OSError: there is no room for them; the message says how many bytes are missing.
        PermissionError: one of them is a link, or not this user's.
        RuntimeError: the folder's journal is damaged.
    """

    def __init__(self, folder: Path, *, max_clients: int = 1024) -> None:
        self.folder = folder
        # The journal's file, mapped: its first line is the header, and each of the others a client's slot. What is
        # written here is in the file, as the next server of this folder will read it, however this one ends.
        self._words = _open_words(folder / JOURNAL, max_clients)
        self._header, self._slots = self._words[0], self._words[1:]
        # A bit for each of the last 64 pushes of every client, by the push's number: it was refused.
        self._refused = self._slots[:, _REFUSED].view(np.uint64)
        # The undo record, and its memory, of which only the first `_reserved` bytes are known to be on the disk:
        # writing behind them is a bus error where the disk is full. It is valid while the header names a push.
        self._undo_file = open_own(folder / UNDO)
        self._close_undo_file = weakref.finalize(self, os.close, self._undo_file)
        self._undo = _map_ahead(self._undo_file)
        self._reserved = 0
        # The last undo, where it was of whole arrays, with these arrays and their places in the record: the next push
        # of the same kind copies values and leaves the record's header. None once the record may be another's.
        self._recorded: tuple[Undo, list[_Copy]] | None = None
        # The slot of each client that is in the journal, those that have said goodbye included.
        self._index = {slot[_ID].tobytes(): number for number, slot in enumerate(self._slots) if slot[_ID].any()}
        self.nonce = self._header[_HEADER_NONCE].tobytes()
        self._go_on_counting()
        self.restarts = int(self._header[_HEADER_STARTS])
        self._header[_HEADER_STARTS] += 1

    def recover(self) -> bool:
        """Put back what a killed server left half done; says whether there was something to put back."""
        slot, sequence = int(self._header[_HEADER_SLOT]) - 1, int(self._header[_HEADER_SEQUENCE])
        if slot < 0:
            return False  # the last server was not within a push
        # It was, or had just ended one: the client's number is written before the header is cleared.
        unfinished = self._slots[slot, _APPLIED] < sequence
        if unfinished:
            if not os.fstat(self._undo_file).st_size:
                raise RuntimeError(f"{self.folder / UNDO} was removed while it was needed: remove the folder as well.")
            self._restore()
        # Cleared last: a server that is killed while it puts rows back leaves the same to the next one, and putting
        # them back twice is as good as once.
        self._header[_HEADER_SLOT] = 0
        return bool(unfinished)

    def close(self) -> None:
        """Let go of the files."""
        empty = np.empty((1, _WORDS), dtype=_INT64)
        self._words, self._header, self._slots = empty, empty[0], empty[1:]
        self._refused = self._slots[:, _REFUSED].view(np.uint64)
        self._undo = np.empty(0, dtype=np.uint8)
        self._recorded = None
        self._close_undo_file()

    # --- Clients -----------------------------------------------------------------------------------------------------

    def register(self, client: bytes, connected: Container[int] = ()) -> int:
        """The client's slot, a free one if it is new.

        Args:
            client: The client's id, 16 bytes.
            connected: Slots whose clients are connected, which keep them.

        Raises:
            RuntimeError: no slot is free, or the client has said goodbye before.
        """
        slot = self._index.get(client)
        if slot is None:
            slot = self._free_slot(connected)
            self._index.pop(self._slots[slot, _ID].tobytes(), None)
            # The slot is nobody's while it changes hands. Killed between the two ids, the server leaves it free. The
            # other way round, the new client could be taken for one whose first pushes are applied already.
            self._slots[slot, _ID] = 0
            self._slots[slot, _ID.stop :] = 0
            self._slots[slot, _SEEN_SECONDS] = _now()
            self._slots[slot, _ID] = np.frombuffer(client, dtype=_INT64)
            self._index[client] = slot
        elif self._slots[slot, _CLOSED]:
            raise RuntimeError("this client has said goodbye; connect again")
        self.touch(slot)
        return slot

    def _free_slot(self, connected: Container[int]) -> int:
        used = self._slots[:, _ID].any(axis=1)
        if not used.all():
            return int(used.argmin())
        age = _now() - self._slots[:, _SEEN_SECONDS]
        # Of a client that has pushed nothing there is nothing to remember.
        free = (age > LEASE_SECONDS) | (self._slots[:, _APPLIED] == 0)
        free &= ~self._are_here(connected)
        if not free.any():
            raise RuntimeError(
                f"all {len(self._slots)} places for clients are taken (one is free again {LEASE_SECONDS:.0f} s after a "
                "goodbye, or after a connection was lost). Start the server with a larger max_clients (--max-clients)."
            )
        return int(np.where(free, age, -1).argmax())

    def slot(self, client: bytes) -> int | None:
        """Where a client is, if it has registered and not said goodbye."""
        slot = self._index.get(client)
        return None if slot is None or self._slots[slot, _CLOSED] else slot

    def _are_here(self, connected: Container[int]) -> NDArray[np.bool_]:
        """For each slot whether its client is connected and has not said goodbye."""
        is_connected = np.fromiter((slot in connected for slot in range(len(self._slots))), bool, len(self._slots))
        is_connected &= self._slots[:, _CLOSED] == 0
        return is_connected

    def touch(self, slot: int) -> None:
        """The client was heard of now."""
        self._slots[slot, _SEEN_SECONDS] = _now()

    def say_goodbye(self, slot: int) -> None:
        """The client will push no more; its slot is freed when late copies of its pushes can no longer arrive."""
        self.touch(slot)
        self._slots[slot, _CLOSED] = 1

    def num_clients(self, connected: Container[int] = ()) -> int:
        """Clients that have registered and not said goodbye: those connected, and those cut off not long ago."""
        recent = _now() - self._slots[:, _SEEN_SECONDS] < LEASE_SECONDS
        registered = self._slots[:, _ID].any(axis=1) & (self._slots[:, _CLOSED] == 0)
        return int((registered & (recent | self._are_here(connected))).sum())

    def _go_on_counting(self) -> None:
        """Take the clients of a journal that another boot of the machine has written for heard of now.

        Times are those since the machine started, which no setting of its clock moves; those of another start mean
        nothing. Nobody's slot is given away then before the whole :data:`LEASE_SECONDS` have passed.
        """
        boot = np.frombuffer(hashlib.blake2b(boot_id().encode(), digest_size=16).digest(), dtype=_INT64)
        if boot_id() and np.array_equal(self._header[_HEADER_BOOT], boot):
            return
        self._slots[:, _SEEN_SECONDS] = _now()
        # Last: a server that is killed before leaves the same to the next one.
        self._header[_HEADER_BOOT] = boot

    # --- Pushes ------------------------------------------------------------------------------------------------------

    def applied(self, slot: int) -> int:
        """Sequence number of the client's last push that counts."""
        return int(self._slots[slot, _APPLIED])

    def was_refused(self, slot: int, sequence: int) -> bool:
        """Whether this push was refused; known of the last 64 that count."""
        return bool(int(self._refused[slot]) & _bit(sequence))

    def refuse(self, slot: int, sequence: int) -> None:
        """Count a push as done without doing it, so that the next one may follow."""
        self._mark(slot, sequence, refused=True)

    @contextmanager
    def push(self, slot: int, sequence: int, undo: Undo | None) -> Iterator[None]:
        """Around the application of a push, which then counts once; undone if it raises.

        Args:
            slot: Slot of the client in the journal.
            sequence: Sequence number of the push, one above the client's last.
            undo: What the push will change; ``None`` where doing it twice is the same as doing it once.

        Raises:
            OSError: there is no room for the undo record; nothing was changed.
        """
        if undo is None:
            self._recorded = None  # it may remove a store, whose memory nobody should hold then
        else:
            # Step 1 is whole before step 2 begins, which is whole with its second line: the slot is what says that a
            # push is in progress, so the number beside it is written first. Killed before that line, the server has
            # changed no row, and its successor looks at nothing else.
            self._record(undo)
            self._header[_HEADER_SEQUENCE] = sequence
            self._header[_HEADER_SLOT] = slot + 1
        try:
            yield  # step 3; killed here, the server leaves rows that its successor puts back
        except BaseException:
            if undo is not None:
                self._restore(undo.arrays)
                self._header[_HEADER_SLOT] = 0
            raise
        # Step 4. Killed between these two lines, the server leaves a header whose push counts: nothing is put back.
        self._mark(slot, sequence)
        self._header[_HEADER_SLOT] = 0

    def _mark(self, slot: int, sequence: int, *, refused: bool = False) -> None:
        """The bit first: a server killed between the two leaves that of a push which comes again and writes it anew."""
        others = int(self._refused[slot]) & ~_bit(sequence)
        self._refused[slot] = others | _bit(sequence) if refused else others
        self._slots[slot, _APPLIED] = sequence

    # --- The undo record: length of a msgpack header, the header, the arrays it describes --------------------

    def _record(self, undo: Undo) -> None:
        # No push is in progress while this runs (the header's slot is 0), so a record that is half written is read by
        # nobody.
        if self._recorded is not None and self._recorded[0] is undo:  # the header is there, as after any such push
            for array, place in self._recorded[1]:
                np.copyto(place, array)
            return
        self._recorded = None
        rows = None if undo.rows is None else undo.rows.numpy()
        arrays = {name: undo.arrays.memory(name) for name in (*undo.names, _COUNTERS)}
        saved: list[_Saved] = []
        for name, array in arrays.items():
            shape = array.shape if rows is None or name == _COUNTERS else (rows.size, *array.shape[1:])
            saved.append((name, array.dtype, shape))
        if rows is not None:
            saved.append((_ROWS, _INT64, rows.shape))
        described = [(name, dtype.str, shape) for name, dtype, shape in saved]
        header = msgpack.packb({"store": undo.arrays.folder.name, "arrays": described})
        size = sum(math.prod(shape) * dtype.itemsize + _ALIGNMENT for _, dtype, shape in saved)
        self._reserve(8 + len(header) + size + _ALIGNMENT)
        memory = self._undo
        memory[:8].view(_INT64)[0] = len(header)
        memory[8 : 8 + len(header)] = np.frombuffer(header, dtype=np.uint8)
        places = dict(zip((name for name, _, _ in saved), self._places(8 + len(header), saved), strict=True))
        if rows is not None:
            places.pop(_ROWS)[:] = rows
            for name in undo.names:
                arrays[name].take(rows, axis=0, out=places.pop(name))
        for name, place in places.items():
            np.copyto(place, arrays[name])
        if rows is None:
            self._recorded = undo, [(arrays[name], place) for name, place in places.items()]

    def _places(self, end: int, saved: Sequence[_Saved]) -> Iterator[NDArray[Any]]:
        """Views of the undo record, one array behind the other."""
        memory = self._undo
        for _, dtype, shape in saved:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            yield memory[start:end].view(dtype).reshape(shape)

    def _restore(self, arrays: MappedArrays | None = None) -> None:
        memory = self._undo
        length = int(memory[:8].view(_INT64)[0])
        header: dict[str, Any] = msgpack.unpackb(memory[8 : 8 + length].tobytes())
        if arrays is None:
            try:
                arrays = MappedArrays(self.folder / header["store"])
            except FileNotFoundError:  # removed since: nothing to put back
                return
        saved = [(name, np.dtype(dtype), shape) for name, dtype, shape in header["arrays"]]
        places = dict(zip([name for name, _, _ in saved], self._places(8 + length, saved), strict=True))
        rows = places.pop(_ROWS, None)
        for name, values in places.items():
            where = slice(None) if rows is None or name == _COUNTERS else rows
            arrays.memory(name)[where] = values  # a row that is named twice was saved twice, and equal

    def _reserve(self, size: int) -> None:
        if size <= self._reserved:
            return
        size = max(1 << 20, 1 << (size - 1).bit_length())
        reserve(self._undo_file, self._reserved, size, what="the undo record of a push", folder=self.folder)
        self._reserved = size


def _now() -> int:
    """Seconds since the machine started, those included in which it slept."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))


def _bit(sequence: int) -> int:
    return 1 << (sequence % MAX_WINDOW)


def read_nonce(folder: Path) -> bytes | None:
    """The nonce of the journal in a folder of this machine; ``None`` where there is none to read and write."""
    path = folder / JOURNAL
    try:
        with path.open("r+b") as file:
            words = np.frombuffer(file.read(8 * _WORDS), dtype=_INT64)
    except OSError:
        return None
    return words[_HEADER_NONCE].tobytes() if len(words) == _WORDS and words[_HEADER_MAGIC] == _MAGIC else None


def _open_words(path: Path, max_clients: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Map the journal, made or lengthened where needed."""
    wanted, what = (1 + max_clients) * _WORDS * 8, f"a journal of {max_clients} clients"
    if not os.path.lexists(path):
        header = np.zeros(_WORDS, dtype=_INT64)
        header[_HEADER_MAGIC] = _MAGIC
        header[_HEADER_NONCE] = np.frombuffer(os.urandom(16), dtype=_INT64)
        temporary = path.with_name(f"{JOURNAL}-new")  # one name: what a killed server leaves its successor writes anew
        with os.fdopen(open_own(temporary), "r+b") as file:
            reserve(file.fileno(), 0, wanted, what=what, folder=path.parent)
            file.write(header.tobytes())
            file.truncate(wanted)  # what a killed server has left may be longer
        temporary.rename(path)  # whole or not at all
    descriptor = open_own(path)
    try:
        size = os.fstat(descriptor).st_size
        if size < 8 * _WORDS or size % (8 * _WORDS) or _map(descriptor, size)[:8].view(_INT64)[0] != _MAGIC:
            raise RuntimeError(f"{path} is not a journal of this version, or damaged: remove its folder to start anew.")
        # Whole, for a copy may lack pages.
        reserve(descriptor, 0, max(size, wanted), what=what, folder=path.parent)
        return _map(descriptor, max(size, wanted)).view(_INT64).reshape(-1, _WORDS)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)


def _map_ahead(descriptor: int) -> NDArray[np.uint8]:
    """Map what the file may become: nothing needs to be opened or mapped when it grows."""
    size = os.fstat(descriptor).st_size
    os.ftruncate(descriptor, max(_UNDO_BYTES, size))
    try:
        return _map(descriptor, _UNDO_BYTES)
    finally:
        os.ftruncate(descriptor, size)
