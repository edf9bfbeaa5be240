"""Gathering rows from memory, against lists, and the splits that rows go into."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recsys.data.rows import InMemoryRows
from lightning_recsys.data.tables.splitting import split_by_share, split_by_time

NUM_ROWS = 6
BAGS = {"x": [[1, 2], [], [3], [], [4, 5, 6], []], "y": [[]] * NUM_ROWS, "z": [[9]] * NUM_ROWS}


def make(dtype: torch.dtype, bags: dict[str, list[list[int]]]) -> InMemoryRows:
    flat = {
        name: (torch.tensor([0, *np.cumsum([len(bag) for bag in lists])]), torch.tensor(sum(lists, []), dtype=dtype))  # noqa: RUF017
        for name, lists in bags.items()
    }
    ids = torch.arange(2 * NUM_ROWS, dtype=dtype).view(NUM_ROWS, 2)
    return InMemoryRows(torch.arange(NUM_ROWS).float()[:, None], ("a", "b"), ids, flat, torch.arange(NUM_ROWS) % 2.0)


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=10),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    names=st.sets(st.sampled_from(sorted(BAGS))),
)
def test_take_when_any_rows_are_asked_for_then_gives_those(rows, dtype, names):
    bags = {name: BAGS[name] for name in sorted(names)}
    batch = make(dtype, bags).take(torch.tensor(rows, dtype=torch.int64))
    assert batch.dense[:, 0].tolist() == rows
    assert batch.labels.tolist() == [row % 2 for row in rows]
    assert batch.sparse.keys == ("a", "b", *bags)
    assert batch.sparse.values.dtype == torch.int64
    assert batch.sparse.is_single_hot == (not bags)
    expected = [[[2 * row] for row in rows], [[2 * row + 1] for row in rows]]
    expected += [[lists[row] for row in rows] for lists in bags.values()]
    assert batch.sparse.bag_lengths().tolist() == [len(bag) for feature in expected for bag in feature]
    assert batch.sparse.values.tolist() == [id_ for feature in expected for bag in feature for id_ in bag]


@pytest.mark.parametrize("num_rows", [1, 2, 10, 999])
@pytest.mark.parametrize(("validation", "test"), [(0, 0), (0.1, 0), (0, 0.3), (0.25, 0.5)])
def test_split_by_share_when_rows_are_any_number_then_parts_have_their_share_and_every_row_once(
    num_rows, validation, test
):
    parts = split_by_share(num_rows, validation=validation, test=test, seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_rows))
    assert [len(part) for part in parts[1:]] == [round(num_rows * validation), round(num_rows * test)]
    assert all((np.diff(part) > 0).all() for part in parts)


def test_split_by_share_when_the_seed_is_fixed_then_rows_are_the_same_for_ever():
    # Written down once: a checkpoint's test rows must not become another version's training rows.
    assert split_by_share(20, validation=0.1, test=0.2, seed=0)[2].tolist() == [6, 11, 12, 18]


def test_split_by_share_when_rows_are_many_then_parts_are_spread_evenly():
    test = split_by_share(100_000, validation=0, test=0.1, seed=0)[2]
    counts = np.histogram(test, bins=10, range=(0, 100_000))[0]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(900)


@settings(deadline=None)
@given(
    times=st.lists(st.integers(0, 8), min_size=1, max_size=40), shares=st.sampled_from([(0.1, 0.2), (0, 0.5), (0.3, 0)])
)
def test_split_by_time_when_times_repeat_then_later_parts_are_later_and_ties_stay_together(times, shares):
    array = np.array(times, dtype=float)
    parts = split_by_time(array, validation=shares[0], test=shares[1])
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(times)))
    seen = [set(array[part].tolist()) for part in parts]
    for earlier, later in ((0, 1), (1, 2), (0, 2)):
        if seen[earlier] and seen[later]:
            assert max(seen[earlier]) < min(seen[later])
    assert len(parts[2]) >= round(len(times) * shares[1])
