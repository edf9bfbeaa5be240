"""Which rows of the training files are held back for validation and testing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.hashing import key64, mix64

Rows = NDArray[np.int64]


def split_by_share(num_rows: int, *, validation: float, test: float, seed: int) -> tuple[Rows, Rows, Rows]:
    """Draw validation and test rows at random; the same ones wherever and whenever the seed is the same.

    Returns:
        Training, validation and test rows, each in ascending order.

    >>> [len(rows) for rows in split_by_share(10, validation=0.2, test=0.1, seed=0)]
    [7, 2, 1]
    """
    hashes = drawing_keys(0, num_rows, seed=seed)
    ends = np.cumsum(split_sizes(num_rows, validation=validation, test=test))[:2]
    train, middle, last = (np.sort(part) for part in np.split(np.argsort(hashes), ends))
    return train, middle, last


def split_by_time(times: NDArray[np.float64], *, validation: float, test: float) -> tuple[Rows, Rows, Rows]:
    """Hold back the latest rows: test rows are the last ones, validation rows those before.

    Rows of one time stay together, in the later split, so that the shares are met as closely as that allows.

    >>> [rows.tolist() for rows in split_by_time(np.array([3.0, 1, 2, 5, 4]), validation=0.2, test=0.4)]
    [[1, 2], [0], [3, 4]]
    """
    train, middle, _ = split_sizes(len(times), validation=validation, test=test)
    ordered = np.append(np.sort(times), np.inf)
    first_validation, first_test = ordered[train], ordered[train + middle]
    held_back = times >= first_validation
    tested = times >= first_test
    return np.flatnonzero(~held_back), np.flatnonzero(held_back & ~tested), np.flatnonzero(tested)


def drawing_keys(first: int, count: int, *, seed: int) -> NDArray[np.uint64]:
    """A different number for each row from ``first`` on: the rows with the largest ones are held back."""
    return mix64(np.arange(first, first + count, dtype=np.uint64) + key64(seed, "split"))


def split_sizes(num_rows: int, *, validation: float, test: float) -> tuple[int, int, int]:
    """How many rows are for training, validation and test."""
    num_validation, num_test = round(num_rows * validation), round(num_rows * test)
    return num_rows - num_validation - num_test, num_validation, num_test
