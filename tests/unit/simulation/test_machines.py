"""Distributions of time, and what a cluster's machines may be."""

import math

import numpy as np
import pytest

from lightning_recsys.placement import Network
from lightning_recsys.simulation import (
    Constant,
    Exponential,
    HETCluster,
    Leg,
    Normal,
    Servers,
    Synchronization,
    VirtualCluster,
    Workers,
)
from lightning_recsys.simulation.events import VirtualClock
from lightning_recsys.simulation.machines import ServerQueues
from lightning_recsys.sync import ClockRule, StalenessNormalization


@pytest.mark.parametrize(
    ("duration", "deviation"), [(Constant(2.0), 0.0), (Exponential(2.0), 2.0), (Normal(2.0, deviation=0.5), 0.5)]
)
def test_durations_then_mean_and_deviation_are_those_asked_for(duration, deviation):
    random = np.random.default_rng(0)
    times = [duration.draw(random) for _ in range(20_000)]
    assert min(times) >= 0
    assert np.mean(times) == pytest.approx(2.0, rel=0.03)
    assert np.std(times) == pytest.approx(deviation, rel=0.03)


def test_workers_then_stragglers_are_as_many_and_as_slow_as_asked_for():
    workers = Workers(straggler_share=0.2, straggler_factor=5.0, cores=4)
    slowness = workers.slowness(10, 8, np.random.default_rng(0))
    assert sorted(slowness) == [2.0] * 8 + [10.0] * 2  # 8 workers on 4 cores take twice as long


def test_workers_when_heterogeneous_then_speeds_are_normal_like_and_positive():
    slowness = Workers(speed_deviation=0.3).slowness(5000, 1, np.random.default_rng(0))
    assert min(slowness) > 0
    assert max(slowness) <= 10
    assert np.std(1 / np.array(slowness)) == pytest.approx(0.3, rel=0.05)


def test_servers_when_two_pull_together_then_the_second_waits_for_the_port():
    servers = Servers(count=2, link=Network(latency=1.0, bandwidth=50.0), push=Constant(4.0))
    queues = ServerQueues(servers, Network(latency=0.5, bandwidth=100.0), VirtualClock(), np.random.default_rng(0))
    assert queues.answer(1000.0) == 1.5 + 10.0  # by both ports together, and by the worker's link
    assert queues.answer(1000.0) == 1.5 + 20.0
    assert queues.send(1000.0) == 1.5 + 10.0  # the other way is another queue
    assert queues.work(servers.push) == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1.0), "Constant.mean must be a finite number of at least 0, got -1.0"),
        (lambda: Normal(1.0, deviation=1.0), "deviation must be below the mean"),
        (lambda: Network(bandwidth=0.0), "bandwidth must be above 0"),
        (lambda: Servers(count=0), "servers.count must be a whole number of at least 1, got 0"),
        (lambda: Servers(count=1.5), "servers.count must be a whole number of at least 1, got 1.5"),
        (lambda: Workers(straggler_share=1.5), "straggler_share must be at most 1"),
        (lambda: Workers(cores=0), "cores must be above 0"),
        (lambda: Workers(cores=math.nan), "cores must be above 0"),
        (lambda: VirtualCluster(workers_per_replica=2.5), "workers_per_replica must be a whole number"),
        (lambda: Synchronization(gap=2.5), "gap must be a whole number"),
        (lambda: Workers(compute=Constant(5.0), failures=Exponential(4.0)), "failures must be further apart"),
        (lambda: VirtualCluster(num_replicas=2), "2 replicas need one"),
        (lambda: VirtualCluster(workers_per_replica=0), "workers_per_replica must be a whole number of at least 1"),
        (lambda: Synchronization("sgd"), "strategy.algorithm must be one of"),
        (lambda: Synchronization(gap=0), "gap must be"),
        (lambda: Synchronization(rounds="sometimes"), "background or foreground"),
        (lambda: Synchronization(rounds="foreground", interval=1.0), "workers that ask a centre count steps"),
    ],
)
def test_machines_when_impossible_then_error_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "slow",
    [{"cores": 1.0}, {"straggler_share": 0.1, "straggler_factor": 10.0}, {"speed_deviation": 0.5}],
    ids=["cores", "stragglers", "speeds"],
)
def test_workers_when_the_slowest_fails_before_a_batch_is_done_then_error_says_so(slow):
    workers = Workers(compute=Constant(1.0), failures=Constant(2.0), **slow)
    with pytest.raises(ValueError, match=r"failures must be further apart than .* on the slowest worker"):
        workers.slowness(20, 10, np.random.default_rng(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(True),
        lambda: Workers(cores=True),
        lambda: Network(bandwidth=True),
        lambda: Servers(count=True),
        lambda: VirtualCluster(workers_per_replica=True),
        lambda: HETCluster(num_workers=True),
        lambda: HETCluster(lookahead_batches=True),
        lambda: HETCluster(staleness=True),
        lambda: HETCluster(cache_fraction=True),
        lambda: Synchronization(interval=False),
        lambda: Synchronization("easgd", {"alpha": True}),
        lambda: Synchronization("bmuf", {"eta": True}),
        lambda: Synchronization("bmuf", {"block_momentum": False}),
        lambda: Leg(True, 1.0),
        lambda: Leg(None, True),
        lambda: Leg(0, 1.0, sent_bytes=True),
        lambda: Leg(0, 1.0, returned_bytes=True),
        lambda: StalenessNormalization(power=True),
        lambda: StalenessNormalization(target=True),
        lambda: StalenessNormalization(scale=True),
        lambda: StalenessNormalization(sensitivity=True),
        lambda: ClockRule(staleness=True),
    ],
)
def test_number_when_it_is_true_or_false_then_refused(make):
    with pytest.raises(ValueError, match=r"must be .*, got (True|False)"):
        make()
