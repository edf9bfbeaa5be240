"""Suites that are measured part by part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness.bars import Bar, Bars
from benchmarks.harness.choices import check_choices
from benchmarks.harness.report import Result

Measured = tuple[list[Result], list[Bar]]
"""A part's results, and the bars that they are held against."""

log = logging.getLogger("benchmark")


def measure_parts(parts: Sequence[str], measures: Mapping[str, Callable[[], Measured]]) -> list[Result]:
    """Measure some parts of a suite, one after the other; all their bars close the results.

    Args:
        parts: Names of those to measure, in this order.
        measures: How each is measured, by name.

    Raises:
        ValueError: there is no such part.
    """
    check_choices("suite.parts", parts, measures)
    results: list[Result] = []
    bars: list[Bar] = []
    for part in parts:
        began = time.monotonic()
        measured, held = measures[part]()
        results += measured
        bars += held
        log.info("%s: %.0f s", part, time.monotonic() - began)
    return [*results, Bars(tuple(bars))]
