"""Counter-based random numbers: each is a hash of its coordinates, so any row can be made alone, in any order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers in place: a bijection in which every input bit flips half of the output bits.

    Args:
        values: Any shape; overwritten and returned.

    Reference: the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
    variant 13 of Stafford's constants.

    >>> mix64(np.array([0, 1], dtype=np.uint64)).tolist()
    [0, 6238072747940578789]
    """
    scratch = values >> np.uint64(30)
    values ^= scratch
    values *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(values, np.uint64(27), out=scratch)
    values ^= scratch
    values *= np.uint64(0x94D049BB133111EB)
    np.right_shift(values, np.uint64(31), out=scratch)
    values ^= scratch
    return values


def key64(*coordinates: int | str) -> np.uint64:
    """One well-mixed 64-bit key from a few integers or names; the same in every process and on every platform.

    >>> int(key64(0, "train")), int(key64(1, "train"))
    (17051070864037222506, 8819667295981807555)
    """
    state = np.zeros(1, dtype=np.uint64)
    for coordinate in coordinates:
        number = int.from_bytes(coordinate.encode(), "little") if isinstance(coordinate, str) else coordinate
        while True:  # 64 bits at a time, so that long names keep all their letters
            state += np.uint64(((number & _MASK) + _GOLDEN) & _MASK)
            state = mix64(state)
            number = abs(number) >> 64
            if not number:
                break
    return np.uint64(state[0])


def uniform(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in ``[0, 1)`` from the top 53 bits of each hash.

    >>> uniform(np.array([0, 1 << 63], dtype=np.uint64)).tolist()
    [0.0, 0.5]
    """
    floats: NDArray[np.float64] = (hashes >> np.uint64(11)).astype(np.float64)
    floats *= 2.0**-53
    return floats
