"""The HET suite: the oracle that caches are held against, and what a replay of batches counts."""

from functools import cache

import numpy as np
import pytest
from benchmarks.harness.workload import Workload
from benchmarks.suites.het.cache import replay
from benchmarks.suites.het.traces import Trace, oracle


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
