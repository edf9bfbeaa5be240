"""Blocks of one training that take turns, so that what drifts meets both sides alike."""

from __future__ import annotations

import numpy as np
from benchmarks.harness.turns import Measurement
from numpy.typing import NDArray

Clocks = NDArray[np.float64]
"""Seconds by each of several clocks."""


class Quadruples:
    """Blocks with something and without it: with, without, without, with, or the other way round, by lot.

    A machine that grows slower within a quadruple takes as much from one side as from the other; and what comes at
    fixed distances, such as a reader's next rows, meets both sides.

    Args:
        batch_size: Examples of a step.

    Attributes:
        taken: Of each side (``True``: with it), steps and seconds by each clock of the two blocks of each quadruple.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._lot = np.random.default_rng(0)
        self.taken: dict[bool, list[NDArray[np.float64]]] = {True: [], False: []}
        self._coming: list[bool] = []
        self._begin()

    def _begin(self) -> None:
        first = bool(self._lot.integers(2))
        self._coming = [first, not first, not first, first]
        self._of_quadruple: dict[bool, list[NDArray[np.float64]]] = {True: [], False: []}

    @property
    def on(self) -> bool:
        """Whether the block that comes now is one with it."""
        return self._coming[0]

    def add(self, steps: int, seconds: Clocks) -> bool:
        """End a block of so many steps; returns whether it was the last one of a quadruple."""
        self._of_quadruple[self._coming.pop(0)].append(np.array([steps, *seconds]))
        if self._coming:
            return False
        for on, blocks in self._of_quadruple.items():
            self.taken[on].append(np.sum(blocks, axis=0))
        self._begin()
        return True

    def forget(self) -> None:
        """Leave out the quadruples so far: they warmed up."""
        self.taken = {True: [], False: []}

    def __len__(self) -> int:
        return len(self.taken[True])

    def rates(self, clock: int, *, on: str, off: str) -> Measurement:
        """Examples per second by a clock, one number for each quadruple, under the names of the two sides."""
        sides = {on: np.array(self.taken[True]), off: np.array(self.taken[False])}
        return Measurement(
            {name: (self._batch_size * side[:, 0] / side[:, 1 + clock]).tolist() for name, side in sides.items()}
        )
