"""Exchanges with a server: as with mapped stores, each push once whatever is lost, the answer when it is wanted."""

import random
from dataclasses import replace

import pytest
import torch
from server_helpers import CLIENT, LAYOUT, ForgetfulServer, ask, digest, running

from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.errors import RequestRefusedError
from lightning_recsys.optim import RowAdagrad, RowSGD, RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.messages.wire import Limits
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.exchange import RowExchange

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NUM_ROWS, DIM = 9, 4
SHAPES = {"RowSGD": {"weight": (DIM,)}, "RowWiseAdagrad": {"weight": (DIM,), "sum": ()}}


def make_users(stores, rule=None, dtype="float32"):
    layout = TableLayout(tuple(replace(table, dtype=dtype) for table in LAYOUT.tables))
    return stores.create_embedding_store("users", layout, rule or RowSGD(lr=0.5), seed=3)


def clocks(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def add_ones(rows, **more):
    rows = torch.tensor(rows)
    updates = {"weight": torch.full((len(rows), DIM), -1.0)}
    ones = torch.ones(len(rows), dtype=torch.int32)
    return RowExchange(push_rows=rows, push_clocks=ones, updates=updates, clock="sum", num_steps=1, **more)


def random_exchange(generator, shapes):
    """Each of the three parts with 0 to 5 rows."""
    sizes = [int(torch.randint(0, 6, (), generator=generator)) for _ in range(3)]
    pushed, fetched, checked = (torch.randperm(NUM_ROWS, generator=generator)[:size] for size in sizes)
    names = shapes if sizes[0] else {}
    draw_counts, draw_copies = torch.randint(0, 2, (2,), generator=generator).tolist()
    return RowExchange(
        fetch_rows=fetched,
        push_rows=pushed,
        push_clocks=torch.randint(0, 9, (sizes[0],), generator=generator).int(),
        updates={name: torch.randn(sizes[0], *shapes[name], generator=generator) for name in names},
        push_counts=torch.randint(1, 9, (sizes[0] * draw_counts,), generator=generator).int(),
        copies={name: torch.randn(sizes[0], *shapes[name], generator=generator) for name in names if draw_copies},
        num_steps=int(torch.randint(0, 3, (), generator=generator)),
        check_rows=checked,
        check_clocks=torch.randint(0, 9, (sizes[2],), generator=generator).int(),
        staleness=[None, 0, 1, 2**62 - 1][int(torch.randint(0, 4, (), generator=generator))],
        clock=["max", "sum"][int(torch.randint(0, 2, (), generator=generator))],
    )


def equal(one, other):
    pairs = [*((one.values[name], other.values[name]) for name in other.values)]
    pairs += [(one.clocks, other.clocks), (one.stale, other.stale)]
    return one.values.keys() == other.values.keys() and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def rounded(tensors, compression):
    """What arrives of weights or their updates; states arrive as they are."""
    if compression == "none" or not tensors:
        return tensors
    return {**tensors, "weight": tensors["weight"].bfloat16().float()}


@pytest.mark.parametrize(
    ("compression", "dtype", "widths"),
    [
        ("none", "float32", (4, 4)),
        ("bf16", "float32", (2, 2)),
        ("none", "bfloat16", (2, 4)),
        ("bf16", "bfloat16", (2, 2)),
    ],
)
@pytest.mark.parametrize("rule", [RowSGD(0.5), RowWiseAdagrad(0.5)], ids=lambda rule: type(rule).__name__)
def test_remote_exchange_when_compared_then_equals_a_mapped_one_and_counts_its_bytes(
    tmp_path, rule, compression, dtype, widths
):
    (tmp_path / "own").mkdir()
    (tmp_path / "served").mkdir()
    mapped, shapes = make_users(MappedStores(tmp_path / "own"), rule, dtype), SHAPES[type(rule).__name__]
    generator = torch.Generator().manual_seed(0)
    with running(tmp_path / "served") as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20, compression=compression)
        remote, traffic = make_users(stores, rule, dtype), stores.connection.traffic
        assert (remote.weight_bytes, remote.gradient_bytes) == widths
        told = 0
        before = traffic.sent_bytes + traffic.received_bytes
        for _ in range(200):
            request = random_exchange(generator, shapes)
            answer = remote.begin_exchange(request)()
            received = {kind: rounded(getattr(request, kind), compression) for kind in ("updates", "copies")}
            expected = mapped.begin_exchange(replace(request, **received))()
            assert equal(answer, replace(expected, values=rounded(expected.values, compression)))
            weight, gradient = widths
            told += sum(request.bytes_by_kind(NUM_ROWS, shapes, weight_bytes=weight, gradient_bytes=gradient).values())
        assert traffic.sent_bytes + traffic.received_bytes - before == told
        assert server.handler.counts.refused == 0
        for name in shapes:
            assert torch.equal(remote.read(name, 0, NUM_ROWS), mapped.read(name, 0, NUM_ROWS))
        assert remote.step == mapped.step > 0
        stores.close()
    served = MappedStores(tmp_path / "served").embedding_store("users")
    assert torch.equal(served.clocks, mapped.clocks)
    assert served.clocks.any()


@pytest.mark.parametrize("bytes_of_rows", [1, 3, 5])
def test_exchange_when_over_a_limit_then_goes_in_parts_and_equals_a_whole_one(tmp_path, bytes_of_rows):
    limits = Limits(message_bytes=bytes_of_rows * (24 + 2 * (4 * DIM + 4)))  # with copies
    (tmp_path / "own").mkdir()
    (tmp_path / "served").mkdir()
    whole = make_users(MappedStores(tmp_path / "own"), RowWiseAdagrad(0.5))
    generator = torch.Generator().manual_seed(0)
    with running(tmp_path / "served") as server:
        stores = connect(server.endpoint, transport="tcp")
        users = make_users(stores, RowWiseAdagrad(0.5))
        server.handler.stores.limits = stores.connection.limits = limits
        for _ in range(30):
            exchange = random_exchange(generator, SHAPES["RowWiseAdagrad"])
            assert equal(users.begin_exchange(exchange)(), whole.begin_exchange(exchange)())
        assert users.step == whole.step
        assert server.handler.counts.refused == 0
        stores.close()


def test_answers_when_awaited_late_then_are_those_of_the_moment_and_what_came_between_is_done(tmp_path):
    with running(tmp_path) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20, window=2)
        users, row = make_users(stores), torch.tensor([4])
        start = users.lookup(row)
        waiting = []
        for _ in range(10):
            waiting.append(users.begin_exchange(add_ones([4], fetch_rows=row)))
            users.apply_row_gradients(row, torch.full((1, DIM), -10.0), lr=1.0)
            waiting.append(users.begin_exchange(RowExchange(fetch_rows=row)))
        answers = [wait() for wait in reversed(waiting)][::-1]
        for turn in range(10):
            for answer, added in zip(answers[2 * turn :], (11 * turn + 1, 11 * turn + 11), strict=False):
                torch.testing.assert_close(answer.values["weight"], start + added)
                assert answer.clocks.tolist() == [turn + 1]
        users.begin_exchange(add_ones([4]))  # nobody waits for it
        users.flush()
        torch.testing.assert_close(users.lookup(row), start + 111)
        stores.close()


def test_exchange_when_refused_then_raises_where_it_is_awaited_and_later_ones_count(tmp_path):
    with running(tmp_path, limits=Limits(rows=5)) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20)
        users, row = make_users(stores), torch.tensor([1])
        with pytest.raises(IndexError, match=r"fetch_rows must be in \[0, 9\), got 9 to 9"):
            users.begin_exchange(RowExchange(fetch_rows=torch.tensor([9])))
        wrong = users.begin_exchange(add_ones([1], fetch_rows=torch.arange(6)))
        with pytest.raises(RequestRefusedError, match=r"refused 'exchange': .*rows than 5; got 1 pushes.* 7 rows"):
            wrong()
        assert users.begin_exchange(add_ones([1], fetch_rows=row))().clocks.tolist() == [1]
        late = users.begin_exchange(add_ones([1], fetch_rows=torch.arange(6)))
        with pytest.raises(RequestRefusedError, match="rows than 5"):
            users.flush()
        with pytest.raises(RequestRefusedError, match="rows than 5"):
            late()
        assert users.step == 1
        stores.remove("users")
        with pytest.raises(KeyError, match="no store 'users'"):
            users.begin_exchange(add_ones([1]))()
        stores.close()


def test_exchange_when_replies_are_lost_then_is_applied_once_and_answered(tmp_path):
    with running(tmp_path, kind=ForgetfulServer) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=0.2, retries=100)
        users, row = make_users(stores), torch.tensor([4])
        start = users.lookup(row)
        for turn in range(1, 41):
            checks = {"check_rows": row, "check_clocks": clocks(turn - 2), "staleness": 1}
            answer = users.begin_exchange(add_ones([4], fetch_rows=row, **checks))()
            torch.testing.assert_close(answer.values["weight"], start + turn)
            assert (answer.clocks.tolist(), answer.stale.tolist()) == ([turn], [True])
        assert users.step == 40
        assert server.lost > 10
        assert server.handler.counts.duplicates > 0
        stores.close()


def test_clients_when_they_take_turns_at_random_then_every_update_counts_once(tmp_path):
    draws = random.Random(1)
    with running(tmp_path) as server:
        clients = [connect(server.endpoint, transport="tcp", timeout=20) for _ in range(3)]
        stores = [make_users(client) for client in clients]
        start, expected = stores[0].read("weight", 0, NUM_ROWS), torch.zeros(NUM_ROWS)
        waiting = [[] for _ in clients]
        for _ in range(300):
            client = draws.randrange(3)
            rows = draws.sample(range(NUM_ROWS), 3)
            expected[rows] += 1
            waiting[client].append(stores[client].begin_exchange(add_ones(rows, fetch_rows=torch.tensor(rows))))
            if len(waiting[client]) > draws.randrange(5):
                waiting[client].pop(draws.randrange(len(waiting[client])))()
        for waits in waiting:
            for wait in waits:
                wait()
        torch.testing.assert_close(stores[0].read("weight", 0, NUM_ROWS), start + expected.unsqueeze(1))
        answer = stores[1].begin_exchange(RowExchange(fetch_rows=torch.arange(NUM_ROWS)))()
        assert answer.clocks.tolist() == expected.tolist()
        assert stores[2].step == 300
        for client in clients:
            client.close()


# --- The handler alone --------------------------------------------------------------------------------------------

ROWS, CLOCKS = torch.tensor([2, 3, 4], dtype=torch.int32), clocks(5, 1)
RIGHT = {"pushes": 1, "counted": False, "copied": False, "steps": 1, "clock": "max", "staleness": 3}
UPDATE = torch.ones(1, DIM)  # of row 2, with 3 checked and 4 fetched


@pytest.fixture
def handler(tmp_path):
    handler = RequestHandler(tmp_path, limits=Limits(message_bytes=4096, rows=300))
    make_users(handler.stores.mapped)
    assert ask(handler, "hello").status == "ok"
    yield handler
    handler.close()


def exchange(handler, *arrays, sequence=0, **arguments):
    return ask(handler, "exchange", *arrays, store="users", sequence=sequence, **arguments)


def test_push_when_it_comes_again_then_its_fetches_and_checks_are_answered_with_what_is_now(handler, tmp_path):
    arguments = RIGHT | {"clock": "sum"}
    arrays = torch.tensor([2, 2, 2], dtype=torch.int32), clocks(5, 1), UPDATE
    first = exchange(handler, *arrays, sequence=1, **arguments)
    before = digest(tmp_path)
    again = exchange(handler, *arrays, sequence=1, **arguments)
    assert digest(tmp_path) == before
    for reply in (first, again):
        weight, fetched_clocks, bits = reply.arrays
        assert torch.equal(weight[0], handler.stores.mapped.embedding_store("users").rows[2])
        assert (fetched_clocks.tolist(), bits.tolist()) == ([5], [0b1000_0000])
    assert (handler.counts.pushes, handler.counts.duplicates) == (1, 1)
    assert exchange(handler, *arrays, sequence=3, **arguments).status == "gap"
    assert digest(tmp_path) == before


def test_push_when_it_fails_half_way_then_rows_clocks_and_step_are_as_before(tmp_path, monkeypatch):
    handler = RequestHandler(tmp_path)
    make_users(handler.stores.mapped, RowAdagrad(0.5))
    ask(handler, "hello")
    before = digest(tmp_path)

    def fail(store, request):
        assert digest(tmp_path) != before
        raise MemoryError("in the middle")

    monkeypatch.setattr("lightning_recsys.stores.embedding_store.MappedEmbeddingStore.fetch_and_check", fail)
    reply = exchange(handler, ROWS, CLOCKS, UPDATE, UPDATE, sequence=1, **RIGHT)
    assert (reply.status, reply.value) == ("failed", "MemoryError: in the middle")
    assert digest(tmp_path) == before
    handler.close()


@pytest.mark.parametrize(
    ("sequence", "arrays", "changed", "reason"),
    [
        (0, (ROWS, CLOCKS, UPDATE), {}, "needs a sequence number"),
        (0, (ROWS, CLOCKS), {"pushes": 0}, "needs a sequence number"),
        (1, (ROWS, CLOCKS), {"pushes": 0, "steps": 0}, "takes no sequence number"),
        (1, (ROWS, CLOCKS, UPDATE), {"pushes": 3}, "pushes may not be more than clocks"),
        (1, (ROWS, CLOCKS, UPDATE), {"pushes": -1}, "pushes may not be more than clocks"),
        (1, (ROWS, CLOCKS[:1], UPDATE), {"counted": True}, "pushes may not be more than clocks"),
        (1, (ROWS, clocks(5, 1, 0), UPDATE), {"counted": True}, "push_counts must be at least 1, got 0"),
        (1, (ROWS, CLOCKS, UPDATE), {"counted": 1}, "counted must be bool"),
        (1, (ROWS, CLOCKS, UPDATE), {"copied": True}, "an array is missing: weight"),
        (1, (ROWS, CLOCKS, UPDATE, UPDATE[:, :3].contiguous()), {"copied": True}, r"copies\['weight'\] must be"),
        (1, (ROWS, CLOCKS, UPDATE), {"pushes": 2}, r"updates\['weight'\] must be .* of shape \[2, 4\]"),
        (1, (ROWS, CLOCKS, UPDATE), {"pushes": True}, "pushes must be int"),
        (1, (ROWS, CLOCKS, UPDATE), {"steps": -1}, "num_steps must be in"),
        (1, (ROWS, CLOCKS, UPDATE), {"steps": 2**40}, "num_steps must be in"),
        (1, (ROWS, CLOCKS, UPDATE), {"clock": "mean"}, r"clock must be one of \['max', 'sum'\]"),
        (1, (ROWS, CLOCKS, UPDATE), {"staleness": -1}, "staleness must be None or from 0"),
        (1, (ROWS, CLOCKS, UPDATE), {"staleness": 2**63}, "staleness must be None or from 0"),
        (1, (ROWS, CLOCKS, UPDATE), {"staleness": 1.0}, "staleness must be int or NoneType"),
        (1, (ROWS, CLOCKS, UPDATE), {"more": 1}, "takes the arguments"),
        (1, (ROWS, CLOCKS), {}, "an array is missing: weight"),
        (1, (ROWS, CLOCKS, UPDATE, UPDATE), {}, "takes 3 arrays, got 4"),
        (1, (ROWS.long(), CLOCKS, UPDATE), {}, "rows must be torch.int32"),
        (1, (ROWS, CLOCKS.long(), UPDATE), {}, "clocks must be torch.int32"),
        (1, (ROWS[:1], CLOCKS, UPDATE), {}, "these than rows"),
        (1, (ROWS, clocks(-1, 0), UPDATE), {}, "push_clocks must be at least 0, got -1"),
        (1, (ROWS, CLOCKS, UPDATE[:, :3].contiguous()), {}, r"of shape \[1, 4\] on the CPU, got .* \[1, 3\]"),
        (1, (ROWS + 6, CLOCKS, UPDATE), {}, r"fetch_rows must be in \[0, 9\), got 10"),
        (1, (ROWS - 3, CLOCKS, UPDATE), {}, r"push_rows must be in \[0, 9\), got -1"),
        (1, (torch.zeros(301).int(), CLOCKS, UPDATE), {}, "rows than 300"),
        (
            1,
            (torch.zeros(300).int(), CLOCKS, UPDATE),
            {},
            "reply would have 5960 bytes and may have 4096",
        ),
    ],
)
def test_exchange_when_wrong_then_is_refused_counted_and_changes_nothing(
    handler, tmp_path, sequence, arrays, changed, reason
):
    before = digest(tmp_path)
    reply = exchange(handler, *arrays, sequence=sequence, **RIGHT | changed)
    assert reply.status == "refused"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(reply.value)
    assert handler.counts.refused == 1
    assert digest(tmp_path) == before
    following = handler.journal.applied(handler.journal.slot(CLIENT)) + 1
    assert exchange(handler, ROWS, CLOCKS, UPDATE, sequence=following, **RIGHT).status == "ok"


def test_exchange_when_the_store_has_no_rows_then_says_so(handler):
    handler.stores.mapped.create_dense_store("center", torch.zeros(3))
    reply = ask(handler, "exchange", ROWS, CLOCKS, UPDATE, store="center", sequence=1, **RIGHT)
    assert (reply.status, "'center' is a dense store" in reply.value) == ("missing", True)
