"""Rows of ids, as they come in requests, become what a model takes, or are refused by row and feature."""

import math

import pytest
import torch

from lightning_recsys.serving.encoders import IdEncoder

FEATURES = {"a": 5, "b": 2**63, "c": 3}


def test_rows_when_ids_and_lists_are_mixed_then_bags_are_feature_by_feature():
    encoder = IdEncoder(FEATURES, 2)
    rows = [
        {"dense": [1, 2.5], "a": 4, "b": -(2**63), "c": [], "other": "x"},
        {"dense": (2**60 + 1, -0.1), "a": [0, 4, 4], "b": 2**63 - 1, "c": (2,)},
    ]
    dense, sparse = encoder.encode(rows)
    assert torch.equal(dense, torch.tensor([[1, 2.5], [2**60 + 1, -0.1]], dtype=torch.float32))
    assert sparse.keys == ("a", "b", "c")
    assert sparse.values.tolist() == [4, 0, 4, 4, -(2**63), 2**63 - 1, 2]
    assert sparse.lengths.tolist() == [1, 3, 1, 1, 0, 1]
    one = encoder.encode([{"dense": [0, 0], "a": [1], "b": (0,), "c": 0}])[1]  # lists of one id are ids
    assert one.is_single_hot
    assert one.values.tolist() == [1, 0, 0]


def test_rows_when_nothing_is_numeric_then_dense_may_be_left_out():
    dense, sparse = IdEncoder({"a": 5}, 0).encode([{"a": 1}, {"a": 2, "dense": []}])
    assert dense.shape == (2, 0)
    assert sparse.values.tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [5, -1, True, None, 1.0, "1", 2**70, [1, 5], [[1]], [None], {}, [1.0], [True]])
def test_id_when_it_cannot_be_one_then_its_feature_and_row_are_named(wrong):
    rows = [{"dense": [0, 0], "a": 1, "b": [2, 3], "c": 0} for _ in range(3)]
    rows[1]["a"] = wrong
    rows[0]["c"] = 3  # of a later feature: it is not the first
    with pytest.raises(ValueError, match=r"^row 1: 'a' takes ids in \[0, 5\), got ") as error:
        IdEncoder(FEATURES, 2).encode(rows)
    assert str(error.value).endswith(f"got {wrong!r}.")
    for given, shown in ((-1, "-1"), (2**63, str(2**63))):  # where all of int64 are ids, -1 marks a place without one
        with pytest.raises(ValueError, match=rf"^row 0: 'b' takes ids in \[0, {2**63}\), got {shown}\.$"):
            IdEncoder(FEATURES, 2).encode([{"dense": [0, 0], "a": 1, "b": given, "c": 0}])


def test_id_when_it_is_missing_then_its_feature_and_row_are_named():
    with pytest.raises(ValueError, match=r"^row 1: 'b' takes ids in .*, got None\.$"):
        IdEncoder(FEATURES, 0).encode([{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 9}])


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "ab",
        {},
        5,
        [1],
        [1, 2, 3],
        *([1, x] for x in (True, None, "2", [2], math.nan, -math.inf, 3.5e38, 10**400)),
    ],
    ids=lambda wrong: repr(wrong)[:20],
)
def test_numbers_when_they_cannot_be_then_their_row_is_named(wrong):
    with pytest.raises(ValueError, match=r"^row 1: 'dense' takes 2 finite numbers, got ") as error:
        IdEncoder({"a": 5}, 2).encode([{"dense": [0, 0], "a": 1}, {"dense": wrong, "a": 1}])
    assert str(error.value).endswith(f"got {wrong!r:.80}.")
