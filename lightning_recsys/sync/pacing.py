"""When a trainer's next round is: after a pause that bounds its cost, or after so many steps or seconds.

Time comes in as an argument: seconds of any clock that never goes back.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
from numpy.typing import NDArray

# Of a core: what rounds without an interval take, with the threads and the server that move their bytes.
ROUND_SHARE = 0.0175
# A round over sockets takes all of them together so many times what its own thread takes: 5.6 ms to 0.9 ms for a
# million parameters, with the server, whose part is taken from training where both are on one machine.
SOCKET_FACTOR = 6
RECENT = 9  # rounds by whose median cost the next pause is measured


class ShadowPace:
    """The pause of a shadow thread between two rounds.

    Args:
        interval: Seconds, always. By default as long as keeps what rounds take at 1.75 % of a core: a small model is
            synchronised more often than a large one, and waiting for the network costs nothing.
        over_sockets: Whether the vectors travel, and other threads and a server take processor time for each round.

    >>> pace = ShadowPace()
    >>> pace.pause_after(5.0)  # the first round compiles, and says nothing of the others
    0.0
    >>> round(pace.pause_after(0.00175), 6)
    0.09825
    """

    def __init__(self, *, interval: float | None = None, over_sockets: bool = False) -> None:
        self._interval = interval
        self._factor = SOCKET_FACTOR if over_sockets else 1
        # Processor seconds of the last rounds; None until there was a first one, which compiles and touches memory: it
        # may cost a thousand times what others do.
        self._costs: deque[float] | None = None

    def pause_after(self, cost: float) -> float:
        """Seconds until the next round.

        Args:
            cost: Processor seconds that the thread has taken for the round that is over.
        """
        if self._interval is not None:
            return self._interval
        if self._costs is None:
            self._costs = deque(maxlen=RECENT)
            return 0.0
        self._costs.append(cost)
        return statistics.median(self._costs) * (self._factor / ROUND_SHARE - 1)


class RoundSchedule:
    """When a worker in the foreground makes its next round: ``gap`` steps, or ``interval`` seconds, after the last one.

    Args:
        gap: Steps of this worker from one round to the next.
        interval: Seconds from one round to the next, instead of steps.
        steps: int64 ``[1]``, the steps since the last round: where others can read and set it, as checkpoints do.

    >>> schedule = RoundSchedule(gap=2)
    >>> [schedule.is_due_after_step(0.0), schedule.is_due_after_step(0.0)]
    [False, True]
    """

    def __init__(self, *, gap: int, interval: float | None = None, steps: NDArray[np.int64] | None = None) -> None:
        self._gap = gap
        self._interval = interval
        self._steps = np.zeros(1, dtype=np.int64) if steps is None else steps
        self._last = 0.0  # when the last round was over, or training began or went on

    def begin(self, now: float) -> None:
        """Training begins, or goes on after a pause: seconds are counted from now, and steps go on being counted."""
        self._last = now

    def is_due_after_step(self, now: float) -> bool:
        """Count a step; whether a round is due."""
        self._steps[0] += 1
        return bool(self._steps[0] >= self._gap if self._interval is None else now - self._last >= self._interval)

    def finish_round(self, now: float) -> None:
        """A round that was due is over. Rounds that were made for others, before leaving, are not its own."""
        self._steps[0], self._last = 0, now
