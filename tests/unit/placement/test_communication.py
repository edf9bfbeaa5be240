"""The cost model against the figures that the DES paper printed, and closed forms."""

from __future__ import annotations

import pytest
import torch
from thread_group import on_threads

from lightning_recsys.placement.communication import (
    CommunicationCost,
    Network,
    RichLayer,
    all_gather,
    all_reduce,
    deep,
    first_order,
    mesh,
    parameter_servers,
    round_trip,
    row_exchange,
    saving,
    second_order,
    substitution,
)
from lightning_recsys.row_cache.owners import RowGradients, sum_at_owners
from lightning_recsys.stores.exchange import RowExchange

# Rong et al. 2019, Table 2: four processes, D = 8, H = 256, F D = 4800.
TABLE_2 = {
    512: (147_664, 99.769, 99.376, 90.310),
    1024: (257_757, 99.735, 99.285, 86.226),
    2048: (448_814, 99.696, 99.179, 81.658),
    4096: (789_511, 99.654, 99.066, 77.015),
    8192: (1_389_353, 99.607, 98.939, 72.264),
}
LAYERS = {"lr": first_order(), "fm": second_order(8), "dnn": deep(600, 8, 256)}


@pytest.mark.parametrize("batch_size", TABLE_2)
def test_saving_when_sizes_are_the_papers_then_it_is_table_2_to_three_decimals(batch_size: int) -> None:
    distinct, *printed = TABLE_2[batch_size]
    computed = [
        100
        * saving(
            substitution([layer], num_processes=4, batch_size=batch_size),
            mesh([layer], num_processes=4, num_distinct=distinct),
        )
        for layer in LAYERS.values()
    ]
    assert [round(x, 3) for x in computed] == printed


def test_parameter_servers_when_weights_are_elsewhere_then_nothing_is_spared() -> None:
    layers = [deep(3, 4, 5)]
    whole = parameter_servers(layers, num_distinct=10)
    assert whole.sent_bytes == 10 * (8 + 4 * 4) + 4 * 3 * 4 * 5
    assert mesh(layers, num_processes=4, num_distinct=10).sent_bytes == whole.sent_bytes * 3 / 4
    assert round_trip(whole) == CommunicationCost(2 * whole.sent_bytes, 2)


def test_row_exchange_then_it_is_what_exchanges_and_workers_in_step_count_themselves() -> None:
    # A fetch of 40 rows, of which half are on this host; the other process has 30 of them in its batch, too.
    stored = {"weight": (8,), "sum": ()}
    keys = [torch.arange(40).numpy(), torch.arange(10, 50).numpy()]
    given = [[RowGradients(x, torch.ones(40, 8))] for x in keys]
    summed = on_threads(2, lambda rank, group: sum_at_owners(given[rank], group, torch.device("cpu")))
    owned = [len(x.rows[0]) for x in summed if x.rows[0] is not None]
    assert sum(owned) == 50
    fetch = RowExchange(fetch_rows=torch.arange(40)).bytes_by_kind(100, stored)
    pushes = [
        RowExchange(push_rows=torch.arange(x), push_clocks=torch.ones(x).int()).bytes_by_kind(100, stored)
        for x in owned
    ]
    layers = [deep(600, 8, 256), RichLayer(0, 0, (9,))]
    traffic = row_exchange(layers, num_processes=2, num_distinct=40, num_distinct_of_all=50, state_floats=1)
    to_servers = sum(fetch.values()) / 2 + sum(sum(push.values()) for push in pushes) / 2 / 2
    assert traffic == CommunicationCost(to_servers + sum(x.num_bytes for x in summed) / 2 / 2, 4 + 3)
    assert row_exchange(layers, num_processes=1, num_distinct=10, num_distinct_of_all=10) == CommunicationCost(0, 0)


def test_all_reduce_when_ring_then_each_process_sends_two_shares_per_other_process() -> None:
    assert all_reduce(1000, num_processes=4) == CommunicationCost(2 * 3 * 1000 * 4 / 4, 6)
    assert all_gather(1000, num_processes=4) == CommunicationCost(3000, 3)


def test_substitution_when_layer_needs_several_sums_then_each_waits_for_the_one_before() -> None:
    layer = RichLayer(8, 0, (2, 3))
    traffic = substitution([layer], num_processes=2, batch_size=16)
    assert traffic == CommunicationCost(16 * 5 * 4, 4)
    network = Network(bandwidth=1000, latency=0.01)
    assert traffic.seconds(network) == pytest.approx(4 * 0.01 + 16 * 5 * 4 / 1000)


def test_all_reduce_then_takes_the_steps_of_a_ring() -> None:
    ring = all_reduce(100.0, num_processes=4)  # of 400 bytes, a quarter at a time
    assert ring.seconds(Network(latency=1.0, bandwidth=100.0)) == 6 * (1.0 + 1.0)


def test_traffic_when_process_is_alone_then_nothing_is_sent() -> None:
    for layer in LAYERS.values():
        assert substitution([layer], num_processes=1, batch_size=8).sent_bytes == 0
        assert mesh([layer], num_processes=1, num_distinct=8).sent_bytes == 0
    assert all_gather(5, num_processes=1).sent_bytes == 0


def test_saving_when_first_layer_is_wide_and_few_rows_are_touched_then_it_is_negative() -> None:
    layers = [deep(2, 2, 1024)]
    des = substitution(layers, num_processes=2, batch_size=8192)
    assert saving(des, mesh(layers, num_processes=2, num_distinct=100)) < 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Network(bandwidth=0), "bandwidth must be above 0"),
        (lambda: RichLayer(-1, 0, (1,)), "at least 0"),
        (lambda: all_reduce(1, num_processes=0), "num_processes must be at least 1, got 0"),
        (lambda: mesh([], num_processes=2, num_distinct=-1), "num_distinct must be at least 0"),
        (lambda: substitution([], num_processes=2, batch_size=-1), "batch_size must be at least 0"),
    ],
)
def test_arguments_when_out_of_range_then_error_names_them(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
