"""GraphSAGE under the strategies that fit: two lookups a step, and batches of as many rows as were sampled."""

from __future__ import annotations

import pytest
import torch
from graph_runs import loss_on_all, make_link_task, make_task, train, train_link, weights

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


@pytest.fixture(scope="module")
def links_alone():
    return train_link("auto", 1)


@pytest.mark.parametrize("name", ["ddp", "het without staleness"])
def test_two_workers_when_links_are_learned_then_equal_one_with_twice_the_batch(name, links_alone):
    """Neighbours, negatives and candidates are drawn: each must be what one worker draws."""
    learned, metrics = train_link(EXACT[name](), 2)
    assert metrics["world_size"] == 2
    assert learned.keys() == links_alone[0].keys()
    start = weights(make_link_task())
    for key, value in links_alone[0].items():
        assert not torch.equal(value, start[key])
        torch.testing.assert_close(learned[key], value, rtol=1e-4, atol=1e-5, msg=key)
    for metric in ("val/recall", "val/ndcg", "val/mrr"):
        assert metrics[metric] == pytest.approx(links_alone[1][metric], abs=1e-5)


FREE = {
    "shadowsync": lambda: ShadowSyncStrategy(table_placement="size"),
    "async_ps": lambda: AsyncParameterServerStrategy(table_placement="size"),
    "het": lambda: HETStrategy(staleness=10, cache_rows=20, transport="tcp"),
}


def check_trained(learned, alone):
    """As far from the start as training alone goes, and as low, within what staleness and another order allow."""
    start = weights(make_task())
    assert learned.keys() == start.keys()
    for key in filter(lambda key: start[key].is_floating_point(), start):
        value = start[key]
        assert 0.3 < (learned[key] - value).norm() / (alone[key] - value).norm() < 3, key
    before, wanted = loss_on_all(start), loss_on_all(alone)
    assert before - loss_on_all(learned) > (before - wanted) / 2


@pytest.mark.parametrize("name", FREE)
def test_two_workers_when_stale_then_all_parts_are_trained(name, alone):
    learned, metrics = train(FREE[name](), 2)
    assert metrics["world_size"] == 2
    check_trained(learned, alone[0])


@pytest.mark.parametrize("part", ["all", "model.node_embeddings", "model.embeddings", "model.layers"])
def test_check_when_a_part_is_as_at_the_start_then_fails(part, alone):
    start, learned = weights(make_task()), alone[0]
    check_trained(learned, learned)
    untrained = {key: start[key] if part == "all" or key.startswith(part) else x for key, x in learned.items()}
    with pytest.raises(AssertionError):
        check_trained(untrained, learned)


REFUSED = {
    "des": (DESStrategy, r"strategy=des cuts layers by field, and CountedTask joins nodes .*: use strategy=het"),
    "hierarchical": (HierarchicalStrategy, r"strategy=hierarchical cuts .*, and CountedTask joins .*: use strategy="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strategy_when_it_cuts_layers_then_refuses_graphs_with_the_reason(name):
    strategy, reason = REFUSED[name]
    with pytest.raises(TypeError, match=reason):
        train(strategy(), 1)
