"""The news that ranks tell each other while a model is brought to its group servers, and what they wait for."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Store

from lightning_recsys.parameter_server.waiting import turns


class News:
    """Values by name, for which others wait. A rank that fails says so in the place of all that it owes.

    Args:
        store: The store in which all ranks read the values.
        lost: Tells the ranks that have died.
    """

    def __init__(self, store: Store, *, lost: Callable[[], Container[int]] = frozenset) -> None:
        self._store, self._lost = store, lost

    def tell(self, name: str, value: Any = None) -> None:
        """Give a value, which JSON can carry."""
        self._store.set(name, json.dumps({"value": value}))

    def ask(self, name: str, *, by: int) -> Any:
        """Wait for a value.

        Args:
            name: Name of the value.
            by: Rank that has to tell the value.

        Raises:
            RuntimeError: that rank has failed, with its error, or has died.
        """
        for looks in turns():
            is_lost = looks and by in self._lost()  # first: it may have told the value and died since
            if self._store.check([name]):
                break
            if is_lost:
                raise RuntimeError(
                    f"rank {by} died before it had brought the model to its group servers, which others wait for:"
                    " begin anew, or go on from the last checkpoint."
                )
        told = json.loads(self._store.get(name))
        if "failed" in told:
            raise RuntimeError(told["failed"])
        return told["value"]

    @contextmanager
    def owing(self, rank: int, names: Sequence[str]) -> Iterator[None]:
        """Let nobody wait for what a rank owes, when it fails within."""
        try:
            yield
        except Exception as error:
            text = f"rank {rank} could not bring the model to its group servers: {type(error).__name__}: {error}"
            for name in names:
                self._store.set(name, json.dumps({"failed": text}))
            raise
