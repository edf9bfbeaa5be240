"""Rounds for which all workers of a trainer stand still: nobody updates the replica while one of them averages it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock
from typing import Any

from lightning_recsys.strategies.replicas.replica import file_of_team


class Standstill:
    """Keeps the updates of a trainer's workers and its rounds apart, by two locks of the kernel's.

    Who updates holds the *room* shared, as any number of workers do at once; who runs a round holds it exclusively.
    Both come in by the *turnstile*: an update lets go of it once it is in, a round keeps it to its end. So workers that
    come after a round was announced wait outside, and a round waits for no more than the updates that are under way,
    however many workers take turns at updating.

    Each lock is a file that every worker has opened for itself. A process that ends, however it does, holds none any
    more: the others go on until somebody ends them.

    Args:
        turnstile: File descriptor of the turnstile's file, opened by this worker for itself.
        room: File descriptor of the room's file, which is another one, opened likewise.
    """

    def __init__(self, turnstile: int, room: int) -> None:
        self._turnstile, self._room = turnstile, room
        self._is_in = False  # this worker is in an update

    @classmethod
    def open(cls, *, team_size: int) -> Standstill:
        """One for each team of consecutive ranks; all ranks of the default group call this together."""
        files = []
        for _ in range(2):
            with file_of_team(team_size=team_size) as path:
                files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return cls(*files)

    @contextmanager
    def update_after(self, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """A closure that ends within an update, which lasts until the block ends.

        It begins to compute when no round is under way. A round may begin while it does: what it computes is then an
        update for the replica as the round left it, and not lost.
        """

        def compute_and_come_in() -> Any:
            if not self._is_in:  # an optimizer may call its closure more than once
                flock(self._turnstile, LOCK_SH)
                flock(self._turnstile, LOCK_UN)
            result = closure()
            self._come_in()
            return result

        try:
            yield compute_and_come_in
        finally:
            self._is_in = False
            flock(self._room, LOCK_UN)

    def _come_in(self) -> None:
        if self._is_in:
            return
        # The turnstile first and then the room, as a round does it: so no two wait for what the other one holds.
        flock(self._turnstile, LOCK_SH)
        flock(self._room, LOCK_SH)
        flock(self._turnstile, LOCK_UN)
        self._is_in = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No worker of the trainer is in an update, or begins one, until the block ends; nor may this one be."""
        assert not self._is_in
        flock(self._turnstile, LOCK_EX)  # nobody comes in any more,
        try:
            flock(self._room, LOCK_EX)  # and who is in lets go without needing either
            yield
        finally:
            flock(self._room, LOCK_UN)
            flock(self._turnstile, LOCK_UN)

    def close(self) -> None:
        """Let go of both, also where processes that this one has forked have them open."""
        for file in (self._room, self._turnstile):
            flock(file, LOCK_UN)
            os.close(file)
