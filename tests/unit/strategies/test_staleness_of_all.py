"""Histograms of the other workers' pushes: what they were told once is not counted twice."""

import pytest
import torch
import torch.distributed as dist

from lightning_recsys.stores.versions import StalenessHistogram
from lightning_recsys.strategies.rows.staleness_of_all import StalenessOfAll


@pytest.fixture
def others(monkeypatch):
    """What the other ranks bring to each meeting: the largest staleness, then the counts of each histogram."""
    brought = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        other = torch.tensor(brought.pop(0))
        tensor.copy_(torch.maximum(tensor, other) if op == dist.ReduceOp.MAX else tensor + other)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return brought


def histogram(counts):
    found = StalenessHistogram()
    found.add(torch.tensor(list(counts.items())))
    return found


def test_staleness_when_workers_meet_twice_then_each_push_counts_once(others):
    met, cpu = StalenessOfAll(), torch.device("cpu")
    others += [3, [[0, 0, 2, 1], [0, 4, 0, 0]]]
    met.meet({"dense": histogram({1: 5, 2: 1}), "rows": StalenessHistogram()}, device=cpu)
    own = histogram({1: 6, 2: 1})  # and one more push since
    assert met.of_all("dense", own).counts == {1: 6, 2: 3, 3: 1}
    assert met.of_all("rows", StalenessHistogram()).counts == {1: 4}
    others += [0, [[0, 0], [0, 0]]]  # the others have made none
    met.meet({"dense": own, "rows": StalenessHistogram()}, device=cpu)
    assert met.of_all("dense", own).counts == {1: 6, 2: 3, 3: 1}


def test_staleness_when_nobody_has_pushed_then_there_is_none(others):
    met = StalenessOfAll()
    others += [0, [[0]]]
    met.meet({"dense": StalenessHistogram()}, device=torch.device("cpu"))
    assert met.of_all("dense", StalenessHistogram()).counts == {}
