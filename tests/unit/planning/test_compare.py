"""Plans from measurements that are given: what is first and why, what is left out, what is printed."""

import re
import sys

import pytest

from lightning_recsys.planning import Measured, StepCost, compare, machines_from, measure, plan
from lightning_recsys.planning.methods import METHODS
from lightning_recsys.planning.plan import command_of, keep, kept, layouts


def cost(workers, **given):
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
    return StepCost(workers=workers, **{**numbers, **given})


MEASURED = Measured(
    {
        "single": {1: cost(1)},
        "ddp": {2: cost(2, peer_bytes=4e6)},
        "shadowsync": {1: cost(1, sent_bytes=2e6, received_bytes=2e6, server_seconds=0.001)},
        "het": {n: cost(n, sent_bytes=2e4, received_bytes=2e4, server_seconds=0.0005) for n in (1, 2)},
    },
    {"des": "LinearRegression has no layer that is cut by fields."},
    50.0,
)
MACHINES = machines_from({"cpu": {"number": 4, "cores": 2, "port_gbit": 1, "memory_gib": 16, "price": 0.36}})


def made(**narrowed):
    return compare(MEASURED, MACHINES, **narrowed)


def test_plan_when_rows_fill_the_port_then_the_cache_is_first_and_the_reason_says_so():
    found = made()
    assert found.best.method.name == "het"
    rates = [each.examples_per_second for each in found.forecasts]
    assert rates == sorted(rates, reverse=True)
    assert [each.method.name for each in found.of_each()] == ["het", *(x.method.name for x in found.of_each()[1:])]
    assert "bytes fill" in found.reason()
    assert "trainers' cores" in found.reason()
    assert found.refused == MEASURED.refusals
    text = str(found)
    assert "des: LinearRegression has no layer" in text
    assert f"{found.best.examples_per_second:,.0f}" in text
    assert len({len(row) for row in found.table(every=True)}) == 1


def test_plan_when_narrowed_then_says_what_was_left_out_and_why():
    exact = made(exact=True)
    assert {each.method.name for each in exact.forecasts} == {"single", "ddp"}
    assert exact.refused["het"] == "left out by exact=true"
    surviving = made(survives=1)
    assert {each.method.name for each in surviving.forecasts} == {"shadowsync"}
    assert surviving.refused["ddp"] == "left out by survives=1: it goes on after 0 deaths"
    fresh = made(at_most_staleness=0.5)
    assert all(each.staleness <= 0.5 for each in fresh.forecasts)
    assert any(each.method.name == "shadowsync" for each in fresh.forecasts)  # one worker alone


def test_plan_by_cost_then_the_cheapest_example_is_first():
    found = made(metric="cost")
    costs = [each.cost for each in found.forecasts]
    assert costs == sorted(costs)
    best = found.best
    assert best.cost == pytest.approx(best.layout.num_machines * 1e-4 / best.examples_per_second * 1e9)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"metric": "speed"}, "metric must be eps or cost, got 'speed'"),
        ({"survives": -1}, "survives must be at least 0, got -1"),
        ({"at_most_staleness": -0.1}, "at_most_staleness must be at least 0, got -0.1"),
    ],
)
def test_plan_when_an_argument_is_wrong_then_names_it(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(**given)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"methods": ["des", "ddpp"]}, ValueError, "there is no strategy ddpp; there are single, ddp"),
        ({"methods": []}, ValueError, "strategies must name one at least of single, ddp"),
        ({"methods": "het"}, TypeError, re.escape("must be a list of names, such as [het], got 'het'")),
        ({"seconds": 0}, ValueError, "seconds must be above 0, got 0"),
        ({"seconds": float("nan")}, ValueError, "seconds must be above 0, got nan"),
    ],
)
def test_measurement_when_an_argument_is_wrong_then_names_it(given, error, sentence):
    with pytest.raises(error, match=sentence):
        measure(None, None, **given)


def test_plan_when_a_narrowing_is_wrong_then_nothing_is_measured():
    with pytest.raises(ValueError, match="metric=cost needs a price"):
        plan(None, None, machines_from({"cpu": {}}), metric="cost")


def test_plan_when_there_is_no_price_then_refuses_to_compare_costs():
    with pytest.raises(ValueError, match="metric=cost needs a price"):
        compare(MEASURED, machines_from({"cpu": {}}), metric="cost")


def test_plan_when_no_machine_has_the_memory_then_every_strategy_says_what_is_missing():
    found = compare(MEASURED, machines_from({"cpu": {"number": 2, "memory_gib": 0.5}}))
    assert not found.forecasts
    assert "GiB are missing" in found.refused["single"]
    with pytest.raises(ValueError, match="no strategy can train this model on these machines"):
        _ = found.best


def test_layouts_when_servers_have_their_own_machines_then_no_machine_is_used_twice():
    for method in METHODS.values():
        for layout in layouts(method, MACHINES):
            assert layout.num_machines <= 4
            assert layout.workers >= 1
            if method.has_servers:
                assert layout.num_processes >= 1


def test_command_when_servers_are_apart_then_starts_them_and_names_them():
    found = next(each for each in made().forecasts if each.layout.servers is not None and each.method.name == "het")
    *servers, train = command_of(found, ["model=deepfm"])
    assert len(servers) == found.layout.per_server
    assert all(line.startswith("lightning-recsys server --bind tcp://0.0.0.0:29600 ") for line in servers)
    assert "model=deepfm strategy=het strategy.staleness=100 strategy.servers=[tcp://server-0:29600" in train


def test_measurement_when_kept_then_comes_back_and_anything_else_is_none(tmp_path):
    path = tmp_path / "folder" / "kept.json"
    assert kept(path) is None
    keep(MEASURED, path)
    assert kept(path) == MEASURED
    path.write_text('{"costs": {"het": {"1": {"unknown": 2}}}, "refusals": {}, "gflops": 1}')
    assert kept(path) is None


@pytest.mark.parametrize("fails", [False, True])
def test_request_when_measured_by_one_and_several_servers_then_costs_the_difference_or_is_warned_of(
    monkeypatch, caplog, fails
):
    def step(*_, workers, servers, **__):
        if servers > 1 and fails:
            raise RuntimeError("no room for so many servers")
        asked = {"requests": 2.0 * servers, "row_requests": 2.0 * servers}
        return cost(workers, worker_seconds=0.01 + 6e-4 * servers, server_seconds=0.002 * servers, **asked)

    own = sys.modules[measure.__module__]  # whose name a function of the package has, too
    monkeypatch.setattr(own, "measure_step", step)
    monkeypatch.setattr(own, "float32_gflops", lambda: 50.0)
    told = []
    measured = measure(None, None, methods=["single", "shadowsync", "het"], tell=told.append)
    assert told[-1] == "shadowsync, 1 worker, 4 servers"  # not het, whose cache takes long to fill
    assert set(measured.costs) == {"single", "shadowsync", "het"}
    for each in (measured.costs["shadowsync"][1], measured.costs["het"][2]):
        assert each.request_worker_seconds == pytest.approx(0 if fails else 3e-4)
        assert each.request_server_seconds == pytest.approx(0 if fails else 1e-3)
    assert ("layouts with many are foretold too fast" in caplog.text) == fails
