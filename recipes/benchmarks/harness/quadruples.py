"""Blocks of one training that take turns, so that what drifts meets both sides alike."""

from __future__ import annotations

from typing import Any

import numpy as np


class Quadruples:
    """Blocks with something and without it: with, without, without, with, or the other way round, by lot.

    A machine that grows slower within a quadruple takes as much from one side as from the other; and what comes at
    fixed distances, such as a reader's next rows, meets both sides.

    Attributes:
        on: Whether the block that comes now is one with it.
    """

    def __init__(self) -> None:
        self._lot = np.random.default_rng(0)
        self._begin()

    def _begin(self) -> None:
        first = bool(self._lot.integers(2))
        self._coming = [first, not first, not first, first]
        self._taken: dict[bool, Any] = {True: 0.0, False: 0.0}

    @property
    def on(self) -> bool:
        return self._coming[0]

    def add(self, taken: Any) -> dict[bool, Any] | None:
        """End a block.

        Args:
            taken: What it took, a number or an array of them.

        Returns:
            After the last block of a quadruple, what its two blocks of each side took together.
        """
        self._taken[self._coming.pop(0)] += taken
        if self._coming:
            return None
        whole = self._taken
        self._begin()
        return whole
