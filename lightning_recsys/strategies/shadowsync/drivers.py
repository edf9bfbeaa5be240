"""When the rounds of an algorithm run: in a thread beside training, or between two of its steps."""

from __future__ import annotations

import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.runtime import configure_worker
from lightning_recsys.strategies.shadowsync.rounds import Rounds

# Of a core: what a shadow thread without an interval computes. A round over TCP costs connection and server together
# about four times as much again, whichever thread moves the bytes, and all of it should stay below 3 % of the training.
SHADOW_SHARE = 0.0035
RECENT = 9  # rounds by whose median cost the next pause is measured


class Driver(ABC):
    """Runs rounds while training goes on.

    Attributes:
        rounds: What it runs.
        active_seconds: Time between :meth:`start` and :meth:`stop`, all of it so far.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self._seconds = 0.0
        self._started: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._started is not None

    @property
    def active_seconds(self) -> float:
        """Seconds of training so far, pauses left out."""
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def start(self) -> None:
        """Training begins, or goes on after a pause."""
        self._started = time.monotonic()

    def check(self) -> None:
        """Raise what happened beside training since the last call, if anything did."""
        return

    def after_step(self) -> None:
        """This worker has made an update."""
        return

    def stop(self) -> None:
        """Return when no round is under way and the other trainers are ready to do without this one.

        All trainers call this. Nothing happens where it is stopped already.
        """
        if self._started is not None:
            self._leave()
            self._seconds, self._started = self.active_seconds, None

    @abstractmethod
    def _leave(self) -> None: ...

    def abandon(self) -> None:
        """Stop without the others: the run has failed."""
        self._started = None


class ShadowThread(Driver):
    """Loops over rounds in a thread of its own that knows nothing of training.

    Args:
        rounds: What to run. Nothing else may touch the exchange behind it while the thread runs.
        interval: Seconds between two rounds. By default as long as keeps the thread's computing at 0.35 % of a core:
            a small model is synchronised more often than a large one, and waiting for the network costs nothing.
    """

    def __init__(self, rounds: Rounds, *, interval: float | None = None) -> None:
        super().__init__(rounds)
        self._interval = interval
        self._computed: list[float] = []  # seconds of each of the last rounds
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Training begins, or goes on: so does the thread."""
        super().start()
        self._leaving.clear()
        self._thread = threading.Thread(target=self._loop, name="shadow", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        try:
            configure_worker()  # thread count and denormals are settings of each thread
            while True:
                began = time.thread_time() - self.rounds.moving_seconds
                if self.rounds.run(leaving=self._leaving.is_set()):
                    return
                ended = time.thread_time() - self.rounds.moving_seconds
                self._computed = [*self._computed[-RECENT:], ended - began]
                self._leaving.wait(self._pause())
        except BaseException as error:
            self._error = error

    def _pause(self) -> float:
        if self._leaving.is_set():
            return 0.0
        if self._interval is not None:
            return self._interval
        # The first round compiles and touches memory: it may cost a thousand times what others do.
        usual = self._computed[1:]
        return statistics.median(usual) * (1 / SHADOW_SHARE - 1) if usual else 0.0

    def check(self) -> None:
        """Raise what the thread died of, if it has."""
        if self._error is not None:
            error, self._error, self._started = self._error, None, None
            error.add_note("Raised in the shadow thread, which synchronises this trainer in the background.")
            raise error

    def _leave(self) -> None:
        assert self._thread is not None
        self._leaving.set()
        self._thread.join()
        self.check()

    def abandon(self) -> None:
        """Ask the thread to stop; it may be waiting for a trainer that no longer answers."""
        super().abandon()
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)


class ForegroundHook(Driver):
    """Runs a round between two steps, while the worker waits.

    Args:
        rounds: What to run.
        gap: Steps of this worker from one round to the next.
        interval: Seconds from one round to the next, instead of steps.
        steps: int64 ``[1]``, the steps since the last round: where others can read and set it, as checkpoints do.
        alone: Around each round, while which no other worker may update the replica.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        gap: int,
        interval: float | None = None,
        steps: NDArray[np.int64] | None = None,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(rounds)
        self._gap = gap
        self._interval = interval
        self._steps = np.zeros(1, dtype=np.int64) if steps is None else steps
        self._alone = alone
        self._last = time.monotonic()

    def start(self) -> None:
        """Training begins, or goes on: the interval is counted from now."""
        super().start()
        self._last = time.monotonic()

    def after_step(self) -> None:
        """Take part in a round where one is due."""
        self._steps[0] += 1
        due = self._steps[0] >= self._gap if self._interval is None else time.monotonic() - self._last >= self._interval
        if due:
            self._run(leaving=False)
            self._steps[0], self._last = 0, time.monotonic()

    def _run(self, *, leaving: bool) -> bool:
        with self._alone():
            return self.rounds.run(leaving=leaving)

    def _leave(self) -> None:
        while not self._run(leaving=True):
            pass
