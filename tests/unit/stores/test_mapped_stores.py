"""Stores in mapped files: what they hold, what survives, what is refused and how."""

import copy
import errno
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.errors import StoreReplacedError
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowSWAP, RowWiseAdagrad
from lightning_recsys.optim.row_optimizers import RowOptimizer
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.folders import mapped_arrays
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays
from lightning_recsys.stores.plain import layout_from_plain, layout_to_plain, optimizer_from_plain, optimizer_to_plain

LAYOUT = TableLayout(
    (EmbeddingBagConfig("a", 6, 4, ("a",), init_std=0.5), EmbeddingBagConfig("b", 4, 4, ("b",), init_std=0.0))
)
RULES = [
    RowSGD(0.1),
    RowAdagrad(0.1, initial_accumulator=0.5),
    RowWiseAdagrad(0.1),
    RowAdam(0.1),
    RowFTRL(0.1, l1=0.01),
    RowSWAP(inner=RowAdam(0.1), period=3, discount=0.5),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_new_store_when_created_then_rows_are_drawn_and_state_starts_as_the_rule_says(stores, rule):
    store = stores.create_embedding_store("t", LAYOUT, rule, seed=3)
    assert 0.2 < store.rows[:6].std() < 1
    assert not store.rows[6:].any()
    for name, state in rule.initial_state(store.rows).items():
        assert torch.equal(store.row_state[name], state)
    again = stores.create_embedding_store("again", LAYOUT, rule, seed=3)
    other = stores.create_embedding_store("other", LAYOUT, rule, seed=4)
    assert torch.equal(store.rows, again.rows)
    assert not torch.equal(store.rows, other.rows)


def test_new_rows_when_drawn_in_several_blocks_then_no_row_is_left_out(stores, monkeypatch):
    monkeypatch.setattr("lightning_recsys.stores.embedding_store._BLOCK_BYTES", 4 * 4 * 2)
    store = stores.create_embedding_store("t", LAYOUT, RowFTRL(0.1), seed=0)
    assert store.rows[:6].all()
    assert torch.equal(store.row_state["linear"], RowFTRL(0.1).initial_state(store.rows)["linear"])
    assert len({tuple(row) for row in store.rows[:6].tolist()}) == 6


def test_store_when_opened_twice_then_both_see_every_write_and_one_count(stores, tmp_path):
    first = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0)
    second = MappedStores(tmp_path).embedding_store("t")
    assert (second.layout, second.optimizer) == (first.layout, first.optimizer)
    before = first.read("weight", 0, 10)
    second.apply_gradients(SparseFeatures(("a", "b"), torch.tensor([1, 2])), torch.ones(1, 2, 4), lr=0.5)
    first.apply_row_gradients(torch.tensor([1, 9]), torch.ones(2, 4), lr=1.0)
    expected = before.clone()
    expected[[1, 8]] -= 0.5
    expected[[1, 9]] -= 1.0
    assert torch.allclose(second.read("weight", 0, 10), expected)
    assert first.step == second.step == 2
    first.step = 7
    assert second.step == 7


def test_store_when_asked_for_a_second_time_then_it_is_the_same_one(stores):
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    store.write("weight", 0, torch.ones(10, 4))
    assert stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=1).rows.eq(1).all()
    with pytest.raises(ValueError, match=r"'t' is in .* with other tables or another rule.*RowSGD.*RowAdam.*remove it"):
        stores.create_embedding_store("t", LAYOUT, RowAdam(), seed=0)
    smaller = TableLayout(LAYOUT.tables[:1])
    with pytest.raises(ValueError, match="other tables"):
        stores.create_embedding_store("t", smaller, RowSGD(), seed=0)
    stores.create_dense_store("v", torch.zeros(3)).assign(torch.ones(3))
    assert stores.create_dense_store("v", torch.zeros(3)).pull().tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"3 elements in 1 parts, the rule None and .* asked were 4 in 1"):
        stores.create_dense_store("v", torch.zeros(4))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_store_when_copied_then_the_copy_is_the_same_store(stores, duplicate):
    embedding = stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    dense = stores.create_dense_store("v", torch.zeros(3))
    duplicate(embedding).write("weight", 9, torch.full((1, 4), 5.0))
    duplicate(dense).assign(torch.ones(3))
    assert embedding.lookup(torch.tensor([9])).eq(5).all()
    assert dense.pull().sum() == 3


def test_elastic_average_when_applied_then_the_center_moves_and_is_returned(stores):
    store = stores.create_dense_store("v", torch.tensor([0.0, 4.0]))
    assert store.elastic_average(torch.tensor([2.0, 0.0]), alpha=0.25).tolist() == [0.5, 3.0]
    assert store.elastic_average(torch.tensor([7.0, 7.0]), alpha=1.0).tolist() == [7.0, 7.0]
    assert store.pull().tolist() == [7.0, 7.0]
    assert store.version == 2


@pytest.mark.parametrize(
    "rule", [RowSGD(0.1), RowAdagrad(0.1), RowAdam(0.1), RowFTRL(0.1, l1=0.01)], ids=lambda x: type(x).__name__
)
def test_dense_gradients_when_pushed_then_the_rule_moves_the_vector(stores, rule):
    initial, gradients = torch.randn(5), torch.randn(3, 5)
    store = stores.create_dense_store("v", initial, optimizer=rule)
    row = initial.clone().unsqueeze(0)
    state = rule.initial_state(row)
    for step, gradient in enumerate(gradients, start=1):
        store.push_gradient(gradient, lr=0.05 * step)
        assert store.version == step
        rule.update_(row, gradient.unsqueeze(0), state, lr=0.05 * step, step=step)
    assert torch.equal(store.pull(), row[0])


def test_tables_when_created_then_all_of_their_rows_have_their_room(stores, tmp_path):
    tables = TableLayout((EmbeddingBagConfig("zeros", 300_000, 16, ("x",), init_std=0.0),))
    stores.create_embedding_store("t", tables, RowAdam(), seed=0)
    stores.create_dense_store("v", torch.zeros(1_000_000))
    for path in [*tmp_path.glob("t/*"), *tmp_path.glob("v/*")]:
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_names_when_open_or_not_there_then_errors_say_what_is_there(stores, tmp_path):
    stores.create_embedding_store("model.tables", LAYOUT, RowSGD(), seed=0)
    stores.create_dense_store("center", torch.zeros(1))
    status = stores.status()
    free, place, used = (status.pop(name) for name in ("free_bytes", "place", "used_bytes"))
    assert status == {"stores": 2, "rows": 10, "live_rows": 10, "bytes": 10 * (16 + 4) + 8 + 4 + 16}
    assert 0 < free <= shutil.disk_usage(tmp_path).free + 2**30, "others write as well"
    assert used >= status["bytes"]
    assert MappedStores(tmp_path.parent).status()["place"] == place
    with pytest.raises(KeyError, match=r"no embedding store 'center' in .*\['model.tables'\]"):
        stores.embedding_store("center")
    with pytest.raises(KeyError, match=r"no dense store 'x' in .*\['center'\]"):
        stores.dense_store("x")
    for name in ("", ".hidden", "a/b", "..", "x" * 129, "a\n"):
        with pytest.raises(ValueError, match="a store's name must be"):
            stores.create_dense_store(name, torch.zeros(1))
    stores.remove("center")
    assert [path.name for path in tmp_path.iterdir()] == ["model.tables"]
    with pytest.raises(KeyError, match=r"no store 'center' in .*\['model.tables'\]"):
        stores.remove("center")


def test_folder_when_not_there_then_the_error_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder of stores .*gone.*is its server up"):
        MappedStores(tmp_path / "gone")


def test_file_when_truncated_then_opening_is_refused(stores, tmp_path):
    stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    os.truncate(tmp_path / "t" / "weight", 100)
    with pytest.raises(RuntimeError, match=r"t/weight has 100 bytes and should have 160.*damaged.*checkpoint"):
        stores.embedding_store("t")
    assert (tmp_path / "t" / "weight").stat().st_size == 100


def test_room_when_too_small_then_nothing_is_made_and_the_error_says_what_to_do(stores, tmp_path, monkeypatch):
    huge = TableLayout((EmbeddingBagConfig("huge", 10**13, 4, ("huge",), init_std=0.0),))
    with pytest.raises(
        OSError, match=r"t needs 200,000,000,000,008 bytes in .*are there: .*are missing.*store_folder="
    ):
        stores.create_embedding_store("t", huge, RowSGD(), seed=0)
    assert list(tmp_path.iterdir()) == []

    def taken(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", taken)  # somebody else was faster, or the user has a quota
    with pytest.raises(
        OSError, match=r"t needs .* bytes in .*are there: they were refused \(No space left on device\)"
    ):
        stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    assert list(tmp_path.iterdir()) == []


def test_creation_when_it_fails_then_no_half_made_store_is_left(stores, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("lightning_recsys.stores.embedding_store._draw_rows", fail)
    with pytest.raises(MemoryError):
        stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("cleaner", ["next store", "next server"])
def test_process_when_killed_while_it_makes_or_removes_a_store_then_the_next_one_cleans_up(
    stores, tmp_path, cleaner, is_removed
):
    if is_removed:
        stores.create_dense_store("v", torch.ones(2))
    pid = os.fork()
    if pid == 0:

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        if is_removed:
            mapped_arrays.shutil.rmtree = die
            MappedStores(tmp_path).remove("v")
        mapped_arrays.MappedArrays.create(tmp_path / "v", {}, {"values": ("float32", (4,))}, die)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".removing-v-" if is_removed else ".making-v-")
    if cleaner == "next store":
        stores.create_dense_store("other", torch.ones(2))
    else:
        RequestHandler(tmp_path).close()
    assert not left.exists()


def test_store_when_another_is_being_made_or_removed_then_that_is_left_alone(stores, tmp_path):
    seen = []

    def fill(arrays):
        stores.create_dense_store("meanwhile", torch.ones(2))
        seen.extend(path.name for path in tmp_path.iterdir() if path.name.startswith(".making-slow-"))

    mapped_arrays.MappedArrays.create(tmp_path / "slow", {}, {"values": ("float32", (4,))}, fill)
    assert len(seen) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meanwhile", "slow"]


def test_creation_when_another_process_is_faster_then_its_store_is_taken(stores, tmp_path, monkeypatch):
    def slow_check(*args, **kwargs):
        monkeypatch.undo()
        MappedStores(tmp_path).create_dense_store("v", torch.ones(2))

    monkeypatch.setattr(mapped_arrays, "check_room", slow_check)
    assert stores.create_dense_store("v", torch.zeros(2)).pull().tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_closed_store_when_used_then_the_error_says_so(stores):
    embedding = stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    dense = stores.create_dense_store("v", torch.zeros(1))
    stores.close()
    with pytest.raises(RuntimeError, match="was closed by this process"):
        embedding.pooled_lookup(SparseFeatures(("a", "b"), torch.tensor([0, 0])))
    with pytest.raises(RuntimeError, match="was closed by this process"):
        dense.pull()


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda s: s.read("sum", 0, 1), ValueError, r"has \['weight'\], got 'sum'"),
        (lambda s: s.read("weight", 8, 3), IndexError, r"rows 8 to 11 are not within the store's 10"),
        (lambda s: s.read("weight", -1, 1), IndexError, "are not within"),
        (
            lambda s: s.write("weight", 0, torch.ones(2, 3)),
            ValueError,
            r"shape \[2, 4\], got torch.float32 of shape \[2, 3\]",
        ),
        (lambda s: s.lookup(torch.tensor([3, 10, -1])), IndexError, r"rows must be in \[0, 10\), got -1 to 10"),
        (
            lambda s: s.apply_row_gradients(torch.tensor([10]), torch.ones(1, 4), lr=1.0),
            IndexError,
            r"rows must be in \[0, 10\), got 10 to 10",
        ),
        (
            lambda s: s.apply_row_gradients(torch.tensor([1]), torch.ones(1, 3), lr=1.0),
            ValueError,
            r"shape \[1, 4\], got \[1, 3\]",
        ),
    ],
)
def test_embedding_store_when_asked_beyond_its_rows_then_nothing_changes(stores, act, error, match):
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(), seed=0)
    before = store.read("weight", 0, 10)
    with pytest.raises(error, match=match):
        act(store)
    assert torch.equal(store.rows, before)
    assert store.step == 0


def test_dense_store_when_given_what_it_cannot_hold_then_it_says_so(stores):
    with pytest.raises(TypeError, match=r"flat float32 tensor of at least one element, got torch.float64"):
        stores.create_dense_store("v", torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"at least one element"):
        stores.create_dense_store("v", torch.zeros(0))
    for rule in (RowWiseAdagrad(), RowSWAP(inner=RowWiseAdagrad(), period=2, discount=0.5)):
        with pytest.raises(TypeError, match=r"RowWiseAdagrad .* use RowAdagrad"):
            stores.create_dense_store("v", torch.zeros(2), optimizer=rule)
    store = stores.create_dense_store("v", torch.zeros(2))
    with pytest.raises(ValueError, match=r"holds 2 elements, got a tensor of shape \[3\]"):
        store.elastic_average(torch.zeros(3), alpha=0.5)
    with pytest.raises(RuntimeError, match=r"'v' has no update rule: create it with optimizer="):
        store.push_gradient(torch.zeros(2), lr=1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_plain_data_when_read_back_then_it_is_the_same(rule):
    assert optimizer_from_plain(json.loads(json.dumps(optimizer_to_plain(rule)))) == rule
    assert layout_from_plain(json.loads(json.dumps(layout_to_plain(LAYOUT)))) == LAYOUT


class OwnRule(RowSGD):
    pass


def test_rule_when_unknown_to_a_store_then_it_is_refused(stores):
    with pytest.raises(TypeError, match=r"a store knows the rules \['RowAdagrad'.*got OwnRule: .*Use one of these, or"):
        stores.create_embedding_store("t", LAYOUT, OwnRule(), seed=0)
    with pytest.raises(TypeError, match="got OwnRule"):
        stores.create_embedding_store("t", LAYOUT, OwnRule(), seed=0, dynamic=DynamicRows(first_keys=(0, 0)))
    with pytest.raises(TypeError, match="got OwnRule"):
        stores.create_dense_store("v", torch.zeros(2), optimizer=OwnRule())
    assert issubclass(OwnRule, RowOptimizer)


@pytest.mark.parametrize("dynamic", [None, DynamicRows(first_keys=(0, 0))])
def test_rule_when_it_decays_all_rows_then_a_store_refuses_it(stores, dynamic):
    rule = RowSGD(weight_decay=0.1, decay_all_rows=True)
    with pytest.raises(
        TypeError, match=r"RowSGD\(decay_all_rows=True\) updates every row .*: leave decay_all_rows out"
    ):
        stores.create_embedding_store("t", LAYOUT, rule, seed=0, dynamic=dynamic)


def test_rule_without_weight_decay_then_its_plain_form_is_that_of_older_folders():
    assert optimizer_to_plain(RowSGD(0.5)) == {"rule": "RowSGD", "lr": 0.5}
    assert optimizer_from_plain({"rule": "RowSGD", "lr": 0.5, "weight_decay": 0.1}) == RowSGD(0.5, weight_decay=0.1)


TABLE = layout_to_plain(LAYOUT)[0]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [None],
        [TABLE | {"name": 3}],
        [TABLE | {"num_embeddings": True}],
        [TABLE | {"num_embeddings": 0}],
        [TABLE | {"pooling": "max"}],
        [TABLE | {"feature_names": [1]}],
        [TABLE | {"init_std": float("nan")}],
        [TABLE | {"extra": 1}],
        [TABLE, TABLE],
        [TABLE, TABLE | {"name": "c", "feature_names": ["c"], "embedding_dim": 8}],
    ],
)
def test_plain_layout_when_wrong_then_it_is_refused(value):
    with pytest.raises(ValueError, match=r"."):
        layout_from_plain(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"rule": "Nesterov"},
        {"rule": ["RowSGD"]},
        {"rule": "RowSGD"},
        {"rule": "RowSGD", "lr": "1"},
        {"rule": "RowSGD", "lr": float("nan")},
        {"rule": "RowSGD", "lr": 1.0, "eps": 1.0},
        {"rule": "RowSGD", "lr": 1.0, "weight_decay": True},
        {"rule": "RowSGD", "lr": 1.0, "weight_decay": 0.1, "decay_all_rows": True},
    ],
)
def test_plain_rule_when_wrong_then_it_is_refused(value):
    with pytest.raises(ValueError, match=r"."):
        optimizer_from_plain(value)


# --- Generations ----------------------------------------------------------------------------------------------------


def test_store_when_removed_then_whoever_has_it_open_is_told(tmp_path):
    stores, others = MappedStores(tmp_path), MappedStores(tmp_path)
    stores.create_dense_store("center", torch.zeros(2))
    center = others.dense_store("center")
    stores.remove("center")
    with pytest.raises(StoreReplacedError, match=r"center was removed or made anew"):
        center.pull()
    stores.create_dense_store("center", torch.ones(2))
    with pytest.raises(StoreReplacedError):
        center.assign(torch.zeros(2))
    assert others.dense_store("center").pull().tolist() == [1.0, 1.0]


def test_store_when_its_removal_was_cut_short_then_opens_for_nobody_and_can_be_removed(tmp_path, monkeypatch):
    stores = MappedStores(tmp_path)
    stores.create_dense_store("center", torch.zeros(2))
    with monkeypatch.context() as patch:
        patch.setattr(mapped_arrays.tempfile, "mkdtemp", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stores.remove("center")
    with pytest.raises(FileNotFoundError, match="was being removed when that was cut short: remove it again"):
        stores.dense_store("center")
    stores.remove("center")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mappings")
def test_store_when_closed_then_nothing_of_it_stays_mapped_and_it_counts_as_gone(tmp_path):
    arrays = MappedArrays.create(tmp_path / "v", {}, {"values": ("float32", (4,))}, lambda arrays: None)
    assert not arrays.is_removed
    arrays.close()
    assert arrays.is_removed
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_folder_when_it_has_no_generation_or_a_cleaner_is_faster_then_it_can_be_removed(tmp_path, monkeypatch):
    stores = MappedStores(tmp_path)
    stores.create_dense_store("center", torch.zeros(2))
    (tmp_path / "center" / mapped_arrays.GENERATION).unlink()
    rmtree = shutil.rmtree

    def both_at_once(folder, **options):
        rmtree(folder)
        rmtree(folder, **options)

    monkeypatch.setattr(mapped_arrays.shutil, "rmtree", both_at_once)
    stores.remove("center")
    assert list(tmp_path.iterdir()) == []
