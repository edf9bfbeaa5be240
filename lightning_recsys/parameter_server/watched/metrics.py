"""A server's counts as metrics for Prometheus, made when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.watched.counts import BUCKET_SECONDS, OperationCounts

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.core import HistogramMetricFamily

PREFIX = "lightning_recsys_server"
STALENESS_BOUNDS = [2**power for power in range(17)]
_TOTALS = {
    "duplicates": "Pushes that came again and were acknowledged without being applied",
    "pushes": "Pushes that were applied",
    "full": "Requests that were refused because there was no room",
    "restarts": "Earlier starts of a server on this folder",
}
_GAUGES = {  # by the name in the status, the metric's and what it is
    "clients": ("clients", "Clients that are connected, or were cut off not long ago"),
    "stores": ("stores", "Stores in the folder"),
    "rows": ("rows", "Rows of all embedding stores, those included that do not exist yet"),
    "live_rows": ("live_rows", "Rows that exist"),
    "unfinished": ("unfinished_requests", "Requests that other threads work on"),
    "queued_bytes": ("queued_bytes", "Bytes of requests that have arrived and wait to be read"),
    "uptime": ("uptime_seconds", "Time since the server started"),
}
_MEMORY = {"reserved": "bytes", "used": "used_bytes", "free": "free_bytes"}  # by the label, the status's name


def collect(handler: RequestHandler) -> Iterator[Metric]:
    """The metrics of a server.

    Counts are read while the server's own thread goes on: each is right, and two that belong together may be a
    request apart.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    counts, status = handler.counts, handler.status()
    requests = CounterMetricFamily(f"{PREFIX}_requests", "Requests that were answered", labels=["operation"])
    refused = CounterMetricFamily(f"{PREFIX}_refused", "Requests that were not carried out", labels=["operation"])
    received = CounterMetricFamily(f"{PREFIX}_received_bytes", "Bytes of requests", labels=["operation"])
    sent = CounterMetricFamily(f"{PREFIX}_sent_bytes", "Bytes of answers", labels=["operation"])
    seconds = HistogramMetricFamily(
        f"{PREFIX}_request_seconds", "Time from taking a request to having its answer", labels=["operation"]
    )
    for name, of_operation in counts.operations.items():
        label = [name or "other"]
        requests.add_metric(label, of_operation.requests)
        refused.add_metric(label, of_operation.refused)
        received.add_metric(label, of_operation.received_bytes)
        sent.add_metric(label, of_operation.sent_bytes)
        if of_operation.requests:
            _add_latencies(seconds, label, of_operation)
    yield from (requests, refused, received, sent, seconds)
    for name, text in _TOTALS.items():
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=status[name])
    for key, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=status[key])
    memory = GaugeMetricFamily(
        f"{PREFIX}_memory_bytes", "Bytes of stores: reserved for them, used of that, free besides", labels=["kind"]
    )
    for kind, name in _MEMORY.items():
        memory.add_metric([kind], status[name])
    yield memory
    begun = counts.begun
    yield GaugeMetricFamily(
        f"{PREFIX}_present_request_seconds",
        "How long the server has worked on its present request; 0 where there is none",
        value=(time.perf_counter_ns() - begun) / 1e9 if begun else 0.0,
    )
    staleness = HistogramMetricFamily(
        f"{PREFIX}_staleness", "Updates between a gradient's parameters and its own, by store", labels=["store"]
    )
    for store, occurred in handler.stores.staleness().items():
        _add_staleness(staleness, [store], occurred)
    yield staleness


def _add_latencies(family: HistogramMetricFamily, label: list[str], counts: OperationCounts) -> None:
    buckets, total = [], 0
    for bound, count in zip([*map(str, BUCKET_SECONDS), "+Inf"], list(counts.buckets), strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(label, buckets, counts.nanoseconds / 1e9)


def _add_staleness(family: HistogramMetricFamily, label: list[str], occurred: dict[int, int]) -> None:
    buckets: list[tuple[str, float]] = [
        (str(float(bound)), sum(count for x, count in occurred.items() if x <= bound)) for bound in STALENESS_BOUNDS
    ]
    buckets.append(("+Inf", sum(occurred.values())))
    family.add_metric(label, buckets, sum(x * count for x, count in occurred.items()))
