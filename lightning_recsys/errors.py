"""Errors with fields, for what a caller may want to handle by itself."""

from __future__ import annotations


class ServerUnreachableError(ConnectionError):
    """A server did not answer within all attempts.

    Args:
        endpoint: Where it was sought.
        operation: What was asked of it.
        attempts: How often it was asked.
        seconds: How long that took.
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
        endpoint: The server.
        operation: What was asked of it.
        reason: Why it refused.
    """

    def __init__(self, endpoint: str, operation: str, reason: str) -> None:
        super().__init__(endpoint, operation, reason)
        self.endpoint = endpoint
        self.operation = operation
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.endpoint} refused {self.operation!r}: {self.reason}"
