"""Ranks to trainers and nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recsys.placement import ClusterLayout


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_layout_when_made_then_every_rank_has_one_trainer_on_one_node(trainers_per_node, workers, nodes):
    layout = ClusterLayout(trainers_per_node * nodes, workers, nodes)
    assert layout.world_size == trainers_per_node * nodes * workers
    places = [(layout.trainer_of(rank), layout.worker_of(rank)) for rank in range(layout.world_size)]
    assert places == [(trainer, worker) for trainer in range(layout.num_trainers) for worker in range(workers)]
    assert layout.leaders == tuple(rank for rank, (_, worker) in enumerate(places) if worker == 0)
    nodes_of = {(trainer, rank // layout.ranks_per_node) for rank, (trainer, _) in enumerate(places)}
    assert len(nodes_of) == layout.num_trainers, "a trainer's workers are all on one node"
    assert layout.ranks_per_node * nodes == layout.world_size


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0,), "strategy.num_trainers must be at least 1, got 0"),
        ((1, 0), "strategy.workers_per_trainer must be at least 1, got 0"),
        ((1, 1, 0), "strategy.num_nodes must be at least 1, got 0"),
        ((3, 2, 2), "num_trainers=3 is not a multiple of the 2 nodes.*memory of one node.*such as 4"),
        ((1, 4, 2), "num_trainers=1 is not a multiple of the 2 nodes.*such as 2"),
    ],
)
def test_layout_when_impossible_then_the_error_says_what_to_do(arguments, match):
    with pytest.raises(ValueError, match=match):
        ClusterLayout(*arguments)


@pytest.mark.parametrize("method", ["trainer_of", "worker_of"])
@pytest.mark.parametrize("rank", [-1, 6])
def test_rank_when_outside_the_world_then_it_is_refused(method, rank):
    with pytest.raises(ValueError, match=f"ranks are 0 to 5, got {rank}"):
        getattr(ClusterLayout(2, 3), method)(rank)
