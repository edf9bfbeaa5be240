"""How long one waits for others, how often it asks meanwhile, and how it hears that nobody wants the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

CANCEL_SECONDS = 0.2  # how often a long wait asks whether anybody still wants its end
PATIENCE_SECONDS = 5.0  # of one who was asked to end: the others may have ended by the same signal, or come yet
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05  # seconds between two questions of one who waits
LOOK_SECONDS = 0.5  # from one look who lives to the next


class Patience:
    """How long to wait; not much longer once nobody wants the result.

    Args:
        seconds: Longest time to wait.
        cancelled: Tells whether the result is no longer wanted.
        last_seconds: Longest time to wait from then on.
    """

    def __init__(self, seconds: float, cancelled: Callable[[], bool], *, last_seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._cancelled, self._last_seconds = cancelled, last_seconds
        self._looked = False

    def next_wait(self) -> float:
        """Seconds to wait before asking again, 0 when the time is over."""
        now = time.monotonic()
        if self._looked and self._cancelled():
            self._deadline = min(self._deadline, now + self._last_seconds)
        self._looked = True
        return max(0.0, min(self._deadline - now, CANCEL_SECONDS))


def turns(seconds: float = math.inf, cancelled: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """The turns of one who asks again and again, with pauses that grow; there are no more when its time is over.

    Args:
        seconds: Longest time to wait.
        cancelled: Asked between turns; once ``True`` it waits a few seconds more.

    Yields:
        Whether it is time to look as well who lives, which costs more than a question.
    """
    patience = Patience(seconds, cancelled, last_seconds=PATIENCE_SECONDS)
    pause, next_look = SHORTEST_PAUSE, time.monotonic() + LOOK_SECONDS
    yield False
    while wait := patience.next_wait():
        time.sleep(min(pause, wait))
        pause = min(1.5 * pause, LONGEST_PAUSE)
        if looks := time.monotonic() > next_look:
            next_look = time.monotonic() + LOOK_SECONDS
        yield looks
