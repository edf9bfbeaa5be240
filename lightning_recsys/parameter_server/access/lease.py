"""One run at a time on a server that outlives runs: the server lends itself, and the run tells it that it lives.

A run takes the lease before it touches a store, and gives it back at its end. A run that is killed gives nothing back:
its lease ends by itself ``LEASE_SECONDS`` after it was last heard of. Whoever finds the server lent waits as long as it
takes to know which of the two it is: a holder that lives is heard of meanwhile, and then the second run is refused.

The holder is written to the folder, so a server that is started again knows it, and gives it the whole time anew. Ranks
that are started again ask in the same run's name.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_recsys.errors import RequestRefusedError, ServerInUseError, ServerUnreachableError
from lightning_recsys.parameter_server.access.keys import ClientKeys, Token
from lightning_recsys.parameter_server.client import Connection

LEASE = ".lease"  # a name that no store can have
LEASE_SECONDS = 20.0  # after which a run that was not heard of is taken for dead
RENEW_SECONDS = 2.0  # between two signs of life: many may be late or lost
LOOK_SECONDS = 0.5  # between two questions of one that waits

log = logging.getLogger("pytorch_lightning.lightning_recsys.lease")  # which has a handler in worker processes


@dataclass(frozen=True)
class _Held:
    """Who has the server, as it was last heard of.

    Args:
        run: Id of the run that has the lease.
        holder: Description of that run, for messages.
        seconds: When it was heard of, by the server's clock.
        signs: How often it was, since it took the lease or the server started.
    """

    run: str
    holder: str
    seconds: float
    signs: int


class Lease:
    """The server's side.

    Args:
        folder: The stores', which keeps who has the lease.
        clock: Returns the present time in seconds, and never goes back.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / LEASE
        self._clock = clock
        self._held: _Held | None = None
        # A server that was started again takes the run in the file for alive, as of now: nobody else gets the server
        # before LEASE_SECONDS have passed, in which a run that lives renews its lease.
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # nobody has it, or nobody can know
            kept = json.loads(self._path.read_text())
            self._held = _Held(str(kept["run"]), str(kept["holder"]), clock(), 0)

    def take(self, run: str, holder: str) -> dict[str, Any]:
        """Give the lease to a run, or renew it; what stands then.

        Args:
            run: The run's id; processes that share one are one run.
            holder: Description of the run, for messages to other runs.

        Returns:
            ``granted``; where it was not, ``holder``, the ``seconds`` since that was heard of, and its ``signs`` of
            life so far.
        """
        now, held = self._clock(), self._held
        if held is not None and held.run != run and now - held.seconds < LEASE_SECONDS:
            return {"granted": False, "holder": held.holder, "seconds": now - held.seconds, "signs": held.signs}
        # The file is written when the lease changes hands, before the run hears of it. Killed between the two, the
        # server has lent itself to a run that asks again, and gets it. Renewals change the memory alone.
        if held is None or held.run != run:
            self._write(run, holder)
            held = _Held(run, holder, now, 0)
        self._held = _Held(run, held.holder, now, held.signs + 1)
        return {"granted": True}

    def give_back(self, run: str) -> None:
        """End the lease of a run; another's stays."""
        if self._held is not None and self._held.run == run:
            self._held = None
            self._path.unlink(missing_ok=True)

    @property
    def holder(self) -> str | None:
        """Who has it now, in its own words; ``None`` where nobody does."""
        held = self._held
        return held.holder if held is not None and self._clock() - held.seconds < LEASE_SECONDS else None

    def _write(self, run: str, holder: str) -> None:
        new = self._path.with_name(f"{LEASE}-{os.getpid()}")
        new.write_text(json.dumps({"run": run, "holder": holder}))
        new.rename(self._path)  # whole or not at all


class RunLease:
    """The run's side: leases on some servers, each renewed by a thread of its own until they are closed.

    One thread for all would wait for minutes at a server that has died, and the others' leases would end meanwhile.

    Args:
        endpoints: The endpoints of the servers to lease.
        keys: The clients' keys or the token, the same for all servers; ``None`` where servers ask for neither.
        run: Id of this run.
        holder: Description of this run, which a server tells other runs.
        cancelled: Asked while it waits for a server; see :class:`~lightning_recsys.parameter_server.client.Connection`.

    Raises:
        ServerInUseError: another run has one of them. None is kept then.
        ServerUnreachableError: one of them does not answer.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        keys: ClientKeys | Token | None,
        run: str,
        holder: str,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cancelled = cancelled
        self._run, self._holder = run, holder
        self._error: ServerInUseError | None = None
        self._done = threading.Event()
        self._connections = [Connection(x, keys=keys, cancelled=self._is_over) for x in dict.fromkeys(endpoints)]
        try:
            for connection in self._connections:
                self._take(connection)
        except BaseException:
            self._done.set()
            self._give_back()
            self._close()
            raise
        self._threads = [
            threading.Thread(target=self._renew, args=(connection,), name="lease", daemon=True)
            for connection in self._connections
        ]
        for thread in self._threads:
            thread.start()

    def _is_over(self) -> bool:
        return self._done.is_set() or self._cancelled()

    def check(self) -> None:
        """Raise if a server was lent to another run meanwhile, which takes this one for dead.

        Raises:
            ServerInUseError: another run has one of the servers now.
        """
        if self._error is not None:
            raise self._error

    def close(self, *, gives_back: bool = True) -> None:
        """Renew the leases no more; nothing happens a second time.

        Args:
            gives_back: Let another run have the servers at once, instead of leaving that to other processes of this
                run, or to the end of the leases' time.
        """
        if not self._done.is_set():
            self._done.set()
            for thread in self._threads:
                thread.join()
            if gives_back:
                self._give_back()
            self._close()

    def _take(self, connection: Connection) -> None:
        """Wait for the lease as long as its holder may be dead."""
        # A holder that lives gives another sign of life within RENEW_SECONDS, and this run is refused. One that is dead
        # gives none, and the server lends itself to whoever asks once LEASE_SECONDS have passed.
        seen: int | None = None  # signs of life of the holder at the last look
        while not (answer := self._ask(connection))["granted"]:
            if seen is not None and answer["signs"] > seen:
                raise ServerInUseError(connection.endpoint, answer["holder"], answer["seconds"])
            if seen is None:
                log.info("Server %s is lent to %s; does that run live?", connection.endpoint, answer["holder"])
            seen = answer["signs"]
            if self._cancelled():
                raise ServerInUseError(connection.endpoint, answer["holder"], answer["seconds"])
            time.sleep(LOOK_SECONDS)

    def _ask(self, connection: Connection) -> dict[str, Any]:
        arguments = {"run": self._run, "holder": self._holder}
        answer: dict[str, Any] = connection.request("lease", arguments=arguments).value
        return answer

    def _renew(self, connection: Connection) -> None:
        while not self._done.wait(RENEW_SECONDS):
            # One that is being started again will hear of us when it is back, and knows until then whose it is.
            # One that could not do it (its disk is full) may do so the next time.
            with suppress(ServerUnreachableError, RequestRefusedError):
                answer = self._ask(connection)
                if not answer["granted"]:
                    self._error = ServerInUseError(connection.endpoint, answer["holder"], answer["seconds"])
                    return

    def _give_back(self) -> None:
        for connection in self._connections:
            with suppress(ServerUnreachableError, RequestRefusedError):  # it ends by itself
                connection.request("give_back", arguments={"run": self._run})

    def _close(self) -> None:
        for connection in self._connections:
            with suppress(ServerUnreachableError, RequestRefusedError):
                connection.close()
