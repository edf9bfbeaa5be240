"""GraphSAGE under the strategies that fit: two lookups a step, and batches of as many rows as were sampled."""

from __future__ import annotations

import pytest
import torch
from graph_runs import train

from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    DESStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def alone():
    return train("auto", 1)


EXACT = {
    "ddp": lambda: "ddp_forkserver",
    "hybrid": lambda: HETStrategy(algorithm="hybrid"),
    "het without staleness": lambda: HETStrategy(staleness=0),
}


@pytest.mark.parametrize("name", EXACT)
def test_two_workers_when_exact_then_equal_one_with_twice_the_batch(name, alone):
    learned, metrics = train(EXACT[name](), 2)
    assert metrics["world_size"] == 2
    assert learned.keys() == alone[0].keys()
    for key, value in alone[0].items():
        torch.testing.assert_close(learned[key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert metrics["val/accuracy"] == pytest.approx(alone[1]["val/accuracy"])


FREE = {
    "shadowsync": lambda: ShadowSyncStrategy(table_placement="size"),
    "async_ps": lambda: AsyncParameterServerStrategy(table_placement="size"),
    "het": lambda: HETStrategy(staleness=10, cache_rows=20, transport="tcp"),
}


@pytest.mark.parametrize("name", FREE)
def test_two_workers_when_stale_then_all_parts_are_trained(name, alone):
    learned, metrics = train(FREE[name](), 2)
    assert metrics["world_size"] == 2
    untrained = {key for key, value in learned.items() if value.is_floating_point() and not value.any()}
    assert not untrained
    # As far from the start as training alone goes, within what staleness and another order allow.
    for key in ("model.node_embeddings.embedding_bags.node.weight", "model.layers.1.lin_l.weight"):
        assert 0.3 < learned[key].norm() / alone[0][key].norm() < 3


REFUSED = {
    "des": (DESStrategy, r"strategy=des cuts layers by field, and CountedTask joins nodes .*: use strategy=het"),
    "hierarchical": (HierarchicalStrategy, r"strategy=hierarchical cuts .*, and CountedTask joins .*: use strategy="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strategy_when_it_cuts_layers_then_refuses_graphs_with_the_reason(name):
    strategy, reason = REFUSED[name]
    with pytest.raises(TypeError, match=reason):
        train(strategy(), 1)
