"""Costs of lookups: each table's own ids are looked up, as often as asked, with and without rows in this process."""

import pytest
import torch

from lightning_recsys.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    SparseFeatures,
    lookup_cost,
    measure_lookup_cost,
)
from lightning_recsys.embeddings.kernels.torch_kernel import TorchKernel

TABLES = [
    EmbeddingBagConfig("a", 50, 4, ("x", "y"), "mean"),
    EmbeddingBagConfig("b", 3_000_000_000, 4, ("z",)),
]


def batch() -> SparseFeatures:
    return SparseFeatures(("z", "y", "x"), torch.tensor([2_999_999_999, 7, 8, 9]), lengths=torch.tensor([1, 1, 2]))


def test_costs_when_measured_then_each_table_is_looked_up_for_each_batch_and_round(monkeypatch):
    seen, clock = [], iter(range(10_000))

    class Counting(TorchKernel):
        def lookup(self, rows, sparse):
            seen.append((sparse.keys, rows.shape[0], sparse.values.tolist(), sparse.weights.tolist()))
            for _ in range(9 if sparse.keys == ("z",) else 0):  # z costs ten ticks, the others one
                next(clock)
            return super().lookup(rows, sparse)

    monkeypatch.setattr(
        lookup_cost, "choose_kernel", lambda name, layout, optimizer, device: Counting(layout, optimizer)
    )
    monkeypatch.setattr(lookup_cost, "perf_counter", lambda: next(clock))
    collection = EmbeddingBagCollection(TABLES, device="meta")
    costs = measure_lookup_cost(collection, [batch(), batch()], repeats=3)
    assert costs == {"a": 1, "b": 10}
    assert len(seen) == 2 * 2 * 4
    assert seen[0] == (("x", "y"), 50, [8, 9, 7], [0.5, 0.5, 1.0])
    assert seen[-1] == (("z",), 1 << 20, [2_999_999_999 % (1 << 20)], [1.0])


def test_costs_when_rows_are_here_then_the_collection_is_unchanged():
    collection = EmbeddingBagCollection(TABLES[:1])
    before = {name: tensor.clone() for name, tensor in collection.state_dict().items()}
    costs = measure_lookup_cost(collection, [batch()])
    assert costs.keys() == {"a"}
    assert costs["a"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in collection.state_dict().items())


@pytest.mark.parametrize(("batches", "repeats"), [([], 3), ([batch()], 0)])
def test_costs_when_nothing_would_be_timed_then_that_is_refused(batches, repeats):
    with pytest.raises(
        ValueError, match=f"at least one batch and one round are needed, got {len(batches)} and {repeats}"
    ):
        measure_lookup_cost(EmbeddingBagCollection(TABLES[:1]), batches, repeats=repeats)
