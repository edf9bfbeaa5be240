"""The HET suite: the oracle that caches are held against, and what a replay of batches counts."""

import os
import re
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import pytorch_lightning as pl
from benchmarks.harness.workload import Workload
from benchmarks.suites.het import link
from benchmarks.suites.het.cache import replay, worker
from benchmarks.suites.het.link import HET, HYBRID, PREFETCHED, Crossed, variants
from benchmarks.suites.het.traces import Trace, oracle
from benchmarks.suites.het.training import PAPERS_MODELS

from lightning_recsys.strategies import HETStrategy


def fewest_misses(keys, limit):
    """Of all ways to choose what to drop, found by trying them."""

    @cache
    def best(number, held):
        if number == len(keys):
            return 0
        key = keys[number]
        there = held | {key}
        if len(there) <= limit:
            return (key not in held) + best(number + 1, there)
        return (key not in held) + min(best(number + 1, there - {dropped}) for dropped in there)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_belady_when_batches_have_one_row_each_then_none_misses_less(limit, seed):
    keys = np.random.default_rng(seed).integers(0, 6, 24)
    trace = Trace("random", 6, [np.array([key]) for key in keys])
    needs = oracle(trace, limit=limit, staleness=None, skip=0)
    assert needs.missed == fewest_misses(tuple(keys.tolist()), limit)


def test_most_frequent_when_a_row_comes_most_often_then_it_stays():
    trace = Trace("one", 4, [np.array([0, key]) for key in (1, 2, 3, 1, 2, 3)])
    needs = oracle(trace, limit=1, staleness=None, skip=1, kind="most_frequent")
    assert (needs.wanted, needs.missed) == (10, 5)  # of each batch but the first, what is not row 0


def test_oracle_when_rows_are_refreshed_then_that_is_counted_both_ways():
    trace = Trace("same", 1, [np.array([0])] * 10)
    needs = oracle(trace, limit=1, staleness=2, skip=0)
    # Fetched, then sent and fetched again when three updates are made: before batches 3, 6 and 9.
    assert (needs.missed, needs.fetched, needs.pushed) == (1, 4, 3)
    assert needs.saved() == pytest.approx(1 - 7 / 20)


def test_crossed_when_the_interface_saw_nothing_then_is_far_off_what_was_told():
    readings = np.array([[0.0] * 6, [132, 2, 66, 1, 5e5, 5e5], [264, 4, 132, 2, 1e6, 1e6]])
    crossed = Crossed.of(readings)  # empty packets, while rows went through shared memory
    assert (crossed.steps, crossed.counted, crossed.told) == (2, 0, 2e6)
    assert crossed.error == 100


def test_crossed_when_the_strategy_tells_of_nothing_then_is_as_far_off():
    assert Crossed.of(np.array([[0.0] * 6, [1e6, 700, 1e6, 700, 0, 0]])).error == 100


@pytest.mark.parametrize(("name", "millions"), [("WDL", 0.138), ("DFM", 0.918), ("DCN", 1.01)])
def test_models_when_made_for_the_link_then_have_the_papers_dense_parameters(name, millions):
    work = Workload(rows=1, dim=128)
    model = PAPERS_MODELS[name](work.num_dense, work.fields, embedding_dim=128, device="meta")
    dense = sum(x.numel() for x in model.parameters() if not x.is_meta)
    assert dense / 1e6 == pytest.approx(millions, rel=0.1)


@pytest.mark.distributed
def test_replay_when_all_batches_are_announced_then_misses_are_the_oracles():
    work = Workload(rows=6400)
    trace = Trace.of(work, 128, name="Zipf")
    limit, skip = trace.num_rows // 100, 25
    options = {"dim": 4, "batch_size": 128, "staleness": 100, "skip": skip}
    without, cached = (replay(work, cache_rows=rows, **options) for rows in (0, limit))
    best = oracle(trace, limit=limit, staleness=100, skip=skip)
    assert without.miss_rate == 1
    # Batches that were announced in a window as long as the trace: Belady's choice but for ties.
    assert cached.miss_rate == pytest.approx(best.miss_rate, rel=0.02)
    assert cached.num_bytes < 0.7 * without.num_bytes


@pytest.mark.distributed
def test_hybrid_prefetched_when_it_trains_then_moves_what_hybrid_moves_and_asks_ahead():
    work, told = Workload(rows=16 * 12), {}
    for name, (settings, _) in variants(staleness=100, warm_steps=0).items():
        caches = settings["algorithm"] == "het"
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        strategy = pl.Trainer(accelerator="cpu", devices=1, strategy=HETStrategy(**settings), **quiet).strategy
        assert strategy.rows._prefetches == caches  # as one worker
        options = {"cache_rows": settings.get("cache_rows", 10_000 * caches), "staleness": strategy.rows.staleness}
        with worker(work, dim=4, batch_size=16, lookahead_batches=0, **options) as own:
            assert len(list(own.steps([x.sparse for x in work.batches(16)]))) == 12
            own.backend.flush()
            told[name] = own.backend.telemetry()
    moved = {name: x["comm/rows_bytes"] + x["comm/gradients_bytes"] for name, x in told.items()}
    assert moved[PREFETCHED] == moved[HYBRID]
    assert moved[HET] < 0.8 * moved[HYBRID]
    # What two batches in a row share is pushed and fetched when it is looked up; all else was asked for before.
    assert told[PREFETCHED]["cache/refresh_rate"] == told[PREFETCHED]["cache/hit_rate"] > 0


def test_folders_in_shared_memory_when_made_then_tell_whose_they_are(monkeypatch):
    class SeenEnoughError(Exception):
        """There is no namespace and no job here: only the folder is looked at."""

    def make(hosts, folder):
        folders.append(folder)
        raise SeenEnoughError

    folders = []
    monkeypatch.setattr(link, "linked_hosts", lambda rate: nullcontext((None, None)))
    with pytest.raises(SeenEnoughError):
        link.measure_on_links({"het": make}, ["1gbit"], batch_size=1, rounds=1, seconds=0.1, read=len)
    (folder,) = folders
    assert re.findall(r"\d+", folder.name)[0] == str(os.getpid())  # by which tests know what a neighbour left
    assert not folder.exists()
