"""One index for several caches: who gets which plan, and how many rows stay."""

import numpy as np
import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache import SharedIndex
from lightning_recsys.row_cache.messages import RowPlaces

LAYOUT = TableLayout((EmbeddingBagConfig("t", 1000, 1, ("f",)),))
PLACES = RowPlaces(LAYOUT, [[TablePart("net", "t", 1000, server=0)]])


class Cache:
    """What a shared index asks of a cache."""

    needs_from = 2**62

    def __init__(self):
        self.cache, self.left = self, []

    def make_room(self, num_slots):
        self.num_slots = num_slots

    def leave(self, slots):
        self.left += slots.tolist()


def shared(limit=100, num_caches=2):
    index, caches = SharedIndex(limit, policy="lru"), [Cache() for _ in range(num_caches)]
    for cache in caches:
        index.join(cache)
    return index, *caches


def features(*ids):
    return SparseFeatures(("f",), torch.tensor(ids))


def keys_of(*ids):
    return PLACES.keys_of(features(*ids))


def test_plan_when_two_caches_look_up_the_same_batch_then_they_share_it():
    index, first, second = shared()
    batch = keys_of(4, 9, 4)
    plan = index.plan(first, batch)
    assert index.plan(second, batch) is plan
    again = index.plan(first, batch)
    assert again.number == plan.number + 1, "each cache gets a plan once"
    assert again.new_U.tolist() == [False, False]


def test_plan_when_another_object_has_the_same_ids_then_the_plan_is_shared():
    index, first, second = shared()
    plan = index.plan(first, keys_of(4, 9, 4))
    assert index.plan(second, keys_of(4, 9, 4)) is plan


@pytest.mark.parametrize("inference", [False, True])
def test_plan_when_ids_were_changed_in_place_meanwhile_then_the_other_cache_gets_a_plan_of_its_own(inference):
    index, first, second = shared()
    with torch.inference_mode(inference):
        batch = features(4, 9)
        index.plan(first, PLACES.keys_of(batch))
        batch.values.add_(1)
        plan = index.plan(second, PLACES.keys_of(batch))
    assert plan.keys_U.tolist() == [5, 10]


def test_evict_when_there_are_too_many_then_one_of_64_goes_with_them_and_never_do_more_stay():
    index, first, second = shared(limit=128)
    held = []
    for start in range(0, 400, 8):
        index.plan(first, keys_of(*range(start, start + 8)))
        index.evict()
        held.append(len(index.index))
    assert held[:16] == list(range(8, 129, 8))
    assert set(held[16:]) == {126}, "8 new rows are over the limit each time"
    assert first.left == second.left
    assert len(first.left) == 400 - 126
    small, cache = shared(limit=3, num_caches=1)
    for start in range(0, 40, 2):
        small.plan(cache, keys_of(start, start + 1))
        small.evict()
    assert len(small.index) == 3, "a small cache keeps all that it may"


def test_join_when_slots_are_there_then_the_cache_has_room_for_them():
    index, first, _ = shared()
    index.plan(first, keys_of(*range(50)))
    late = Cache()
    index.join(late)
    assert late.num_slots == first.num_slots >= 50
    assert np.array_equal(index.plan(late, keys_of(*range(50))).slots_U, np.arange(50))
