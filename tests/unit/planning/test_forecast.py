"""Forecasts against closed forms, and against the simulator where both answer."""

import numpy as np
import pytest

from lightning_recsys.placement import Network
from lightning_recsys.planning import Layout, StepCost, machines_from
from lightning_recsys.planning.forecast import SERVER_CORES, TRAINER_CORES, TRAINER_PORT, forecast
from lightning_recsys.planning.methods import METHODS
from lightning_recsys.simulation.events import VirtualClock
from lightning_recsys.simulation.machines import Exponential, ServerQueues, Servers

EFFICIENCY = 1448 / 1514  # of full packets


def cost(workers=1, **given):
    numbers = {
        **{
            "batch_size": 100,
            "dense_floats": 1000,
            "waiting_seconds": 0.0,
            "worker_seconds": 0.01,
            "server_seconds": 0.0,
        },
        **{"sent_bytes": 0.0, "received_bytes": 0.0, "peer_bytes": 0.0, "gathered": 0.0},
        **{"group_bytes": 0.0, "requests": 0.0, "row_requests": 0.0},
        **{"request_worker_seconds": 0.0, "request_server_seconds": 0.0},
        **{"worker_bytes": 1e9, "server_bytes": 2e9},
    }
    return {workers: StepCost(workers=workers, **{**numbers, **given})}


def machines(**given):
    return machines_from({"cpu": {"number": 8, "cores": 4, "port_gbit": 1, "latency_us": 0, **given}})


def test_one_worker_when_it_asks_a_server_then_its_step_is_the_sum_of_its_parts():
    made = forecast(
        METHODS["shadowsync"],
        cost(server_seconds=0.002, sent_bytes=1e5, received_bytes=2e5, requests=2),
        Layout("cpu", 1, 1, "cpu", 1),
        machines(latency_us=100),
    )
    link = 3e5 / (1.25e8 * EFFICIENCY)
    assert made.step_seconds == pytest.approx(0.01 + 0.002 + link + 2 * 2 * 1e-4)
    assert made.examples_per_second == pytest.approx(100 / made.step_seconds)
    assert made.trainer_bytes == pytest.approx((1e5 / made.step_seconds, 2e5 / made.step_seconds))
    assert made.server_bytes == pytest.approx((2e5 / made.step_seconds, 1e5 / made.step_seconds))
    assert made.staleness == 0
    assert made.survives == 0


def test_step_when_rows_are_striped_over_more_servers_then_takes_the_further_requests():
    asks = {"requests": 2, "row_requests": 2, "request_worker_seconds": 1e-3, "request_server_seconds": 2e-3}
    costs = cost(server_seconds=0.002, **asks)
    steps = {
        servers: forecast(METHODS["shadowsync"], costs, Layout("cpu", 1, 1, "cpu", 1, servers), machines()).step_seconds
        for servers in (1, 4)
    }
    assert steps[1] == pytest.approx(0.01 + 0.002)
    assert steps[4] == pytest.approx(0.01 + 6 * 1e-3 + (0.002 + 6 * 2e-3) / 4)  # six requests more, four processes


def test_group_when_it_has_more_servers_then_takes_requests_of_each_kind():
    asks = {"requests": 5, "row_requests": 2, "request_worker_seconds": 1e-3, "request_server_seconds": 0.0}
    made = forecast(METHODS["hierarchical"], cost(**asks), Layout("cpu", 3, 1, None, 3, 2), machines())
    rows, parts = (3 - 1) * 2, (2 - 1) * 3  # a server of rows on each of three machines; two group servers
    assert made.step_seconds == pytest.approx(0.01 + (rows + parts) * 1e-3)


@pytest.mark.parametrize("workers", [1, 4, 12])
@pytest.mark.parametrize("serving", [0.0005, 0.004])
def test_free_workers_when_served_exponentially_then_have_the_simulators_rate(workers, serving):
    """One line for the servers' processor, as both have it; times of service are exponential, as in the closed form."""
    made = forecast(
        METHODS["async_ps"],
        cost(server_seconds=serving),
        Layout("cpu", workers, 1, "cpu", 1),
        machines(number=64),
    )
    clock, random = VirtualClock(), np.random.default_rng(0)
    queues = ServerQueues(Servers(push=Exponential(serving)), Network(), clock, random)
    steps, seconds = [0], 200.0

    def worker():
        while clock.now < seconds:
            yield Exponential(0.01).draw(random)
            yield queues.work(Exponential(serving))
            steps[0] += 1

    for _ in range(workers):
        clock.start(worker())
    clock.run()
    assert made.examples_per_second == pytest.approx(100 * steps[0] / seconds, rel=0.05)


def test_free_workers_when_there_are_ever_more_then_the_server_limits_and_is_named():
    many = forecast(
        METHODS["async_ps"], cost(server_seconds=0.001), Layout("cpu", 64, 4, "cpu", 1), machines(number=65)
    )
    assert many.limit == SERVER_CORES
    assert many.busy[SERVER_CORES] == pytest.approx(1.0, abs=0.01)
    assert many.examples_per_second == pytest.approx(100 / 0.001, rel=0.01)


def test_ddp_when_workers_are_apart_then_sends_a_rings_share_and_rows_to_all():
    ring_of_two = 4 * 1000  # 2 (N - 1) / N floats of each parameter
    costs = cost(2, peer_bytes=ring_of_two + 5e5)
    made = forecast(METHODS["ddp"], costs, Layout("cpu", 8, 1), machines())
    # An all-gather among eight goes in seven rounds of two halves; the first half is on its way alone.
    bytes_of_eight = 2 * 7 / 8 * 4 * 1000 + 7 * 5e5 * 15 / 14
    assert made.step_seconds == pytest.approx(0.01 + bytes_of_eight / (1.25e8 * EFFICIENCY))
    assert made.examples_per_second == pytest.approx(800 / made.step_seconds)
    assert made.step_examples == 800
    assert made.limit == TRAINER_PORT


def test_des_when_fields_are_dealt_out_further_then_only_what_is_cut_shrinks():
    alone = cost(worker_seconds=0.012)[1]
    costs = cost(2, worker_seconds=0.008)  # 0.004 beside 0.008 that is cut
    made = forecast(METHODS["des"], costs, Layout("cpu", 1, 4), machines(), alone=alone)
    assert made.step_seconds == pytest.approx(0.004 + 0.008 / 4)
    assert made.step_examples == 100  # all train on one batch
    assert made.limit == TRAINER_CORES


@pytest.mark.parametrize(("ahead", "together"), [(0.0, 0.018), (0.5, 0.014), (1.0, 0.010)])
def test_worker_in_step_when_it_asks_a_step_ahead_then_its_requests_travel_while_it_computes(ahead, together):
    asks = {
        "server_seconds": 0.002,
        "sent_bytes": 0.003 * 1.25e8 * EFFICIENCY,
        "received_bytes": 0.003 * 1.25e8 * EFFICIENCY,
    }
    layout = Layout("cpu", 1, 1, "cpu", 1)
    made = forecast(METHODS["het"], cost(**asks, ahead=ahead), layout, machines())
    assert made.step_seconds == pytest.approx(together)
    slow = forecast(METHODS["het"], cost(**asks, ahead=ahead), layout, machines(port_gbit=0.1))
    link = 0.06 + 0.002  # longer than it computes
    assert slow.step_seconds == pytest.approx(max(0.01, ahead * link) + (1 - ahead) * link)


def test_groups_when_there_are_more_then_each_has_its_own_servers_and_all_are_as_fast_as_one():
    costs = cost(server_seconds=0.02)
    one, ten = (
        forecast(METHODS["hierarchical"], costs, Layout("cpu", groups, 1, None, groups, 1), machines(number=10))
        for groups in (1, 10)
    )
    assert one.step_seconds == pytest.approx(0.01 + 0.02)
    assert ten.examples_per_second == pytest.approx(10 * one.examples_per_second)


def test_forecast_when_memory_is_missing_then_says_how_much():
    made = forecast(METHODS["async_ps"], cost(), Layout("cpu", 1, 4, "cpu", 1), machines(memory_gib=1e9 / 2**30))
    assert made.refused == "a machine cpu needs 3.7 GiB and has 0.9: 2.8 GiB are missing"


def test_forecast_when_a_core_is_faster_then_computes_as_much_faster():
    costs, layout = cost(worker_seconds=0.01), Layout("cpu", 1, 1)
    same, twice = (forecast(METHODS["single"], costs, layout, machines(gflops=g), gflops=50.0) for g in (None, 100.0))
    assert twice.examples_per_second == pytest.approx(2 * same.examples_per_second)


def test_staleness_when_workers_mostly_compute_then_is_the_number_of_the_others():
    made = forecast(METHODS["async_ps"], cost(), Layout("cpu", 8, 4, "cpu", 1), machines(number=9))
    assert made.staleness == pytest.approx(31)
    assert made.survives == 31
