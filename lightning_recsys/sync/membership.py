"""Who still takes part in a run whose workers may die, and when a meeting of all of them is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Met:
    """A meeting that is over.

    Args:
        number: Number of the meeting, from 1.
        present: The ranks whose contributions count, in the order of members. One that came and died later is among
            them.
        members: The ranks that take part from now on: those that were present, or all as before where it failed. So
            whoever divides a sum by their number divides by that of its summands.
        missing: The rank that was lost where nobody may be missing, though another process may have its place by now;
            ``None`` where the meeting succeeded.
    """

    number: int
    present: tuple[int, ...]
    members: tuple[int, ...]
    missing: int | None = None


class Membership:
    """Meetings of all living workers, one after another.

    Everybody counts its own meetings, and comes to each of them once. A meeting is over when every member that is not
    lost has come. What members know of each other changes at meetings only, so all of them know the same: a worker that
    is lost stays a member until the next meeting that it does not come to and that can do without it. Some meetings
    cannot: who gathers one value of each member has made room for so many. Such a meeting fails for all members alike,
    and they may meet anew.

    Another process may take the place of a worker that died. It takes part from the meeting that is under way on,
    behind all others, so that whoever is the first stays it; they learn of it there. Until then they know the members
    of the last meeting, and it knows those of the next: a meeting that cannot miss anybody fails then, too.

    Args:
        size: Number of ranks at the start.

    Attributes:
        members: The ranks that take part, as of the last meeting: those of the start in rising order, then those that
            have joined since.
        joined: The ranks that have joined since the last meeting.
        lost: The ranks that have died.
        last: The last meeting that is over; ``None`` before the first.

    >>> membership = Membership(3)
    >>> for rank in (0, 2): membership.come(rank, 1, "barrier", may_miss=True)
    >>> membership.lose(1), membership.met()
    (True, Met(number=1, present=(0, 2), members=(0, 2), missing=None))
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a run has at least 1 worker, got {size}.")
        self.size = size
        self.members: tuple[int, ...] = tuple(range(size))
        self.joined: tuple[int, ...] = ()
        self.lost: set[int] = set()
        self.last: Met | None = None
        self._kind = ""  # of the meeting that is under way, and whether it may miss members
        self._may_miss = True
        self._here: set[int] = set()

    @property
    def number(self) -> int:
        """The number of the meeting that is under way, or comes next."""
        return 1 if self.last is None else self.last.number + 1

    @property
    def expected(self) -> tuple[int, ...]:
        """The ranks that take part in the meeting under way, in the order in which one after another is the first."""
        return (*(rank for rank in self.members if rank not in self.joined), *self.joined)

    @property
    def first(self) -> int | None:
        """The first of those that live; ``None`` where nobody does."""
        return next((rank for rank in self.expected if rank not in self.lost), None)

    def restore(self, last: Met, lost: Sequence[int], joined: Sequence[int] = ()) -> None:
        """Go on after a meeting that another object like this has seen the end of."""
        self.last, self.members, self.lost, self.joined = last, last.members, set(lost), tuple(joined)

    def lose(self, rank: int) -> bool:
        """A worker has died.

        Returns:
            Whether the rank was alive until now.
        """
        if rank in self.lost or not 0 <= rank < self.size:
            return False
        self.lost.add(rank)
        return True

    def join(self, rank: int) -> None:
        """Another process is to take part in the place of a worker that died."""
        self.lost.discard(rank)
        self._here.discard(rank)
        self.joined = (*(x for x in self.joined if x != rank), rank)

    def come(self, rank: int, number: int, kind: str, *, may_miss: bool) -> None:
        """A worker has come to a meeting; it may say so again.

        Args:
            rank: The worker's rank in the run.
            number: Of the meeting: the one under way, or the last one, whose end the worker has not heard of.
            kind: What the meeting is for; the same for all who come.
            may_miss: Whether the meeting can do without members that are lost; the same for all as well.

        Raises:
            ValueError: the worker was lost, or is at another meeting than the others.
        """
        if rank not in self.expected or rank in self.lost:
            raise ValueError(f"worker {rank} is no member of this run: it was taken for dead, or never belonged to it")
        if self.last is not None and number == self.last.number:
            return
        if number != self.number:
            raise ValueError(f"worker {rank} comes to meeting {number}, and the others are at {self.number}")
        if self._here and kind != self._kind:
            others = ", ".join(map(str, sorted(self._here)))
            raise ValueError(
                f"worker {rank} comes to meeting {number} for {kind!r}, and worker {others} for {self._kind!r}: each"
                " would wait for the other"
            )
        self._kind, self._may_miss = kind, may_miss
        self._here.add(rank)

    def has(self, rank: int, number: int) -> bool:
        """Whether a worker has come to the meeting that is under way, which is the one of this number."""
        return number == self.number and rank in self._here

    def met(self) -> Met | None:
        """How the meeting that is under way ends, as everybody is there; ``None`` while some are missing."""
        expected = self.expected
        missing = [rank for rank in expected if rank not in self._here]
        if not self._here or any(rank not in self.lost for rank in missing):
            return None
        if self._may_miss:
            present = tuple(rank for rank in expected if rank in self._here)
            return Met(self.number, present, present)
        failed = next(iter((*missing, *self.joined)), None)
        return Met(self.number, expected if failed is None else (), expected, failed)

    def end(self, met: Met) -> None:
        """The meeting that is under way is over, as :meth:`met` said."""
        self.last, self.members, self.joined = met, met.members, ()
        self._here = set()
