"""Epochs of suite ``graph`` over a slow link: HET's cache of nodes' rows beside no cache (Table 1's GNN rows).

A worker and its server are on two hosts, as in :mod:`benchmarks.suites.het.link`; bytes are held against those told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.jobs.hosts import NoLinkError
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Columns, Result, Row
from benchmarks.suites.het.link import HET, HYBRID, PER_STEP, measure_variants

TRAINING = "benchmarks.suites.graph.training"

log = logging.getLogger("benchmark")


def measure(
    *,
    rate: str,
    exponents: Sequence[float],
    at_least: Sequence[float],
    staleness: int,
    rounds: int,
    seconds: float,
    warm_steps: int,
    **workload: Any,
) -> Measured:
    """How many times as long an epoch takes without the cache, and the bytes that crossed the link.

    An epoch has as many steps either way, so its time is the inverse of the examples a second.

    Args:
        rate: Of the link, in the words of ``tc``.
        exponents: Of the graphs' degrees: how uneven neighbours are drawn.
        at_least: Bars: an epoch of hybrid over one of het, for each of these.
        staleness: Of het.
        rounds: Of turns.
        seconds: Of each variant in each round.
        warm_steps: Steps until the cache is full.
        workload: ``num_nodes``, ``num_edges``, ``num_neighbors``, ``batch_size`` and ``dim`` of
            :func:`benchmarks.suites.graph.training.train`.
    """
    strategies: Mapping[str, tuple[Mapping[str, Any], int]] = {
        HYBRID: ({"algorithm": "hybrid"}, 5),
        HET: ({"algorithm": "het", "staleness": staleness}, warm_steps),
    }
    results: list[Result] = []
    bars: list[Bar] = []
    lines: list[list[str]] = []
    for exponent, least in zip(exponents, at_least, strict=True):
        title = f"epoch of hybrid / het, {rate}, exponent {exponent:g}"
        settings = {**workload, "exponent": exponent}
        try:
            measured, jobs = measure_variants(
                settings, strategies, [rate], rounds=rounds, seconds=seconds, training=TRAINING
            )
        except NoLinkError as error:
            log.warning("The link is left out: %s.", error)
            bars.append(Bar(title, None, "at least", least, " x"))
            continue
        where = f"GraphSAGE, exponent {exponent:g}"
        shape = f"{list(workload['num_neighbors'])}, B={workload['batch_size']}, D={workload['dim']}"
        results.append(Row(f"{where}, {rate}, {shape}", measured[rate], base=HYBRID))
        bars.append(Bar(title, measured[rate].ratio(HET, HYBRID), "at least", least, " x"))
        for name, told in jobs.items():
            crossed, missed = told.crossed, told.telemetry.get("cache/miss_rate", 1.0)
            lines.append([*crossed.line(f"{where}, {name}"), f"{missed:.1%}"])
            bars.append(crossed.bar(f"{where}, {name}"))
    header = (*PER_STEP, "rows missed")
    return [*results, Columns("Bytes between worker and server, both ways", header, lines)], bars
