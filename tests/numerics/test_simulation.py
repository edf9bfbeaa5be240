"""A virtual cluster against what queueing theory says: how stale pushes are, and how many a server deals with."""

from __future__ import annotations

from itertools import repeat
from math import factorial

import pytest
import torch

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.placement import Network
from lightning_recsys.simulation import Constant, Exponential, Servers, VirtualCluster, Workers
from lightning_recsys.simulation.replica import Gradient

BATCH = Batch(torch.zeros(2, 0), SparseFeatures(("a",), torch.zeros(2, dtype=torch.int64)), torch.tensor([0.0, 1.0]))
LOGITS = torch.zeros(2)


class Pushes:
    """A learner that learns nothing: it only counts versions."""

    def __init__(self, dense_bytes=0):
        self.flat, self.dense_bytes, self.version = torch.zeros(1), dense_bytes, 0

    def gradient(self, batch):
        return Gradient(batch, LOGITS, [], [], self.version)

    def apply(self, gradient, normalization):
        self.version += 1
        return self.version - gradient.version, []


def simulate(cluster, pushes, *, seed=0, dense_bytes=0):
    return cluster.simulate([Pushes(dense_bytes)], repeat(BATCH, pushes), seed=seed)


@pytest.mark.parametrize(
    "workers", [10, 100, pytest.param(1000, marks=pytest.mark.slow), pytest.param(3000, marks=pytest.mark.slow)]
)
def test_staleness_when_times_are_exponential_then_mean_n_and_variance_n_times_n_minus_1(workers):
    cluster = VirtualCluster(workers_per_replica=workers, workers=Workers(compute=Exponential(2.0)))
    found = simulate(cluster, max(40_000, 40 * workers)).staleness["dense"].to_dict()
    assert found["mean"] == pytest.approx(workers, rel=0.05)
    assert found["variance"] == pytest.approx(workers * (workers - 1), rel=0.10)


@pytest.mark.parametrize(("workers", "elsewhere"), [(1000, 0.125), (1000, 0.5)])
@pytest.mark.slow
def test_staleness_when_workers_are_elsewhere_for_a_share_then_mean_is_less_by_it(workers, elsewhere):
    cycle = Workers(compute=Exponential(1 - elsewhere), elsewhere=Exponential(elsewhere))
    found = (
        simulate(VirtualCluster(workers_per_replica=workers, workers=cycle), 40 * workers).staleness["dense"].to_dict()
    )
    assert found["mean"] == pytest.approx(workers * (1 - elsewhere), rel=0.05)


@pytest.mark.parametrize(
    ("workers", "think", "serve"), [(1, 1.0, 1.0), (5, 4.0, 1.0), (20, 10.0, 1.0), (40, 10.0, 1.0)]
)
def test_throughput_of_one_server_then_is_that_of_the_machine_repairman(workers, think, serve):
    cluster = VirtualCluster(
        workers_per_replica=workers,
        workers=Workers(compute=Exponential(think)),
        servers=Servers(push=Exponential(serve)),
    )
    results = simulate(cluster, 40_000)
    states = [factorial(workers) // factorial(workers - k) * (serve / think) ** k for k in range(workers + 1)]
    idle = 1 / sum(states)
    assert results.metrics["eps"] / 2 == pytest.approx((1 - idle) / serve, rel=0.02)
    assert results.utilization["servers processor"] == pytest.approx(1 - idle, rel=0.02)


def test_one_worker_then_each_batch_takes_the_sum_of_its_parts():
    cluster = VirtualCluster(
        workers=Workers(compute=Constant(1.0), elsewhere=Constant(0.25)),
        link=Network(latency=0.125, bandwidth=1000.0),
        servers=Servers(count=2, link=Network(latency=0.5, bandwidth=250.0), pull=Constant(2.0), push=Constant(4.0)),
    )
    results = simulate(cluster, 1001, dense_bytes=1000)
    # ask .625, pull 2/2, answer .625 + 1000/(2 x 250) = 2, compute 1, send the same 2.625, push 4/2, elsewhere .25
    cycle = 0.625 + 1.0 + 2.625 + 1.0 + 2.625 + 2.0 + 0.25
    assert results.seconds == pytest.approx(1001 * cycle, rel=1e-3)
    assert results.traffic["dense pulled"] == results.traffic["dense pushed"] == 1001 * 1000
    assert results.metrics["staleness/dense_max"] == 1
