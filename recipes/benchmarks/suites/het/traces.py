"""Batches as caches see them, and what an oracle could keep of them.

A cache keeps the rows that its policy likes best; an oracle knows the whole trace beforehand. Both fetch what they
miss, send what a row has gathered when it goes, and refresh a row after ``staleness`` updates, so that their bytes
differ by what they chose to keep alone. Nothing here shares code with the cache that it is held against.
"""

# Shape suffixes: U distinct keys of a batch.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from benchmarks.harness.workload import Workload
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Oracle = Literal["belady", "most_frequent"]

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Trace:
    """The distinct rows of each batch.

    Args:
        name: For tables.
        num_rows: Rows of all tables.
        batches: Sorted distinct keys of each batch.
    """

    name: str
    num_rows: int
    batches: Sequence[Keys]

    @classmethod
    def of(cls, work: Workload, batch_size: int, *, name: str) -> Trace:
        """The rows of a workload's batches, every table's behind the one before."""
        sizes = np.array(work.cardinalities, dtype=np.int64)
        starts = (sizes.cumsum() - sizes)[:, None]
        batches = []
        for batch in work.batches(batch_size):
            ids = batch.sparse.values.numpy().reshape(len(sizes), -1)
            batches.append(np.unique(ids + starts))
        return cls(name, int(sizes.sum()), batches)

    def share_of_most_updated(self, fraction: float) -> float:
        """The share of all updates that goes to this fraction of the rows, those with the most."""
        counts = np.sort(self.counts())[::-1]
        return float(counts[: int(fraction * self.num_rows)].sum() / counts.sum())

    def counts(self) -> Keys:
        """Batches that have each row."""
        counts = np.zeros(self.num_rows, np.int64)
        for keys_U in self.batches:
            counts[keys_U] += 1
        return counts


@dataclass(frozen=True)
class Needs:
    """What a cache asked for, over the counted batches.

    Args:
        wanted: Distinct rows of all batches.
        missed: Of them, those that were not there.
        fetched: Rows that travelled to the worker.
        pushed: Updates of rows that travelled to the server.
    """

    wanted: int
    missed: int
    fetched: int
    pushed: int

    @property
    def miss_rate(self) -> float:
        """Share of the wanted rows that were not there."""
        return self.missed / self.wanted

    def saved(self) -> float:
        """Share of rows and updates that do not travel, compared with fetching and pushing every wanted row."""
        return 1 - (self.fetched + self.pushed) / (2 * self.wanted)


def oracle(trace: Trace, *, limit: int, staleness: int | None, skip: int, kind: Oracle = "belady") -> Needs:
    """What a cache needs that knows the future.

    Args:
        trace: The batches.
        limit: Rows that it may keep from one batch to the next.
        staleness: Updates of a row after which it is sent and fetched again.
        skip: First batches that are not counted, while the cache fills.
        kind: ``belady`` drops the row whose next batch is the farthest, which no cache can beat in misses;
            ``most_frequent`` keeps the rows that the most batches of the whole trace have.

    Reference: Belady 1966, "A study of replacement algorithms for a virtual-storage computer".
    """
    next_uses = _next_uses(trace)
    counts = trace.counts()
    held = np.zeros(trace.num_rows, bool)
    value = np.zeros(trace.num_rows, np.int64)  # of keeping a row
    ticks = np.zeros(trace.num_rows, np.int64)
    wanted = missed = fetched = pushed = 0
    for number, keys_U in enumerate(trace.batches):
        if number == skip:
            wanted = missed = fetched = pushed = 0
        is_held = held[keys_U]
        misses, hits = keys_U[~is_held], keys_U[is_held]
        due = hits[ticks[hits] > staleness] if staleness is not None else hits[:0]
        wanted, missed = wanted + len(keys_U), missed + len(misses)
        fetched, pushed = fetched + len(misses) + len(due), pushed + len(due)
        ticks[misses] = ticks[due] = 0
        held[misses] = True
        ticks[keys_U] += 1
        value[keys_U] = -next_uses[number] if kind == "belady" else counts[keys_U]
        keys = np.flatnonzero(held)
        if (over := len(keys) - limit) > 0:
            held[keys[np.argpartition(value[keys], over - 1)[:over]]] = False
            pushed += over  # every row was updated since it came
    return Needs(wanted, missed, fetched, pushed)


def _next_uses(trace: Trace) -> list[Keys]:
    """For each key of each batch, the next batch that has it."""
    following = np.full(trace.num_rows, NEVER)
    uses: list[Keys] = [np.empty(0, np.int64)] * len(trace.batches)
    for number in range(len(trace.batches) - 1, -1, -1):
        keys_U = trace.batches[number]
        uses[number] = following[keys_U]
        following[keys_U] = number
    return uses
