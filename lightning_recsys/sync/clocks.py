"""When a cached embedding row may still be used: per-row clocks and their bounds.

The rule stands here once, as compiled functions of single clocks: :func:`advance`, :func:`hear` and :func:`is_too_far`.
The loops over a worker's copies and over a store's rows call them. :class:`ClockRule` says which bound and which clock
a run has.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.compiled.loops import compile_loop

ClockName = Literal["max", "sum"]
Clocks = NDArray[np.int32]

MAX_CLOCK = 2**31 - 1
"""Where a clock ends: it stays there, at servers and in workers. See :class:`ClockRule` for such rows."""

NO_BOUND = -1
"""The number that stands for a staleness without bound in compiled functions."""


@compile_loop
def advance(clock, updates):  # noqa: ANN001, ANN201
    """A clock after so many further updates; it stops at its end."""
    return np.int32(clock + min(updates, MAX_CLOCK - clock))


@compile_loop
def hear(clock, sent, by_sum):  # noqa: ANN001, ANN201
    """A server's clock after a push: the larger of both, or with ``by_sum`` its own and what was sent."""
    return advance(clock, sent) if by_sum else np.int32(max(clock, sent))


@compile_loop
def is_too_far(ahead, behind, staleness):  # noqa: ANN001, ANN201
    """Whether a clock is more than the staleness (or :data:`NO_BOUND`) ahead of another one, or at its end."""
    # The difference of two clocks fits into int64; the sum of a clock and a staleness may not fit into int32.
    return staleness >= 0 and (ahead == MAX_CLOCK or np.int64(ahead) - np.int64(behind) > staleness)


@compile_loop
def _advance_each(clocks, after):  # noqa: ANN001, ANN202
    for i in range(after.size):
        after[i] = advance(clocks[i], 1)


@dataclass(frozen=True)
class ClockRule:
    r"""Per-row clocks (int32) with bounded staleness.

    A row counts its updates: :math:`c_g` at its server, and for each copy in a worker's cache :math:`c_s`, the server's
    clock when the copy was fetched, and :math:`c_c = c_s` plus the updates made to the copy since. A copy may be read
    while

    .. math:: c_c \le c_s + s \quad\text{and}\quad c_g \le c_c + s;

    otherwise the worker pushes what it owes and fetches the row, which sets :math:`c_s = c_c = c_g`. The first bound
    is known locally, the second needs the server's clock. Copies that may be read at the same moment differ by at most
    :math:`2s` in :math:`c_c` (Lemma 1). A copy that its worker does not read may fall behind further: it is checked
    before it is next read.

    A clock that has reached its end, :math:`2^{31}-1`, no longer tells how far copies are apart. So a copy with such a
    clock, or of a row with one at its server, counts as too far ahead, or behind, whatever :math:`s` is: it is pushed
    and fetched whenever it is read, as with :math:`s = 0`, and nothing goes unseen. (With ``sum`` and 1000 workers that
    train a row 100 times a second each, that is after six hours; with ``max`` after eight months.)

    Args:
        staleness: :math:`s`, in updates of a row; ``None`` is infinity, and rows then travel only when they are
            missing or evicted.
        clock: What a push makes of the server's clock: ``max`` the larger of the two, ``sum`` the server's plus the
            updates pushed. With ``max``, updates that several workers made at once count once, so the clock is their
            longest chain; ``sum`` counts every one.

    Raises:
        ValueError: ``staleness`` is negative or no number, or the clock is unknown.

    Reference: Miao et al. 2022, HET, section 3.1 and Lemma 1; ``sum`` is what the public code of the paper does.
    Differs from the paper: nothing with ``clock="max"``.

    >>> rule = ClockRule(staleness=2)
    >>> start, current, server = np.array([4, 7, 10], dtype=np.int32)
    >>> is_too_far(current, start, rule.bound), is_too_far(server, current, rule.bound)  # ahead of its start, behind
    (True, True)
    >>> int(hear(server, rule.sent(current, current - start), rule.by_sum))
    10
    """

    staleness: int | None
    clock: ClockName = "max"

    def __post_init__(self) -> None:
        if self.staleness is not None and (isinstance(self.staleness, bool) or self.staleness < 0):
            raise ValueError(
                f"strategy.staleness must be at least 0, or null for no bound, got {self.staleness}. 100 is usual."
            )
        if self.clock not in get_args(ClockName):
            raise ValueError(f"strategy.clock must be one of {list(get_args(ClockName))}, got {self.clock!r}.")

    @property
    def bound(self) -> int:
        """The staleness as compiled functions take it."""
        return NO_BOUND if self.staleness is None else min(self.staleness, MAX_CLOCK)

    @property
    def by_sum(self) -> bool:
        """Whether a server's clock counts every update; otherwise it takes the larger of two clocks."""
        return self.clock == "sum"

    def sent(self, current: Clocks, unsent: Clocks) -> Clocks:
        """The number that travels with a push.

        Args:
            current: The copies' clocks :math:`c_c`.
            unsent: Updates of each copy that the server does not have yet.
        """
        return unsent if self.by_sum else current

    @staticmethod
    def after_update(current: Clocks) -> Clocks:
        """The clocks of copies ``[C]`` once each was updated again."""
        _advance_each(current, after := np.empty_like(current))
        return after


def missed_updates(staleness: int, *, num_workers: int, prefetch: bool) -> int:
    """How many updates of all other workers together a read lacks at most, with ``clock="sum"``.

    The server's clock then counts every update that was pushed. A copy may be read while that is at most ``staleness``
    ahead of the copy's own, which counts the reader's updates as well, of which there are at most ``staleness``: so it
    lacks at most twice as many that were pushed. Each other worker has at most ``staleness + 1`` that it has not
    pushed: its last update was made to a copy that it could still read. Where clocks are compared a step early, each
    of them may have trained the batch between, and the batch of the read, since.

    The latter assumes that no worker is more than one batch ahead of another. Lightning's broadcast at each batch and
    the all-reduce of ``DistributedDataParallel`` keep them so; workers that run free do not have this bound.

    Args:
        staleness: The bound of a copy's clock, ahead and behind.
        num_workers: Workers that train the row, the reader included.
        prefetch: Whether clocks are compared one step before the row is read.

    >>> missed_updates(5, num_workers=8, prefetch=True)
    66
    """
    return 2 * staleness + (num_workers - 1) * (staleness + 1 + 2 * prefetch)


def staleness_for(most: int, *, num_workers: int, prefetch: bool) -> int:
    """The largest staleness, at least 1, with which a read lacks so many updates at most (:func:`missed_updates`).

    Args:
        most: Updates of all other workers together that a read may lack.
        num_workers: Workers that train the row, the reader included.
        prefetch: Whether clocks are compared one step before the row is read.

    Raises:
        ValueError: even a staleness of 1 would let a read lack more.

    >>> staleness_for(100, num_workers=8, prefetch=True)
    8
    """
    least = missed_updates(1, num_workers=num_workers, prefetch=prefetch)
    if most < least:
        early = "with prefetch" if prefetch else "without prefetch"
        raise ValueError(
            f"strategy.max_missed_updates must be at least {least} for {num_workers} workers {early}, got {most}."
            " strategy.staleness=0 lets no read miss any update."
        )
    return (most - missed_updates(0, num_workers=num_workers, prefetch=prefetch)) // (num_workers + 1)
