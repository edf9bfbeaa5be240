"""Whatever arrives at a server: it answers, its tables stay as they are, and it goes on serving.

Most cases are given to the handler itself; some hundreds go through a socket, with what only a socket can bring.
"""

import socket as plain_socket
import time

import msgpack
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import CLIENT, LAYOUT, ask, digest, raw_dealer, request_frames, running

from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.messages.wire import Limits, Status, decode_reply
from lightning_recsys.stores.plain import layout_to_plain, optimizer_to_plain

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

CASES = 6_000
PER_EXAMPLE = 50  # requests that hypothesis draws at once: its own overhead is per example
LIMITS = Limits(header_bytes=2048, message_bytes=4096, rows=64)
IDS, OFFSETS, GRADS = torch.tensor([0, 5, 1, 4, 2, 0]), torch.arange(7), torch.ones(2, 3, 4)
ROWS, CLOCKS = torch.tensor([2, 3, 4], dtype=torch.int32), torch.tensor([5, 1], dtype=torch.int32)
EXCHANGE = {"pushes": 1, "counted": False, "copied": False, "steps": 1, "clock": "max", "staleness": 2}
TABLES, RULE = layout_to_plain(LAYOUT), optimizer_to_plain(RowSGD())

# A right request of every kind; those that change something carry a sequence number that is not the next one, so that
# they change nothing where a mutation leaves them right.
RIGHT = [
    request_frames("hello"),
    request_frames("status"),
    request_frames("describe", store="users"),
    request_frames("counter", store="users"),
    request_frames("lookup", torch.tensor([0, 8]), store="users"),
    request_frames("pooled_lookup", IDS, store="users", bags=False, weighted=False),
    request_frames("pooled_lookup", IDS, OFFSETS, torch.ones(6), store="users", bags=True, weighted=True),
    request_frames("read", store="users", array="weight", first_row=1, num_rows=3),
    request_frames("read", torch.tensor([0, 8]), store="users", array="digest"),
    request_frames("pull", store="center"),
    request_frames("exchange", ROWS, CLOCKS, store="users", **EXCHANGE | {"pushes": 0, "steps": 0}),
    *(
        request_frames(operation, *arrays, sequence=sequence, **fields)
        for sequence in (0, 2**40, 2**62)
        for operation, arrays, fields in (
            (
                "apply_gradients",
                (IDS, GRADS),
                {"store": "users", "bags": False, "weighted": False, "lr": 1.0},
            ),
            ("apply_row_gradients", (torch.tensor([1]), torch.ones(1, 4)), {"store": "users", "lr": 1.0}),
            (
                "exchange",
                (ROWS, CLOCKS, torch.ones(1, 4)),
                {"store": "users", **EXCHANGE, "clock": "sum", "staleness": None},
            ),
            ("write", (torch.ones(2, 4),), {"store": "users", "array": "weight", "first_row": 0, "num_rows": 2}),
            ("write", (torch.tensor([3]), torch.ones(1, 4)), {"store": "users", "array": "weight"}),
            ("set_step", (), {"store": "users", "step": 9}),
            ("write_dense", (torch.ones(3),), {"store": "center", "array": "values"}),
            ("elastic_average", (torch.ones(3),), {"store": "center", "alpha": 0.5}),
            ("push_gradient", (torch.ones(3),), {"store": "center", "lr": 1.0}),
            ("create_dense_store", (torch.ones(3),), {"store": "new", "optimizer": None}),
            ("create_embedding_store", (), {"store": "new", "tables": TABLES, "optimizer": RULE, "seed": 0}),
            ("remove", (), {"store": "users"}),
        )
    ),
]
# Wrong ones with the next sequence number: refused for what they are, not for their number.
WRONG_PUSHES = [
    (operation, arrays, fields)
    for operation, arrays, fields in (
        (
            "apply_gradients",
            (IDS + 9, GRADS),
            {"store": "users", "bags": False, "weighted": False, "lr": 1.0},
        ),
        ("apply_gradients", (IDS, GRADS), {"store": "users", "bags": True, "weighted": False, "lr": 1.0}),
        ("apply_row_gradients", (torch.tensor([-1]), torch.ones(1, 4)), {"store": "users", "lr": 1.0}),
        (
            "apply_row_gradients",
            (torch.tensor([1]), torch.ones(1, 4)),
            {"store": "users", "lr": float("nan")},
        ),
        *(
            (
                "exchange",
                (ROWS + off, CLOCKS + off, torch.ones(1, 4)),
                {"store": "users", **EXCHANGE, "pushes": pushes},
            )
            for off, pushes in ((6, 1), (-6, 1), (0, 2))
        ),
        ("write", (torch.ones(2, 4),), {"store": "users", "array": "weight", "first_row": 8, "num_rows": 2}),
        ("write", (torch.tensor([9]), torch.ones(1, 4)), {"store": "users", "array": "weight"}),
        ("elastic_average", (torch.ones(3),), {"store": "center", "alpha": float("nan")}),
        ("create_embedding_store", (), {"store": "new", "tables": TABLES, "optimizer": {"rule": "x"}, "seed": 0}),
        ("remove", (), {"store": "nobody"}),
    )
]

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
mutations = st.one_of(
    st.tuples(st.just("field"), st.integers(0, 7), plain),
    st.tuples(st.just("argument"), st.integers(0, 9), plain),
    st.tuples(st.just("description"), st.integers(0, 4), plain),
    st.tuples(st.just("flip"), st.integers(0, 5), st.integers(0, 10_000)),
    st.tuples(st.just("cut"), st.integers(0, 5), st.integers(0, 200)),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(1, 5000)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.none()),
    st.tuples(st.just("repeat"), st.integers(0, 5), st.integers(1, 8)),
    st.tuples(st.just("number"), st.integers(0, 5), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("nest"), st.integers(0, 7), st.integers(1, 600)),
)
requests = st.one_of(
    st.tuples(st.sampled_from(RIGHT), st.lists(mutations, min_size=1, max_size=3)),
    st.tuples(st.lists(st.binary(max_size=60), max_size=4), st.just([])),
)


def mutated(frames, changes):
    frames = [bytearray(frame) for frame in frames]
    for kind, place, value in changes:
        if not frames:
            break
        frame = frames[place % len(frames)]
        match kind:
            case "field" | "argument" | "description" | "nest":
                frames[0] = changed_header(frames[0], kind, place, value)
            case "flip" if frame:
                frame[value % len(frame)] ^= 1 << (value % 8)
            case "cut":
                del frame[value:]
            case "grow":
                frame += bytes(value)
            case "drop":
                frames.pop(place % len(frames))
            case "repeat":
                frames += [bytearray(frame)] * value
            case "number" if len(frame) >= 8:  # one of an array's values
                frame[-8:] = value.to_bytes(8, "little", signed=True)
    return frames


def changed_header(frame, kind, place, value):
    try:
        header = msgpack.unpackb(frame)
        if kind == "field":
            header[place] = value
        elif kind == "argument":
            names = sorted(header[6])
            header[6][names[place] if place < len(names) else "more"] = value
        elif kind == "description":
            header[7][place] = value
        else:
            for _ in range(value):
                header[place] = [header[place]]
        return bytearray(msgpack.packb(header))
    except Exception:  # an earlier mutation left no such header
        return frame


def check(reply):
    reply = decode_reply([bytearray(frame) for frame in reply], Limits())
    assert reply.status in Status.ALL
    assert reply.status == Status.OK or reply.status == Status.GAP or reply.value  # says why
    return reply


def make_handler(folder):
    handler = RequestHandler(folder, limits=LIMITS)
    handler.stores.mapped.create_embedding_store("users", LAYOUT, RowSGD(), seed=0)
    handler.stores.mapped.create_dense_store("center", torch.zeros(3), optimizer=RowSGD())
    assert ask(handler, "hello").status == "ok"
    return handler


def test_handler_when_given_thousands_of_wrong_requests_then_answers_all_and_changes_nothing(tmp_path):
    handler = make_handler(tmp_path)
    before = digest(tmp_path)
    seen = {"cases": 0, "not_ok": 0}

    @settings(
        max_examples=CASES // PER_EXAMPLE,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE), st.sampled_from(WRONG_PUSHES))
    def fuzz(batch, wrong_push):
        for frames, changes in batch:
            reply = check(handler.handle(mutated(frames, changes)))
            seen["not_ok"] += reply.status not in (Status.OK, Status.GAP)
        operation, arrays, fields = wrong_push
        sequence = handler.journal.applied(handler.journal.slot(CLIENT)) + 1
        assert ask(handler, operation, *arrays, sequence=sequence, **fields).status in ("refused", "missing")
        seen["not_ok"] += 1
        seen["cases"] += PER_EXAMPLE + 1
        assert digest(tmp_path) == before
        assert ask(handler, "lookup", torch.tensor([0, 8]), store="users").status == "ok"

    fuzz()
    assert seen["cases"] >= CASES
    assert seen["not_ok"] > CASES // 2
    assert handler.counts.refused == seen["not_ok"]
    handler.close()


def test_server_when_given_wrong_messages_over_a_socket_then_answers_and_goes_on(tmp_path):
    with running(tmp_path, limits=LIMITS) as server, zmq.Context() as context:
        server.handler.stores.mapped.create_embedding_store("users", LAYOUT, RowSGD(), seed=0)
        server.handler.stores.mapped.create_dense_store("center", torch.zeros(3), optimizer=RowSGD())
        before, sent = digest(tmp_path), 0
        with raw_dealer(context, server.endpoint) as dealer:

            @settings(max_examples=40, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
            @given(st.lists(requests, min_size=10, max_size=10))
            def fuzz(batch):
                nonlocal sent
                messages = [mutated(frames, changes) or [b""] for frames, changes in batch]
                for message in messages:
                    dealer.send_multipart(message)
                for _ in messages:
                    assert dealer.poll(60_000), "no answer"
                    check(dealer.recv_multipart())
                sent += len(messages)

            fuzz()
        assert sent >= 380
        assert server.handler.counts.requests == sent
        assert digest(tmp_path) == before
        stores = connect(server.endpoint, transport="tcp")
        assert stores.embedding_store("users").lookup(torch.tensor([1])).shape == (1, 4)
        stores.close()


def test_server_when_given_what_is_no_message_then_cuts_that_connection_and_goes_on(tmp_path):
    with running(tmp_path, limits=LIMITS) as server, zmq.Context() as context:
        server.handler.stores.mapped.create_embedding_store("users", LAYOUT, RowSGD(), seed=0)
        path = server.endpoint.removeprefix("ipc://")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 100, b""):
            with plain_socket.socket(plain_socket.AF_UNIX) as stranger:
                stranger.connect(path)
                stranger.sendall(garbage)
        with raw_dealer(context, server.endpoint) as dealer:  # one frame that is larger than ZeroMQ is told to take
            dealer.send(bytes(3 * LIMITS.message_bytes))
            assert not dealer.poll(300)
        with raw_dealer(context, server.endpoint) as dealer:  # no frame but an empty one
            dealer.send(b"")
            assert dealer.poll(60_000)
            assert "not msgpack" in decode_reply(dealer.recv_multipart(), Limits()).value
        request = request_frames("hello")
        with raw_dealer(context, server.endpoint) as dealer:  # gone before its answer is
            dealer.send_multipart(request)
        stores = connect(server.endpoint, transport="tcp", timeout=60)
        deadline = time.monotonic() + 60
        while (status := stores.status())["requests"] < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert status["refused"] == 1
        stores.close()
