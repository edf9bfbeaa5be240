"""Folder checkpoints of tables of which only some rows exist."""

from dataclasses import replace

import pytest
import torch

from lightning_recsys.checkpoints import read_checkpoint, read_stored, save_folder, stored
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowAdam, RowSGD, RowSWAP
from lightning_recsys.placement import PlacementPlan, TablePart
from lightning_recsys.stores import DynamicRows, MappedStores, StoreBackend
from lightning_recsys.strategies.common.stored_rows import row_keys, rows_left_out, stored_tensors

TABLES = [
    EmbeddingBagConfig("users", 10**9, 4, ("user",)),
    EmbeddingBagConfig("items", 200, 4, ("item",)),
    EmbeddingBagConfig("unseen", 10**6, 4, ("unseen",)),
]
CUTS = [
    ("users", 10**9 // 2, 1, 0, 2),
    ("users", 10**9 // 2, 0, 1, 2),
    ("items", 200, 1, 0, 1),
    ("unseen", 10**6, 0, 0, 1),
]


@pytest.fixture
def servers(tmp_path):
    opened = []
    for index in range(3):
        (tmp_path / f"store{index}").mkdir()
        opened.append(MappedStores(tmp_path / f"store{index}"))
    yield opened
    for stores in opened:
        stores.close()


def model_on(servers, *, plan=None):
    collection = EmbeddingBagCollection(TABLES, optimizer=RowAdam(0.1), device="meta")
    layout, options = collection.layout, {"plan": plan, "seed": 3, "dynamic": DynamicRows()}
    collection.bind(StoreBackend.create("net", layout, RowAdam(0.1), servers=servers, **options))
    return torch.nn.ModuleDict({"tables": collection})


def train(model):
    ids = torch.cat([torch.randint(150, (20,)), torch.randint(200, (20,))])
    sparse = SparseFeatures(("user", "item", "unseen"), ids, lengths=torch.tensor([1] * 40 + [0] * 20))
    model["tables"](sparse).sum().backward()


def test_checkpoint_when_saved_from_one_store_then_two_processes_load_it_into_two_stores(
    tmp_path, servers, monkeypatch
):
    monkeypatch.setattr(stored, "BLOCK_BYTES", 100)  # several blocks
    model, path = model_on(servers[:1]), tmp_path / "last.ckpt"
    for _ in range(4):
        train(model)
    with rows_left_out(model):
        rest = model.state_dict()
    assert set(rest) == {f"tables.embedding_bags.{table.name}.step" for table in TABLES}
    state = rest | stored_tensors(model, rank=0, world_size=1)
    save_folder(path, {"state_dict": state, "global_step": 4})
    parts = tuple(TablePart("net", *cut[:3], stripe=cut[3], num_stripes=cut[4]) for cut in CUTS)
    other = model_on(servers[1:], plan=PlacementPlan("size", 2, parts))
    loaded = read_checkpoint(path, without=row_keys(other))
    assert loaded["state_dict"].keys() == rest.keys()
    for rank in range(2):
        read_stored(path, stored_tensors(other, rank=rank, world_size=2))
    with rows_left_out(other):
        other.load_state_dict(loaded["state_dict"])
    expected, found = model.state_dict(), other.state_dict()
    assert expected["tables.embedding_bags.users.ids"].numel() > 30
    assert expected["tables.embedding_bags.unseen.ids"].numel() == 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    train(other)
    whole = read_checkpoint(path)["state_dict"]
    model.load_state_dict(whole | {key: x for key, x in expected.items() if ".unseen." in key})


def test_checkpoint_when_a_second_rank_saves_then_it_adds_nothing(servers):
    model = model_on(servers[:1])
    (rows,) = stored_tensors(model, rank=1, world_size=2).values()
    assert rows.to_save("tables.embedding_bags") == {}


def test_checkpoint_when_it_lacks_a_table_then_the_error_names_it(tmp_path, servers):
    save_folder(tmp_path / "last.ckpt", {"state_dict": {"other": torch.ones(1)}, "global_step": 0})
    with pytest.raises(KeyError, match=r"has no 'tables.embedding_bags.users.weight'"):
        read_stored(tmp_path / "last.ckpt", stored_tensors(model_on(servers[:1]), rank=0, world_size=1))


@pytest.mark.parametrize("dynamic", [DynamicRows(), None])
def test_checkpoint_when_it_has_all_rows_and_no_periods_then_they_become_dynamic_ones_with_swap(
    tmp_path, servers, dynamic
):
    weight = torch.randn(200, 4)
    state = {f"net.items.{name}": weight * factor for factor, name in enumerate(("weight", "exp_avg", "exp_avg_sq"), 1)}
    save_folder(tmp_path / "last.ckpt", {"state_dict": state, "global_step": 0})
    rule = RowSWAP(inner=RowAdam(0.1), period=3, discount=0.5)
    collection = EmbeddingBagCollection(TABLES[1:2], optimizer=rule, device="meta")
    backend = StoreBackend.create("net", collection.layout, rule, servers=servers[:1], dynamic=dynamic)
    read_stored(tmp_path / "last.ckpt", stored_tensors(torch.nn.ModuleDict({"net": backend}), rank=0, world_size=1))
    assert torch.equal(backend.read("items", "exp_avg"), weight * 2)
    assert not backend.read("items", "period").any()
    fresh = StoreBackend.create("fresh", collection.layout, rule, servers=servers[:1], dynamic=dynamic)
    fresh.load_state_dict({key.removeprefix("net."): value for key, value in state.items()}, strict=True)
    assert torch.equal(fresh.read("items", "exp_avg"), weight * 2)


@pytest.mark.parametrize("saved_ids", [[3, 170], None], ids=["some rows", "all rows"])
def test_checkpoint_when_its_table_is_larger_then_is_refused_and_no_other_table_gets_its_rows(
    tmp_path, servers, saved_ids
):
    ids = torch.arange(200) if saved_ids is None else torch.tensor(saved_ids)
    state = {"net.items.weight": torch.ones(len(ids), 4), "net.users.weight": torch.ones(1, 4)}
    state |= {"net.users.ids": torch.tensor([5])} | ({} if saved_ids is None else {"net.items.ids": ids})
    save_folder(tmp_path / "last.ckpt", {"state_dict": state, "global_step": 0})
    tables = [replace(TABLES[1], num_embeddings=100), TABLES[0]]
    layout = EmbeddingBagCollection(tables, device="meta").layout
    backend = StoreBackend.create("net", layout, RowSGD(), servers=servers[:1], dynamic=DynamicRows())
    model = torch.nn.ModuleDict({"net": backend})
    with pytest.raises(IndexError, match=r"table 'items' has 100 ids, and the rows of .* others were given"):
        read_stored(tmp_path / "last.ckpt", stored_tensors(model, rank=0, world_size=1))
    backend.dynamic.clear()
    with pytest.raises(RuntimeError, match=r"table 'items' has 100 ids|size mismatch for net.items.weight"):
        model.load_state_dict(state)
    assert [ids.numel() for ids in backend.dynamic.live_ids().values()] == [0, 0]
    with pytest.raises(IndexError, match="such as 100"):
        backend.dynamic.read("items", "weight", torch.tensor([99, 100]))
