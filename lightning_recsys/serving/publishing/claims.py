"""One publisher at a time: a lock on a local folder, and a claim that its holder renews on a remote one.

Object stores lock nothing, and clocks of machines differ. So the holder rewrites its claim every few seconds, and who
finds one watches it for longer than that: a claim that changes meanwhile has a holder that lives, and is refused to
everybody else; one that does not is of a publisher that died. Before a version counts, its publisher looks whether the
claim is still its own: one that stood still for too long, and was taken for dead, lets nothing count any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lightning_recsys.launchers.folders import is_running

_LOCK = ".publisher.lock"
_CLAIM = "publisher.json"
RENEW_SECONDS = 10.0
WATCH_SECONDS = 35.0  # three signs of life may be late or lost
LOOK_SECONDS = 5.0  # between two looks at a claim of somebody else
SETTLE_SECONDS = 2.0  # after which of several that claim at once the last one is known
DEAD_SECONDS = 20.0  # in which the workers of a loader end whose process was killed, and with them its lock
_TRY_SECONDS = 0.1


def words_of(holder: str) -> str:
    """How a publisher is named to others."""
    return f"{holder} (process {os.getpid()} on {socket.gethostname()})"


def _is_dead(holder: str) -> bool:
    """Whether a holder in words is a process of this machine that has ended."""
    found = re.search(r"\(process (\d+) on (.*)\)$", holder)
    return found is not None and found[2] == socket.gethostname() and not is_running(int(found[1]))


@contextmanager
def locked(root: Path, url: str, holder: str) -> Iterator[None]:
    """Hold the lock on a local folder, which the system gives back when this process and what it forked have died.

    Raises:
        ValueError: another publisher holds it; the message names that one.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("a+") as file:
        _lock(file, url)
        try:
            file.truncate(0)
            file.write(holder)
            file.flush()
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has it open too


@contextmanager
def shut(path: Path) -> Iterator[None]:
    """Hold a lock for a moment, and wait for whoever has it; the system gives it back where its holder dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: IO[str], url: str) -> None:
    """Take the lock; where its holder is dead, wait for the processes that it forked, which end soon after it."""
    waited_until = time.monotonic() + DEAD_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read(1000)
            if not _is_dead(other) or time.monotonic() > waited_until:
                raise ValueError(_refusal(url, other or "another process")) from None
            time.sleep(_TRY_SECONDS)
        else:
            return


class Claim:
    """A claim on a remote folder; a context manager.

    Args:
        read: Reads the claim that is there; ``FileNotFoundError`` where there is none.
        write: Replaces the claim by another one.
        remove: Removes the claim.
        url: Address of the folder, for error messages.
        holder: Description of this publisher, for messages to others.

    Raises:
        ValueError: when it is entered: another publisher lives, whom the message names.
    """

    def __init__(
        self,
        read: Callable[[str], bytes],
        write: Callable[[str, bytes], object],
        remove: Callable[[str], object],
        *,
        url: str,
        holder: str,
    ) -> None:
        self._read, self._write, self._remove = read, write, remove
        self._url, self._holder, self._token = url, holder, uuid.uuid4().hex
        self._signs = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="publisher-claim", daemon=True)

    def __enter__(self) -> Claim:
        # Who is there is watched for longer than a publisher that lives takes to renew its claim. Several that find the
        # same dead one all write theirs; after a moment the last one finds its own there, and the others are refused.
        found = self._found()
        watched_until = time.monotonic() + WATCH_SECONDS
        while found is not None and time.monotonic() < watched_until:
            time.sleep(LOOK_SECONDS)
            if (now := self._found()) is not None and now != found:
                raise ValueError(_refusal(self._url, str(now.get("holder"))))
            found = now
        self._sign()
        time.sleep(SETTLE_SECONDS)
        self.check()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(OSError, ValueError):
            self.check()
            self._remove(_CLAIM)

    def check(self) -> None:
        """See whether this is still the one that publishes.

        Raises:
            ValueError: another one has claimed the folder, whom the message names.
        """
        found = self._found()
        if found is None or found.get("token") != self._token:
            other = "whoever removed its claim" if found is None else str(found.get("holder"))
            raise ValueError(_refusal(self._url, other))

    def _found(self) -> dict[str, Any] | None:
        try:
            plain = json.loads(self._read(_CLAIM))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return plain if isinstance(plain, dict) else {}

    def _sign(self) -> None:
        self._signs += 1
        plain = {"token": self._token, "holder": self._holder, "signs": self._signs}
        self._write(_CLAIM, json.dumps(plain).encode())

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(Exception):  # a network that fails for a moment, each library with errors of its own
                try:
                    self.check()
                except ValueError:  # it is another's, which the next version tells
                    return
                self._sign()


def _refusal(url: str, other: str) -> str:
    return f"{url}: {other} publishes there. Choose another folder, or end that one first."
