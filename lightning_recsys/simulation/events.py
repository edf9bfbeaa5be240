"""Virtual time: processes that wait, in one queue of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["float | Signal", None, None]
"""The type of a simulation's actors: generators that yield seconds to wait, or a signal to wait for."""


class Signal:
    """Something that processes wait for."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []


class VirtualClock:
    """Runs processes in the order of their events; events of the same moment come in the order in which they were made.

    Nothing here depends on real time, so a run is the same whenever it is repeated.

    >>> clock = VirtualClock()
    >>> def tick(name, seconds):
    ...     for _ in range(2):
    ...         yield seconds
    ...         print(name, clock.now)
    >>> clock.start(tick("slow", 3.0))
    >>> clock.start(tick("fast", 2.0))
    >>> clock.run()
    fast 2.0
    slow 3.0
    fast 4.0
    slow 6.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Process]] = []
        self._numbers = count()

    def start(self, process: Process) -> None:
        """Let a process begin at the present moment."""
        heapq.heappush(self._events, (self.now, next(self._numbers), process))

    def fire(self, signal: Signal) -> None:
        """Let all processes go on that wait for a signal now."""
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self.start(process)

    def run(self) -> None:
        """Go on until every process has ended, or waits for a signal that nobody will give."""
        while self._events:
            self.now, _, process = heapq.heappop(self._events)
            wait = next(process, None)
            if isinstance(wait, Signal):
                wait.waiting.append(process)
            elif wait is not None:
                heapq.heappush(self._events, (self.now + wait, next(self._numbers), process))


class Meeting:
    """Where processes wait for each other, again and again, and for what is done once all are there.

    Args:
        clock: The clock of the processes that meet.
        members: Number of processes that take part.
        work: What is done while all of them wait.
    """

    def __init__(self, clock: VirtualClock, members: int, work: Callable[[], Process]) -> None:
        self._clock, self._members, self._work = clock, members, work
        self._done = Signal()

    def wait(self) -> Process:
        """Wait until all are there and the work is done."""
        self._begin_with(len(self._done.waiting) + 1)
        yield self._done

    def leave(self) -> None:
        """Take part no longer; those who wait for this one alone go on."""
        self._members -= 1
        self._begin_with(len(self._done.waiting))

    def _begin_with(self, present: int) -> None:
        if present == self._members > 0:
            self._clock.start(self._finish())

    def _finish(self) -> Process:
        yield from self._work()
        self._clock.fire(self._done)


class Station:
    """Serves requests, first come, first served.

    Args:
        clock: The clock that tells when a request comes.
        servers: How many requests it serves at a time, such as the cores of a machine.

    Attributes:
        busy_seconds: How long all of its servers have served so far, together.

    >>> two_cores = Station(VirtualClock(), 2)
    >>> two_cores.serve(2.0), two_cores.serve(3.0), two_cores.serve(1.0)
    (2.0, 3.0, 3.0)
    """

    def __init__(self, clock: VirtualClock, servers: int = 1) -> None:
        self.busy_seconds = 0.0
        self._clock = clock
        self._free_at = [0.0] * servers  # a heap: the server that is free first comes first

    def serve(self, seconds: float) -> float:
        """How long a request that comes now waits until it has been served.

        Args:
            seconds: What serving it takes. It is known when the request comes, so the queue is one number for each
                server: the moment at which its last request will have been served. What takes no time is not queued.

        >>> station = Station(VirtualClock())
        >>> station.serve(2.0), station.serve(3.0)
        (2.0, 5.0)
        """
        if not seconds:
            return 0.0
        ends = max(self._free_at[0], self._clock.now) + seconds
        heapq.heapreplace(self._free_at, ends)
        self.busy_seconds += seconds
        return ends - self._clock.now
