"""Publications of one training, switched on and off, a period of the publisher's clock at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
from benchmarks.harness.quadruples import Clocks, Quadruples
from benchmarks.harness.turns import Stopped

from lightning_recsys.serving import ModelPublisher

NONE, PUBLISHING = "no publication", "publishing"
WALL, TRAINING, PROCESS = range(3)  # the clocks


def clocks() -> Clocks:
    """Seconds: since 1970, as the publisher counts; of this thread's processor time; and of the whole process's."""
    return np.array([time.time(), time.thread_time(), time.process_time()])


def processor_seconds(blocks: Quadruples) -> float:
    """Of a version: what threads other than the training one take more than they do in as many steps without."""
    (steps, *with_), (steps_without, *without) = (np.sum(blocks.taken[on], axis=0) for on in (True, False))
    others = with_[PROCESS] - with_[TRAINING] - (without[PROCESS] - without[TRAINING]) * steps / steps_without
    return float(others) / (2 * len(blocks))


class PublicationSwitch(pl.Callback):
    """Lets a publisher publish, or not, for a block at a time, and notes the steps and seconds of each.

    A block is a period of the publisher: from one multiple of ``every_seconds`` to the next. A publisher publishes at
    its first step in a period, so a block with publications has exactly one: its cut, and its writing beside training.
    A block does not end before its version is written; where that takes longer than the period, the next block begins
    with the period after, and what lies between counts for neither side.

    Blocks come in quadruples: with, without, without, with, or the other way round, by lot. So a machine that grows
    slower takes as much from one side as from the other.

    This callback must stand before the publisher, so that the step which begins a period is the new block's.

    Args:
        publisher: With ``every_seconds``.
        batch_size: Examples of a step.
        is_warm: Asked where a period begins, until it is so: then the first block begins. Until then it publishes.
        is_enough: Asked after each quadruple with the blocks and the seconds since the first one began; ends the
            training by :class:`benchmarks.harness.turns.Stopped`.
        clock: Tells the seconds so far, as :func:`clocks` does.

    Attributes:
        blocks: What was measured.
    """

    def __init__(
        self,
        publisher: ModelPublisher,
        batch_size: int,
        *,
        is_warm: Callable[[], bool],
        is_enough: Callable[[Quadruples, float], bool],
        clock: Callable[[], Clocks] = clocks,
    ) -> None:
        assert publisher.every_seconds is not None
        self.blocks = Quadruples(batch_size)
        self._publisher, self._every = publisher, publisher.every_seconds
        self._is_warm, self._is_enough, self._clock = is_warm, is_enough, clock
        self._hook: Any = None  # of the publisher, from the first block on
        self._period: int | None = None  # of the latest step
        self._steps, self._since = 0, clock()  # of the block
        self._is_counting = self._is_over = False  # whether there is a block; whether its period is over
        self._began = 0.0  # when the first block did

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count the step; where a period ends, end the block and begin the next."""
        now = self._clock()
        period = int(now[WALL] // self._every)
        is_new, self._period = self._period not in (None, period), period
        if self._is_counting:
            self._steps += 1
            self._is_over |= is_new
            if not self._is_over:
                return
            self._publisher.on_train_batch_end = None  # what is due now is the next block's
            if not self._publisher.is_writing:
                self._end_block(now)
        if is_new and not self._is_counting and self._is_warm_now(now):
            self._publisher.on_train_batch_end = self._hook if self.blocks.on else None
            self._steps, self._since, self._is_counting, self._is_over = 0, now, True, False

    def _is_warm_now(self, now: Clocks) -> bool:
        if self._hook is None and self._is_warm():
            self._hook, self._began = self._publisher.on_train_batch_end, now[WALL]
        return self._hook is not None

    def _end_block(self, now: Clocks) -> None:
        self._is_counting = False
        is_whole = self.blocks.add(self._steps, now - self._since)
        if is_whole and self._is_enough(self.blocks, now[WALL] - self._began):
            raise Stopped
