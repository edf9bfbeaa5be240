"""From keys to slots: a hash table that grows a small piece at a time and forgets keys that were not seen for long.

Extendible hashing (Fagin et al. 1979) over the package's hash tables (:mod:`lightning_recsys.compiled.hash_table`):
there are many tables of a fixed size, the segments, and a directory that finds a key's segment by the first bits of its
hash. A full segment is split into two, which moves at most its own entries; the directory, four bytes for a segment,
doubles now and then. So no insertion takes longer than some tens of microseconds, however many keys there are.

An entry is 16 bytes: the key, and one word with the update in which the key was last seen and its *value*. The value is
the slot of the key's row; while the key has no row, it is ``-1 - n`` after ``n`` updates that have named the key, so
that no word is :data:`~lightning_recsys.compiled.hash_table.EMPTY`. Half of the entries are free on average.
"""

# Shape suffixes: N keys of a request.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import mmap

import numpy as np

from lightning_recsys.compiled.hash_table import EMPTY, erase, find, home, prefetch_cell, put
from lightning_recsys.compiled.hashing import mix
from lightning_recsys.compiled.loops import AHEAD, compile_loop

_BITS = 12
_SEGMENT = 1 << _BITS  # entries
_FULL = _SEGMENT * 3 // 4
_MAX_DEPTH = 22
_MAX_SEGMENTS = 1 << 20
_SPARE_SEGMENTS = 1 << 12  # more than one request can need
_NORESERVE = 0x4000  # Linux: memory counts when it is touched; Python has no name for it yet

_DEPTH, _SEGMENTS, _ROWS, _FREE, _HIGH, _CURSOR = range(6)
_WORD = np.int64(0xFFFFFFFF)


class KeyIndex:
    """Which slot each key has, which slots are free, and who was not seen for long. Every int64 but -1 is a key.

    Not for several threads at once.

    Args:
        slot_keys: For each slot ``~key``, or 0 where it is free; int64 ``[capacity]``. It is kept up to date, so that
            an index can be made from it again; in memory that outlives the process it can be by the next one.
        high: Slots that were ever in use, the first ones.
        admission: Updates that must name a key before it gets a slot.
        expire_after: A key that no update or lookup has named in so many updates is forgotten; ``None``: never.

    Attributes:
        now: Updates so far: stands for the present one until :meth:`advance`.
    """

    def __init__(
        self, slot_keys: np.ndarray, high: int, *, admission: int = 1, expire_after: int | None = None
    ) -> None:
        self.now = 0
        self._slot_keys, self._admission, self._expire = slot_keys, admission, expire_after or 0
        self._header = np.zeros(8, dtype=np.int64)
        self._directory = np.zeros(1 << _MAX_DEPTH, dtype=np.int32)
        self._segments = np.zeros((_MAX_SEGMENTS, 2), dtype=np.int32)  # depth, entries
        # A hash table each; those that are not in use yet hold zeros, and take no memory.
        self._entries = _reserved(2 * _MAX_SEGMENTS * _SEGMENT, np.int64).reshape(_MAX_SEGMENTS, _SEGMENT, 2)
        self._entries[0, :, 1] = EMPTY
        self._free = _reserved(len(slot_keys), np.int32)  # slots, used from the end of the first header[_FREE]
        self._header[_SEGMENTS], self._header[_HIGH] = 1, high
        _rebuild(slot_keys, self._free, *self._table)

    @property
    def _table(self) -> tuple[np.ndarray, ...]:
        return self._header, self._directory, self._segments, self._entries

    @property
    def num_rows(self) -> int:
        """Keys that have a slot."""
        return int(self._header[_ROWS])

    @property
    def high(self) -> int:
        """Slots that were ever in use: all of them are below this number."""
        return int(self._header[_HIGH])

    def find(self, keys_N: np.ndarray, *, touch: bool = True) -> tuple[np.ndarray, int]:
        """The keys' slots, -1 for a key without one, and how many those are; keys that have one count as seen.

        Args:
            keys_N: Keys; any may be named twice.
            touch: ``False``: they do not count as seen.
        """
        slots_N = np.empty(keys_N.shape[0], dtype=np.int64)
        absent = _find(keys_N, slots_N, _int32(self.now), np.int64(self._expire), touch, *self._table)
        return slots_N, int(absent)

    def admit(
        self, keys_N: np.ndarray, counts_N: np.ndarray | None = None, *, always: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Note that the present update names keys without a slot, and give slots to those that have earned one.

        To call it again in the same update changes nothing. Slots beyond ``high`` are used where none is free.

        Args:
            keys_N: Found to have no slot; a key may be named twice.
            counts_N: How many updates the present one stands for, for each key, at least 1, int32 ``[N]``; by default
                one. A key that is named twice counts as the first time.
            always: Whether every key gets a slot, whatever ``admission`` says.

        Returns:
            The keys that got slots, and the slots. Their rows hold what was there before. They are not in ``slot_keys``
            until :meth:`publish`.

        Raises:
            MemoryError: the index is full.
        """
        if self._header[_SEGMENTS] > _MAX_SEGMENTS - _SPARE_SEGMENTS:
            raise MemoryError(f"an index holds at most {_MAX_SEGMENTS * _SEGMENT // 2} keys: use more servers.")
        made = np.empty((2, keys_N.shape[0]), dtype=np.int64)
        counts = np.ones(keys_N.shape[0], dtype=np.int32) if counts_N is None else counts_N
        admission = 1 if always else self._admission
        times = _int32(self.now), np.int64(self._expire)
        slots = self._slot_keys, self._free
        count = _admit(keys_N, counts, made, np.int64(admission), *times, *slots, *self._table)
        return made[0, :count], made[1, :count]

    def publish(self, keys_U: np.ndarray, slots_U: np.ndarray) -> None:
        """The rows of these slots are complete."""
        self._slot_keys[slots_U] = ~keys_U

    def advance(self) -> None:
        """The present update is over; forget some of the keys that were not seen for long.

        Every key is looked at once in ``expire_after`` updates; until then it takes room, but is not found any more.
        """
        self.now += 1
        if self._expire:
            _sweep(_int32(self.now), np.int64(self._expire), self._slot_keys, self._free, *self._table)


def _reserved(size: int, dtype: type[np.generic]) -> np.ndarray:
    """Zeros of which only those take memory that are written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    num_bytes = max(size, 1) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype)[:size]


def _int32(number: int) -> np.int32:
    """The last 32 bits."""
    return np.int32((number + 2**31) % 2**32 - 2**31)


@compile_loop
def _pack(value, seen):  # noqa: ANN001, ANN202
    return (np.int64(seen) << 32) | (np.int64(value) & _WORD)


@compile_loop
def _is_old(word, now, expire):  # noqa: ANN001, ANN202
    """Whether too many updates lie between; differences of 32 bits do not mind that counts start again at 2**32."""
    return expire > 0 and np.int64(np.int32(np.int64(now) - (word >> 32))) > expire


@compile_loop
def _segment_of(key, header, directory):  # noqa: ANN001, ANN202
    depth = header[_DEPTH]
    return directory[0] if depth == 0 else directory[np.int64(mix(np.uint64(key)) >> np.uint64(64 - depth))]


@compile_loop
def _prefetch(key, header, directory, entries):  # noqa: ANN001, ANN202
    table = entries[_segment_of(key, header, directory)]
    prefetch_cell(table, home(table, key))


@compile_loop
def _find(keys, slots, now, expire, touch, header, directory, segments, entries):  # noqa: ANN001, ANN202
    absent, last = 0, keys.shape[0] - 1
    for i in range(keys.shape[0]):
        _prefetch(keys[min(i + AHEAD, last)], header, directory, entries)
        table = entries[_segment_of(keys[i], header, directory)]
        cell = find(table, keys[i])
        word = table[cell, 1]
        value = np.int64(np.int32(word))
        if value < 0 or _is_old(word, now, expire):  # the word of a free cell is negative as well
            slots[i] = -1
            absent += 1
        else:
            slots[i] = value
            if touch and expire > 0:
                put(table, cell, keys[i], _pack(value, now))
    return absent


@compile_loop
def _split(segment, header, directory, segments, entries):  # noqa: ANN001, ANN202
    """Move the entries of a segment whose next bit is set to a new one."""
    if segments[segment, 0] == header[_DEPTH]:
        for i in range((1 << header[_DEPTH]) - 1, -1, -1):
            directory[2 * i] = directory[2 * i + 1] = directory[i]
        header[_DEPTH] += 1
    new = header[_SEGMENTS]
    header[_SEGMENTS] += 1
    depth = segments[segment, 0] + 1
    segments[segment, 0], segments[new, 0] = depth, depth
    # The directory's entries of a segment lie side by side; the second half of them is the new one's.
    old = entries[segment].copy()
    entries[segment, :, 1] = EMPTY
    entries[new, :, 1] = EMPTY
    segments[segment, 1] = 0
    width = np.int64(1) << (header[_DEPTH] - depth)
    begin = np.int64(-1)
    for i in range(_SEGMENT):
        if old[i, 1] == EMPTY:
            continue
        key = old[i, 0]
        if begin < 0:
            begin = np.int64(mix(np.uint64(key)) >> np.uint64(64 - header[_DEPTH])) // (2 * width) * 2 * width
            for j in range(begin + width, begin + 2 * width):
                directory[j] = new
        target = _segment_of(key, header, directory)
        put(entries[target], find(entries[target], key), key, old[i, 1])
        segments[target, 1] += 1


@compile_loop
def _add(key, word, header, directory, segments, entries):  # noqa: ANN001, ANN202
    """Add a key that is not there."""
    segment = _segment_of(key, header, directory)
    while segments[segment, 1] >= _FULL and segments[segment, 0] < _MAX_DEPTH:
        _split(segment, header, directory, segments, entries)
        segment = _segment_of(key, header, directory)
    put(entries[segment], find(entries[segment], key), key, word)
    segments[segment, 1] += 1


@compile_loop
def _take_slot(free, header):  # noqa: ANN001, ANN202
    header[_ROWS] += 1
    if header[_FREE] > 0:
        header[_FREE] -= 1
        return np.int64(free[header[_FREE]])
    header[_HIGH] += 1
    return header[_HIGH] - 1


@compile_loop
def _free_slot(slot, slot_keys, free, header):  # noqa: ANN001, ANN202
    slot_keys[slot] = 0
    free[header[_FREE]] = slot
    header[_FREE] += 1
    header[_ROWS] -= 1


@compile_loop
def _admit(keys, counts, made, admission, now, expire, slot_keys, free, header, directory, segments, entries):  # noqa: ANN001, ANN202
    count = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        table = entries[_segment_of(key, header, directory)]
        cell = find(table, key)
        word = table[cell, 1]
        seen = np.int64(counts[i])
        if word != EMPTY:
            value, old = np.int64(np.int32(word)), _is_old(word, now, expire)
            if value >= 0 and not old:  # named twice, and got its slot the first time
                continue
            if value >= 0:
                _free_slot(value, slot_keys, free, header)
            elif not old:
                seen = ~value if np.int32(word >> 32) == now else seen + ~value
        value = ~seen
        if seen >= admission:
            value = _take_slot(free, header)
            made[0, count], made[1, count] = key, value
            count += 1
        if word == EMPTY:
            _add(key, _pack(value, now), header, directory, segments, entries)
        else:
            put(table, cell, key, _pack(value, now))
    return count


@compile_loop
def _sweep(now, expire, slot_keys, free, header, directory, segments, entries):  # noqa: ANN001, ANN202
    total = header[_SEGMENTS] << _BITS
    budget = total // expire + 1
    place = header[_CURSOR]
    while budget > 0:
        if place >= total:
            place = 0
        table, cell = entries[place >> _BITS], place & (_SEGMENT - 1)
        word = table[cell, 1]
        if word == EMPTY or not _is_old(word, now, expire):
            place += 1
            budget -= 1
            continue
        value = np.int64(np.int32(word))
        if value >= 0:
            _free_slot(value, slot_keys, free, header)
        segments[place >> _BITS, 1] -= 1
        erase(table, cell)  # what moves here is looked at next
    header[_CURSOR] = place


@compile_loop
def _rebuild(slot_keys, free, header, directory, segments, entries):  # noqa: ANN001, ANN202
    for slot in range(header[_HIGH] - 1, -1, -1):
        if slot_keys[slot] != 0:
            key = ~slot_keys[slot]
            _add(key, _pack(slot, 0), header, directory, segments, entries)
            header[_ROWS] += 1
        else:
            free[header[_FREE]] = slot
            header[_FREE] += 1
