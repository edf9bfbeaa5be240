"""Estimates from noisy repetitions, each with its standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A value, and how far a repetition of the whole measurement would be off, typically."""

    value: float
    standard_error: float


def trimmed_mean(values: Sequence[float], *, share: float = 0.1) -> Estimate:
    """Mean without the smallest and the largest ``share`` of the values.

    A mean is carried off by a few disturbed repetitions; a median needs half as many repetitions again, and forgets
    what only a few of them have to pay.

    Args:
        values: At least two.
        share: Left out on each side, rounded down to whole values; below one half.

    Raises:
        ValueError: fewer than two values.

    Source: Tukey and McLaughlin 1963, Less Vulnerable Confidence and Significance Procedures for Location, for the
    standard error: that of the values with the ones left out put on the last ones kept, over the share that is kept.

    >>> trimmed_mean([0.0, 1.0, 2.0, 3.0, 100.0], share=0.2).value
    2.0
    """
    if len(values) < 2:
        raise ValueError(f"a standard error needs at least two values, got {len(values)}.")
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    out = int(share * len(ordered))
    kept = ordered[out : len(ordered) - out]
    deviation = float(np.clip(ordered, kept[0], kept[-1]).std(ddof=1))
    return Estimate(float(kept.mean()), deviation * len(ordered) ** 0.5 / len(kept))
