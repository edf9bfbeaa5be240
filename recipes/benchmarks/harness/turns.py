"""Variants measured in turns inside one process, so that their ratios are free of the machine's drift."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from benchmarks.harness.estimates import Estimate, trimmed_mean


class Stopped(Exception):
    """Raised in a variant's thread when its measurement is over."""


class Turn:
    """One variant's side: it calls :meth:`step_done` after every training step, and waits there between its turns."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._go, self._done = threading.Event(), threading.Event()
        self._stopping = False
        self._examples, self._started = 0, 0.0
        self.rates: list[float] = []
        self.error: BaseException | None = None

    def step_done(self, num_examples: int) -> None:
        """Count a step; blocks when the turn is over, and raises :class:`Stopped` when the measurement is."""
        if self._stopping:
            raise Stopped
        self._examples += num_examples
        elapsed = time.perf_counter() - self._started
        if elapsed >= self.seconds:
            self.rates.append(self._examples / elapsed)
            self._done.set()
            self.wait()

    def wait(self) -> None:
        """Block until the next turn."""
        self._go.wait()
        self._go.clear()
        if self._stopping:
            raise Stopped
        self._examples, self._started = 0, time.perf_counter()

    def give(self) -> None:
        """The measuring side: let the variant run for one turn."""
        self._done.clear()
        self._go.set()
        self._done.wait()

    def stop(self) -> None:
        """The measuring side: end the variant."""
        self._stopping = True
        self._go.set()

    def run(self, variant: Callable[[Turn], None]) -> None:
        """Body of the variant's thread."""
        torch.set_flush_denormal(True)  # holds for a thread
        try:
            self.wait()
            variant(self)
        except Stopped:
            pass
        except BaseException as error:  # handed to the measuring thread, which raises it
            self.error = error
        finally:
            self._done.set()


@dataclass
class Measurement:
    """Examples per second of each variant, one number for each round."""

    rates: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Median rate of a variant."""
        return statistics.median(self.rates[name])

    def ratio(self, name: str, base: str) -> float:
        """Median over the rounds of ``name``'s rate divided by ``base``'s in the same round."""
        return statistics.median(a / b for a, b in zip(self.rates[name], self.rates[base], strict=True))

    def estimate(self, name: str, base: str) -> Estimate:
        """The same ratio as a trimmed mean of its logarithm: for many short rounds, of which one says little."""
        logs = trimmed_mean(np.log(np.divide(self.rates[name], self.rates[base])).tolist())
        ratio = math.exp(logs.value)
        return Estimate(ratio, ratio * logs.standard_error)

    def spread(self, name: str, base: str) -> tuple[float, float]:
        """Smallest and largest of the rounds' ratios."""
        ratios = [a / b for a, b in zip(self.rates[name], self.rates[base], strict=True)]
        return min(ratios), max(ratios)


def in_turns(variants: Mapping[str, Callable[[Turn], None]], *, rounds: int, seconds: float) -> Measurement:
    """Run every variant for ``seconds`` in each of ``rounds`` rounds, one at a time, in rotating order.

    Each variant lives in a thread of its own and stops inside :meth:`Turn.step_done`, so that a whole
    ``Trainer.fit`` can be paused. A first, uncounted round warms everything up.

    Raises:
        RuntimeError: a variant ended or failed before the measurement was over.
    """
    turns = {name: Turn(seconds) for name in variants}
    threads = [
        threading.Thread(target=turns[name].run, args=(variant,), name=f"variant {name}", daemon=True)
        for name, variant in variants.items()
    ]
    for thread in threads:
        thread.start()
    names = list(variants)
    try:
        for i in range(rounds + 1):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                turns[name].give()
                if len(turns[name].rates) != i + 1:
                    raise RuntimeError(f"variant {name!r} ended in round {i}") from turns[name].error
    finally:
        for turn, thread in zip(turns.values(), threads, strict=True):
            turn.stop()
            thread.join()
    return Measurement({name: turn.rates[1:] for name, turn in turns.items()})
