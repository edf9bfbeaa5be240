"""The cache's tables of keys against a dict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recsys.compiled.hash_table import (
    EMPTY,
    copy_into,
    erase,
    find,
    home,
    key_at,
    make_array,
    make_like,
    make_table,
    put,
    value_at,
)


def stored(table):
    cells = [cell for cell in range(len(table)) if value_at(table, cell) != EMPTY]
    return {int(key_at(table, cell)): int(value_at(table, cell)) for cell in cells}


def check_against_a_dict(table, events):
    expected = {}
    for number, (puts, key) in enumerate(events):
        cell = find(table, np.int64(key))
        assert (value_at(table, cell) != EMPTY) == (key in expected)
        if puts:
            put(table, cell, np.int64(key), number)
            expected[key] = number
        elif key in expected:
            erase(table, cell)
            del expected[key]
    assert stored(table) == expected
    assert all(value_at(table, find(table, np.int64(key))) == value for key, value in expected.items())


@given(
    events=st.lists(st.tuples(st.booleans(), st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1)))),
)
@settings(max_examples=200, derandomize=True)
def test_hash_table_when_keys_come_and_go_then_it_holds_what_a_dict_holds(events):
    check_against_a_dict(make_table(max(len(events), 1)), events)


@given(events=st.lists(st.tuples(st.booleans(), st.integers(0, 12))))
@settings(max_examples=100, derandomize=True)
def test_array_when_keys_come_and_go_then_it_holds_what_a_dict_holds(events):
    check_against_a_dict(make_array(13), events)


@pytest.mark.parametrize("table", [make_table(40), make_array(40)], ids=["hash", "array"])
def test_like_when_a_table_has_keys_then_the_other_is_empty_and_as_large(table):
    put(table, find(table, np.int64(7)), np.int64(7), 3)
    other = make_like(table)
    assert (other.shape, other.dtype) == (table.shape, table.dtype)
    assert stored(other) == {}


def test_erase_when_keys_collide_and_wrap_around_then_all_others_are_still_found():
    table = make_table(4)
    last = table.shape[0] - 1
    keys = [key for key in range(200) if home(table, np.int64(key)) == last][:4]
    assert len(keys) == 4
    for value, key in enumerate(keys):
        table[find(table, np.int64(key))] = key, value
    erase(table, find(table, np.int64(keys[0])))
    assert stored(table) == {keys[1]: 1, keys[2]: 2, keys[3]: 3}
    assert [table[find(table, np.int64(key)), 1] for key in keys] == [EMPTY, 1, 2, 3]


def test_copy_when_the_new_table_is_larger_then_everything_is_there():
    table = make_table(8)
    for key in (-(2**63), -1, 0, 2**62, 2**63 - 1):
        table[find(table, np.int64(key))] = key, 7
    bigger = make_table(100)
    copy_into(table, bigger)
    assert stored(bigger) == stored(table)
    assert len(stored(bigger)) == 5
    assert all(bigger[find(bigger, np.int64(key)), 1] == 7 for key in stored(table))


def test_home_when_keys_are_regular_then_they_spread():
    table = make_table(1 << 12)
    for stride in (1, 4096, 1 << 32, 1 << 50):
        homes = {home(table, np.int64(np.int64(i) * stride)) for i in range(1 << 12)}
        assert len(homes) > 0.8 * (1 << 13) * (1 - np.exp(-0.5)), stride  # what random places would give, less a fifth
