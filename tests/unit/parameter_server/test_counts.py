"""What a handler counts of requests, and the metrics that it becomes."""

from concurrent.futures import Future

import msgpack
import pytest
import torch
from prometheus_client.core import CollectorRegistry

from lightning_recsys.parameter_server.handler import RequestHandler, Unfinished
from lightning_recsys.parameter_server.messages.wire import Request, encode_request
from lightning_recsys.parameter_server.requests.operations import Operations
from lightning_recsys.parameter_server.watched.counts import BUCKET_SECONDS, OperationCounts
from lightning_recsys.parameter_server.watched.metrics import PREFIX, collect


class Slow:
    """Something that answers later."""

    def __init__(self, *_):
        self.future = Future()
        self.operations = Operations(reads={"later": lambda _: self.future})

    def status(self):
        return {}

    def close(self):
        pass


@pytest.fixture
def handler(tmp_path):
    handler = RequestHandler(tmp_path, offer=Slow)
    yield handler
    handler.close()


def value(handler, name, **labels):
    registry = CollectorRegistry()
    registry.register(type("Collector", (), {"collect": lambda _: collect(handler)})())
    return registry.get_sample_value(f"{PREFIX}_{name}", labels)


def frames_of(operation, *arrays, sequence=0, store="", **arguments):
    request = Request(operation, 1, b"c" * 16, sequence, store, arguments, list(arrays))
    return [bytearray(frame) for frame in encode_request(request)]


@pytest.mark.parametrize(
    ("nanoseconds", "bucket"),
    [(1, 0), (2**16, 0), (2**16 + 1, 1), (2**17, 1), (2**17 + 1, 2), (2**36, 20), (2**36 + 1, 21), (2**50, 21)],
)
def test_latency_when_counted_then_lies_within_its_bounds(nanoseconds, bucket):
    counts = OperationCounts()
    counts.add(nanoseconds, 3, 5, is_ok=True)
    assert counts.buckets.index(1) == bucket
    assert bucket == len(BUCKET_SECONDS) or nanoseconds / 1e9 <= BUCKET_SECONDS[bucket]
    assert bucket == 0 or nanoseconds / 1e9 > BUCKET_SECONDS[bucket - 1]
    assert (counts.requests, counts.refused, counts.nanoseconds) == (1, 0, nanoseconds)
    assert (counts.received_bytes, counts.sent_bytes) == (3, 5)


def test_requests_when_answered_then_counted_by_operation_with_their_bytes(handler):
    sent = {"hello": 1, "status": 3, "create_dense_store": 1, "pull": 2}
    asked = [frames_of("hello"), *[frames_of("status")] * 3]
    asked.append(frames_of("create_dense_store", torch.zeros(3), sequence=1, store="center", optimizer=None))
    asked += [frames_of("pull", store="center"), frames_of("pull", store="missing")]
    replies = [handler.handle(frames) for frames in asked]
    for name, number in sent.items():
        mine = [x for x, frames in enumerate(asked) if msgpack.unpackb(frames[0])[1] == name]
        assert value(handler, "requests_total", operation=name) == len(mine) == number
        received = sum(len(frame) for x in mine for frame in asked[x])
        assert value(handler, "received_bytes_total", operation=name) == received
        answered = sum(len(frame) for x in mine for frame in replies[x])
        assert value(handler, "sent_bytes_total", operation=name) == answered
        assert value(handler, "request_seconds_count", operation=name) == number
        assert value(handler, "request_seconds_bucket", operation=name, le="+Inf") == number
    assert value(handler, "refused_total", operation="pull") == 1
    assert value(handler, "pushes_total") == 1
    assert value(handler, "memory_bytes", kind="reserved") == handler.status()["bytes"] > 0
    handler.handle(asked[4])
    assert value(handler, "duplicates_total") == 1
    assert handler.status()["received_bytes"] == sum(len(x) for frames in [*asked, asked[4]] for x in frames)


def test_strangers_when_they_ask_for_anything_then_are_counted_together(handler):
    names = set(handler.counts.operations)
    for number in range(20):
        handler.handle(frames_of(f"made-up-{number}"))
    handler.handle([b"no header"])
    assert set(handler.counts.operations) == names
    assert value(handler, "requests_total", operation="other") == 21
    assert value(handler, "refused_total", operation="other") == 21


def test_request_when_answered_later_then_counted_then_with_all_its_time(handler):
    unfinished = handler.handle(frames_of("later"))
    assert isinstance(unfinished, Unfinished)
    assert value(handler, "requests_total", operation="later") == 0
    assert value(handler, "present_request_seconds") == 0  # the server's thread is free
    unfinished.future.set_result(7)
    assert msgpack.unpackb(handler.finish(unfinished)[0])[3] == 7
    assert value(handler, "requests_total", operation="later") == 1


def test_staleness_when_a_store_counts_versions_then_is_a_histogram(handler):
    handler.stores.staleness = lambda: {"center": {1: 6, 3: 2, 70_000: 1}}
    samples = {le: value(handler, "staleness_bucket", store="center", le=le) for le in ("1.0", "2.0", "4.0", "+Inf")}
    assert samples == {"1.0": 6, "2.0": 6, "4.0": 8, "+Inf": 9}
    assert value(handler, "staleness_sum", store="center") == 70_012
    assert handler.status()["mean_staleness"] == 70_012 / 9


def test_server_when_it_starts_again_then_counts_its_restarts(tmp_path):
    for restarts in range(3):
        handler = RequestHandler(tmp_path)
        assert value(handler, "restarts_total") == restarts
        handler.close()
