"""The index of dynamic rows against a dictionary: slots, admission, expiry, growth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recsys.stores.dynamic.key_index import KeyIndex


class Model:
    """What an index should know, in the plainest way: per key the last update that saw it, and its count or row."""

    def __init__(self, admission, expire_after):
        self.admission, self.expire_after, self.now = admission, expire_after, 0
        self.seen, self.count, self.rows = {}, {}, set()

    def forget(self, key):
        if self.expire_after is not None and self.now - self.seen.get(key, self.now) > self.expire_after:
            self.rows.discard(key)
            self.count.pop(key, None)
            self.seen.pop(key)

    def find(self, keys):
        for key in keys:
            self.forget(key)
            if key in self.rows:
                self.seen[key] = self.now
        return [key in self.rows for key in keys]

    def admit(self, keys, counts):
        for key, count in dict(zip(keys, counts, strict=True)).items():
            if key in self.rows:
                continue
            if self.seen.get(key) != self.now:
                self.count[key] = self.count.get(key, 0) + count
            self.seen[key] = self.now
            if self.count[key] >= self.admission:
                self.rows.add(key)


KEYS = st.lists(st.sampled_from([0, 1, 2, -2, 2**40, 2**63 - 2, 2**63 - 1, -(2**63)]), max_size=6)
STEPS = st.lists(st.tuples(st.booleans(), KEYS, st.integers(0, 3)), max_size=25)


@settings(max_examples=120)
@given(STEPS, st.integers(1, 3), st.sampled_from([None, 1, 2, 5]))
def test_index_when_keys_come_and_go_then_it_knows_what_a_dictionary_knows(steps, admission, expire_after):
    slot_keys = np.zeros(64, dtype=np.int64)
    index = KeyIndex(slot_keys, 0, admission=admission, expire_after=expire_after)
    model = Model(admission, expire_after)
    for is_update, keys, pause in steps:
        array = np.array(keys, dtype=np.int64)
        slots, absent = index.find(array)
        assert [bool(x) for x in slots >= 0] == model.find(keys)
        assert absent == (slots < 0).sum()
        if is_update:
            named = np.unique(array[slots < 0])
            counts = 1 + (named % 3 == 2)  # some stand for two updates
            for _ in range(2):  # asking twice in one update counts once
                index.publish(*index.admit(named, counts.astype(np.int32)))
            model.admit(named.tolist(), counts.tolist())
        slots, _ = index.find(array, touch=False)
        taken = dict(zip(keys, slots.tolist(), strict=True))
        assert {key for key, slot in taken.items() if slot >= 0} == model.rows & set(keys)
        assert all(slot_keys[slot] == ~key for key, slot in taken.items() if slot >= 0)
        assert len({slot for slot in taken.values() if slot >= 0}) == len(model.rows & set(keys))
        for _ in range(pause if is_update else 0):
            index.advance()
            model.now += 1
    assert index.num_rows == (slot_keys != 0).sum() >= len(model.rows) - (expire_after is not None) * 8
    assert index.high <= 8  # slots of what was forgotten are used again


def test_index_when_it_grows_then_every_key_keeps_its_slot_and_no_step_moves_many():
    capacity = 60_000
    slot_keys = np.zeros(capacity, dtype=np.int64)
    index = KeyIndex(slot_keys, 0)
    keys = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=capacity))
    given_slots = {}
    for part in np.array_split(keys, 40):
        made, slots = index.admit(part)
        index.publish(made, slots)
        given_slots |= dict(zip(made.tolist(), slots.tolist(), strict=True))
    slots, absent = index.find(keys)
    assert absent == 0
    assert slots.tolist() == [given_slots[key] for key in keys.tolist()]
    assert sorted(slots.tolist()) == list(range(len(keys)))
    assert index.num_rows == index.high == len(keys)
    segments = index._segments[:, 1]
    assert segments.sum() == len(keys)
    assert np.count_nonzero(segments) * index._entries[0].nbytes < 64 * len(keys)
    again = KeyIndex(slot_keys, index.high)
    assert again.find(keys)[0].tolist() == slots.tolist()
    assert again.find(np.setdiff1d(np.arange(1000), keys))[1] == 1000


def test_index_when_most_keys_expire_then_the_rest_is_found_and_slots_are_used_again():
    slot_keys = np.zeros(20_000, dtype=np.int64)
    index = KeyIndex(slot_keys, 0, expire_after=10)
    keys = np.arange(10_000) * 12_345
    index.publish(*index.admit(keys))
    kept = keys[::7]
    for _ in range(25):
        index.advance()
        assert index.find(kept)[1] == 0
    assert index.num_rows == len(kept) == (slot_keys != 0).sum()
    assert index.find(np.setdiff1d(keys, kept))[1] == 10_000 - len(kept)
    new = np.arange(8_000) + 10**15
    index.publish(*index.admit(new))
    assert index.high == 10_000
    assert index.find(np.concatenate([kept, new]))[1] == 0
    again = KeyIndex(slot_keys, index.high)
    assert again.num_rows == len(kept) + 8_000
    more = np.arange(1_000) + 10**16
    again.publish(*again.admit(more))
    assert again.high == 10_429


@pytest.mark.parametrize("now", [2**31 - 3, 2**32 - 3])
def test_expiry_when_the_count_of_updates_passes_32_bits_then_nobody_is_forgotten_early(now):
    slot_keys = np.zeros(8, dtype=np.int64)
    index = KeyIndex(slot_keys, 0, expire_after=8)
    index.now = now
    index.publish(*index.admit(np.array([1, 2])))
    for _ in range(8):
        index.advance()
        assert index.find(np.array([1]))[1] == 0
        assert index.find(np.array([2]), touch=False)[1] == 0
    index.advance()
    assert index.find(np.array([1, 2]), touch=False)[0].tolist() == [0, -1]
