"""What ranks tell each other while a model is brought to its group servers, and what they wait for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Store


class News:
    """Values by name, for which others wait. A rank that fails says so in the place of all that it owes.

    Args:
        store: Where all ranks read them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def tell(self, name: str, value: Any = None) -> None:
        """Give a value, which JSON can carry."""
        self._store.set(name, json.dumps({"value": value}))

    def ask(self, name: str) -> Any:
        """Wait for a value.

        Raises:
            RuntimeError: the rank that owes it has failed; with its error.
        """
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
