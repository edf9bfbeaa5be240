"""Which rows a cache keeps: against simulations of each policy in dicts."""

from collections import OrderedDict

import numpy as np
import pytest

from lightning_recsys.row_cache import CacheIndex
from lightning_recsys.row_cache import index as index_module


class SimulatedLRU:
    def __init__(self, limit):
        self.limit, self.held = limit, OrderedDict()

    def use(self, key):
        self.held[key] = True
        self.held.move_to_end(key)

    def evict(self, spared):
        victims = [key for key in self.held if key not in spared][: max(len(self.held) - self.limit, 0)]
        for key in victims:
            del self.held[key]
        return victims


class SimulatedLFU:
    """Counts in a dict; the order among equals is that of a time stamp, which halving leaves in the old order."""

    def __init__(self, limit, memory):
        self.limit, self.memory = limit, memory
        self.uses, self.stamp, self.held, self.time = {}, {}, {}, 0

    def use(self, key):
        self.time += 1
        self.uses[key] = self.uses.get(key, 0) + 1
        self.stamp[key], self.held[key] = self.time, True

    def order(self, keys):
        return sorted(keys, key=lambda key: (self.uses[key], self.stamp[key]))

    def evict(self, spared):
        over = max(len(self.held) - self.limit, 0)
        victims = self.order(key for key in self.held if key not in spared)[:over]
        for key in victims:
            del self.held[key]
            if not self.uses[key] or not self.memory:
                del self.uses[key]
        if len(self.uses) - len(self.held) > self.memory:
            in_order = self.order(self.held)
            self.uses = {key: n // 2 for key, n in self.uses.items() if n > 1 or key in self.held}
            self.stamp = {key: self.time + i for i, key in enumerate(in_order)}
            self.time += len(in_order)
        return victims


def zipf_batches(num_batches, size, *, num_keys=3000, seed=0, bounded=False):
    """Batches of any keys, or of those from 0 to below ``num_keys``."""
    generator = np.random.default_rng(seed)
    weights = np.arange(1, num_keys + 1) ** -1.1
    keys = generator.permutation(num_keys) if bounded else generator.integers(-(2**63), 2**63 - 1, num_keys)
    return [keys[generator.choice(num_keys, size, p=weights / weights.sum())] for _ in range(num_batches)]


def run_against(simulation, cache, batches, *, prefetches):
    """Every step: misses and victims, with or without the next batch planned ahead."""
    misses = []
    coming = [*batches[1:], None] if prefetches else [None] * len(batches)
    planned = None
    for keys, ahead in zip(batches, coming, strict=True):
        for batch in [keys] if planned is None else []:
            planned = check_plan(simulation, cache, batch)
        misses.append(int(planned.new_U.sum()))
        after, spared, spare_from = None, set(), planned.number + 1
        if ahead is not None:
            after = check_plan(simulation, cache, ahead)
            spared, spare_from = set(after.keys_U.tolist()), after.number
        victims = cache.keys(cache.evict(spare_from=spare_from))
        assert victims.tolist() == simulation.evict(spared)
        assert len(cache) == len(simulation.held)
        planned = after
    return misses


def check_plan(simulation, cache, keys):
    plan = cache.plan(keys)
    distinct = list(dict.fromkeys(keys.tolist()))
    assert plan.keys_U.tolist() == distinct
    assert plan.new_U.tolist() == [key not in simulation.held for key in distinct]
    assert (plan.slots_U[plan.distinct_N] == plan.slots_N).all()
    assert (plan.keys_U[plan.distinct_N] == keys).all()
    for key in distinct:
        simulation.use(key)
    assert cache.keys(plan.slots_U).tolist() == distinct
    assert np.unique(cache.slots()).size == len(simulation.held)
    assert set(cache.keys(cache.slots()).tolist()) == set(simulation.held)
    return plan


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 100, 400, 5000])
def test_lru_when_run_against_a_simulation_then_the_same_rows_go_in_the_same_order(limit, prefetches):
    batches = zipf_batches(60, 150)
    misses = run_against(SimulatedLRU(limit), CacheIndex(limit, policy="lru"), batches, prefetches=prefetches)
    distinct = len(set(np.concatenate(batches).tolist()))
    assert sum(misses) == distinct if limit == 5000 else sum(misses) > distinct


@pytest.mark.parametrize("num_keys", [None, 3000])
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize(("limit", "remembered"), [(0, 8), (1, 8), (100, 8), (100, 1), (400, 2), (400, 1), (5000, 8)])
def test_lfu_when_run_against_a_simulation_then_the_same_rows_go_in_the_same_order(
    limit, remembered, prefetches, num_keys, monkeypatch
):
    monkeypatch.setattr(index_module, "REMEMBERED", remembered)
    simulation = SimulatedLFU(limit, remembered * limit)
    cache = CacheIndex(limit, policy="lfu", num_keys=num_keys)
    run_against(simulation, cache, zipf_batches(80, 150, bounded=num_keys is not None), prefetches=prefetches)


def test_lfu_when_compared_then_it_misses_less_than_lru_and_light_lfu_about_as_much():
    batches = zipf_batches(300, 300, num_keys=20_000, seed=3)
    misses = {}
    for policy in ("lru", "lfu", "light_lfu"):
        cache = CacheIndex(500, policy=policy)
        counts = []
        for keys in batches:
            plan = cache.plan(keys)
            counts.append(plan.new_U.sum() / plan.new_U.size)
            cache.evict(spare_from=plan.number + 1)
        misses[policy] = np.mean(counts[100:])
    assert misses["lfu"] < misses["lru"] - 0.03
    assert abs(misses["light_lfu"] - misses["lfu"]) < 0.01


def test_light_lfu_when_a_row_passes_the_bound_then_it_goes_only_when_nothing_else_is_left(monkeypatch):
    monkeypatch.setattr(index_module, "LIGHT_BOUND", 3)
    cache = CacheIndex(2, policy="light_lfu")
    for _ in range(3):
        cache.plan(np.array([1, 2]))
    cache.plan(np.array([7]))  # used later than the others, but less often
    assert cache.keys(cache.evict(spare_from=99)).tolist() == [7]
    for _ in range(3):
        cache.plan(np.array([8]))
    assert cache.keys(cache.evict(spare_from=99)).tolist() == [1]  # all are past the bound: halved, they go by slot
    cache.plan(np.array([9]))
    assert cache.keys(cache.evict(spare_from=99)).tolist() == [2]  # 2 and 8 have counts again, 3 // 2, and so has 9


def test_light_lfu_when_no_row_reaches_the_bound_then_it_is_lfu(monkeypatch):
    monkeypatch.setattr(index_module, "LIGHT_BOUND", 10_000)
    run_against(SimulatedLFU(100, 800), CacheIndex(100, policy="light_lfu"), zipf_batches(60, 150), prefetches=True)


def test_evict_when_the_spared_rows_alone_exceed_the_limit_then_they_stay():
    for policy in ("lru", "lfu", "light_lfu"):
        cache = CacheIndex(2, policy=policy)
        cache.plan(np.array([1, 2, 3]))
        ahead = cache.plan(np.array([3, 4, 5, 6]))
        slots = cache.evict(spare_from=ahead.number)
        assert cache.keys(slots).tolist() == [1, 2]
        assert slots.tolist() == [0, 1]
        assert len(cache) == 4
        assert cache.plan(np.array([8, 9])).slots_U.tolist() == [1, 0]  # slots come back into use


@pytest.mark.parametrize("num_keys", [None, 3])
def test_clear_when_called_then_nothing_is_held_and_plans_count_on(num_keys):
    cache = CacheIndex(5, policy="lfu", num_keys=num_keys)
    cache.plan(np.array([1, 2]))
    cache.clear()
    assert (len(cache), cache.num_slots, cache.slots().size) == (0, 0, 0)
    plan = cache.plan(np.array([2, 2]))
    assert (plan.number, plan.new_U.tolist(), plan.slots_N.tolist()) == (2, [True], [0, 0])


def test_plan_when_the_batch_is_empty_then_so_is_the_plan():
    plan = CacheIndex(5, policy="lru").plan(np.empty(0, dtype=np.int64))
    assert (plan.slots_N.size, plan.keys_U.size, plan.new_U.size) == (0, 0, 0)


def test_index_when_an_argument_is_wrong_then_refused():
    with pytest.raises(ValueError, match=r"strategy\.cache_rows must be at least 0, got -1"):
        CacheIndex(-1, policy="lru")
    with pytest.raises(ValueError, match=r"strategy\.policy must be one of \['lru', 'lfu', 'light_lfu'\], got 'fifo'"):
        CacheIndex(1, policy="fifo")


# --- Batches known to come -------------------------------------------------------------------------------------------


class SimulatedWindow:
    """Rows without a known use go first, as ``policy`` says; then those whose next use is the farthest."""

    def __init__(self, policy, limit, *, highest=2**31):
        self.policy, self.limit, self.highest = policy, limit, highest
        self.uses, self.stamp, self.held, self.time = {}, {}, {}, 0
        self.known = {}  # next use of held rows: number of a batch, and when that was found out
        self.window = []  # (number, distinct keys)

    def _tick(self):
        self.time += 1
        return self.time

    def _look(self, key):
        """Find the next use of a held row."""
        number = next((number for number, keys in self.window if key in keys), None)
        if number is not None:
            self.known[key] = number, self._tick()
        else:
            self.known.pop(key, None)
            self.uses[key] = min(self.uses[key], self.highest)
            self.stamp[key] = self._tick()

    def announce(self, number, keys):
        before = {key for _, announced in self.window for key in announced}
        self.window.append((number, keys))
        for key in keys:
            if key in self.held and key not in before:
                self._look(key)

    def forget(self, number):
        while self.window and self.window[0][0] <= number:
            dropped, keys = self.window.pop(0)
            for key in keys:
                if self.known.get(key, (None,))[0] == dropped:
                    self._look(key)

    def plan(self, keys, number):
        missing = [key not in self.held for key in keys]
        if number is not None:
            self.forget(number - 1)
            self.window.pop(0)
        for key in keys:
            self.uses[key] = self.uses.get(key, 0) + (self.policy != "lru")
            self.held[key] = True
            if number is not None:
                self._look(key)
            elif key not in self.known:
                self.stamp[key] = self._tick()
        return missing

    def evict(self, spared):
        over = max(len(self.held) - self.limit, 0)
        free = [key for key in self.held if key not in spared]
        unknown = sorted((key for key in free if key not in self.known), key=lambda x: (self.uses[x], self.stamp[x]))
        known = sorted((key for key in free if key in self.known), key=self.known.get, reverse=True)
        victims = [*unknown, *known][:over]
        for key in victims:
            del self.held[key]
            self.known.pop(key, None)
            if not self.limit:  # nothing is remembered
                del self.uses[key]
        return victims


def distinct(keys):
    return list(dict.fromkeys(keys.tolist()))


def run_window(policy, limit, batches, *, window, prefetches, skipped=(), unannounced=(), num_keys=None, **arguments):
    """Every step: misses and victims, with so many batches known ahead; returns the misses."""
    cache = CacheIndex(limit, policy=policy, num_keys=num_keys)
    simulation = SimulatedWindow(policy, limit, **arguments)
    numbers, announced, misses, ahead = {}, 0, 0, []
    served = [i for i in range(len(batches)) if i not in skipped]

    def plan(i):
        number = numbers.get(i)
        plan = cache.plan(batches[i]) if number is None else cache.plan_announced(number)
        assert plan.keys_U.tolist() == distinct(batches[i])
        assert plan.new_U.tolist() == simulation.plan(distinct(batches[i]), number)
        assert (plan.keys_U[plan.distinct_N] == batches[i]).all()
        assert (cache.keys(plan.slots_N) == batches[i]).all()
        return plan

    for step, i in enumerate(served):
        plans = ahead or [plan(i)]
        misses += plans[0].new_U.sum()
        announced = max(announced, i + 1)
        while announced < min(i + window + 1, len(batches)):
            if announced not in unannounced:
                numbers[announced] = cache.announce(batches[announced])
                simulation.announce(numbers[announced], distinct(batches[announced]))
            announced += 1
        ahead = [plan(served[step + 1])] if prefetches and step + 1 < len(served) else []
        spared = set(ahead[0].keys_U.tolist()) if ahead else ()
        victims = cache.keys(cache.evict(spare_from=ahead[0].number if ahead else plans[0].number + 1))
        assert victims.tolist() == simulation.evict(spared)
        assert set(cache.keys(cache.slots()).tolist()) == set(simulation.held)
    return misses


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("limit", "window"), [(0, 4), (1, 4), (100, 1), (100, 5), (300, 2), (400, 20), (5000, 10)])
def test_window_when_run_against_a_simulation_then_the_same_rows_go_in_the_same_order(
    policy, limit, window, prefetches, monkeypatch
):
    monkeypatch.setattr(index_module, "REMEMBERED", 10_000)
    batches = zipf_batches(50, 150)
    run_window(policy, limit, batches, window=window, prefetches=prefetches)


def test_window_when_keys_have_a_bound_then_the_same_rows_go(monkeypatch):
    monkeypatch.setattr(index_module, "REMEMBERED", 10_000)
    for policy, limit in (("lru", 400), ("lfu", 100)):
        batches = zipf_batches(50, 150, bounded=True)
        run_window(policy, limit, batches, window=5, prefetches=True, num_keys=3000)


@pytest.mark.parametrize("prefetches", [False, True])
def test_window_when_batches_are_skipped_or_come_unannounced_then_the_same_rows_go(prefetches, monkeypatch):
    monkeypatch.setattr(index_module, "REMEMBERED", 10_000)
    generator = np.random.default_rng(5)
    skipped, unannounced = (set(generator.choice(np.arange(1, 60), 12, replace=False).tolist()) for _ in range(2))
    for policy in ("lru", "lfu"):
        gaps = {"skipped": skipped, "unannounced": unannounced}
        run_window(policy, 300, zipf_batches(60, 150), window=6, prefetches=prefetches, **gaps)


def test_window_when_light_then_a_row_that_falls_out_counts_as_one_below_the_bound(monkeypatch):
    monkeypatch.setattr(index_module, "LIGHT_BOUND", 4)
    monkeypatch.setattr(index_module, "REMEMBERED", 10_000)
    batches = zipf_batches(50, 150)
    run_window("light_lfu", 300, [batches[0][:0], *batches], window=6, prefetches=True, highest=3)


def test_window_when_it_sees_everything_then_no_more_is_missed_than_belady_misses():
    batches, limit = zipf_batches(60, 150), 300
    held, misses = set(), 0
    coming = [set(keys.tolist()) for keys in batches]
    for i, keys in enumerate(coming):
        misses += len(keys - held)
        uses = {key: next((j for j in range(i + 1, 60) if key in coming[j]), 99) for key in held | keys}
        held = set(sorted(uses, key=uses.get)[:limit])
    assert run_window("lru", limit, batches, window=60, prefetches=False) == misses
    assert run_window("lru", limit, batches, window=0, prefetches=False) > 1.1 * misses


def test_clear_when_batches_are_announced_then_they_are_still_known():
    cache = CacheIndex(1, policy="lru")
    cache.plan(np.array([1, 2, 3]))
    first, second = cache.announce(np.array([1, 2])), cache.announce(np.array([2, 1, 3, 3]))
    cache.clear()
    plan = cache.plan_announced(first)
    assert plan.new_U.tolist() == [True, True]
    assert len(cache.evict(spare_from=99)) == 1
    assert cache.plan_announced(second).slots_N.size == 4
    cache.forget(second)
    assert len(cache) == 3
