"""The rows that a schema holds back, against lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_recsys.data.preparation import BySchema
from lightning_recsys.data.raw import TabularFormat


def parts_of(num_rows: int, times: np.ndarray | None = None, **split: float) -> list[np.ndarray]:
    """Numbers of the training, validation and test rows, each in ascending order."""
    schema = {"files": "a.csv", "label": "click", "categorical": ["user"], "time": "when"}
    rule = BySchema(TabularFormat(schema=schema | {"split": {"by": "share" if times is None else "time", **split}}))
    everything = {"file": 0, "line_N": np.arange(num_rows), "time_N": times, "first_row": 0}
    if rule.surveys:
        rule.bounds = tuple(rule.find_bounds(num_rows, lambda: [times]))
    assigned = rule.assign(**everything)
    return [np.flatnonzero(assigned == i) for i in range(3)]


@pytest.mark.parametrize("num_rows", [10, 11, 999])
@pytest.mark.parametrize(("validation", "test"), [(0, 0), (0.1, 0), (0, 0.3), (0.25, 0.5)])
def test_split_by_share_when_rows_are_any_number_then_parts_have_their_share_and_every_row_once(
    num_rows, validation, test
):
    parts = parts_of(num_rows, validation=validation, test=test, seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_rows))
    assert [len(part) for part in parts[1:]] == [round(num_rows * validation), round(num_rows * test)]


def test_split_by_share_when_the_seed_is_fixed_then_rows_are_the_same_for_ever():
    # Written down once: a checkpoint's test rows must not become another version's training rows.
    assert parts_of(20, validation=0.1, test=0.2, seed=0)[2].tolist() == [6, 11, 12, 18]


def test_split_by_share_when_rows_are_many_then_parts_are_spread_evenly():
    test = parts_of(100_000, validation=0, test=0.1, seed=0)[2]
    counts = np.histogram(test, bins=10, range=(0, 100_000))[0]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(900)


@given(
    times=st.lists(st.integers(0, 8), min_size=1, max_size=40), shares=st.sampled_from([(0.1, 0.2), (0, 0.5), (0.3, 0)])
)
def test_split_by_time_when_times_repeat_then_later_parts_are_later_and_ties_stay_together(times, shares):
    array = np.array(times, dtype=float)
    held = [round(len(times) * share) for share in shares]
    first = [np.sort(array)[len(times) - count] if count else np.inf for count in (sum(held), held[1])]
    assume(first[0] > array.min() and all(count or not share for count, share in zip(held, shares, strict=True)))
    assume(first[0] < first[1] or not shares[0])  # else ties leave a split without rows, which is an error
    parts = parts_of(len(times), array, validation=shares[0], test=shares[1])
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(times)))
    seen = [set(array[part].tolist()) for part in parts]
    for earlier, later in ((0, 1), (1, 2), (0, 2)):
        if seen[earlier] and seen[later]:
            assert max(seen[earlier]) < min(seen[later])
    assert len(parts[2]) >= round(len(times) * shares[1])
