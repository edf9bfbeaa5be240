"""A worker's side of meetings at a server, and of the leases of its share of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from lightning_recsys.errors import RunOverError, WorkerLostError
from lightning_recsys.parameter_server.access.keys import ClientKeys, JobKeys, Token
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.connect import client_keys
from lightning_recsys.parameter_server.messages.wire import Reply
from lightning_recsys.parameter_server.requests.meetings import FAILED, OVER, SEND, WAIT
from lightning_recsys.parameter_server.waiting import turns
from lightning_recsys.sync.leases import IN_FLIGHT, Lease

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


@dataclass(frozen=True)
class MeetingPlace:
    """Where the workers of a run meet.

    Args:
        endpoint: Endpoint of the server where the workers meet.
        run: Id of the run, letters and digits.
        size: Number of workers at the start of the run.
        keys: The clients' keys or the server's token; ``None`` where the server asks for neither.
    """

    endpoint: str
    run: str
    size: int
    keys: ClientKeys | JobKeys | Token | str | None = None

    def connect(self, cancelled: Callable[[], bool] = lambda: False) -> Connection:
        """A connection of its own: who waits in one holds nobody else up."""
        return Connection(self.endpoint, keys=client_keys(self.keys), cancelled=cancelled)

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """The same for a moment."""
        connection = self.connect()
        try:
            yield connection
        finally:
            connection.close()

    def lose(self, rank: int) -> bool:
        """Tell the others that a worker has died; whether they can go on, which they cannot before they have met."""
        with self.connected() as connection:
            arguments = {"run": self.run, "size": self.size, "rank": rank}
            return bool(connection.request("lose", arguments=arguments).value)

    def lost(self) -> frozenset[int]:
        """The workers that have died."""
        with self.connected() as connection:
            return frozenset(connection.request("lost", arguments={"run": self.run, "size": self.size}).value)

    def end_run(self) -> None:
        """Tell processes that wait to join, and those that will, that all workers have come to the end of the run."""
        with self.connected() as connection:
            connection.request("end_run", arguments={"run": self.run, "size": self.size})


@dataclass(frozen=True)
class Joined:
    """How a run stands that another process has joined in the place of a dead worker.

    Args:
        meeting: Number of the last meeting.
        members: The ranks that take part from the next one on, this one behind the others.
        number: Number of the pass through the data that is under way; see :class:`ShareDealer`.
    """

    meeting: int
    members: tuple[int, ...]
    number: int


class WaitingPlace:
    """A process that is to take the place of a dead worker, until it takes part in the run.

    Args:
        place: The server where the workers of the run meet.
        rank: Rank of the worker that died.
        cancelled: Asked while it waits; once ``True`` it waits a few seconds more.
    """

    def __init__(self, place: MeetingPlace, *, rank: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.place, self.rank, self._cancelled = place, rank, cancelled
        self._connection = place.connect(cancelled)

    def wait_for_state(self) -> tuple[int, int]:
        """Return when the first worker has left what it knows of the run: the last meeting and the pass, by numbers.

        Raises:
            TimeoutError: this process was asked to end.
            RunOverError: the others have come to the end of the run.
            RequestRefusedError: there are no others any more.
        """
        for _ in turns(cancelled=self._cancelled):
            place = self._ask("wait_to_join").value
            if place is None:
                raise RunOverError(self.rank)
            if place:
                meeting, number = place
                return meeting, number
        raise TimeoutError(f"worker {self.rank}, which was to take the place of one that died, was asked to end.")

    def join(self, place: tuple[int, int]) -> Joined | None:
        """Take part; ``None`` where another meeting or pass has been since, or nothing is left of this one to train.

        Args:
            place: What :meth:`wait_for_state` has given.
        """
        meeting, number = place
        state, *numbers = self._ask("join", meeting=meeting, number=number).arrays[0].tolist()
        return Joined(numbers[0], tuple(numbers[2:]), numbers[1]) if state == OVER else None

    def _ask(self, operation: str, **arguments: int) -> Reply:
        common = {"run": self.place.run, "size": self.place.size, "rank": self.rank}
        return self._connection.request(operation, arguments={**common, **arguments})

    def close(self) -> None:
        """Wait no more."""
        self._connection.close()


class Alone:
    """Meetings with nobody, in the place of :class:`Meetings` where a worker has not joined the others.

    Args:
        rank: Rank of this worker in the run.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.members = rank, (rank,)

    def meet(self, kind: str, brought: Tensor, *, combine: str = "all", may_miss: bool = True) -> Tensor:
        """Get back what was brought."""
        return brought

    def close(self) -> None:
        """Nothing is open."""


class Meetings:
    """The meetings of one worker with all the others that live.

    Args:
        place: The server where the workers of this run meet.
        rank: Rank of this worker in the run.
        timeout: Seconds to wait for the other workers.
        cancelled: Asked while it waits; once ``True`` it waits a few seconds more.
        joined: How the run stands, for a worker that has joined it; ``None`` for one that was there from the start.

    Attributes:
        members: The ranks that take part, as of the last meeting; the same for all of them, but for those that have
            joined since.
    """

    def __init__(
        self,
        place: MeetingPlace,
        *,
        rank: int,
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
        joined: Joined | None = None,
    ) -> None:
        self.place, self.rank = place, rank
        self.members: tuple[int, ...] = tuple(range(place.size)) if joined is None else joined.members
        self._timeout, self._cancelled = timeout, cancelled
        self._connection = place.connect(cancelled)
        self._number = 0 if joined is None else joined.meeting  # of the last meeting

    def meet(self, kind: str, brought: Tensor, *, combine: str = "all", may_miss: bool = True) -> Tensor:
        """Wait for all the others; what they have brought, in the order of their ranks, or what was made of it.

        Args:
            kind: What it is for, as all of them say.
            brought: uint8, as many from each unless ``combine`` is ``all``.
            combine: ``all``: one after another. Else an operation and a dtype: ``sum``, ``mean``, ``product``, ``min``
                or ``max``, as in ``sum float32``.
            may_miss: Whether it can do without workers that died since the last meeting.

        Raises:
            WorkerLostError: a worker died without which this meeting cannot be.
            TimeoutError: the others did not come in time.
            RequestRefusedError: another worker is at a meeting of another kind.
        """
        self._number += 1
        arguments = {
            **{"run": self.place.run, "size": self.place.size, "rank": self.rank, "number": self._number},
            **{"kind": f"{kind} {combine}", "may_miss": may_miss, "combine": combine},
        }
        # The tensor travels once, or once more where a server that was started anew lacks it; then only questions do.
        sends = True
        for _ in turns(self._timeout, self._cancelled):
            reply = self._connection.request("meet", arguments=arguments, arrays=[brought] if sends else [])
            state, *numbers = reply.arrays[0].tolist()
            if state == OVER:
                self.members = tuple(numbers[1 : 1 + numbers[0]])
                return reply.arrays[1]
            if state == FAILED:
                raise WorkerLostError(numbers[0], kind)
            sends = state == SEND
        raise TimeoutError(f"worker {self.rank} waited for the others at {kind!r}, and they did not come.")

    def look(self) -> tuple[int, tuple[int, ...]]:
        """The first worker that lives, as far as the launcher has noticed, and those that wait for it to join."""
        arguments = {"run": self.place.run, "size": self.place.size}
        first, *waiting = self._connection.request("look", arguments=arguments).value
        return first, tuple(waiting)

    def leave_state(self, number: int) -> None:
        """Tell those that wait to join that what they need is there, from behind the last meeting.

        Args:
            number: Of the pass through the data that it is from.
        """
        common = {"run": self.place.run, "size": self.place.size, "rank": self.rank}
        self._connection.request("leave_state", arguments={**common, "meeting": self._number, "number": number})

    def close(self) -> None:
        """Meet nobody any more."""
        self._connection.close()


class ShareDealer:
    """Leases one worker's part of each pass through the training data.

    Args:
        place: The server where the workers of the run meet.
        rank: Rank of this worker in the run.
        accumulated: Batches whose gradients make one update.
        cancelled: Asked while it waits for other workers; once ``True`` it waits no longer.
        tells: Whether this worker logs for all.
        passes: Passes that were begun before; the next one has the number behind it.

    Attributes:
        in_flight: Batches that this worker was given last and may not have trained.
        dealt_again: Batches of all passes so far that were leased again because their worker had died.
        pauses: Asked before each lease: whether this worker leaves its share to the others for now.
        while_waiting: Entered when there is no lease at the moment, and left when there is one, or none will come.
            Gives what is called again and again meanwhile; what that raises ends the wait.
    """

    def __init__(
        self,
        place: MeetingPlace,
        *,
        rank: int,
        accumulated: int = 1,
        cancelled: Callable[[], bool] = lambda: False,
        tells: Callable[[], bool] = lambda: False,
        passes: int = 0,
    ) -> None:
        self._place, self._rank, self._cancelled, self._tells = place, rank, cancelled, tells
        self._connection = place.connect(cancelled)
        self.in_flight = IN_FLIGHT + accumulated - 1
        self.dealt_again = 0
        self.pauses: Callable[[], bool] = lambda: False
        self.while_waiting: Callable[[], AbstractContextManager[Callable[[], None]]] = lambda: nullcontext(lambda: None)
        self._pass = passes  # number of the pass that is under way

    @property
    def number(self) -> int:
        """Number of the pass that is under way; 0 before the first."""
        return self._pass

    def __call__(self, num_batches: int) -> Iterator[Lease]:
        """The leases of a new pass, in which every worker has a share of so many batches.

        Whoever iterates asks for the next lease when all batches of the last one are handed out. At the end it waits
        until nobody else may die with batches of a lease, which would then be its own.
        """
        self._pass += 1
        size = lease_size(num_batches, in_flight=self.in_flight)
        arguments = {"number": self._pass, "shard": num_batches, "lease": size, "in_flight": self.in_flight}
        latest = 0
        while (lease := self._take(latest=latest, **arguments)) is not None:
            latest = lease.number
            yield lease

    def _take(self, *, latest: int, **arguments: int) -> Lease | None:
        """The next lease, once there is one; ``None`` where none will come, or this worker was asked to end."""
        check: Callable[[], None] | None = None
        with ExitStack() as waiting:
            for _ in turns():
                if self._cancelled():
                    break
                reply = self._ask("take_share", latest=latest, pauses=self.pauses(), **arguments)
                state, *numbers = reply.arrays[0].tolist()
                if state == OVER:
                    self._tell(*numbers)
                    return None
                if state != WAIT:
                    return Lease(*numbers)
                if check is None:
                    check = waiting.enter_context(self.while_waiting())
                check()
        return None

    def finish(self, lease: Lease) -> None:
        """All batches of a lease are trained."""
        self._ask("finish_share", number=self._pass, lease=lease.number)

    def end_pass(self) -> None:
        """Let nobody be given another lease of this pass: this worker trains no more of it."""
        self._ask("end_pass", number=self._pass)

    def _tell(self, dealt_again: int) -> None:
        more, self.dealt_again = dealt_again - self.dealt_again, dealt_again
        if more and self._tells():
            log.warning("%d batches were leased again after a worker's death; some of them were trained twice.", more)

    def _ask(self, operation: str, **arguments: int) -> Reply:
        common = {"run": self._place.run, "size": self._place.size, "rank": self._rank}
        return self._connection.request(operation, arguments={**common, **arguments})

    def close(self) -> None:
        """Lease nothing any more."""
        self._connection.close()


def lease_size(num_batches: int, *, in_flight: int = IN_FLIGHT) -> int:
    """Batches of a lease, of which a share has so many: few enough that a death costs little, and worth the asking.

    >>> lease_size(10), lease_size(6400)
    (8, 100)
    """
    return max(4 * in_flight, -(-num_batches // 64))
