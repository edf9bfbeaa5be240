"""When the rounds of an algorithm run: in a thread beside training, or between two of its steps."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_recsys.runtime import configure_worker
from lightning_recsys.strategies.replicas.rounds import Rounds
from lightning_recsys.sync import RoundSchedule, ShadowPace

STAND_IN_PAUSE = 0.01  # seconds between two rounds of one who waits: those who wait with it would make no pause either


class Driver(ABC):
    """Runs rounds while training goes on.

    Attributes:
        rounds: The rounds that it runs.
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

    def stop_before_others(self) -> None:
        """Leave the rounds now, if they need this worker, which is about to wait for those that still train."""
        return

    @contextmanager
    def standing_in(self) -> Iterator[Callable[[], None]]:
        """Around a wait of this worker for something to train: others may need it in their rounds meanwhile.

        Gives what the worker is to call again and again while it waits: it raises what has happened in those rounds.
        """
        yield self.check

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
        interval: Seconds between two rounds, as for :class:`~lightning_recsys.sync.ShadowPace`.
    """

    def __init__(self, rounds: Rounds, *, interval: float | None = None) -> None:
        super().__init__(rounds)
        self._pace = ShadowPace(interval=interval, over_sockets=rounds.over_sockets)
        self._leaving = threading.Event()  # set from the moment that training wants the thread to end
        self._thread: threading.Thread | None = None  # the last one that was started, which may have ended
        self._error: BaseException | None = None  # what it died of, until training has raised it

    def start(self) -> None:
        """Training begins, or goes on: so does the thread."""
        super().start()
        self._leaving.clear()
        self._thread = threading.Thread(target=self._loop, name="shadow", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        try:
            configure_worker()  # thread count and denormals are settings of each thread
            # The thread reads and writes the replica while workers train on it, without a lock: a round may mix
            # parameters from before and after an update, as updates of several workers do. Only the end is agreed on:
            # the thread returns from a round in which all trainers wanted to stop, so none is left waiting in one.
            while True:
                began = time.thread_time()
                if self.rounds.run(leaving=self._leaving.is_set()):
                    return
                # A trainer that leaves does not pause: the others wait for its vote in every round until all leave.
                self._leaving.wait(self._pace.pause_after(time.thread_time() - began))
        except BaseException as error:
            # Kept for training, which looks at every batch; until then the replica trains on without rounds.
            self._error = error

    def check(self) -> None:
        """Raise what the thread died of, if it has."""
        if self._error is not None:
            error, self._error = self._error, None
            self._seconds, self._started = self.active_seconds, None
            error.add_note("Raised in the shadow thread, which synchronises this trainer in the background.")
            raise error

    def _leave(self) -> None:
        assert self._thread is not None
        # The flag first: it ends a pause, and is the vote that the thread takes into its next round.
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
        rounds: The rounds to run.
        schedule: After which steps, or how many seconds, a round is due.
        alone: A context entered around each round, in which no other worker may update the replica.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        schedule: RoundSchedule,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(rounds)
        self._schedule = schedule
        self._alone = alone
        self._making: Future[None] | None = None  # the rounds of this worker's last wait, done when their thread is

    def start(self) -> None:
        """Training begins, or goes on: the interval is counted from now."""
        super().start()
        self._schedule.begin(time.monotonic())

    def after_step(self) -> None:
        """Take part in a round where one is due."""
        if self._schedule.is_due_after_step(time.monotonic()):
            self._run(leaving=False)
            self._schedule.finish_round(time.monotonic())

    def stop_before_others(self) -> None:
        """Make the rounds of those who still train: nobody else does, while this worker waits."""
        self.stop()

    @contextmanager
    def standing_in(self) -> Iterator[Callable[[], None]]:
        """Make the rounds of those who still train, in a thread: this worker is not asked whether it wants to stop.

        When it has something to train it waits for the end of the round that the thread is in. The others come to it,
        for each of them trains, or waits as this one does, or makes rounds until all want to stop. Where the block
        raises, as with Ctrl-C, nobody waits: others that end as well would not come.
        """
        if not self.is_active:
            self.start()
        ended, making = threading.Event(), Future[None]()
        self._making = making
        # A daemon: the process does not wait for it at its end either.
        threading.Thread(target=self._run_until, args=(ended, making), name="rounds", daemon=True).start()

        def check() -> None:
            if making.done():
                making.result()

        try:
            yield check
        finally:
            ended.set()
        making.result()  # waits, and raises what has happened

    def _run_until(self, ended: threading.Event, making: Future[None]) -> None:
        try:
            configure_worker()  # thread count and denormals are settings of each thread
            while not ended.is_set():
                self._run(leaving=False)
                ended.wait(STAND_IN_PAUSE)
        except BaseException as error:
            making.set_exception(error)
        else:
            making.set_result(None)

    def _run(self, *, leaving: bool) -> bool:
        with self._alone():
            return self.rounds.run(leaving=leaving)

    def _leave(self) -> None:
        while not self._run(leaving=True):
            pass

    def abandon(self) -> None:
        """Give the thread of a wait that was cut off a moment to end: what it trains on is taken apart next."""
        super().abandon()
        if self._making is not None:
            wait([self._making], timeout=1.0)
