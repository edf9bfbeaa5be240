"""Ids of strings, against collections.Counter and known hashes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch

from lightning_recsys.data.tables.columns import Categories
from lightning_recsys.data.tables.vocabulary import HashBuckets, Vocabulary


def column(words: list[str]) -> Categories:
    return Categories.from_strings(pa.chunked_array([pa.array(words, pa.string())]), strip=True, missing=[""])


@pytest.mark.parametrize("min_count", [1, 2, 5, 1000])
def test_vocabulary_when_learned_then_is_what_a_counter_says(min_count):
    words = [f"w{x}" for x in np.random.default_rng(0).zipf(1.5, 5000) % 300] + [""] * 40
    counts = Counter(word for word in words if word)
    kept = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
    vocabulary = Vocabulary.learn(column(words), min_count=min_count)
    expected = {word: i + 2 for i, word in enumerate(kept)}
    asked = [*counts, "never seen"]
    assert vocabulary.ids(pa.array(asked)).tolist() == [expected.get(word, 0) for word in asked]
    assert vocabulary.num_embeddings == len(kept) + 2
    assert vocabulary.missing_id == 1


@pytest.mark.parametrize("words", [["b", "a", "b", "ü", "x" * 1000], [""], []])
def test_vocabulary_when_saved_and_loaded_then_is_the_same(words, tmp_path):
    vocabulary = Vocabulary.learn(column(words), min_count=1)
    torch.save(vocabulary.state_dict(), tmp_path / "state.pt")
    loaded = Vocabulary.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert loaded.strings.equals(vocabulary.strings)
    if len(vocabulary.strings) > 1:  # a part of a larger array, as sorting and taking make it
        part = Vocabulary(vocabulary.strings[1:])
        assert Vocabulary.from_state_dict(part.state_dict()).strings.equals(part.strings)


def test_hash_buckets_when_values_are_hashed_then_ids_are_stable_and_in_range():
    mapping = HashBuckets(10)
    ids = mapping.ids(pa.array(["a", "b", "", "Zürich", "a", "68fd1e64"]))
    # Written down once: they must not change, or trained embeddings would be another value's.
    assert ids.tolist() == [5, 1, 1, 3, 5, 10]
    assert mapping.num_embeddings == 11
    assert mapping.missing_id == 0
    many = mapping.ids(pa.array([str(i) for i in range(10_000)]))
    assert sorted(set(many.tolist())) == list(range(1, 11))
    assert np.bincount(many)[1:].min() > 850  # 1000 expected, deviation 30


def test_hash_buckets_when_the_array_is_a_slice_or_empty_then_ids_are_those_of_its_values():
    mapping = HashBuckets(1 << 40)
    words = pa.array(["a", "bc", "def", "g"])
    assert mapping.ids(words[1:3]).tolist() == mapping.ids(words).tolist()[1:3]
    assert mapping.ids(pa.array([], pa.string())).tolist() == []
