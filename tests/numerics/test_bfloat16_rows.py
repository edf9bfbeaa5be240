"""Rows kept in bfloat16: right on average, of the same bits by every kernel and store, in half the bytes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_recsys.compiled.bfloat16 import as_loop_array, round_stochastically
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, LocalBackend, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.embeddings.kernels.numba_kernel import gather_for
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowSWAP, RowWiseAdagrad
from lightning_recsys.optim.compiled import apply_update
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.exchange import RowExchange
from lightning_recsys.sync import StalenessNormalization

RULES = [RowSGD(0.1), RowAdagrad(0.1), RowWiseAdagrad(0.1, weight_decay=0.2), RowAdam(0.1), RowFTRL(0.1, l1=0.01)]
RULES += [RowSWAP(inner=RowAdagrad(0.1), period=2, discount=0.5), RowAdam(0.1, weight_decay=0.1, decay_all_rows=True)]
ULP = 2**-7  # distance of neighbours from 1 to 2


def layout_of(dim: int, dtype: str = "bfloat16") -> TableLayout:
    first = EmbeddingBagConfig("a", 50, dim, ("a", "a2"), init_std=0.5, dtype=dtype)
    return TableLayout((first, EmbeddingBagConfig("b", 30, dim, ("b",), init_std=0.5, dtype=dtype)))


def batch(kind: str) -> SparseFeatures:
    lengths = torch.randint(0, 4, (3 * 8,)) if kind != "single" else torch.ones(3 * 8, dtype=torch.int64)
    values = torch.randint(0, 30, (int(lengths.sum()),))
    weights = torch.rand(values.numel()) if kind == "weighted" else None
    return SparseFeatures(("a", "a2", "b"), values, lengths=None if kind == "single" else lengths, weights=weights)


def name_of(rule) -> str:
    return type(rule).__name__ + "-decay" * bool(rule.weight_decay)


# --- Rounding --------------------------------------------------------------------------------------------------------


def test_number_when_rounded_then_becomes_a_neighbour_as_often_as_it_is_near_to_it():
    rows_U, dim = torch.arange(4000), 16
    for share in (0.0, 1 / 64, 0.25, 0.5, 0.9):
        for low in (1.0, -3.0, 1e-30):
            exact = torch.full((4000, dim), low).bfloat16().float()
            step = exact.view(torch.int32) + int(share * 2**16)
            found = round_stochastically(step.view(torch.float32), rows_U, update=5)
            up = (exact.view(torch.int32) + 2**16).view(torch.float32)
            is_up = found.float() == up
            assert (is_up | (found.float() == exact)).all()
            error = 5 * math.sqrt(share * (1 - share) / is_up.numel())
            assert is_up.float().mean().item() == pytest.approx(share, abs=error)


def test_number_when_it_is_none_then_stays_what_it_is():
    nans = torch.tensor([[0x7FFFFFFF, 0x7F800001, -1]], dtype=torch.int32).view(torch.float32)
    others = torch.tensor([[math.inf, -math.inf, 0.0]])
    for update in range(50):
        assert round_stochastically(nans, torch.tensor([3]), update).isnan().all()
        assert torch.equal(round_stochastically(others, torch.tensor([3]), update).float(), others)
        rows = torch.zeros(4, 3, dtype=torch.bfloat16)
        grads = np.stack([-nans[0].numpy(), -others[0].numpy()])
        apply_update(RowSGD(1.0), np.array([3, 1]), grads, rows, {}, lr=1.0, step=update)
        assert rows[3].isnan().all()
        assert torch.equal(rows[1].float(), others[0])


@pytest.mark.parametrize("kernel", ["numba", "torch"])
def test_rows_when_every_step_is_a_small_part_of_their_distance_then_they_still_arrive(kernel):
    num_rows, dim, steps = 2000, 8, 320
    layout = TableLayout((EmbeddingBagConfig("a", num_rows, dim, ("a",), dtype="bfloat16"),))
    rows = torch.ones(num_rows, dim, dtype=torch.bfloat16)
    chosen = choose_kernel(kernel, layout, RowSGD(1.0), rows.device)
    every_row = SparseFeatures(("a",), torch.arange(num_rows))
    gradient = torch.full((num_rows, 1, dim), -ULP / 64)
    for step in range(1, steps + 1):
        chosen.apply_gradients(rows, {}, every_row, gradient, lr=1.0, step=step)
    moved = (rows.float() - 1) / ULP  # rounded to the nearest, none would have moved
    assert chosen.lookup(rows, every_row).dtype == torch.float32
    # A number takes `steps` draws of 1/64: mean and variance are those of the binomial distribution.
    variance = steps / 64 * (1 - 1 / 64)
    assert moved.mean().item() == pytest.approx(steps / 64, abs=5 * math.sqrt(variance / moved.numel()))
    assert moved.var().item() == pytest.approx(variance, rel=0.1)


# --- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 16, 36])
@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_kernels_when_they_train_the_same_batches_then_rows_are_equal_and_near_those_of_float32(rule, dim):
    torch.manual_seed(0)
    layout, plain = layout_of(dim), layout_of(dim, "float32")
    backends = {name: LocalBackend(layout, rule, kernel=name) for name in ("numba", "torch")}
    backends["float32"] = LocalBackend(plain, rule, kernel="torch")
    for backend in backends.values():
        backend.rows.data.copy_(backends["numba"].rows.data)
    for name, state in backends["numba"].row_state.items():
        for backend in backends.values():
            backend.row_state[name].copy_(state)
    for kind in ["single", "bags", "weighted"] * 2:
        sparse, rows = batch(kind), backends["numba"].rows.data
        pooled = [backends[name].kernel.lookup(rows, sparse) for name in ("numba", "torch")]
        assert pooled[0].dtype == pooled[1].dtype == torch.float32
        torch.testing.assert_close(*pooled, rtol=1e-6, atol=1e-6)
        grad_BFD = 0.1 * torch.randn(8, 3, dim)
        for backend in backends.values():
            _, ticket = backend.lookup(sparse)
            backend.apply_gradients([ticket], grad_BFD, lr=0.1)
    one, other = backends["numba"].rows.data, backends["torch"].rows.data
    assert one.dtype == other.dtype == torch.bfloat16
    # Where a compiled loop and torch differ in the last bits of float32, a number may become the other neighbour.
    assert (one != other).sum().item() <= 1 + one.numel() // 500
    torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-3)
    # Each of 6 roundings is by less than 2^-7 of numbers of about 1; Adam may turn a step around where they cancel out.
    assert (backends["numba"].rows.float() - backends["float32"].rows.data).abs().mean() < 0.02
    for name, state in backends["torch"].row_state.items():
        torch.testing.assert_close(backends["numba"].row_state[name], state, rtol=1e-3, atol=1e-3)
        assert state.dtype == torch.float32


def test_rows_when_drawn_then_are_those_of_float32_rounded():
    drawn = []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(3)
        drawn.append(LocalBackend(layout_of(16, dtype), RowSGD(0.1), kernel="auto").rows.data)
    assert torch.equal(drawn[0].bfloat16(), drawn[1])


def test_rows_when_cast_then_refused_and_moved_then_not():
    collection = EmbeddingBagCollection(layout_of(4).tables)
    for cast in (torch.Tensor.float, torch.Tensor.double, torch.Tensor.half):
        with pytest.raises(TypeError, match="dtype='bfloat16'"):
            collection._apply(cast)
    assert collection.to("cpu").embedding_bags.rows.dtype == torch.bfloat16


def test_tables_when_of_two_dtypes_then_refused():
    tables = [
        EmbeddingBagConfig(name, 5, 4, (name,), dtype=dtype) for name, dtype in (("a", "float32"), ("b", "bfloat16"))
    ]
    with pytest.raises(ValueError, match=r"must share a dtype, got \['a: float32', 'b: bfloat16'\]"):
        EmbeddingBagCollection(tables)
    with pytest.raises(ValueError, match="table 'a': dtype must be 'float32' or 'bfloat16', got 'float16'"):
        EmbeddingBagConfig("a", 5, 4, ("a",), dtype="float16")
    with pytest.raises(ValueError, match="on a GPU only"):
        EmbeddingBagCollection(tables[1:], kernel="fbgemm")


def test_state_dict_when_loaded_into_tables_of_another_dtype_then_rows_are_rounded_or_exact():
    half, plain = (EmbeddingBagCollection(layout_of(4, dtype).tables) for dtype in ("bfloat16", "float32"))
    plain.load_state_dict(half.state_dict())
    assert torch.equal(plain.embedding_bags.rows.data, half.embedding_bags.rows.data.float())
    plain.embedding_bags.rows.data.normal_()
    half.load_state_dict(plain.state_dict())
    assert torch.equal(half.embedding_bags.rows.data, plain.embedding_bags.rows.data.bfloat16())


# --- Stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES[:-1], ids=name_of)
def test_store_when_trained_as_local_rows_then_rows_are_bit_equal(tmp_path, rule):
    layout = layout_of(12)
    local = LocalBackend(layout, rule, kernel="auto")
    store = MappedStores(tmp_path).create_embedding_store("t", layout, rule, seed=0)
    store.write("weight", 0, local.rows.data)
    for name, tensor in local.row_state.items():
        store.write(name, 0, tensor)
    for kind in ["single", "bags", "weighted"] * 2:
        sparse = batch(kind)
        pooled_BFD, ticket = local.lookup(sparse)
        assert torch.equal(store.pooled_lookup(sparse), pooled_BFD)
        grad_BFD = torch.randn_like(pooled_BFD)
        local.apply_gradients([ticket], grad_BFD, lr=0.1)
        store.apply_gradients(sparse, grad_BFD, lr=0.1)
    assert torch.equal(store.read("weight", 0, 80), local.rows.data)
    assert torch.equal(store.lookup(torch.tensor([79, 3])), local.rows.data[[79, 3]].float())
    again = MappedStores(tmp_path).embedding_store("t")
    assert again.layout == layout
    assert torch.equal(again.read("weight", 0, 80), local.rows.data)


def test_store_when_it_notes_how_far_rows_move_then_it_is_what_they_moved(tmp_path):
    options = {"seed": 0, "normalization": StalenessNormalization("linear", sensitivity=0.5)}
    store = MappedStores(tmp_path).create_embedding_store("t", layout_of(8), RowSGD(0.1), **options)
    before, sparse = store.read("weight", 0, 80).float(), batch("bags")
    pooled_BFD, versions_N = store.begin_versioned_lookup(sparse)()
    store.apply_gradients(sparse, torch.randn_like(pooled_BFD), lr=0.1, versions=versions_N)
    moved = (store.read("weight", 0, 80).float() - before).square().mean(1).sqrt()
    torch.testing.assert_close(store.read("change", 0, 80), moved, rtol=1e-6, atol=0)
    assert moved.any()


def test_file_when_rows_are_bfloat16_then_has_half_the_bytes(tmp_path):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        store = MappedStores(tmp_path).create_embedding_store(dtype, layout_of(16, dtype), RowSGD(0.1), seed=0)
        sizes[dtype] = (store.arrays.folder / "weight").stat().st_size
    assert sizes == {"float32": 80 * 16 * 4, "bfloat16": 80 * 16 * 2}


@pytest.mark.parametrize("clock", ["sum", "max"])
@pytest.mark.parametrize("dynamic", [None, DynamicRows()], ids=["static", "dynamic"])
def test_exchange_when_it_pushes_small_updates_then_rows_arrive_on_average(tmp_path, dynamic, clock):
    num_rows, dim, steps = 800, 8, 320
    layout = TableLayout((EmbeddingBagConfig("a", num_rows, dim, ("a",), init_std=0.0, dtype="bfloat16"),))
    store = MappedStores(tmp_path).create_embedding_store("t", layout, RowSGD(1.0), seed=0, dynamic=dynamic)
    rows_U = torch.arange(num_rows)
    store.write_rows("weight", rows_U, torch.ones(num_rows, dim, dtype=torch.bfloat16))
    for step in range(1, steps + 1):
        request = RowExchange(
            push_rows=rows_U,
            push_clocks=torch.full((num_rows,), 1 if clock == "sum" else step, dtype=torch.int32),
            updates={"weight": torch.full((num_rows, dim), -ULP / 64)},
            fetch_rows=rows_U if step == steps else rows_U[:0],
            num_steps=1,
            clock=clock,
        )
        answer = store.begin_exchange(request)()
    assert answer.values["weight"].dtype == torch.float32
    moved = (answer.values["weight"] - 1) / ULP
    variance = steps / 64 * (1 - 1 / 64)
    assert moved.mean().item() == pytest.approx(steps / 64, abs=5 * math.sqrt(variance / moved.numel()))
    store.close()


def test_dynamic_rows_when_trained_then_are_near_those_of_float32_and_are_forgotten_as_those(tmp_path):
    stores = {
        dtype: MappedStores(tmp_path).create_embedding_store(
            dtype, layout_of(8, dtype), RowFTRL(0.1), seed=4, dynamic=DynamicRows(expire_after=3)
        )
        for dtype in ("float32", "bfloat16")
    }
    every = torch.arange(80)
    first = {dtype: store.lookup(every) for dtype, store in stores.items()}
    assert torch.equal(first["float32"].bfloat16().float(), first["bfloat16"])
    for kind in ["single", "bags", "weighted"] * 2:
        sparse, grad_BFD = batch(kind), 0.1 * torch.randn(8, 3, 8)
        for store in stores.values():
            store.apply_gradients(sparse, grad_BFD, lr=0.1)
    live = {dtype: store.live_rows() for dtype, store in stores.items()}
    assert torch.equal(live["float32"], live["bfloat16"])
    assert 0 < len(live["float32"]) < 80
    found = {dtype: store.read_rows("weight", live[dtype]) for dtype, store in stores.items()}
    assert found["bfloat16"].dtype == torch.bfloat16
    assert (found["bfloat16"].float() - found["float32"]).abs().mean() < 0.02
    for store in stores.values():
        store.close()


def test_loops_when_they_gather_rows_then_widen_them():
    rows, wanted, out = torch.randn(40, 10).bfloat16(), np.array([39, 0, 7]), np.empty((3, 10), dtype=np.float32)
    assert gather_for(10)(wanted, as_loop_array(rows), out)
    assert torch.equal(torch.from_numpy(out), rows[wanted].float())


def test_layout_when_it_came_before_there_were_dtypes_then_is_of_float32(tmp_path):
    plain, half = layout_of(4, "float32"), layout_of(4)
    assert replace(plain.tables[0], dtype="bfloat16") == half.tables[0]
    store = MappedStores(tmp_path).create_embedding_store("t", plain, RowSGD(0.1), seed=0)
    assert "dtype" not in store.arrays.meta["tables"][0]
    with pytest.raises(ValueError, match="dtype"):
        MappedStores(tmp_path).create_embedding_store("t", half, RowSGD(0.1), seed=0)
