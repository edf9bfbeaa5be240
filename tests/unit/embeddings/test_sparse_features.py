"""SparseFeatures against plain Python lists of bags."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_recsys.embeddings import SparseFeatures

KEYS = ("a", "b")


def as_bags(sparse: SparseFeatures) -> list[list[list[int]]]:
    """Bags as [feature][example][ids], read through lengths only."""
    lengths, values, position, bags = sparse.bag_lengths().tolist(), sparse.values.tolist(), 0, []
    for length in lengths:
        bags.append(values[position : position + length])
        position += length
    size = sparse.batch_size
    return [bags[f * size : (f + 1) * size] for f in range(len(sparse.keys))]


def from_bags(bags: list[list[list[int]]], *, weighted: bool = False) -> SparseFeatures:
    flat = [bag for feature in bags for bag in feature]
    values = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
    weights = values.float() / 10 if weighted else None
    return SparseFeatures(KEYS, values, lengths=torch.tensor([len(bag) for bag in flat]), weights=weights)


def batches(size: int) -> st.SearchStrategy[list[list[list[int]]]]:
    bag = st.lists(st.integers(0, 99), max_size=3)
    return st.lists(st.lists(bag, min_size=size, max_size=size), min_size=2, max_size=2)


def test_single_hot_when_no_lengths_then_one_id_per_bag():
    sparse = SparseFeatures(KEYS, torch.tensor([1, 2, 3, 4, 5, 6]))
    assert sparse.is_single_hot
    assert sparse.batch_size == 3
    assert as_bags(sparse) == [[[1], [2], [3]], [[4], [5], [6]]]
    assert sparse.bag_offsets().tolist() == list(range(7))
    assert sparse.feature_bounds() == [0, 3, 6]


def test_from_ids_when_int32_matrix_then_feature_major_int64():
    sparse = SparseFeatures.from_ids(KEYS, torch.tensor([[1, 4], [2, 5]], dtype=torch.int32))
    assert sparse.values.dtype == torch.int64
    assert as_bags(sparse) == [[[1], [2]], [[4], [5]]]


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_cat_of_bags_then_examples_follow_each_other(data, first, second, weighted):
    left, right = data.draw(batches(first)), data.draw(batches(second))
    joined = SparseFeatures.cat([from_bags(left, weighted=weighted), from_bags(right, weighted=weighted)])
    assert as_bags(joined) == [a + b for a, b in zip(left, right, strict=True)]
    assert joined.batch_size == first + second
    if weighted:
        torch.testing.assert_close(joined.weights, joined.values.float() / 10)


def test_cat_of_single_hot_and_bags_then_bags():
    single = SparseFeatures(KEYS, torch.tensor([1, 2]))
    joined = SparseFeatures.cat([single, from_bags([[[], [7, 8]], [[9], []]], weighted=True)])
    assert as_bags(joined) == [[[1], [], [7, 8]], [[2], [9], []]]
    torch.testing.assert_close(joined.weights, torch.tensor([1.0, 0.7, 0.8, 1.0, 0.9]))


def test_cat_of_single_hot_then_stays_on_the_fast_path():
    single = SparseFeatures(KEYS, torch.tensor([1, 2]))
    assert SparseFeatures.cat([single, single]).is_single_hot


@given(batches(3))
def test_select_when_reordered_then_bags_follow_their_feature(bags):
    sparse = from_bags(bags, weighted=True).select(("b", "a"))
    assert sparse.keys == ("b", "a")
    assert as_bags(sparse) == [bags[1], bags[0]]
    torch.testing.assert_close(sparse.weights, sparse.values.float() / 10)


def test_select_when_nothing_is_wanted_then_weights_keep_their_type():
    """As in a process without fields, where the others have them all."""
    nothing = from_bags([[[1], [2, 3]], [[4], []]], weighted=True).select(())
    assert (nothing.values.dtype, nothing.weights.dtype) == (torch.int64, torch.float32)
    assert (nothing.keys, nothing.values.numel(), nothing.weights.numel()) == ((), 0, 0)


def test_select_when_same_keys_then_same_object_and_missing_key_is_named():
    sparse = SparseFeatures(KEYS, torch.tensor([1, 2]))
    assert sparse.select(KEYS) is sparse
    with pytest.raises(KeyError, match=r"\['c'\] are not in the batch, which has \['a', 'b'\]"):
        sparse.select(("a", "c"))


class FakeKeyedJaggedTensor:
    """The part of TorchRec's class that is used; TorchRec itself cannot be installed beside this torch."""

    def __init__(self, keys, values, weights=None, lengths=None):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def weights_or_none(self):
        return self._weights


def test_kjt_there_and_back_then_equal():
    sparse = from_bags([[[1, 2], []], [[3], [4]]], weighted=True)
    kjt = sparse.to_kjt(FakeKeyedJaggedTensor)
    back = SparseFeatures.from_kjt(kjt)
    assert kjt.keys() == ["a", "b"]
    assert as_bags(back) == as_bags(sparse)
    torch.testing.assert_close(back.weights, sparse.weights)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SparseFeatures(("a", "a"), torch.tensor([1, 2])), ValueError, "must not repeat a feature"),
        (lambda: SparseFeatures(KEYS, torch.tensor([1.0, 2.0])), TypeError, "must be a flat int64 tensor"),
        (lambda: SparseFeatures(KEYS, torch.tensor([1, 2, 3])), ValueError, "3 bags, which is not a multiple of the 2"),
        (lambda: SparseFeatures(KEYS, torch.tensor([1]), lengths=torch.tensor([1])), ValueError, "lengths describes 1"),
        (lambda: SparseFeatures(KEYS, torch.tensor([1, 2]), weights=torch.ones(1)), ValueError, "one weight per id"),
        (lambda: SparseFeatures(KEYS, torch.tensor([1, 2]), weights=torch.tensor([1, 1])), TypeError, "be float32"),
        (lambda: SparseFeatures(KEYS, torch.tensor([1]), lengths=torch.ones(2)), TypeError, "lengths must be"),
        (lambda: SparseFeatures.from_ids(KEYS, torch.ones(2, 3)), ValueError, r"shape \[B, 2\]"),
        (lambda: SparseFeatures.from_ids(KEYS, torch.ones(2, 2)), TypeError, "do not survive a float"),
        (lambda: SparseFeatures.cat([]), ValueError, "parts with the same features"),
    ],
)
def test_wrong_input_then_a_sentence_says_what_is_allowed(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_offsets_when_of_fewer_bits_then_are_taken_as_int64(dtype):
    sparse = SparseFeatures(("a",), torch.tensor([3, 1, 2]), offsets=torch.tensor([0, 2, 3], dtype=dtype))
    assert sparse.bag_offsets().dtype == torch.int64
    assert sparse.bag_lengths().tolist() == [2, 1]
