"""Updates, rows and clocks in one message to a mapped store: their order, their rules, what is refused."""

import threading

import numpy as np
import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.stores.exchange import RowExchange, row_dtype
from lightning_recsys.sync.clocks import ClockRule, hear, is_too_far

LAYOUT = TableLayout((EmbeddingBagConfig("a", 6, 4, ("a",), init_std=0.5), EmbeddingBagConfig("b", 4, 4, ("b",))))
RULES = [RowSGD(0.1), RowAdagrad(0.1), RowWiseAdagrad(0.1), RowFTRL(0.1)]


def make(stores, rule=None):
    return stores.create_embedding_store("t", LAYOUT, rule or RowSGD(0.1), seed=0)


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def clocks(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def push(store, touched, sent, *, amount=1.0, **more):
    updates = {name: torch.full((len(touched), *shape), amount) for name, shape in store.row_shapes.items()}
    return store.begin_exchange(RowExchange(push_rows=touched, push_clocks=sent, updates=updates, **more))()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_exchange_when_it_pushes_then_weights_go_down_states_up_and_the_answer_has_them(stores, rule):
    store = make(stores, rule)
    before = {name: store.read(name, 0, 10) for name in store.row_shapes}
    amounts = {name: torch.rand(2, *shape) for name, shape in store.row_shapes.items()}
    request = RowExchange(
        fetch_rows=rows(8, 0, 2),
        push_rows=rows(2, 8),
        push_clocks=clocks(3, 1),
        updates=amounts,
        num_steps=3,
        check_rows=rows(2, 8, 5),
        check_clocks=clocks(0, 0, 0),
        staleness=1,
    )
    answer = store.begin_exchange(request)()
    expected = {name: values.clone() for name, values in before.items()}
    for name, values in expected.items():
        values[[2, 8]] += -amounts[name] if name == "weight" else amounts[name]
    for name, values in expected.items():
        assert torch.equal(store.read(name, 0, 10), values)
        assert torch.equal(answer.values[name], values[[8, 0, 2]])
    assert answer.clocks.dtype == torch.int32
    assert answer.clocks.tolist() == [1, 0, 3]
    assert answer.stale.dtype == torch.bool
    assert answer.stale.tolist() == [True, False, False]  # clocks 3, 1 and 0 against 0 with 1 allowed
    assert store.step == 3


@pytest.mark.parametrize("clock", ["max", "sum"])
def test_clocks_when_pushed_in_any_order_then_follow_the_rule(stores, clock):
    store, rule, generator = make(stores), ClockRule(staleness=2, clock=clock), np.random.default_rng(0)
    expected = np.zeros(10, dtype=np.int32)
    for _ in range(50):
        touched = generator.permutation(10)[:4]
        sent = generator.integers(0, 20, 4).astype(np.int32)
        expected[touched] = [hear(*x, rule.by_sum) for x in zip(expected[touched], sent, strict=True)]
        checked, own = generator.permutation(10)[:6], generator.integers(0, expected.max() + 2, 6).astype(np.int32)
        answer = push(
            store,
            torch.from_numpy(touched),
            torch.from_numpy(sent),
            clock=clock,
            staleness=2,
            check_rows=torch.from_numpy(checked),
            check_clocks=torch.from_numpy(own),
        )
        pairs = zip(expected[checked], own, strict=True)
        assert answer.stale.tolist() == [is_too_far(server, copy, rule.bound) for server, copy in pairs]
        assert store.clocks.tolist() == expected.tolist()


def test_clock_when_at_its_end_then_stays_there(stores):
    store, last = make(stores), 2**31 - 1
    for clock in ("sum", "max", "sum"):
        push(store, rows(1), clocks(last - 1), clock=clock)
    push(store, rows(2), clocks(last), clock="max")
    assert store.clocks[1:3].tolist() == [last, last]
    checks = {"check_rows": rows(1, 1, 0), "check_clocks": clocks(-(2**31), last, last)}
    assert store.begin_exchange(RowExchange(**checks, staleness=5))().stale.tolist() == [True, True, False]


def test_staleness_when_none_then_nothing_is_stale(stores):
    store = make(stores)
    push(store, rows(1), clocks(1000))
    checks = {"check_rows": rows(1), "check_clocks": clocks(0)}
    stale = [store.begin_exchange(RowExchange(**checks, staleness=s))().stale.tolist() for s in (None, 0, 999, 1000)]
    assert stale == [[False], [True], [True], [False]]


def test_exchange_when_it_only_reads_then_changes_nothing(stores, tmp_path):
    store = make(stores, RowWiseAdagrad())
    before = {path: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    empty = store.begin_exchange(RowExchange())()
    shapes = [tuple(x.shape) for x in (*empty.values.values(), empty.clocks, empty.stale)]
    assert shapes == [(0, 4), (0,), (0,), (0,)]
    request = RowExchange(fetch_rows=rows(3), check_rows=rows(3), check_clocks=clocks(0), staleness=0)
    answer = store.begin_exchange(request)()
    answer.values["weight"].add_(1)  # a copy
    answer.clocks.add_(1)
    assert {path: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before


def test_gradients_when_the_store_applies_them_then_clocks_stay(stores):
    store = make(stores)
    store.apply_row_gradients(rows(1, 2), torch.ones(2, 4), lr=1.0)
    assert not store.clocks.any()
    assert store.step == 1


def test_clocks_when_threads_push_the_same_rows_then_no_update_is_missed(stores):
    store, touched = make(stores), torch.arange(10)

    def work():
        for _ in range(500):
            push(store, touched, torch.ones(10, dtype=torch.int32), clock="sum", num_steps=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.clocks.tolist() == [2000] * 10
    assert store.step == 2000


ONE = {"push_rows": rows(1), "push_clocks": clocks(1), "updates": {"weight": torch.ones(1, 4), "sum": torch.ones(1)}}


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"fetch_rows": rows(3, 10)}, IndexError, r"fetch_rows must be in \[0, 10\), got 3 to 10"),
        ({"check_rows": rows(-1), "check_clocks": clocks(0)}, IndexError, "check_rows .* got -1 to -1"),
        (ONE | {"push_rows": rows(10)}, IndexError, "push_rows must be in"),
        ({"fetch_rows": torch.tensor([1.0])}, ValueError, "fetch_rows must be torch.int64 of shape"),
        ({"fetch_rows": rows(1).unsqueeze(0)}, ValueError, r"fetch_rows must be .* of shape \[1\] .*got .* \[1, 1\]"),
        ({"check_rows": rows(1)}, ValueError, r"check_clocks must be torch.int32 of shape \[1\]"),
        ({"check_rows": rows(1), "check_clocks": rows(1)}, ValueError, "check_clocks must be torch.int32"),
        (ONE | {"push_clocks": clocks()}, ValueError, "push_clocks must be torch.int32 of shape"),
        (ONE | {"push_clocks": clocks(-1)}, ValueError, "push_clocks must be at least 0, got -1"),
        (ONE | {"updates": {}}, ValueError, r"updates of 1 rows must be of \['sum', 'weight'\], got \[\]"),
        (ONE | {"updates": ONE["updates"] | {"m": torch.ones(1)}}, ValueError, r"got \['m', 'sum', 'weight'\]"),
        (ONE | {"updates": ONE["updates"] | {"sum": torch.ones(1, 4)}}, ValueError, r"updates\['sum'\] must be"),
        (ONE | {"updates": ONE["updates"] | {"sum": rows(1)}}, ValueError, "must be torch.float32 of shape"),
        ({"updates": ONE["updates"]}, ValueError, r"updates of 0 rows must be of \[\]"),
        ({"num_steps": -1}, ValueError, r"num_steps must be in \[0, 2147483648\), got -1"),
        ({"staleness": -1}, ValueError, "staleness must be None or from 0"),
        ({"clock": "mean"}, ValueError, r"clock must be one of \['max', 'sum'\], got 'mean'"),
    ],
)
def test_exchange_when_wrong_then_is_refused_and_changes_nothing(stores, tmp_path, fields, error, reason):
    store = make(stores, RowWiseAdagrad())
    before = {path: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    with pytest.raises(error, match=reason):
        store.begin_exchange(RowExchange(**fields))
    assert {path: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before


def test_rows_when_they_travel_then_take_4_bytes_where_they_can_be_counted_in_them():
    assert [row_dtype(n) for n in (1, 2**31, 2**31 + 1)] == [torch.int32, torch.int32, torch.int64]
    request = RowExchange(**ONE, fetch_rows=rows(1, 2, 3), check_rows=rows(*range(9)), check_clocks=clocks(*range(9)))
    shapes = {"weight": (4,), "sum": ()}
    assert request.bytes_by_kind(10, shapes) == {"rows": 3 * 24, "clocks": 4 * 4 + 9 * 8 + 2, "gradients": 24}
    assert request.bytes_by_kind(2**40, shapes) == {"rows": 3 * 28, "clocks": 4 * 4 + 9 * 12 + 2, "gradients": 28}
