"""The counts of a server at work: plain numbers, written by the one thread that serves, read by any other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

_FIRST_BITS = 16  # the first bucket holds latencies up to 2**16 ns
_NUM_BUCKETS = 22  # the last one has no upper bound
BUCKET_SECONDS = [2 ** (_FIRST_BITS + bucket) / 1e9 for bucket in range(_NUM_BUCKETS - 1)]
"""Upper bounds of the buckets of latencies but the last: 66 microseconds, doubled up to 69 seconds."""


@dataclass(slots=True)
class OperationCounts:
    """The counts of one operation. A request costs additions to these numbers, no lock and no search for a bucket.

    Args:
        requests: Requests that were answered, however they ended.
        refused: Those of them that were not carried out.
        received_bytes: Bytes of the requests, headers included.
        sent_bytes: Bytes of the answers, headers included.
        nanoseconds: Time from taking a request to having its answer, of all requests.
        buckets: Number of requests by that time; bounds are :data:`BUCKET_SECONDS`.
    """

    requests: int = 0
    refused: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    nanoseconds: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)

    def add(self, nanoseconds: int, received: int, sent: int, *, is_ok: bool) -> None:
        """Count a request that was answered."""
        self.requests += 1
        if not is_ok:
            self.refused += 1
        self.received_bytes += received
        self.sent_bytes += sent
        self.nanoseconds += nanoseconds
        # How many bits are above the first bucket's says which bucket it is.
        bucket = ((nanoseconds - 1) >> _FIRST_BITS).bit_length()
        self.buckets[bucket if bucket < _NUM_BUCKETS else -1] += 1


class Counts:
    """The work of a server since it started.

    Args:
        operations: Names of the operations that it has. Requests for any other, and messages that are no requests,
            are counted together, under the empty name: strangers must not make a server count without end.

    Attributes:
        requests: Requests that have come.
        refused: Those of them that were not carried out.
        full: Those of these for which there was no room, in memory or on the disk.
        pushes: Number of pushes that were applied.
        duplicates: Pushes that came again, and were acknowledged without being applied.
        unfinished: Requests that other threads work on at the moment.
        operations: Counts of the requests that were answered, by the name of the operation.
        others: Those under the empty name.
        begun: When the request that is served now was taken, in nanoseconds of ``time.perf_counter_ns``; 0 where none
            is.
        started: When the server started, in seconds of a clock that never goes back.
    """

    def __init__(self, operations: Iterable[str] = ()) -> None:
        self.requests = 0
        self.refused = 0
        self.full = 0
        self.pushes = 0
        self.duplicates = 0
        self.unfinished = 0
        self.others = OperationCounts()
        self.operations = {**{name: OperationCounts() for name in sorted(operations)}, "": self.others}
        self.begun = 0
        self.started = time.monotonic()
