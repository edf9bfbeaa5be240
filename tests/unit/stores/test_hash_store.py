"""Dynamic rows: made alike in any order, trained like mapped ones, stored only where they were trained."""

import copy
import itertools
import pickle
import resource
import shutil
import statistics

import numpy as np
import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.stores import DynamicRows, MappedStores, StoreBackend
from lightning_recsys.stores.exchange import RowExchange
from lightning_recsys.stores.plain import from_plain

LAYOUT = TableLayout(
    (
        EmbeddingBagConfig("a", 40, 8, ("x", "y"), init_std=0.5),
        EmbeddingBagConfig("b", 30, 8, ("z",), init_std=0.1),
    )
)
HUGE = TableLayout((EmbeddingBagConfig("huge", 2**48, 16, ("h",), init_std=1.0),))
RULES = [
    RowSGD(0.1),
    RowAdagrad(0.1, initial_accumulator=0.5),
    RowWiseAdagrad(0.1),
    RowAdam(0.1),
    RowFTRL(0.1, l1=0.01),
]


def dynamic_store(stores, layout=LAYOUT, rule=RULES[0], *, name="dynamic", seed=0, **options):
    return stores.create_embedding_store(name, layout, rule, seed=seed, dynamic=DynamicRows(**options))


def file_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_rows_when_asked_for_then_they_are_normal_and_depend_on_seed_and_key_only(stores):
    store, other = dynamic_store(stores, HUGE), dynamic_store(stores, HUGE, name="other", seed=1)
    ids = torch.randint(2**48, (4000,))
    rows = store.lookup(ids)
    assert torch.equal(rows.flip(0), store.lookup(ids.flip(0)))
    assert not torch.equal(rows, other.lookup(ids))
    assert store.num_live == 0
    normal = statistics.NormalDist()
    values = rows.flatten().sort().values
    for p in (0.0005, 0.02, 0.1, 0.5, 0.8, 0.99, 0.9999):
        expected = (values > normal.inv_cdf(p)).float().mean()
        assert expected == pytest.approx(1 - p, abs=5 * (p * (1 - p) / len(values)) ** 0.5)
    covariance = rows.T.cov()
    assert (covariance - torch.eye(16)).abs().max() < 0.1
    assert rows[1:].mul(rows[:-1]).mean().abs() < 0.02


def test_rows_when_they_are_made_in_another_order_then_they_are_the_same(stores):
    first, second = dynamic_store(stores, rule=RowFTRL(0.1)), dynamic_store(stores, rule=RowFTRL(0.1), name="second")
    for row in range(70):
        first.insert(torch.tensor([row]))
    second.insert(torch.randperm(70))
    second.insert(torch.tensor([3, 3]))
    assert first.num_live == second.num_live == 70
    for name in ("weight", "accumulator", "linear"):
        assert torch.equal(first.read(name, 0, 70), second.read(name, 0, 70))
    assert 0.4 < first.read("weight", 0, 40).std() < 0.6
    assert 0.08 < first.read("weight", 40, 30).std() < 0.12


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_training_when_a_mapped_store_starts_alike_then_rows_and_state_stay_equal(stores, rule):
    dynamic = dynamic_store(stores, rule=rule)
    mapped = stores.create_embedding_store("mapped", LAYOUT, rule, seed=0)
    for name in dynamic.row_shapes:
        mapped.write(name, 0, dynamic.read(name, 0, 70))
    assert dynamic.num_live == 0
    touched = set()
    for step in range(30):
        if step % 3 == 0:
            lengths = torch.randint(0, 4, (3 * 5,))
            ids = torch.cat([torch.randint(20 + step // 3, (int(lengths[5 * f : 5 * f + 5].sum()),)) for f in range(3)])
            sparse = SparseFeatures(("x", "y", "z"), ids, lengths=lengths, weights=torch.rand(len(ids)))
        else:
            sparse = SparseFeatures(("x", "y", "z"), torch.randint(20, (3 * 5,)))
        pooled = dynamic.pooled_lookup(sparse)
        assert torch.equal(pooled, mapped.pooled_lookup(sparse))
        gradient = torch.randn_like(pooled)
        touched |= set(dynamic.layout.rows_of(sparse).tolist())
        for store in (dynamic, mapped):
            store.apply_gradients(sparse, gradient, lr=0.1)
        rows, grads = torch.randperm(70)[:2], torch.randn(2, 8)
        touched |= set(rows.tolist())
        for store in (dynamic, mapped):
            store.apply_row_gradients(rows, grads, lr=0.1)
    for name in dynamic.row_shapes:
        assert torch.allclose(dynamic.read(name, 0, 70), mapped.read(name, 0, 70), rtol=1e-6, atol=1e-7)
    assert dynamic.step == mapped.step == 60
    assert dynamic.live_rows().tolist() == sorted(touched)
    assert dynamic.num_live == len(touched)


@pytest.mark.parametrize("clock", ["max", "sum"])
def test_exchange_when_a_mapped_store_starts_alike_then_the_answers_are_equal(stores, clock):
    dynamic = dynamic_store(stores, rule=RowAdagrad(0.1, initial_accumulator=0.1))
    mapped = stores.create_embedding_store("mapped", LAYOUT, RowAdagrad(0.1, initial_accumulator=0.1), seed=0)
    for name in dynamic.row_shapes:
        mapped.write(name, 0, dynamic.read(name, 0, 70))
    for _ in range(20):
        push, fetch, check = (torch.randperm(70)[:size] for size in (4, 6, 5))
        request = RowExchange(
            push_rows=push,
            push_clocks=torch.randint(9, (4,), dtype=torch.int32),
            updates={"weight": torch.randn(4, 8), "sum": torch.rand(4, 8)},
            num_steps=2,
            fetch_rows=fetch,
            check_rows=check,
            check_clocks=torch.randint(4, (5,), dtype=torch.int32),
            staleness=2,
            clock=clock,
        )
        ours, theirs = dynamic.begin_exchange(request)(), mapped.begin_exchange(request)()
        assert torch.equal(ours.clocks, theirs.clocks)
        assert torch.equal(ours.stale, theirs.stale)
        assert all(torch.equal(ours.values[name], theirs.values[name]) for name in ("weight", "sum"))
    assert dynamic.step == mapped.step == 40


def test_memory_when_rows_are_touched_then_it_grows_with_them_only(stores, tmp_path):
    store = dynamic_store(stores, HUGE, RowAdam(0.1))
    empty = file_bytes(tmp_path / "dynamic")
    assert empty < 5 << 20
    store.lookup(torch.randint(2**48, (100_000,)))
    assert file_bytes(tmp_path / "dynamic") == empty
    for batch in range(20):
        ids = torch.arange(4000) * 1_000_003 + batch
        store.apply_row_gradients(ids, torch.ones(4000, 16), lr=0.1)
    row_bytes = 3 * 16 * 4 + 12
    assert 80_000 * row_bytes <= file_bytes(tmp_path / "dynamic") < 81_000 * row_bytes + (6 << 20)
    assert store.num_live == 80_000
    assert torch.allclose(store.lookup(torch.tensor([5]))[0], store.read("weight", 5, 1)[0])
    status = stores.status()
    assert (status["rows"], status["live_rows"]) == (2**48, 80_000)
    assert status["bytes"] < 81_000 * row_bytes + (6 << 20)


def test_memory_when_a_trillion_parameters_are_opened_and_trained_then_it_stays_small(stores, tmp_path):
    tables = [EmbeddingBagConfig(f"t{i}", 33_760_000, 4096, (f"f{i}",)) for i in range(8)]
    assert sum(table.num_embeddings * table.embedding_dim for table in tables) > 1.1e12
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    collection = EmbeddingBagCollection(tables, optimizer=RowSGD(0.1), device="meta")
    backend = StoreBackend.create("net", collection.layout, RowSGD(0.1), servers=[stores], dynamic=DynamicRows())
    collection.bind(backend)
    ids = SparseFeatures(collection.feature_names, torch.randint(33_760_000, (8 * 16,)))
    for _ in range(3):
        collection(ids).sum().backward()
    after = backend.lookup_frozen(collection.resolve(ids))
    assert torch.allclose(after.mean(), torch.tensor(-0.3), atol=0.01)
    assert file_bytes(tmp_path / "net") < 64 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    collection.unbind()


def test_admission_when_a_row_is_named_often_enough_then_it_trains_from_that_update_on(stores):
    store = dynamic_store(stores, admission=3)
    initial = store.read("weight", 0, 70)
    sparse = SparseFeatures(("x", "y", "z"), torch.tensor([1, 1, 2, 1, 5, 6]))  # row 1 thrice in one update
    store.apply_gradients(sparse, torch.ones(2, 3, 8), lr=1.0)
    store.apply_row_gradients(torch.tensor([1, 2]), torch.ones(2, 8), lr=1.0)
    assert torch.equal(store.read("weight", 0, 70), initial)
    assert store.num_live == 0
    store.apply_gradients(sparse, torch.ones(2, 3, 8), lr=1.0)
    expected = initial.clone()
    expected[1] -= 3
    expected[2] -= 1
    assert torch.allclose(store.read("weight", 0, 70), expected)
    assert store.live_rows().tolist() == [1, 2]
    assert torch.allclose(store.pooled_lookup(sparse)[0, :, 0], expected[[1, 2, 45], 0])
    exchange = RowExchange(
        push_rows=torch.tensor([45, 60]),
        push_clocks=torch.tensor([7, 7], dtype=torch.int32),
        updates={"weight": torch.ones(2, 8)},
        fetch_rows=torch.tensor([45, 60]),
    )
    values = store.begin_exchange(exchange)()
    assert torch.equal(values.values["weight"], torch.stack([initial[45] - 1, initial[60]]))
    assert values.clocks.tolist() == [7, 0]
    store.insert(torch.tensor([45, 60]))
    assert store.live_rows().tolist() == [1, 2, 45, 60]
    store.clear()
    assert (store.num_live, store.live_rows().tolist()) == (0, [])
    assert torch.equal(store.read("weight", 0, 70), initial)


def test_expiry_when_a_row_was_not_named_for_long_then_it_starts_anew(stores):
    store = dynamic_store(stores, rule=RowAdagrad(1.0), expire_after=4)
    initial = store.read("weight", 0, 70)
    push = RowExchange(
        push_rows=torch.tensor([0, 1]),
        push_clocks=torch.tensor([5, 5], dtype=torch.int32),
        updates={"weight": torch.ones(2, 8), "sum": torch.ones(2, 8)},
        num_steps=1,
    )
    store.begin_exchange(push)()
    for _ in range(3):
        store.apply_row_gradients(torch.tensor([2]), torch.ones(1, 8), lr=0.1)
        store.lookup(torch.tensor([1]))
        store.read("weight", 0, 1)  # a checkpoint does not count
    assert torch.equal(store.read("weight", 0, 1), initial[:1] - 1)
    store.apply_row_gradients(torch.tensor([2]), torch.ones(1, 8), lr=0.1)
    assert torch.equal(store.read("weight", 0, 1), initial[:1])
    assert store.read("sum", 0, 2)[:, 0].tolist() == [0, 1]
    assert store.live_rows().tolist() == [1, 2]
    store.apply_row_gradients(torch.tensor([0]), torch.ones(1, 8), lr=1.0)
    assert torch.allclose(store.read("weight", 0, 1), initial[:1] - 1)
    values = store.begin_exchange(RowExchange(fetch_rows=torch.tensor([0, 1])))()
    assert values.clocks.tolist() == [0, 5]


def test_files_when_their_folder_is_gone_then_rows_are_made_and_trained_all_the_same(stores, tmp_path):
    store = dynamic_store(stores, HUGE, RowSGD(1.0))
    shutil.rmtree(tmp_path / "dynamic")
    ids = torch.arange(200_000)  # more than the room that is there from the start
    before = store.lookup(ids)
    store.apply_row_gradients(ids, torch.ones(len(ids), 16), lr=1.0)
    assert torch.equal(store.lookup(ids), before - 1)
    assert store.num_live == len(ids)


def test_copy_when_the_store_has_forgotten_its_row_then_the_row_is_made_as_the_copy_is(stores, tmp_path):
    def push(store, rows, **more):
        size = len(rows)
        updates = {name: torch.ones(size, 8) for name in ("weight", "sum")}
        copies = {"weight": torch.full((size, 8), 5.0), "sum": torch.full((size, 8), 9.0)}
        clocks = torch.full((size,), 3, dtype=torch.int32)
        store.begin_exchange(RowExchange(push_rows=rows, push_clocks=clocks, updates=updates, copies=copies, **more))

    store = dynamic_store(stores, rule=RowAdagrad(1.0), expire_after=4, admission=2)
    store.write_rows("weight", torch.tensor([1]), torch.full((1, 8), 7.0))
    store.insert(torch.tensor([2]))
    store.apply_row_gradients(torch.tensor([3]), torch.ones(1, 8), lr=1.0)
    store.apply_row_gradients(torch.tensor([3]), torch.ones(1, 8), lr=1.0)
    trained, drawn = store.read("weight", 3, 1)[0, 0].item(), store.read("weight", 2, 1)[0, 0].item()
    push(store, torch.tensor([0, 1, 2, 3, 4]), push_counts=torch.tensor([2, 1, 1, 1, 1], dtype=torch.int32))
    # 0 is new: as the copy. 1, 2 and 3 are there: updated. 4 was named once, and is not admitted.
    expected = [5, 6, drawn - 1, trained - 1]
    torch.testing.assert_close(store.read("weight", 0, 4)[:, 0], torch.tensor(expected))
    assert store.read("sum", 0, 4)[:, 0].tolist() == [9, 1, 1, 2]
    assert store.live_rows().tolist() == [0, 1, 2, 3]
    assert store.clocks[:4].sort().values.tolist() == [3, 3, 3, 3]
    for _ in range(6):
        store.apply_row_gradients(torch.tensor([60]), torch.ones(1, 8), lr=0.1)
    assert store.live_rows().tolist() == [60]
    # A server makes the rows of a push before it applies it, and may be killed in between.
    store.admit(np.array([1]), np.array([2], dtype=np.int32))
    stores.close()
    again = MappedStores(tmp_path)
    store = again.embedding_store("dynamic")
    push(store, torch.tensor([1]), push_counts=torch.tensor([2], dtype=torch.int32))
    assert (store.read("weight", 1, 1)[0, 0].item(), store.read("sum", 1, 1)[0, 0].item()) == (5, 9)
    push(store, torch.tensor([1]))
    assert (store.read("weight", 1, 1)[0, 0].item(), store.read("sum", 1, 1)[0, 0].item()) == (4, 10)
    again.close()


def test_expiry_when_ids_keep_changing_then_room_is_used_again(stores, tmp_path):
    store = dynamic_store(stores, HUGE, expire_after=5)
    sizes = []
    for step in range(60):
        ids = torch.arange(5000) + 5000 * step
        store.apply_row_gradients(ids, torch.ones(5000, 16), lr=0.1)
        sizes.append(file_bytes(tmp_path / "dynamic"))
    assert store.num_live <= 12 * 5000
    assert sizes[-1] == sizes[14] < 13 * 5000 * 76 + (10 << 20)
    assert len(store.live_rows()) == 5 * 5000


@pytest.mark.parametrize(("rule", "dim"), [(RowSGD(0.5), 1), (RowAdam(0.1), 3), (RowAdagrad(0.1), 64)])
def test_store_when_closed_and_opened_again_then_every_row_is_there(stores, tmp_path, rule, dim):
    layout = TableLayout((EmbeddingBagConfig("t", 1000, dim, ("t",), init_std=0.1),))
    store = dynamic_store(stores, layout, rule, seed=4)
    store.apply_row_gradients(torch.arange(0, 1000, 3), torch.randn(334, dim), lr=0.5)
    before = {name: store.read(name, 0, 1000) for name in store.row_shapes}
    stores.close()
    again = MappedStores(tmp_path)
    store = dynamic_store(again, layout, rule, seed=4)
    assert (store.num_live, store.step) == (334, 1)
    assert all(torch.equal(store.read(name, 0, 1000), values) for name, values in before.items())
    store.apply_row_gradients(torch.arange(1000), torch.ones(1000, dim), lr=0.5)
    assert store.num_live == 1000
    again.close()


def test_written_rows_when_read_then_they_are_back_and_exist(stores):
    store = dynamic_store(stores, rule=RowAdagrad(), admission=5)
    rows, values = torch.tensor([50, 3, 69]), torch.randn(3, 8)
    store.write_rows("sum", rows, values)
    assert torch.equal(store.read_rows("sum", rows), values)
    assert store.live_rows().tolist() == [3, 50, 69]
    store.write("weight", 10, values)
    assert torch.equal(store.lookup(torch.tensor([12, 11, 10])), values.flip(0))


def test_store_when_misused_then_the_error_says_what_to_do(stores):
    store = dynamic_store(stores)
    with pytest.raises(RuntimeError, match=r"dynamic is open already.*go through its server"):
        stores.embedding_store("dynamic")
    with pytest.raises(TypeError, match="one process at a time"):
        pickle.dumps(store)
    assert copy.deepcopy(store) is store
    with pytest.raises(ValueError, match=r"has \['weight'\], got 'sum'"):
        store.read("sum", 0, 1)
    with pytest.raises(IndexError, match="not within the store's 70"):
        store.read("weight", 69, 2)
    with pytest.raises(IndexError, match=r"rows must be in \[0, 70\), got 3 to 70"):
        store.apply_row_gradients(torch.tensor([3, 70]), torch.ones(2, 8), lr=1.0)
    with pytest.raises(ValueError, match=r"shape \[2, 8\], got .* \[1, 8\]"):
        store.write_rows("weight", torch.tensor([1, 2]), torch.ones(1, 8))
    store.close()
    with pytest.raises(ValueError, match=r"with other tables or another rule.*DynamicRows"):
        dynamic_store(stores, admission=2)
    with pytest.raises(ValueError, match="one for each of 2 tables"):
        dynamic_store(stores, name="other", first_keys=(1,))
    endless = TableLayout(tuple(EmbeddingBagConfig(f"t{i}", 2**61, 4, (f"f{i}",)) for i in range(8)))
    with pytest.raises(ValueError, match=r"at most 2\*\*64 - 1 rows"):
        dynamic_store(stores, endless, name="endless")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admission": 0}, "admission must be from 1"),
        ({"expire_after": 0}, "expire_after must be None or from 1"),
        ({"first_keys": (-1,)}, "first_keys must be numbers from 0"),
        ({"key_steps": (0,)}, "key_steps must be numbers from 1"),
    ],
)
def test_dynamic_rows_when_out_of_range_then_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicRows(**options)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"admission": 1},
        {"admission": 1.5, "expire_after": None, "first_keys": None, "key_steps": None},
        {"admission": True, "expire_after": None, "first_keys": None, "key_steps": None},
        {"admission": 1, "expire_after": "2", "first_keys": None, "key_steps": None},
        {"admission": 1, "expire_after": None, "first_keys": 3, "key_steps": None},
        {"admission": 1, "expire_after": None, "first_keys": [0, "1"], "key_steps": None},
        {"admission": 1, "expire_after": None, "first_keys": None, "key_steps": [0]},
    ],
)
def test_plain_dynamic_rows_when_they_are_none_then_refused(value):
    with pytest.raises(
        ValueError, match=r"DynamicRows takes a dict of|of DynamicRows have another type|numbers from 1"
    ):
        from_plain(DynamicRows, value)


def test_room_when_there_is_none_then_the_error_says_so_and_nothing_is_changed(stores, monkeypatch):
    store = dynamic_store(stores, HUGE)
    store.apply_row_gradients(torch.arange(10), torch.ones(10, 16), lr=1.0)
    before = store.lookup(torch.arange(10))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    for batch in itertools.count():
        ids = torch.arange(10_000) + 10_000 * batch + 10
        if store.num_live + 10_000 > (4 << 20) // 76:
            break
        store.apply_row_gradients(ids, torch.ones(10_000, 16), lr=1.0)
    live = store.num_live
    with pytest.raises(
        OSError, match=r"no room for more rows in .*dynamic.*needs .* bytes.*No space left.*expire_after"
    ):
        store.apply_row_gradients(ids, torch.ones(10_000, 16), lr=1.0)
    assert store.num_live == live
    assert torch.equal(store.lookup(torch.arange(10)), before)


ALL = TableLayout((EmbeddingBagConfig("all", 2**64 - 1, 128, ("x",), init_std=0.5),))
HASHES = torch.tensor([0, 5, 2**40, 2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63, -(2**40), -3, -2])  # rising, unsigned


def test_ids_when_all_of_int64_but_one_are_then_rows_come_train_and_go_as_those_of_any_other(stores, tmp_path):
    store = dynamic_store(stores, ALL, RowAdagrad(0.1), expire_after=30)
    shuffled = HASHES[torch.randperm(len(HASHES))]
    drawn = store.lookup(shuffled)
    assert len(drawn[:, 0].unique()) == len(HASHES)
    assert torch.equal(drawn.flip(0), store.lookup(shuffled.flip(0)))
    store.apply_row_gradients(shuffled, torch.ones(len(HASHES), 128), lr=0.5)
    sparse = SparseFeatures(("x",), shuffled)
    store.apply_gradients(sparse, torch.ones(len(HASHES), 1, 128), lr=0.5)
    exchange = RowExchange(
        push_rows=shuffled[:3],
        push_clocks=torch.ones(3, dtype=torch.int32),
        updates={name: torch.ones(3, 128) for name in ("weight", "sum")},
        fetch_rows=shuffled,
        check_rows=shuffled[3:],
        check_clocks=torch.zeros(len(HASHES) - 3, dtype=torch.int32),
    )
    values = store.begin_exchange(exchange)().values
    expected = drawn - 0.5 - 0.5 / 2**0.5
    expected[:3] -= 1
    torch.testing.assert_close(values["weight"], expected)
    torch.testing.assert_close(store.pooled_lookup(sparse)[:, 0], expected)
    assert torch.equal(store.live_rows(), HASHES)
    assert torch.equal(
        store.read("weight", 2**63 - 1, 2), store.read_rows("weight", torch.tensor([2**63 - 1, -(2**63)]))
    )
    for wrong in ([-1], [3, -1]):
        with pytest.raises(IndexError, match=r"rows must be in \[0, 18446744073709551615\), got -1 to"):
            store.apply_row_gradients(torch.tensor(wrong), torch.ones(len(wrong), 128), lr=1.0)
        with pytest.raises(IndexError, match=r"fetch_rows must be in \[0, 18446744073709551615\), got -1 to"):
            store.begin_exchange(RowExchange(fetch_rows=torch.tensor(wrong)))
    stores.close()
    again = MappedStores(tmp_path)
    store = again.embedding_store("dynamic")
    assert torch.equal(store.live_rows(), HASHES)
    torch.testing.assert_close(store.lookup(shuffled), expected)
    for _ in range(31):
        store.apply_row_gradients(torch.tensor([-7]), torch.ones(1, 128), lr=0.5)
    assert store.live_rows().tolist() == [-7]
    again.close()


def test_tables_when_the_second_starts_beyond_the_positive_numbers_then_each_has_its_own_rows(stores):
    tables = [
        EmbeddingBagConfig("a", 2**63 + 3, 4, ("x",), init_std=0.5),
        EmbeddingBagConfig("b", 2**62, 4, ("y",), init_std=0.0),
    ]
    with pytest.raises(ValueError, match=r"num_embeddings must be at most 2\*\*64 - 1.*got 18446744073709551616"):
        EmbeddingBagConfig("c", 2**64, 4, ("x",))
    with pytest.raises(ValueError, match=r"at most 2\*\*64 - 1 ids together, got 18446744073709551619.*one table"):
        EmbeddingBagCollection([tables[0], EmbeddingBagConfig("c", 2**63, 4, ("z",))], device="meta")
    collections = []
    for name, servers in (("one", [stores]), ("other", [stores])):
        collection = EmbeddingBagCollection(tables, optimizer=RowSGD(0.5), device="meta")
        backend = StoreBackend.create(name, collection.layout, RowSGD(0.5), servers=servers, dynamic=DynamicRows())
        collection.bind(backend)
        collections.append(collection)
    one, other = collections
    sparse = SparseFeatures(("x", "y"), torch.tensor([3, -(2**63) + 2, 3, 2**62 - 1]))
    before = one(sparse).detach()
    assert before[:, 0].all()
    assert not before[:, 1].any()
    for _ in range(2):
        one(sparse).sum().backward()
    torch.testing.assert_close(one(sparse), before - 1)
    live = one.embedding_bags.dynamic.live_ids()
    assert {table: ids.tolist() for table, ids in live.items()} == {"a": [3, -(2**63) + 2], "b": [3, 2**62 - 1]}
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(sparse), one(sparse))
    for wrong in (-1, -(2**63) + 3):
        with pytest.raises(IndexError, match=rf"table 'a', feature 'x': id {wrong} is outside \[0, {2**63 + 3}\)"):
            one(SparseFeatures(("x", "y"), torch.tensor([wrong, 3])))
