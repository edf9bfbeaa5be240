"""When a cached embedding row may still be used: per-row clocks and their bounds."""

# Shape suffix: U rows.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

ClockName = Literal["max", "sum"]
Clocks = NDArray[np.int32]

MAX_CLOCK = 2**31 - 1
"""Where a clock ends: it stays there, at servers and in workers. See :class:`ClockRule` for such rows."""


@dataclass(frozen=True)
class ClockRule:
    r"""Per-row clocks with bounded staleness, over arrays of rows.

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
        ValueError: ``staleness`` is negative, or the clock is unknown.

    Reference: Miao et al. 2022, HET, section 3.1 and Lemma 1; ``sum`` is what the public code of the paper does.
    Differs from the paper: nothing with ``clock="max"``.

    >>> rule = ClockRule(staleness=2)
    >>> start, current, server = np.array([[4, 4, 4], [6, 7, 4], [4, 7, 7]], dtype=np.int32)
    >>> rule.needs_push(start, current).tolist()
    [False, True, False]
    >>> rule.is_stale(current, server).tolist()
    [False, False, True]
    >>> rule.after_push(server, rule.sent(current, current - start)).tolist()
    [6, 7, 7]
    """

    staleness: int | None
    clock: ClockName = "max"

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(
                f"strategy.staleness must be at least 0, or null for no bound, got {self.staleness}. 100 is usual."
            )
        if self.clock not in get_args(ClockName):
            raise ValueError(f"strategy.clock must be one of {list(get_args(ClockName))}, got {self.clock!r}.")

    def needs_push(self, start_U: Clocks, current_U: Clocks) -> NDArray[np.bool_]:
        """Copies too far ahead of what they started from (:math:`c_c > c_s + s`): push them and fetch them again."""
        return self._exceeds(current_U, start_U)

    def is_stale(self, current_U: Clocks, global_U: Clocks) -> NDArray[np.bool_]:
        """Copies too far behind their server (:math:`c_g > c_c + s`)."""
        return self._exceeds(global_U, current_U)

    def sent(self, current_U: Clocks, unsent_U: Clocks) -> Clocks:
        """The number that travels with a push.

        Args:
            current_U: The copies' clocks :math:`c_c`.
            unsent_U: Updates of each copy that the server does not have yet.
        """
        return current_U if self.clock == "max" else unsent_U

    def after_push(self, global_U: Clocks, sent_U: Clocks) -> Clocks:
        """The server's clocks once pushes with :meth:`sent` have been applied."""
        if self.clock == "max":
            return np.maximum(global_U, sent_U)
        after: Clocks = np.minimum(global_U.astype(np.int64) + sent_U, MAX_CLOCK).astype(np.int32)
        return after

    def _exceeds(self, ahead_U: Clocks, behind_U: Clocks) -> NDArray[np.bool_]:
        if self.staleness is None:
            return np.zeros(ahead_U.shape, dtype=np.bool_)
        lag: Clocks = ahead_U - behind_U  # rather than behind + s, which may not fit int32
        exceeds: NDArray[np.bool_] = (lag > self.staleness) | (ahead_U == MAX_CLOCK)
        return exceeds
