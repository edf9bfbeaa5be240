"""Groups of hierarchical training: legs queue for cores and ports, and staleness follows from the nets in flight."""

from itertools import repeat

import pytest
import torch
from click_module import make_batch

from lightning_recsys.placement import Network
from lightning_recsys.simulation import Constant, Group, Leg, Servers, Synchronization, VirtualCluster, Workers
from lightning_recsys.simulation.replica import Gradient


class Pushes:
    """A learner that learns nothing: it only counts versions."""

    def __init__(self):
        self.flat, self.dense_bytes, self.version = torch.zeros(1), 0, 0

    def gradient(self, batch):
        return Gradient(batch, torch.zeros(len(batch.labels)), [], [], self.version)

    def apply(self, gradient, normalization):
        self.version += 1
        return self.version - gradient.version, []


def run(group, *, replicas=1, steps=40, seed=0, link=None):
    rule = Synchronization(interval=1.0, servers=Servers(link=Network(latency=0.01))) if replicas > 1 else None
    cluster = VirtualCluster(
        num_replicas=replicas,
        dense_on_servers=False,
        workers=Workers(compute=Constant(0.0)),
        group=group,
        link=link or Network(),
        synchronization=rule,
    )
    learners = [Pushes() for _ in range(replicas)]
    return cluster.simulate(learners, repeat(make_batch(2), steps * cluster.num_workers), seed=seed)


def test_step_when_alone_then_takes_its_legs_and_its_messages():
    legs = [Leg(None, 1.0), Leg(0, 2.0, sent_bytes=30.0, returned_bytes=10.0), Leg(None, 0.5)]
    group = Group(legs, num_servers=1, link=Network(latency=0.25, bandwidth=10.0), deviation=0.0)
    seconds = 1.0 + 2.0 + 0.5 + (30 + 10) / 10 + 4 * 0.25
    assert group.cycle_seconds == seconds
    results = run(group, steps=50)
    assert results.seconds == pytest.approx(50 * seconds, abs=seconds)  # and a random start within the first
    assert results.utilization["group server 0 processor"] == pytest.approx(2.0 / seconds, rel=0.03)


def test_legs_when_together_then_a_step_takes_the_longest_and_the_trainers_port_sends_one_after_the_other():
    """Sent after 1, 2 and 3 seconds, computed after 6, 4 and 4.5; answers of a second each come back from then on."""
    together = [Leg(0, 5.0, 10.0, 10.0), Leg(1, 2.0, 10.0, 10.0), Leg(2, 1.5, 10.0, 10.0)]
    group = Group([Leg(None, 0.5), together], num_servers=3, link=Network(latency=0.25, bandwidth=10.0), deviation=0.0)
    seconds = 0.5 + 6.0 + 1.0 + 4 * 0.25
    assert group.cycle_seconds == seconds
    results = run(group, steps=50)
    assert results.seconds == pytest.approx(50 * seconds, abs=seconds)
    assert results.utilization["group server 1 processor"] == pytest.approx(2.0 / seconds, rel=0.03)
    apart = Group([Leg(None, 0.5), *together], num_servers=3, link=Network(latency=0.25, bandwidth=10.0), deviation=0.0)
    assert apart.cycle_seconds == 0.5 + 8.5 + 6.0 + 3 * 4 * 0.25


@pytest.mark.parametrize(
    ("group", "limit"),
    [
        (Group([Leg(None, 1.0)], num_trainers=3, nets_per_trainer=6, trainer_cores=2), 6.0),
        (
            Group([Leg(None, 0.1), Leg(0, 1.0)], num_trainers=3, nets_per_trainer=6, num_servers=1, server_cores=4),
            4.0,
        ),
        (
            Group(
                [Leg(0, 0.01, sent_bytes=5.0)],
                num_trainers=2,
                nets_per_trainer=9,
                num_servers=1,
                link=Network(bandwidth=10.0),
            ),
            2.0,
        ),
        (
            Group(
                [Leg(i, 0.01, sent_bytes=5.0) for i in (0, 1)], nets_per_trainer=9, num_servers=2, link=Network(10.0)
            ),
            1.0,
        ),
        (
            Group(
                [[Leg(i, 0.01, sent_bytes=5.0) for i in (0, 1)]], nets_per_trainer=9, num_servers=2, link=Network(10.0)
            ),
            1.0,
        ),
    ],
    ids=["trainers", "server", "server's port", "trainer's port", "trainer's port, together"],
)
def test_throughput_when_one_machine_is_full_then_is_its_own(group, limit):
    results = run(group)
    per_second = results.counts["pushes"] / results.seconds
    assert per_second == pytest.approx(limit, rel=0.05)
    assert max(results.utilization.values()) == pytest.approx(1.0, abs=0.05)


def test_staleness_when_nets_are_alike_then_its_mean_is_their_number_and_no_group_makes_another_stale():
    group = Group(
        [Leg(None, 1.0), Leg(0, 0.5)],
        num_trainers=3,
        nets_per_trainer=4,
        num_servers=1,
        trainer_cores=4,
        server_cores=12,
    )
    results = run(group, replicas=2)
    found = results.staleness["dense"].to_dict()
    assert found["mean"] == pytest.approx(12, rel=0.05)  # t * r


def test_run_when_repeated_with_its_seed_then_is_the_same():
    group = Group(
        [Leg(None, 1.0), Leg(0, 0.5, 3.0, 2.0)],
        num_trainers=2,
        nets_per_trainer=4,
        num_servers=1,
        link=Network(5.0, 0.1),
    )
    one, other = (run(group, steps=20, seed=3).to_dict() for _ in range(2))
    assert one == other
    assert run(group, steps=20, seed=4).to_dict() != one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group([]), "at least one leg"),
        (lambda: Group([[Leg(0, 1.0), Leg(None, 1.0)]], num_servers=1), "legs that stand together are on servers"),
        (lambda: Group([Leg(None, 1.0), []]), "legs that stand together are on servers"),
        (lambda: Group([[Leg(1, 1.0)]], num_servers=1), "on server 1, but the group has 1 servers"),
        (lambda: Group([Leg(1, 1.0)], num_servers=1), "on server 1, but the group has 1 servers"),
        (lambda: Leg(None, -1.0), "a leg's seconds must be a finite number of at least 0, got -1"),
        (lambda: Leg(0, 1.0, returned_bytes=-1.0), "a leg's returned_bytes must be a finite number of at least 0"),
        (lambda: Leg(-1, 1.0), "a leg's server must be a whole number of at least 0, got -1"),
        (lambda: Group([Leg(None, 1.0)], trainer_cores=0), "trainer_cores must be a whole number of at least 1"),
        (
            lambda: VirtualCluster(workers_per_replica=3, group=Group([Leg(None, 1.0)], nets_per_trainer=2)),
            "but cluster.group has 2 nets: leave it null",
        ),
        (lambda: VirtualCluster(workers=Workers(cores=2), group=Group([Leg(None, 1.0)])), "leave them null"),
    ],
)
def test_group_when_impossible_then_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
