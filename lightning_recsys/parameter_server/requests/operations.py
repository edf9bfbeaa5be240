"""The interface between a server's parts and its handler: operations, by the names that requests call them by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_recsys.parameter_server.journal import Undo
from lightning_recsys.parameter_server.messages.wire import Request

Read = Callable[[Request], object]
"""Answers a request that counts the same however often it comes, in most cases because it changes nothing.

With a plain value, a tensor, a tuple of tensors, an :class:`Answer`, or a future of one of these.
"""


@dataclass(frozen=True)
class Answer:
    """A plain value and tensors."""

    value: Any
    arrays: list[Tensor]


@dataclass(frozen=True)
class Push:
    """A push that was found right, and has changed nothing yet.

    Args:
        apply: Carries it out; answers as a :data:`Read` does.
        undo: What it will touch; ``None`` where doing it twice is doing it once.
    """

    apply: Callable[[], object]
    undo: Undo | None = None


@dataclass(frozen=True)
class Operations:
    """Operations by name.

    Args:
        reads: Those that take no sequence number, as :data:`Read` says.
        pushes: Those that change something. Each is given the request, checks all of it, and changes nothing yet.
        again: For pushes with an answer: what is answered when one comes again that was applied before, which is what
            the store has by then. The others are answered ``None``.
    """

    reads: dict[str, Read] = field(default_factory=dict)
    pushes: dict[str, Callable[[Request], Push]] = field(default_factory=dict)
    again: dict[str, Read] = field(default_factory=dict)

    def __or__(self, other: Operations) -> Operations:
        return Operations(self.reads | other.reads, self.pushes | other.pushes, self.again | other.again)


class Offer(Protocol):
    """The operations of a server besides those of stores."""

    @property
    def operations(self) -> Operations:
        """The requests that it answers."""
        ...

    def status(self) -> dict[str, Any]:
        """The part's share of the server's status: plain numbers and strings."""
        ...

    def close(self) -> None:
        """Let go of everything; the server ends."""
        ...
