"""Arguments of HETStrategy, and what its workers keep. No worker is started."""

from __future__ import annotations

import math
import pickle

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import StrategyRegistry

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from lightning_recsys.optim import RowSGD
from lightning_recsys.placement import PlacementPlan, TablePart
from lightning_recsys.row_cache import SharedIndex
from lightning_recsys.stores import DynamicRows, MappedStores
from lightning_recsys.strategies import AsyncParameterServerStrategy, HETStrategy
from lightning_recsys.strategies.rows.cached import _lag_shares, _merged


def make_trainer(strategy, **arguments) -> pl.Trainer:
    settings = {"devices": 2, **arguments}
    return pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, **settings)


@pytest.mark.parametrize(("name", "algorithm"), [("het", "het"), ("het_hybrid", "hybrid")])
def test_name_when_registered_then_the_trainer_finds_it(name, algorithm):
    assert StrategyRegistry.get(name).rows.algorithm == algorithm
    assert make_trainer(name).strategy.rows.algorithm == algorithm


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "async"}, r"strategy.algorithm must be one of het, hybrid, got 'async'"),
        ({"algorithm": "ps"}, r"strategy.algorithm must be one of het, hybrid, got 'ps'"),
        ({"policy": "fifo"}, r"strategy.policy must be one of lru, lfu, light_lfu, got 'fifo'"),
        ({"clock": "min"}, r"strategy.clock must be one of \['max', 'sum'\], got 'min'"),
        ({"cache_rows": 0}, r"strategy.cache_rows must be at least 1, got 0"),
        (
            {"cache_fraction": 0.0},
            r"strategy.cache_fraction must be in \(0, 1\], got 0.0. strategy.algorithm=hybrid has no",
        ),
        ({"cache_fraction": 1.5}, r"strategy.cache_fraction must be in \(0, 1\], got 1.5"),
        ({"cache_rows": 5, "cache_fraction": 0.5}, r"give strategy.cache_rows or strategy.cache_fraction, not both"),
        ({"staleness": -1}, r"strategy.staleness must be at least 0, or null for no bound, got -1"),
        ({"staleness": 0.5}, r"strategy.staleness must be auto, a whole number of updates, .* got 0.5"),
        ({"staleness": "none"}, r"strategy.staleness must be auto, a whole number of updates, .* got 'none'"),
        ({"lookahead_batches": -1}, r"strategy.lookahead_batches must be at least 0, got -1. 0 looks at none"),
        ({"lookahead_batches": 2.5}, r"strategy.lookahead_batches must be a whole number, got 2\.5"),
        ({"cache_fraction": "0.5"}, r"strategy.cache_fraction must be a number, got '0\.5'"),
        (
            {"algorithm": "hybrid", "staleness": 10},
            r"strategy.staleness=10 means nothing with strategy.algorithm=hybrid, which has no cache\.",
        ),
        ({"max_missed_updates": 60, "staleness": 5}, r"give strategy.max_missed_updates, or strategy.staleness and"),
        ({"max_missed_updates": 0}, r"strategy.max_missed_updates must be at least 1, got 0"),
        ({"algorithm": "hybrid", "max_missed_updates": 60}, r"strategy.max_missed_updates=60 means nothing"),
        ({"algorithm": "hybrid", "cache_rows": 9}, r"strategy.cache_rows=9 means nothing"),
        ({"algorithm": "hybrid", "policy": "lru"}, r"strategy.policy=lru means nothing"),
        ({"lookahead_bytes": 0}, r"strategy.lookahead_bytes must be at least 1, got 0"),
        ({"dynamic_rows": DynamicRows()}, r"strategy.dynamic_rows needs strategy.cache_rows"),
        ({"dynamic_rows": DynamicRows(), "cache_fraction": 0.5}, r"strategy.dynamic_rows needs strategy.cache_rows"),
        ({"num_embedding_servers": 0}, r"strategy.num_embedding_servers must be at least 1, got 0"),
        ({"min_rows": 0}, r"strategy.min_rows must be at least 1, got 0"),
        ({"table_placement": "best"}, r"strategy.table_placement must be one of .*, got 'best'"),
    ],
)
def test_argument_when_wrong_then_refused_by_its_place_in_the_config(arguments, message):
    with pytest.raises(ValueError, match=message):
        HETStrategy(**arguments)


def test_staleness_when_missed_updates_are_bounded_then_follows_from_the_number_of_workers():
    strategies = [make_trainer(HETStrategy(max_missed_updates=60), devices=workers).strategy for workers in (2, 8)]
    # 2 s + (n - 1) (s + 3): 38 + 22 and 8 + 7 * 7, while 10 + 7 * 8 would be 66.
    rows = [strategy.rows for strategy in strategies]
    assert [(x.staleness, x.clock, x.in_step) for x in rows] == [(19, "sum", False), (4, "sum", False)]
    with pytest.raises(
        ValueError, match=r"strategy.max_missed_updates must be at least 30 for 8 workers with prefetch"
    ):
        _ = make_trainer(HETStrategy(max_missed_updates=21), devices=8).strategy.rows.in_step


def test_arguments_of_ddp_when_the_dense_part_is_on_servers_then_refused():
    assert HETStrategy(find_unused_parameters=True)
    with pytest.raises(TypeError, match=r"does not use DistributedDataParallel.*find_unused_parameters"):
        AsyncParameterServerStrategy(find_unused_parameters=True)


@pytest.mark.parametrize(("given", "kept"), [(3, 3), (0, 0), (None, None), ("inf", None), (math.inf, None)])
def test_staleness_when_given_then_is_a_number_or_no_bound(given, kept):
    assert HETStrategy(staleness=given).rows.staleness == kept


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [({}, 101), ({"cache_fraction": 0.5}, 501), ({"cache_rows": 7}, 7), ({"cache_rows": 5000}, 1001)],
)
def test_cache_when_sized_then_holds_so_many_of_1001_rows(arguments, kept):
    assert HETStrategy(**arguments).rows._rows_kept(1001) == kept


@pytest.mark.parametrize(
    ("arguments", "devices", "in_step", "prefetches", "peeks", "scale"),
    [
        ({}, 2, False, True, True, 0.5),
        ({"staleness": 0}, 2, True, False, True, 0.5),  # what was fetched one step early would lack the other's update
        ({"staleness": 0}, 1, False, True, True, 1.0),
        ({"prefetch": False}, 2, False, False, True, 0.5),
        ({"lookahead_batches": 0}, 2, False, True, True, 0.5),
        ({"lookahead_batches": 0, "prefetch": False}, 2, False, False, False, 0.5),
        ({"algorithm": "hybrid"}, 2, True, False, False, 0.5),
    ],
)
def test_workers_when_of_an_algorithm_then_wait_peek_and_scale_accordingly(
    arguments, devices, in_step, prefetches, peeks, scale
):
    strategy = make_trainer(HETStrategy(**arguments), devices=devices).strategy
    rows = strategy.rows
    assert (rows.in_step, rows._prefetches, rows.peeks) == (in_step, prefetches, peeks)
    assert strategy.gradient_scale == scale
    assert not strategy.asynchronous
    assert len(strategy.server_specs()) == 1


@pytest.mark.parametrize(("staleness", "shares"), [(3, True), (0, False)], ids=["in place", "in step"])
def test_index_when_collections_have_the_same_ids_then_is_made_once_and_only_where_it_is_used(
    staleness, shares, tmp_path, monkeypatch
):
    made = []

    class Counted(SharedIndex):
        def __init__(self, *args, **options):
            made.append(self)
            super().__init__(*args, **options)

    for module in ("lightning_recsys.strategies.rows.cached", "lightning_recsys.row_cache.backend"):
        monkeypatch.setattr(f"{module}.SharedIndex", Counted)
    strategy = make_trainer(HETStrategy(staleness=staleness)).strategy
    for width in (1, 4):
        collection = EmbeddingBagCollection([EmbeddingBagConfig("t", 100, width, ("x",))], optimizer=RowSGD(0.1))
        plan = PlacementPlan("size", 1, (TablePart(f"of_{width}", "t", 100, 0),))
        servers = [MappedStores(tmp_path)]
        backend = strategy.rows.make_backend(f"of_{width}", collection, servers=servers, plan=plan, seed=0)
        assert backend.shared_index is (made[0] if shares else None)
    assert len(made) == shares


def test_strategy_when_pickled_then_keeps_its_settings():
    strategy = pickle.loads(pickle.dumps(HETStrategy(algorithm="hybrid", prefetch=False, lookahead_batches=0)))
    assert (strategy.rows.algorithm, strategy.wraps_model) == ("hybrid", True)
    assert (strategy.rows.prefetch, strategy.rows.lookahead_batches) == (False, 0)
    assert strategy.rows.strategy is strategy


def test_telemetry_when_of_several_collections_then_weighs_shares_by_their_lookups():
    parts = [
        {"cache/reads": 30, "cache/hit_rate": 1.0, "comm/rows_bytes": 5, "cache/clock_lag": torch.tensor([1.0])},
        {"cache/reads": 10, "cache/hit_rate": 0.2, "comm/rows_bytes": 7, "cache/clock_lag": torch.tensor([4.0])},
    ]
    merged = _merged(parts)
    assert merged.pop("cache/clock_lag").tolist() == [1.0, 4.0]
    assert merged == {"cache/reads": 40, "cache/hit_rate": pytest.approx(0.8), "comm/rows_bytes": 12}
    assert _merged([]) == _lag_shares(torch.empty(0)) == {}


def test_clock_lags_when_counted_then_each_is_in_one_share():
    lags = torch.tensor([0, 0, 1, 9, 10, 99, 100, 10_000], dtype=torch.float32)
    shares = [value for name, value in _lag_shares(lags).items() if "share" in name]
    assert shares == [0.25, 0.25, 0.25, 0.25]
