"""A mapped store trains exactly as local rows do, bit for bit, whatever the rule and the bags."""

from dataclasses import replace

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, LocalBackend, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.stores import MappedStores

RULES = [RowSGD(0.1), RowAdagrad(0.1), RowWiseAdagrad(0.1), RowAdam(0.1), RowFTRL(0.1, l1=0.01)]
RULES += [replace(rule, weight_decay=0.2) for rule in RULES]


def layout_of(dim: int) -> TableLayout:
    return TableLayout(
        (
            EmbeddingBagConfig("a", 50, dim, ("a", "a2"), init_std=0.5),
            EmbeddingBagConfig("b", 30, dim, ("b",), init_std=0.5),
        )
    )


def batch(kind: str) -> SparseFeatures:
    lengths = torch.randint(0, 4, (3 * 8,)) if kind != "single" else torch.ones(3 * 8, dtype=torch.int64)
    values = torch.randint(0, 30, (int(lengths.sum()),))
    weights = torch.rand(values.numel()) if kind == "weighted" else None
    return SparseFeatures(("a", "a2", "b"), values, lengths=None if kind == "single" else lengths, weights=weights)


@pytest.mark.parametrize("dim", [3, 36])  # the compiled loops, and FBGEMM's kernel where it has the rule
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__ + "-decay" * bool(rule.weight_decay))
def test_store_when_trained_as_local_rows_then_rows_and_state_are_bit_equal(tmp_path, rule, dim):
    layout = layout_of(dim)
    local = LocalBackend(layout, rule, kernel="auto")
    store = MappedStores(tmp_path).create_embedding_store("t", layout, rule, seed=0)
    store.write("weight", 0, local.rows.data)
    for name, tensor in local.row_state.items():
        store.write(name, 0, tensor)
    for step, kind in enumerate(["single", "bags", "weighted"] * 3):
        sparse = batch(kind)
        pooled_BFD = store.pooled_lookup(sparse)
        pooled_locally_BFD, ticket = local.lookup(sparse)
        assert torch.equal(pooled_BFD, pooled_locally_BFD)
        grad_BFD = torch.randn_like(pooled_BFD)
        local.apply_gradients([ticket], grad_BFD, lr=0.1 / (step + 1))
        store.apply_gradients(sparse, grad_BFD, lr=0.1 / (step + 1))
    assert store.step == local.step == 9
    assert torch.equal(store.read("weight", 0, 80), local.rows.data)
    assert local.row_state.keys() == store.row_state.keys()
    for name, tensor in local.row_state.items():
        assert torch.equal(store.read(name, 0, 80), tensor), name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__ + "-decay" * bool(rule.weight_decay))
def test_row_gradients_when_applied_then_the_rows_move_as_the_rule_says(tmp_path, rule):
    layout = layout_of(4)
    store = MappedStores(tmp_path).create_embedding_store("t", layout, rule, seed=0)
    rows = store.read("weight", 0, 80)
    state = rule.initial_state(rows)
    for step in range(1, 4):
        touched, grads = torch.randperm(80)[:10], torch.randn(10, 4)
        store.apply_row_gradients(touched, grads, lr=0.05)
        moved, moved_state = rows[touched], {name: tensor[touched] for name, tensor in state.items()}
        rule.update_(moved, grads + rule.weight_decay * moved, moved_state, lr=0.05, step=step)
        rows[touched] = moved
        for name, tensor in moved_state.items():
            state[name][touched] = tensor
    # The compiled loops round in another order than torch: a few units in the last place of float32.
    torch.testing.assert_close(store.read("weight", 0, 80), rows, rtol=1e-5, atol=1e-6)
    for name, tensor in state.items():
        torch.testing.assert_close(store.read(name, 0, 80), tensor, rtol=1e-5, atol=1e-6)
