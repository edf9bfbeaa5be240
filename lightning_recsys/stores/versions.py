"""Versions of what stores train: how many updates came between a pull and its push, and what the gradient then counts.

Each row, and each part of a dense vector, has a version: the number of updates that it has seen. A pull returns it
beside the values, a push carries it back, and the store that applies the push adds one and compares. This is done here,
for stores that processes map and for stores behind a server alike, so that every push is counted by the same rule.
"""

# Shape suffixes: U distinct rows of an update, R rows of the store, D embedding dim, P parts, K distinct stalenesses.

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.atomics import atomic_add
from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.stores.digests import DIGEST
from lightning_recsys.sync import StalenessNormalization

VERSION = "version"  # of each row, int64 [R]
CHANGE = "change"  # root mean square of each row's last update, float32 [R]
_NUMBERS = (VERSION, DIGEST)  # what a row has in int64


def dtype_of(layout: TableLayout, name: str) -> torch.dtype:
    """The dtype of what the rows of tables have by a name: ``weight``, a state, a tag or their digest."""
    if name == "weight":
        return layout.dtype
    return torch.int64 if name in _NUMBERS else torch.float32


@compile_loop
def _advance(rows, pulled, versions, after, staleness):  # noqa: ANN001, ANN202
    """Add one to the version of each row, in one indivisible step; tells it, and by how much it exceeds the pulled one.

    A version may be below the pulled one where a row was forgotten and made anew meanwhile: that gradient counts as
    fresh.
    """
    for i in range(rows.shape[0]):
        after[i] = atomic_add(versions, rows[i], 1) + 1
        staleness[i] = max(after[i] - pulled[i], 1)


def advance(rows: NDArray[np.int64], pulled: Tensor | None, versions: Tensor) -> tuple[Tensor, Tensor]:
    """Count an update of rows, or of parts.

    Args:
        rows: Numbers of the rows or parts that are updated, without duplicates.
        pulled: The version of each that its gradient was computed at, int64; without them it was the latest one.
        versions: Versions of all rows or parts; written to.

    Returns:
        The staleness of each, int64, at least 1, which is that of synchronous training; and the version of each after
        its update, which no other update of it has.
    """
    staleness, after = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    before = np.full(len(rows), np.iinfo(np.int64).max) if pulled is None else pulled.contiguous().numpy()
    _advance(rows, before, versions.numpy(), after, staleness)
    return torch.from_numpy(staleness), torch.from_numpy(after)


def count_staleness(staleness: Tensor) -> Tensor:
    """How often each staleness occurs: int64 ``[K, 2]``, rising, the staleness and its number.

    >>> count_staleness(torch.tensor([3, 1, 3])).tolist()
    [[1, 1], [3, 2]]
    """
    found, counts = np.unique(staleness.numpy(), return_counts=True)
    return torch.from_numpy(np.stack([found, counts], 1).astype(np.int64))


class StalenessHistogram:
    """How often each staleness was seen; what telemetry calls a histogram.

    >>> seen = StalenessHistogram()
    >>> seen.add(torch.tensor([[1, 98], [5, 2]]))
    >>> seen.mean(), seen.quantile(0.99), seen.max(), len(seen)
    (1.08, 5.0, 5.0, 100)
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, counts: Tensor) -> None:
        """Count what :func:`count_staleness` has told of an update."""
        for staleness, count in counts.tolist():
            self._counts[staleness] += count

    def update(self, other: StalenessHistogram) -> None:
        """Count all that another one has counted."""
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return self._counts.total()

    @property
    def counts(self) -> dict[int, int]:
        """Number of observations of each staleness, rising."""
        return dict(sorted(self._counts.items()))

    def mean(self) -> float:
        """Mean staleness; 0 where nothing was seen, as for the others."""
        return sum(staleness * count for staleness, count in self._counts.items()) / max(len(self), 1)

    def quantile(self, q: float, /) -> float:
        """The least staleness that the share ``q`` of all observations does not exceed."""
        wanted, seen = q * len(self), 0
        for staleness, count in self.counts.items():
            seen += count
            if seen >= wanted:
                return float(staleness)
        return 0.0

    def max(self) -> float:
        """The largest staleness."""
        return float(max(self._counts, default=0))


def tag_arrays(normalization: StalenessNormalization | None, num_rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The arrays that a store of rows has beside weights and state, with dtype and shape; none without versions."""
    if normalization is None:
        return {}
    change: dict[str, Any] = {CHANGE: ("float32", (num_rows,))} if normalization.uses_changes else {}
    return {VERSION: ("int64", (num_rows,)), **change}


def check_versions(normalization: StalenessNormalization | None, versions: Tensor | None, size: int) -> None:
    """Refuse versions that a push cannot have.

    Raises:
        ValueError: the rows have no versions, or it is not one for each of ``size`` ids or rows.
    """
    if versions is None:
        return
    if normalization is None:
        raise ValueError("the push carries versions, and the rows have none: create the store with normalization=...")
    if versions.shape != (size,) or versions.dtype != torch.int64:
        got = f"{versions.dtype} of shape {list(versions.shape)}"
        raise ValueError(f"versions must be torch.int64 of shape {[size]}, got {got}")
