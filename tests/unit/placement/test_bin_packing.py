"""Tables to servers: every row once, LPT's bound, cuts where a table is too large; even chunks of a vector."""

import pickle
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recsys.errors import NoRoomError
from lightning_recsys.placement import PlacementPlan, Room, TableCost, chunk_evenly, place_tables

METHODS = ("round_robin", "size", "profiled")
costs = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
tables = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 64), costs), min_size=1, max_size=12)


def make(sizes) -> list[TableCost]:
    return [TableCost(f"c{i % 2}", f"t{i}", rows, width, cost) for i, (rows, width, cost) in enumerate(sizes)]


@given(tables, st.integers(1, 6), st.sampled_from(METHODS))
def test_plan_when_made_then_every_row_has_exactly_one_place_and_nothing_is_lost(sizes, num_servers, method):
    placed = make(sizes)
    plan = place_tables(placed, num_servers, method=method)
    for table in placed:
        parts = [x for x in plan.parts if (x.collection, x.table) == (table.collection, table.table)]
        rows = [list(range(x.stripe, table.num_rows, x.num_stripes)) for x in parts]
        assert sorted(row for some in rows for row in some) == list(range(table.num_rows))
        assert [len(some) for some in rows] == [x.num_rows for x in parts]
        assert all(0 <= x.server < num_servers and x.num_rows > 0 for x in parts)
        assert sum(x.num_bytes for x in parts) == table.num_rows * table.row_bytes
    asked = sum(t.cost if method == "profiled" else t.num_rows * t.row_bytes for t in placed)
    assert sum(plan.costs) == pytest.approx(asked)
    assert plan.imbalance >= 1 - 1e-9


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_plan_when_made_by_lpt_then_it_is_within_four_thirds_of_the_best(weights, num_servers):
    plan = place_tables([TableCost("c", str(i), w, 4) for i, w in enumerate(weights)], num_servers, method="size")
    parts = [x.cost for x in plan.parts]
    best = min(
        max(sum(cost for cost, server in zip(parts, where, strict=True) if server == s) for s in range(num_servers))
        for where in product(range(num_servers), repeat=len(parts))
    )
    assert max(plan.costs) <= (4 / 3 - 1 / (3 * num_servers)) * best + 1e-9


@given(st.lists(st.tuples(st.integers(100, 1000), st.just(4), st.floats(1, 100)), min_size=1), st.integers(1, 6))
def test_plan_when_tables_can_be_cut_then_no_server_has_twice_its_share(sizes, num_servers):
    plan = place_tables(make(sizes), num_servers, method="profiled")
    # Greedy: the last part came to a server with at most the mean, and was at most a share, but for one row's cost.
    one_row = max(cost / rows for rows, _, cost in sizes)
    share = sum(plan.costs) / num_servers
    assert max(plan.costs) <= 2 * share + one_row


def servers_of(plan: PlacementPlan) -> list[tuple[str, str, int, int]]:
    return [(x.table, f"{x.stripe}::{x.num_stripes}", x.num_rows, x.server) for x in plan.parts]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # fair share 50: smaller, larger, smaller
        ([30, 60, 10], [("t0", "0::1", 30, 0), ("t1", "0::2", 30, 1), ("t1", "1::2", 30, 0), ("t2", "0::1", 10, 1)]),
        # equal to the share: not cut
        ([50, 50], [("t0", "0::1", 50, 0), ("t1", "0::1", 50, 1)]),
        # all there is: one equal part for each
        ([101], [("t0", "0::2", 51, 0), ("t0", "1::2", 50, 1)]),
        ([1], [("t0", "0::1", 1, 0)]),
    ],
)
def test_table_when_smaller_equal_or_larger_than_a_share_then_only_the_larger_is_cut(rows, expected):
    plan = place_tables([TableCost("c", f"t{i}", n, 4) for i, n in enumerate(rows)], 2, method="size")
    got = servers_of(plan)
    assert [x[:3] for x in got] == [x[:3] for x in expected]
    assert sorted(plan.costs) == sorted(4 * sum(x[2] for x in expected if x[3] == server) for server in range(2))


def test_parts_when_all_stripes_of_a_table_meet_on_a_server_then_they_are_joined():
    # Shares of 75: a is cut in two equal parts of 50, and LPT gives b and c a server each before them.
    plan = place_tables(
        [TableCost("c", "a", 100, 1), TableCost("c", "b", 60, 1), TableCost("c", "d", 65, 1)], 3, method="size"
    )
    assert servers_of(plan) == [("a", "0::1", 100, 2), ("b", "0::1", 60, 1), ("d", "0::1", 65, 0)]


def test_round_robin_when_dealt_then_tables_stay_whole_in_their_order():
    plan = place_tables([TableCost("c", f"t{i}", 10**i, 4) for i in range(4)], 3, method="round_robin")
    assert servers_of(plan) == [
        ("t0", "0::1", 1, 0),
        ("t1", "0::1", 10, 1),
        ("t2", "0::1", 100, 2),
        ("t3", "0::1", 1000, 0),
    ]
    assert plan.imbalance == pytest.approx(3 * 1001 / 1111)


def test_profiled_plan_when_costs_and_sizes_disagree_then_costs_decide_and_bytes_break_ties():
    placed = [
        TableCost("c", "hot", 10, 4, cost=3.0),
        TableCost("c", "warm", 10, 4, cost=3.0),
        TableCost("c", "cold", 10**6, 4, cost=0.0),
        TableCost("c", "cold2", 10**6, 4, cost=0.0),
    ]
    plan = place_tables(placed, 2, method="profiled")
    assert plan.imbalance == 1
    assert {x.server for x in plan.parts if x.table in ("hot", "warm")} == {0, 1}
    assert {x.server for x in plan.parts if x.table in ("cold", "cold2")} == {0, 1}


@pytest.mark.parametrize(("method", "servers"), [("size", [0, 1, 1]), ("round_robin", [0, 1, 0])])
def test_plan_when_tables_are_there_already_then_they_stay_and_count(method, servers):
    first = place_tables([TableCost("c", "there", 60, 4)], 2, method="round_robin")
    plan = place_tables([TableCost("c", "x", 30, 4), TableCost("d", "y", 20, 4)], 2, method=method, beside=first)
    assert [(x.table, x.server) for x in plan.parts] == list(zip(["there", "x", "y"], servers, strict=True))


def test_plan_when_printed_then_it_shows_each_server_and_the_imbalance():
    plan = place_tables([TableCost("c", "a", 3_000, 1_000), TableCost("c", "b", 1_000, 1_000)], 3, method="round_robin")
    lines = str(plan).splitlines()
    assert lines[0].split() == ["server", "parts", "rows", "bytes", "cost", "share"]
    assert [line.split() for line in lines[1:4]] == [
        ["0", "1", "3,000", "3,000,000", "3e+06", "75.0%"],
        ["1", "1", "1,000", "1,000,000", "1e+06", "25.0%"],
        ["2", "0", "0", "0", "0", "0.0%"],
    ]
    assert lines[4] == "table_placement=round_robin, imbalance (max / mean cost) 2.250; cost: bytes"
    assert plan.parts_of("c") == plan.parts
    assert plan.parts_of("other") == ()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: place_tables([], 2), "at least one table and one server, got 0 and 2"),
        (lambda: place_tables([TableCost("c", "a", 1, 4, 1.0)], 0), "at least one table and one server, got 1 and 0"),
        (
            lambda: place_tables([TableCost("c", "a", 1, 4)], 2, method="random"),
            r"strategy.table_placement must be one of \['round_robin', 'size', 'profiled'\], got 'random'",
        ),
        (lambda: place_tables([TableCost("c", "a", 1, 4)], 2), r"table_placement=profiled needs .*\['a'\] have none"),
        (
            lambda: place_tables([TableCost("c", "a", 1, 4)] * 2, 2, method="size"),
            r"may be placed once, got \[\('c', 'a'\)\]",
        ),
        (lambda: TableCost("c", "a", 0, 4), "num_rows and row_bytes must be at least 1"),
        (lambda: TableCost("c", "a", 1, 4, float("nan")), "cost must be finite and at least 0, got nan"),
        (lambda: chunk_evenly(0, 2), "size and num_chunks must be at least 1, got 0 and 2"),
        (lambda: chunk_evenly(2, 0), "size and num_chunks must be at least 1, got 2 and 0"),
    ],
)
def test_placement_when_it_cannot_be_made_then_the_error_says_why(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@given(st.integers(1, 10**9), st.integers(1, 50))
def test_chunks_when_cut_then_they_cover_the_vector_and_differ_by_one_at_most(size, num_chunks):
    chunks = chunk_evenly(size, num_chunks)
    assert len(chunks) == min(size, num_chunks)
    assert chunks[0][0] == 0
    assert chunks[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(chunks))
    lengths = [stop - start for start, stop in chunks]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) > 0


def test_profiled_plan_when_it_saw_batches_then_stripes_have_the_cost_of_the_rows_that_these_looked_up():
    seen = np.array([0] * 50 + [1] * 30 + [2] * 10 + [7] * 10)  # of 8 rows in 4 stripes: 50, 30, 10, 10 % of lookups
    tables = [TableCost("c", "a", 8, 4, cost=4.0, seen=seen), TableCost("c", "b", 8, 4, cost=0.0)]
    plan = place_tables(tables, 4, method="profiled")
    assert [x.cost for x in plan.parts if x.table == "a"] == pytest.approx([2.0, 1.2, 0.4, 0.4])
    assert plan.imbalance == pytest.approx(2.0)
    assert str(plan).endswith("imbalance (max / mean cost) 2.000; cost: measured, by the rows of 100 lookups")
    by_bytes = place_tables(tables, 4, method="size")
    assert by_bytes.imbalance == 1


def test_plan_when_a_server_has_little_room_then_the_others_get_more():
    tables = [TableCost("c", f"t{i}", 10, 10) for i in range(4)]
    plan = place_tables(tables, 2, method="size", rooms=[Room("a", 150), Room("b", 1000)])
    assert plan.costs == [100, 300]
    one_disk = [Room("a", 400), Room("a", 400)]
    assert place_tables(tables, 2, method="size", rooms=one_disk).costs == [200, 200]


def test_table_when_no_server_has_room_for_it_then_it_is_cut_further():
    tables = [TableCost("c", "wide", 100, 10, cost=0.0), TableCost("c", "busy", 1, 1, cost=1.0)]
    rooms = [Room(str(server), 300) for server in range(4)]
    plan = place_tables(tables, 4, method="profiled", rooms=rooms)
    assert [x.num_stripes for x in plan.parts if x.table == "wide"] == [4] * 4
    assert {x.server for x in plan.parts if x.table == "wide"} == {0, 1, 2, 3}
    grown = TableCost("c", "grows", 10**15, 1000, grows=True)
    assert place_tables([grown], 4, method="size", rooms=rooms).num_servers == 4


@pytest.mark.parametrize("method", ["size", "round_robin"])
def test_plan_when_there_is_no_room_then_the_error_says_how_much_is_needed_and_how_much_there_is(method):
    tables = [TableCost("c", "a", 60, 10), TableCost("c", "b", 60, 10)]
    with pytest.raises(NoRoomError, match=r"table c.b needs [36]00 bytes that no server has.* server 1 100 of 700"):
        place_tables(tables, 2, method=method, rooms=[Room("x", 700), Room("x", 700)])
    with pytest.raises(ValueError, match="one room for each of 2 servers"):
        place_tables(tables, 2, method=method, rooms=[Room("x", 700)])
    error = NoRoomError("c.b", 600, {0: 100}, {0: 700})
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("num_rows", "free", "needed"),
    [(1_000_000, 100, 68_000_000), (10, 60, 680)],
    ids=["too large", "rows too large"],
)
def test_table_when_it_fits_in_no_parts_then_it_is_not_cut_into_rows_to_find_out(num_rows, free, needed):
    table, rooms = TableCost("c", "t", num_rows, 68), [Room(str(server), free) for server in range(20)]
    with pytest.raises(NoRoomError, match=f"table c.t needs {needed:,} bytes"):
        place_tables([table], 20, method="size", rooms=rooms)
