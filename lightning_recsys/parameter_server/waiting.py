"""How one waits for others: how often it asks them, and when it looks who lives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from lightning_recsys.parameter_server.client import Patience

PATIENCE_SECONDS = 5.0  # of one who was asked to end: the others may have ended by the same signal, or come yet
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05  # seconds between two questions of one who waits
LOOK_SECONDS = 0.5  # from one look who lives to the next


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
