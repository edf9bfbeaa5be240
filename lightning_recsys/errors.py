"""Errors with fields, for what a caller may want to handle by itself."""

from __future__ import annotations

import collections.abc
import contextlib


class ServerUnreachableError(ConnectionError):
    """A server did not answer within all attempts.

    Args:
        endpoint: The endpoint that was tried.
        operation: The operation that the server was asked for.
        attempts: Number of attempts that were made.
        seconds: Seconds that all attempts took together.
        detail: What the connection had last to say; may be empty.
    """

    def __init__(self, endpoint: str, operation: str, attempts: int, seconds: float, detail: str = "") -> None:
        super().__init__(endpoint, operation, attempts, seconds, detail)  # all of them, so that it can be pickled
        self.endpoint = endpoint
        self.operation = operation
        self.attempts = attempts
        self.seconds = seconds
        self.detail = detail

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"{self.endpoint} did not answer {self.operation!r} in {self.attempts} attempts over {self.seconds:.1f} s"
            f"{detail}. Is a server running there, with the same keys? `lightning-recsys-server --status "
            f"{self.endpoint}` asks it; where a server is slow, raise timeout or retries."
        )


class RequestRefusedError(ValueError):
    """A server did not do what it was asked, and changed nothing.

    Args:
        endpoint: The endpoint of the server that refused.
        operation: The operation that the server was asked for.
        reason: The server's reason, in words.
    """

    def __init__(self, endpoint: str, operation: str, reason: str) -> None:
        super().__init__(endpoint, operation, reason)
        self.endpoint = endpoint
        self.operation = operation
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.endpoint} refused {self.operation!r}: {self.reason}"


class StoreReplacedError(RuntimeError):
    """A store was removed, and perhaps made anew, while it was open here: nothing was read or changed.

    Args:
        store: Name of the store, or its folder.
    """

    def __init__(self, store: str) -> None:
        super().__init__(store)
        self.store = store

    def __str__(self) -> str:
        return (
            f"the store {self.store} was removed or made anew by somebody else after it was opened here, most likely by"
            " another run on the same server: what was pushed to it went with it. A server serves one run at a time."
        )


class ServerInUseError(RuntimeError):
    """A server has been lent to another run.

    Args:
        endpoint: The endpoint of the server.
        holder: The run that has it, in its own words.
        seconds: Seconds since that run was last heard of.
    """

    def __init__(self, endpoint: str, holder: str, seconds: float) -> None:
        super().__init__(endpoint, holder, seconds)
        self.endpoint = endpoint
        self.holder = holder
        self.seconds = seconds

    def __str__(self) -> str:
        return (
            f"the server at {self.endpoint} is in use by another run ({self.holder}; last heard of {self.seconds:.0f} s"
            " ago), and a server serves one run at a time: their updates would mix. Wait until that run has ended, or"
            " start a server of your own: lightning-recsys-server --folder ANOTHER_FOLDER."
        )


class NoRoomError(ValueError):
    """The servers have no room for the rows of a table.

    Args:
        table: Name of the table.
        needed: Bytes of the part of it that found no place, or of all of it, with optimizer state.
        left: Bytes that each server has left, by index.
        available: Bytes that each server had before anything was placed, by index.
    """

    def __init__(self, table: str, needed: int, left: dict[int, int], available: dict[int, int]) -> None:
        super().__init__(table, needed, left, available)
        self.table = table
        self.needed = needed
        self.left = left
        self.available = available

    def __str__(self) -> str:
        servers = ", ".join(
            f"server {server} {left:,} of {self.available[server]:,}" for server, left in sorted(self.left.items())
        )
        return (
            f"table {self.table} needs {self.needed:,} bytes that no server has, rows and optimizer state; free are:"
            f" {servers} (servers of one file system share it). Start more servers on other machines, keep their files"
            " on a larger disk (strategy.store_folder, or --folder of the server), or make the table smaller."
        )


class OperatorRoomError(ValueError):
    """The devices of a group have no memory for what a model's dense part needs.

    Args:
        what: The operator, or the device with its share.
        needed: Bytes that it needs: weights, gradients, optimizer state, and on a device what the nets compute, too.
        available: Bytes that each device has for it, by name.
    """

    def __init__(self, what: str, needed: int, available: dict[str, int]) -> None:
        super().__init__(what, needed, available)
        self.what, self.needed, self.available = what, needed, available

    def __str__(self) -> str:
        devices = ", ".join(f"{device} has {left:,}" for device, left in self.available.items())
        return (
            f"{self.what} needs {self.needed:,} bytes of memory: {devices}. Add group servers or memory, split wide "
            "fully connected layers, take fewer nets or smaller batches, or make the model smaller."
        )


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, cut short, or not what was written.

    Args:
        checkpoint: Path of the checkpoint, a folder or a single file.
        file: Path of the damaged file within it.
        reason: What is wrong with the file, in words.
    """

    def __init__(self, checkpoint: str, file: str, reason: str) -> None:
        super().__init__(checkpoint, file, reason)
        self.checkpoint = checkpoint
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.checkpoint}: {self.file} {self.reason}. Take a copy of the checkpoint, or another one."


class CheckpointNotWrittenError(OSError):
    """A checkpoint folder could not be written; what was there before still counts.

    Args:
        checkpoint: Path of the checkpoint's folder.
        reason: What went wrong, and on which rank.
    """

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(checkpoint, reason)
        self.checkpoint = checkpoint
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.checkpoint} was not written: {self.reason}. What was saved there before still counts. Where the"
            " disk is full, make room or save elsewhere."
        )


class PublishedVersionError(ValueError):
    """A published version of a model cannot be used; whoever had another one open still has it.

    Args:
        version: Name of the published version.
        reason: What is wrong with the version, in words.
    """

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(version, reason)
        self.version = version
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.version}: {self.reason}. The version that was open before stays as it was."


class PublisherReplacedError(PublishedVersionError):
    """Another publisher took this one for dead, and publishes in its place: it can publish nothing any more."""


class WorkerLostError(RuntimeError):
    """A worker died while the others were exchanging something that cannot do without it.

    Args:
        rank: The rank of the worker that died.
        kind: What the workers were exchanging, in words.
    """

    def __init__(self, rank: int, kind: str) -> None:
        super().__init__(rank, kind)
        self.rank = rank
        self.kind = kind

    def __str__(self) -> str:
        return (
            f"worker {self.rank} died while all workers were at {self.kind!r}, which cannot do without it. Go on from"
            " the last checkpoint."
        )


class RunOverError(RuntimeError):
    """A process was to take the place of a worker that died, and the others have come to the end of the run.

    Args:
        rank: The rank of the worker that died.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank

    def __str__(self) -> str:
        return (
            f"the run was over before another process had taken the place of worker {self.rank}: nothing is left to do"
        )


@contextlib.contextmanager
def network_errors() -> collections.abc.Iterator[None]:
    """Let errors of an fsspec file system be ``OSError``; the libraries behind it raise some that are none."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
