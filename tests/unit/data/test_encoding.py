"""What was learned of a table, saved and loaded; and hashed ids, which must never change."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from lightning_recsys.data.preparation import SchemaRules
from lightning_recsys.data.preparation.encoding import Encoding
from lightning_recsys.data.raw import TabularFormat
from lightning_recsys.data.tables.schema import Schema

SCHEMA = {"files": "a.csv", "label": "click", "categorical": ["user"], "dense": ["age"]}


def encoding(words: pa.Array, mean: float = 0.5) -> Encoding:
    return Encoding(Schema.from_dict(SCHEMA), vocabularies={"user": words}, statistics={"age": (mean, 2.0)})


@pytest.mark.parametrize("words", [["b", "a", "ü", "x" * 1000], []])
def test_encoding_when_saved_and_loaded_then_is_the_same(words, tmp_path):
    for values in (pa.array(words, pa.string()), pa.array(["x", *words], pa.string())[1:]):
        before = encoding(values)
        torch.save(before.state_dict(), tmp_path / "state.pt")
        loaded = Encoding.from_state_dict(
            Schema.from_dict(SCHEMA), torch.load(tmp_path / "state.pt", weights_only=True)
        )
        assert loaded == before
        assert loaded.digest == before.digest
        assert loaded.fields == {"user": len(words) + 2}


def test_digest_when_anything_learned_differs_then_is_another():
    same = [encoding(pa.array(["a", "b"])), encoding(pa.array(["0", "a", "b"])[1:])]
    others = [encoding(pa.array(["b", "a"])), encoding(pa.array(["ab"])), encoding(pa.array(["a", "b"]), 0.25)]
    assert same[0].digest == same[1].digest
    assert len({x.digest for x in (same[0], *others)}) == 4
    assert same[0] not in others


def hashed(values: list[str], buckets: int) -> list[int]:
    raw_format = TabularFormat(schema=SCHEMA | {"categorical": {"user": {"hash_buckets": buckets}}})
    coded = pa.array([value.encode() for value in values], pa.binary()).dictionary_encode()
    return SchemaRules().look_up("user", coded, None, raw_format).tolist()


def test_hashed_ids_when_values_are_hashed_then_are_stable_and_in_range():
    # Written down once: they must not change, or trained embeddings would be another value's.
    assert hashed(["a", "b", "", "Zürich", "a", "68fd1e64"], 10) == [5, 1, 1, 3, 5, 10]
    many = hashed([str(i) for i in range(10_000)], 10)
    assert sorted(set(many)) == list(range(1, 11))
    assert min(many.count(i) for i in range(1, 11)) > 850  # 1000 expected, deviation 30
