"""The results of a simulation: curves, histograms, traffic, how busy everybody was."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.metrics import NormalizedEntropy
from lightning_recsys.metrics.functional import normalized_entropy

_BINS = 100  # of a histogram that is written


class Histogram:
    """Counts of whole numbers, exact."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)

    def add(self, value: int) -> None:
        """Count one number."""
        if value >= len(self._counts):
            self._grow(value)
        self._counts[value] += 1

    def add_all(self, values: NDArray[np.int32]) -> None:
        """Count many."""
        counts = np.bincount(values)
        if len(counts) > len(self._counts):
            self._grow(len(counts))
        self._counts[: len(counts)] += counts

    def _grow(self, value: int) -> None:
        self._counts = np.pad(self._counts, (0, max(value + 1, 2 * len(self._counts)) - len(self._counts)))

    def to_dict(self) -> dict[str, Any]:
        """Mean, variance, 99th percentile, largest; and counts in at most a hundred bins of equal width.

        >>> histogram = Histogram()
        >>> histogram.add_all(np.array([1, 1, 4]))
        >>> {name: histogram.to_dict()[name] for name in ("mean", "variance", "p99", "max")}
        {'mean': 2.0, 'variance': 2.0, 'p99': 4, 'max': 4}
        """
        total = int(self._counts.sum())
        if not total:
            return {"count": 0}
        values = np.arange(len(self._counts))
        mean = float(values @ self._counts) / total
        largest = int(values[self._counts > 0][-1])
        width = -(-(largest + 1) // _BINS)
        return {
            "count": total,
            "mean": mean,
            "variance": float((values - mean) ** 2 @ self._counts) / total,
            "p99": int(np.searchsorted(self._counts.cumsum(), 0.99 * total)),
            "max": largest,
            "bin_width": width,
            "bins": np.add.reduceat(self._counts[: largest + 1], np.arange(0, largest + 1, width)).tolist(),
        }


@dataclass
class Results:
    """The results of a simulation, which whoever simulates adds to.

    Attributes:
        examples: Number of examples trained on so far.
        seconds: Seconds of virtual time so far.
        metrics: Numbers under the names that strategies log: ``eps``, ``train/ne``, ``val/ne``, ``sync/gap``, ...
        curve: At every mark the examples and seconds so far, the normalized entropy of the predictions since the last
            mark, each made before its example was trained on, and what evaluation said.
        staleness: Staleness of the pushes of the dense part, and of every row of every push, while all workers are at
            work: from each one's second push on, until the batches end.
        traffic: Bytes sent so far, by kind.
        utilization: Share of the time that each kind of machine was busy.
        counts: Counts of what happened, such as pushes, failures and rounds.
    """

    examples: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    staleness: dict[str, Histogram] = field(default_factory=lambda: {"dense": Histogram(), "rows": Histogram()})
    traffic: Counter[str] = field(default_factory=Counter)
    utilization: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _window: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _all: NormalizedEntropy = field(default_factory=lambda: NormalizedEntropy(from_logits=True))

    def add_predictions(self, logits: Tensor, labels: Tensor) -> None:
        """A batch was trained on; the predictions are from before."""
        self.examples += len(labels)
        self._window.append((logits, labels))

    def mark(self, seconds: float, **evaluation: float) -> None:
        """End a window of the curve."""
        self.seconds = seconds
        if not self._window:
            return
        logits, labels = (torch.cat(parts) for parts in zip(*self._window, strict=True))
        self._window.clear()
        self._all.update(logits, labels)
        train = float(normalized_entropy(logits, labels, from_logits=True)) if 0 < labels.mean() < 1 else math.nan
        self.curve.append({"examples": self.examples, "seconds": seconds, "train/ne": train, **evaluation})
        self.metrics |= evaluation

    def finish(self) -> None:
        """Everything was counted: take stock."""
        self.metrics["eps"] = self.examples / self.seconds if self.seconds else math.nan
        if self.curve:
            self.metrics["train/ne"] = float(self._all.compute())
        for kind, histogram in self.staleness.items():
            found = histogram.to_dict()
            self.metrics |= {
                f"staleness/{kind}_{name}": found[name] for name in ("mean", "variance", "p99", "max") if name in found
            }

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain containers."""
        return {
            "examples": self.examples,
            "seconds": self.seconds,
            "metrics": self.metrics,
            "curve": self.curve,
            "staleness": {kind: histogram.to_dict() for kind, histogram in self.staleness.items()},
            "traffic_bytes": dict(self.traffic),
            "utilization": self.utilization,
            "counts": dict(self.counts),
        }
