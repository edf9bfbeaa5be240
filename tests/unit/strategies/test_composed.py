"""Strategies by their three parts: which one has them, and what does not go together."""

from __future__ import annotations

import pickle

import pytest

from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    CachedRows,
    ComposedStrategy,
    DensePart,
    DESStrategy,
    ForkserverDDPStrategy,
    Free,
    FreeRowsDDPStrategy,
    HETStrategy,
    HierarchicalStrategy,
    InStep,
    Replicas,
    ServedDense,
    ServedGroups,
    ServedRows,
    ShadowSyncStrategy,
    VersionedRows,
    compose,
)
from lightning_recsys.sync import StalenessNormalization


@pytest.mark.parametrize(
    ("parts", "strategy", "rows"),
    [
        ({}, ForkserverDDPStrategy, None),
        ({"dense": "ddp", "rows": "local", "pace": "in_step"}, ForkserverDDPStrategy, None),
        ({"dense": "ddp", "rows": "cached", "pace": "in_step"}, HETStrategy, CachedRows),
        ({"dense": "ddp", "rows": "plain"}, HETStrategy, CachedRows),  # hybrid
        ({"dense": "ddp", "rows": "plain", "pace": "free"}, FreeRowsDDPStrategy, VersionedRows),
        ({"dense": "easgd"}, ShadowSyncStrategy, ServedRows),
        ({"dense": "bmuf", "rows": "plain", "pace": "free"}, ShadowSyncStrategy, ServedRows),
        ({"dense": "ma", "rows": "cached"}, ShadowSyncStrategy, CachedRows),
        ({"dense": "groups", "rows": "cached", "num_groups": 2}, HierarchicalStrategy, CachedRows),
        ({"dense": "servers", "rows": "plain"}, AsyncParameterServerStrategy, VersionedRows),
        ({"dense": "servers", "rows": "cached"}, AsyncParameterServerStrategy, CachedRows),
        ({"dense": "fields", "rows": "fields", "pace": "in_step"}, DESStrategy, None),
    ],
)
def test_parts_when_they_go_together_then_are_those_of_one_strategy(parts, strategy, rows):
    made = compose(**parts)
    assert type(made) is strategy
    assert rows is None or type(made.rows) is rows
    again = pickle.loads(pickle.dumps(made))
    assert again.rows.strategy is again.dense.strategy is again


def test_parts_when_objects_then_make_up_a_strategy_which_is_as_free_as_its_dense_part():
    made = compose(dense=Replicas(num_trainers=3, algorithm="ma"), rows="cached", pace="free", min_workers=2)
    assert type(made) is ComposedStrategy
    assert (made.asynchronous, made.wraps_model, made.min_workers, made.num_replicas) == (True, False, 2, 3)
    assert type(made.rows) is CachedRows
    again = pickle.loads(pickle.dumps(made))
    assert (again.asynchronous, again.dense.num_trainers) == (True, 3)
    assert again.dense.strategy is again.rows.strategy is again
    for pace in (InStep(), None):
        in_step = ComposedStrategy(dense=DensePart(), rows=CachedRows(), pace=pace)
        assert (in_step.asynchronous, in_step.wraps_model, in_step.pace.row_scale(4)) == (False, True, 0.25)
    assert ComposedStrategy(dense=DensePart()).pace.row_scale(4) == 1.0  # as ddp_free


def test_rows_when_not_given_then_are_those_of_the_paper_of_the_dense_part():
    stale = ComposedStrategy(dense=ServedDense("linear"), table_placement="size").rows
    assert (type(stale), stale.normalization) == (VersionedRows, StalenessNormalization("linear"))
    assert type(compose(dense=ServedDense()).rows) is VersionedRows
    assert type(ComposedStrategy(dense=Replicas()).rows) is ServedRows
    assert type(ComposedStrategy(dense=ServedDense(), rows="plain").rows) is ServedRows


def test_rows_when_attached_then_see_the_dense_part_and_the_pace_that_they_are_to_go_with():
    class Sees(CachedRows):
        def attach(self, strategy):
            self.seen = type(strategy.dense), strategy.pace.name
            super().attach(strategy)

    assert ComposedStrategy(dense=Replicas(), rows=Sees()).rows.seen == (Replicas, "free")
    assert ComposedStrategy(dense=DensePart(), rows=Sees(), pace=InStep()).rows.seen == (DensePart, "in_step")


class OnItsOwn(DensePart):
    """Workers run free, and yet DDP is to average their gradients."""

    asynchronous = True


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"dense": "easgd"}, TypeError, r"strategy.dense must be a dense part, such as Replicas\(.*, got 'easgd'"),
        ({"dense": ServedDense(), "pace": "free"}, TypeError, r"strategy.pace must be a pace: InStep\(\) or Free\(\)"),
        ({"dense": Replicas(), "pace": InStep()}, ValueError, "dense=Replicas does not go with strategy.pace=in_step"),
        (
            {"dense": DensePart(), "pace": InStep()},
            ValueError,
            "ServedRows does not go with strategy.pace=in_step",
        ),
        (
            {"dense": DensePart(), "rows": "cached", "pace": Free()},
            ValueError,
            "CachedRows does not go with strategy.pace=free where workers are in step: .* by the mean",
        ),
        ({"dense": OnItsOwn()}, ValueError, "dense=OnItsOwn has asynchronous=True and wraps_model=True"),
        (
            {"dense": ServedGroups(), "servers": ["tcp://a:1"]},
            ValueError,
            "group servers compute parts of the run",
        ),
        ({"dense": Replicas(), "rows": "local"}, ValueError, "strategy.rows must be one of plain, cached, got 'local'"),
    ],
)
def test_objects_when_they_do_not_go_together_then_refused_by_name(parts, error, message):
    with pytest.raises(error, match=message):
        ComposedStrategy(**parts)


def test_part_when_it_belongs_to_another_strategy_then_refused():
    used = ComposedStrategy(dense=Replicas(), rows=CachedRows())
    with pytest.raises(ValueError, match="this Replicas belongs to another strategy: make one for each"):
        ComposedStrategy(dense=used.dense)
    with pytest.raises(ValueError, match="this CachedRows belongs to another strategy"):
        ComposedStrategy(dense=Replicas(), rows=used.rows)


def test_dense_part_of_ones_own_when_composed_by_names_then_rows_in_the_process_are_refused():
    with pytest.raises(ValueError, match=r"dense=DensePart does not go with strategy.rows=local"):
        compose(dense=DensePart(), rows="local")
    with pytest.raises(TypeError, match=r"strategy.dense must be a name, or a part such as .*, got 3"):
        compose(dense=3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"dense": "adam"}, "strategy.dense must be one of ddp, easgd, .*, got 'adam'"),
        ({"rows": "remote"}, "strategy.rows must be one of local, plain, cached, fields, None, got 'remote'"),
        ({"pace": "slow"}, "strategy.pace must be one of in_step, free, None, got 'slow'"),
        ({"dense": "ma", "pace": "in_step"}, "dense=ma does not go with strategy.pace=in_step: replicas train on"),
        ({"dense": "servers", "pace": "in_step"}, "dense=servers does not go with strategy.pace=in_step: each worker"),
        ({"dense": "easgd", "rows": "local"}, "dense=easgd does not go with strategy.rows=local: its workers run"),
        ({"dense": "groups", "rows": "fields"}, "dense=groups does not go with strategy.rows=fields"),
        ({"dense": "fields", "rows": "cached"}, "dense=fields does not go with strategy.rows=cached: a process"),
        ({"dense": "fields", "pace": "free"}, "dense=fields does not go with strategy.pace=free: all processes"),
        ({"dense": "ddp", "rows": "fields"}, "dense=ddp does not go with strategy.rows=fields"),
        ({"dense": "ddp", "rows": "local", "pace": "free"}, "rows=local does not go with strategy.pace=free"),
        ({"dense": "ddp", "rows": "cached", "pace": "free"}, "rows=cached and strategy.pace=free"),
        (
            {"dense": "easgd", "rows": CachedRows(algorithm="hybrid")},
            "strategy.algorithm=hybrid has no cache, and its workers meet .* those of ShadowSyncStrategy run free",
        ),
        (
            {"dense": "easgd", "rows": CachedRows(), "table_placement": "size"},
            "strategy.table_placement=size means nothing where strategy.rows is an object: CachedRows has its own",
        ),
        (
            {"dense": "ddp", "rows": VersionedRows(), "pace": "in_step"},
            "rows=VersionedRows does not go with strategy.pace=in_step",
        ),
    ],
)
def test_parts_when_they_do_not_go_together_then_both_are_named_with_the_reason(parts, message):
    with pytest.raises(ValueError, match=message):
        compose(**parts)


def test_rows_when_of_another_type_then_refused():
    with pytest.raises(TypeError, match=r"strategy.rows must be one of plain, cached, or rows such as .*, got 7"):
        ShadowSyncStrategy(rows=7)
    with pytest.raises(ValueError, match=r"strategy.rows=plain: HETStrategy is DDP with CachedRows"):
        HETStrategy(rows="plain")
    with pytest.raises(ValueError, match=r"strategy.staleness=5 means nothing where strategy.rows is an object"):
        HETStrategy(rows=CachedRows(), staleness=5)


def test_normalization_when_rows_are_cached_then_is_that_of_the_dense_part_alone():
    made = compose(dense="servers", rows="cached", normalization="linear")
    assert made.dense.normalization == StalenessNormalization("linear")
    with pytest.raises(ValueError, match=r"CachedRows push finished changes, .* got linear"):
        CachedRows(normalization="linear")


def test_cached_rows_when_workers_run_free_then_look_at_no_batch_ahead_and_count_in_full():
    free, averaged = compose(dense="easgd", rows="cached"), compose(dense="ddp", rows="cached")
    free.rows.strategy = free
    assert (free.rows._prefetches, free.rows.peeks) == (False, False)
    assert (averaged.rows._prefetches, averaged.rows.peeks) == (True, True)
    assert free.pace.row_scale(4) == 1.0
    assert averaged.pace.row_scale(4) == 0.25
