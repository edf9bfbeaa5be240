"""Shares of an epoch that are leased a piece at a time, so that those of the dead and the slow find others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

IN_FLIGHT = 2  # batches that a worker has been given and may not have trained: the one under way, and one fetched ahead


@dataclass(frozen=True)
class Lease:
    """Batches of one worker's share that another one, or itself, is to train.

    Args:
        number: Number of the lease, from 1, in the order of taking.
        owner: Rank of the worker whose share of the epoch it is.
        first: Number of the first batch within that worker's share.
        last: Number of the batch behind the last one.
    """

    number: int
    owner: int
    first: int
    last: int


class ShardLeases:
    """Who trains which part of an epoch, in which each worker has a share of as many batches.

    A worker leases its own share from its front, piece by piece. Then it takes what the dead have left: pieces that
    they had not finished, and the rest of their shares. Then it takes the last piece of whoever has most left. So
    workers of equal speed train their own shares, and a slow one leases fewer; the first batch of its share stays with
    whoever lives, for who trains nothing in an epoch does not come to its end.

    Every batch is in one lease, and a lease ends when it was trained. When a worker dies, what it may not have trained
    is leased again: at most one lease of batches that were trained already.

    Args:
        num_workers: Number of workers at the start, among which the batches are shared.
        shard_size: Number of batches in each worker's share.
        lease_size: Batches in a lease; fewer at the end of a share.
        in_flight: Batches that a worker was given last and may not have trained; more than :data:`IN_FLIGHT` where
            gradients of several make one update.

    Attributes:
        dealt_again: Batches that were leased again after a worker's death.

    Raises:
        ValueError: an argument is out of range.

    >>> leases = ShardLeases(2, shard_size=2, lease_size=1)
    >>> leases.take(0), leases.take(0, latest=1), leases.take(0, latest=2)
    (Lease(number=1, owner=0, first=0, last=1), Lease(number=2, owner=0, first=1, last=2), Lease(number=3, owner=1, \
first=1, last=2))
    """

    def __init__(self, num_workers: int, *, shard_size: int, lease_size: int, in_flight: int = IN_FLIGHT) -> None:
        if num_workers < 1 or shard_size < 0 or lease_size < 1 or in_flight < 1:
            raise ValueError(
                "num_workers, lease_size and in_flight must be at least 1 and shard_size at least 0, got"
                f" num_workers={num_workers}, lease_size={lease_size}, in_flight={in_flight}, shard_size={shard_size}."
            )
        self._lease_size, self._in_flight = lease_size, in_flight
        self._left = [(0, shard_size)] * num_workers  # of each share, what nobody has leased
        self._out: list[list[Lease]] = [[] for _ in range(num_workers)]  # what each worker has not finished
        self._latest: list[Lease | None] = [None] * num_workers  # what each was given last
        self._returned: list[Lease] = []  # what the dead had not finished
        self._lost: set[int] = set()
        self._idle: set[int] = set()  # those that have been given all they can have so far
        self._pausing: set[int] = set()  # those that left their share to others when they last asked
        self._next_number = 1
        self.dealt_again = 0

    def take(self, worker: int, *, latest: int = 0, pauses: bool = False) -> Lease | None:
        """The next lease of a worker; ``None`` where there is nothing to lease at the moment, or the worker is lost.

        (A server may come to what a worker asked for before it died when it knows of the death already.)

        Args:
            worker: Rank of the worker that asks.
            latest: Number of the lease that it was given last, 0 for none. Where it has not heard of a later one, it is
                given that again.
            pauses: It leaves its share to the others, but for the first batch, once that alone is left.

        Raises:
            ValueError: workers have died, and all others leave their shares to each other: nobody trains what is left.
        """
        if worker in self._lost:
            return None
        given = self._latest[worker]
        if given is not None and given.number != latest:
            return given
        # It asks for more when all of the last lease is handed out, so only the end of that may be untrained.
        self._out[worker] = [self._end_of(x) for x in self._out[worker]]
        (self._pausing.add if pauses else self._pausing.discard)(worker)
        found = None if pauses and not self._has_to_come(worker) else self._find(worker)
        if found is None:
            self._idle.add(worker)
            self._refuse_to_wait_for_the_dead()
            return None
        return self._give(worker, found)

    def _give(self, worker: int, found: tuple[int, int, int]) -> Lease:
        self._idle.discard(worker)
        lease = Lease(self._next_number, *found)
        self._next_number += 1
        self._out[worker].append(lease)
        self._latest[worker] = lease
        return lease

    def _end_of(self, lease: Lease) -> Lease:
        return replace(lease, first=max(lease.first, lease.last - self._in_flight))

    def _refuse_to_wait_for_the_dead(self) -> None:
        living = set(range(len(self._left))) - self._lost
        if self._lost and living <= self._pausing and not self.is_dealt_out:
            left = sum(last - first for first, last in self._left) + sum(x.last - x.first for x in self._returned)
            raise ValueError(
                f"{left} batches of the epoch are left, and nobody trains them: workers {sorted(self._lost)} have died,"
                f" and the others, {sorted(living)}, belong to groups that are drained. Go on from the last checkpoint."
            )

    def _find(self, worker: int) -> tuple[int, int, int] | None:
        if self._left[worker][0] < self._left[worker][1]:
            return self._cut(worker, from_end=False)
        if self._returned:
            again = self._returned.pop(0)
            self.dealt_again += again.last - again.first
            return again.owner, again.first, again.last
        for lost in sorted(self._lost):
            if self._left[lost][0] < self._left[lost][1]:
                return self._cut(lost, from_end=False)
        slowest = max(range(len(self._left)), key=lambda x: (self._num_free(x), -x))
        return self._cut(slowest, from_end=True) if self._num_free(slowest) > 0 else None

    def _has_to_come(self, worker: int) -> bool:
        """Whether a worker that pauses has trained nothing, and its share is down to the first batch."""
        first, last = self._left[worker]
        return self._latest[worker] is None and last - first == 1

    def _num_free(self, owner: int) -> int:
        """Batches of a share that others may lease."""
        first, last = self._left[owner]
        return last - first - (self._latest[owner] is None and owner not in self._lost)

    def _cut(self, owner: int, *, from_end: bool) -> tuple[int, int, int]:
        first, last = self._left[owner]
        if from_end:
            cut = max(last - self._num_free(owner), last - self._lease_size)
            self._left[owner] = first, cut
            return owner, cut, last
        cut = min(last, first + self._lease_size)
        self._left[owner] = cut, last
        return owner, first, cut

    def finish(self, worker: int, number: int) -> None:
        """A worker has trained its leases up to one of this number."""
        self._out[worker] = [x for x in self._out[worker] if x.number > number]

    def end(self) -> None:
        """Lease nothing more but the first batch of who has trained nothing: the rest is trained by nobody."""
        behind = [self._latest[x] is None and x not in self._lost for x in range(len(self._left))]
        self._left = [
            (first, min(last, first + is_behind)) for (first, last), is_behind in zip(self._left, behind, strict=True)
        ]
        self._out, self._returned = [[] for _ in self._left], []

    def lose(self, worker: int) -> None:
        """A worker has died: what it has not finished can be leased again, and so can the rest of its share."""
        if worker not in self._lost:
            self._lost.add(worker)
            self._idle.discard(worker)
            self._returned += self._out[worker]
            self._out[worker] = []

    def join(self, worker: int) -> bool:
        """Give another process in the place of a worker that was lost its first lease, which it will ask for.

        Returns:
            Whether there was one. Where not, it stays lost: who trains nothing does not come to the epoch's end.
        """
        if worker not in self._lost:
            return True
        self._lost.discard(worker)
        if (found := self._find(worker)) is None:
            self._lost.add(worker)
            return False
        self._pausing.discard(worker)
        self._give(worker, found)
        return True

    @property
    def is_dealt_out(self) -> bool:
        """Whether nothing is left to lease, and nobody may die with more than what it is training just now.

        Whoever has been given nothing so far will come for the first batch of its share.
        """
        nothing_left = not self._returned and all(first >= last for first, last in self._left)
        busy = any(out and worker not in self._idle for worker, out in enumerate(self._out))
        return nothing_left and not busy

    # --- For whoever keeps it across restarts ------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {
            "lease_size": self._lease_size,
            "in_flight": self._in_flight,
            "left": [list(x) for x in self._left],
            "out": [[asdict(x) for x in out] for out in self._out],
            "latest": [None if x is None else asdict(x) for x in self._latest],
            "returned": [asdict(x) for x in self._returned],
            "lost": sorted(self._lost),
            "idle": sorted(self._idle),
            "pausing": sorted(self._pausing),
            "next_number": self._next_number,
            "dealt_again": self.dealt_again,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ShardLeases:
        """The object of which :meth:`to_plain` told."""
        leases = cls(len(plain["left"]), shard_size=0, lease_size=plain["lease_size"], in_flight=plain["in_flight"])
        leases._left = [(first, last) for first, last in plain["left"]]
        leases._out = [[Lease(**x) for x in out] for out in plain["out"]]
        leases._latest = [None if x is None else Lease(**x) for x in plain["latest"]]
        leases._returned = [Lease(**x) for x in plain["returned"]]
        leases._lost, leases._idle = set(plain["lost"]), set(plain["idle"])
        leases._pausing = set(plain["pausing"])
        leases._next_number, leases.dealt_again = plain["next_number"], plain["dealt_again"]
        return leases
