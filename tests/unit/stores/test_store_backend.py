"""A collection over stores: cut by tables and by rows it looks up, trains and saves as the local one does."""

import copy
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from lightning_recsys.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    LocalBackend,
    SparseFeatures,
)
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.models import DeepFM
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.placement import PlacementPlan, TablePart, place_tables
from lightning_recsys.row_cache.messages import RowPlaces
from lightning_recsys.stores import DynamicRows, MappedStores
from lightning_recsys.stores.backend import StoreBackend, table_costs
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.stores.stripes import stripe_rows
from lightning_recsys.sync import StalenessNormalization

TABLES = [
    EmbeddingBagConfig("users", 40, 4, ("user", "friend"), init_std=0.5),
    EmbeddingBagConfig("movies", 30, 4, ("movie",), "mean", init_std=0.5),
    EmbeddingBagConfig("genres", 10, 4, ("genre",), init_std=0.5),
]
FEATURES = ("user", "friend", "movie", "genre")
SIZES = {"users": 40, "movies": 30, "genres": 10}


def part(table: str, server: int, stripe: int = 0, num_stripes: int = 1) -> TablePart:
    rows = len(range(stripe, SIZES[table], num_stripes))
    return TablePart("net", table, rows, server, stripe=stripe, num_stripes=num_stripes)


PLANS = {
    "one_store": PlacementPlan("size", 1, tuple(part(table, 0) for table in SIZES)),
    "by_tables": PlacementPlan("size", 3, (part("users", 2), part("movies", 0), part("genres", 2))),
    "by_rows": PlacementPlan(
        "size",
        2,
        (
            part("users", 1, 0, 3),
            part("users", 0, 1, 3),
            part("users", 1, 2, 3),  # two stripes of a table on one server
            part("movies", 0, 0, 2),
            part("movies", 1, 1, 2),
            part("genres", 0),
        ),
    ),
}


def make(rule=None, **options) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(TABLES, optimizer=rule or RowSGD(0.1), **options)


def batch(kind: str, size: int = 6) -> SparseFeatures:
    lengths = torch.ones(4 * size).long() if kind == "single" else torch.randint(0, 4, (4 * size,))
    values = torch.randint(0, 10, (int(lengths.sum()),))
    if kind == "single":
        values[:size] = torch.randint(0, 40, (size,))
        values[2 * size : 3 * size] = torch.randint(0, 30, (size,))
    weights = torch.rand(values.numel()) if kind == "weighted" else None
    return SparseFeatures(FEATURES, values, lengths=None if kind == "single" else lengths, weights=weights)


def bind(collection, servers, plan="by_rows", **options) -> StoreBackend:
    backend = StoreBackend.create(
        "net",
        collection.layout,
        collection.optimizer,
        servers=servers[: PLANS[plan].num_servers],
        plan=PLANS[plan],
    )
    collection.bind(backend, **options)
    return backend


@pytest.mark.parametrize("kind", ["single", "bags", "weighted"])
@pytest.mark.parametrize("size", [6, 1, 0])
@pytest.mark.parametrize("plan", PLANS)
def test_lookup_when_rows_are_in_stores_then_it_equals_the_local_one(servers, plan, kind, size):
    collection = make()
    sparse = batch(kind, size)
    local = collection(sparse).detach()
    bind(collection, servers, plan)
    stored = collection(sparse).detach()
    assert stored.shape == local.shape == (size, 4, 4)
    if plan == "one_store":
        assert torch.equal(stored, local)
    else:  # partial sums are added in another order
        torch.testing.assert_close(stored, local, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [RowSGD(0.1), RowAdagrad(0.1), RowWiseAdagrad(0.1), RowAdam(0.01), RowFTRL(0.1)],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("plan", PLANS)
def test_training_when_rows_are_in_stores_then_20_steps_equal_the_local_ones(servers, plan, rule):
    local = make(rule)
    stored = copy.deepcopy(local)
    backend = bind(stored, servers, plan)
    for step in range(20):
        sparse = batch(["single", "bags", "weighted"][step % 3])
        for collection in (local, stored):
            (collection(sparse) - 1).square().sum().backward()
    assert backend.step == 20
    expected, trained = local.state_dict(), stored.state_dict()
    assert list(trained) == list(expected)
    for key, tensor in expected.items():
        assert trained[key].shape == tensor.shape
        if plan == "one_store":
            assert torch.equal(trained[key], tensor), key
        else:
            torch.testing.assert_close(trained[key], tensor, rtol=1e-5, atol=1e-6)
    stored.unbind()
    assert isinstance(stored.embedding_bags, LocalBackend)
    assert all(torch.equal(tensor, trained[key]) for key, tensor in stored.state_dict().items())


def test_state_dict_when_loaded_into_a_bound_collection_then_the_stores_have_it(servers, monkeypatch):
    monkeypatch.setattr("lightning_recsys.stores.tables._BLOCK_BYTES", 4 * 4 * 3)  # three rows at a time
    source, target = make(RowAdam(0.1)), make(RowAdam(0.1))
    source(batch("bags")).sum().backward()
    saved = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    bind(target, servers)
    target.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in target.state_dict().items())
    by_rows = PLANS["by_rows"].parts_of("net")
    assert len(by_rows) == 6
    user_13 = servers[0].embedding_store("net").lookup(torch.tensor([4]))[0]
    assert torch.equal(user_13, saved["embedding_bags.users.weight"][13])
    del saved["embedding_bags.users.weight"]
    saved["embedding_bags.movies.exp_avg"] = torch.zeros(1, 4)
    saved["embedding_bags.extra.weight"] = torch.zeros(1, 4)
    with pytest.raises(
        RuntimeError, match=r"(?s)(?=.*Missing.*users.weight)(?=.*Unexpected.*extra)(?=.*size mismatch)"
    ):
        target.load_state_dict(saved)


def test_bound_collection_when_cast_then_refused_as_an_unbound_one_is(servers):
    collection = make()
    bind(collection, servers)
    with pytest.raises(TypeError, match=r"cannot be cast.*bf16-mixed"):
        collection.bfloat16()
    assert collection.to("cpu") is collection


def test_two_collections_when_bound_to_the_same_stores_then_they_train_the_same_rows(servers):
    first, second = make(), make()
    bind(first, servers)
    backend = bind(second, servers, copy_rows=False)
    assert torch.equal(first.state_dict()["embedding_bags.users.weight"], backend.read("users", "weight"))
    sparse = batch("bags")
    for collection in (first, second):
        collection(sparse).sum().backward()
    assert backend.step == 2
    assert torch.equal(first(sparse), second(sparse))


def test_store_when_a_process_group_of_several_ranks_exists_then_nothing_is_gathered(servers, monkeypatch):
    monkeypatch.setattr("lightning_recsys.embeddings.backend.num_replicas", lambda: 2)
    monkeypatch.setattr(
        "lightning_recsys.embeddings.backend.gather_over_ranks", lambda *_: pytest.fail("gathered over ranks")
    )
    collection = make()
    bind(collection, servers)
    before = collection.state_dict()["embedding_bags.genres.weight"]
    collection(SparseFeatures(FEATURES, torch.tensor([0, 0, 0, 5]))).sum().backward()
    after = collection.state_dict()["embedding_bags.genres.weight"]
    assert torch.allclose(before[5] - 0.1, after[5]), "with the full learning rate"


def test_attached_collection_when_bound_then_the_optimizer_steps_and_schedules_its_rows(servers):
    collection, dense = make(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=1.0)
    collection.attach_to(optimizer)
    backend = bind(collection, servers)
    optimizer.param_groups[1]["lr"] = 0.25
    before = backend.read("genres", "weight")
    collection(SparseFeatures(FEATURES, torch.tensor([0, 0, 0, 5]))).sum().backward()
    assert torch.equal(backend.read("genres", "weight"), before)
    optimizer.step()
    assert torch.allclose(backend.read("genres", "weight")[5], before[5] - 0.25)


def test_pending_gradients_when_unbound_then_they_are_dropped_as_dense_ones_are(servers):
    """Manual optimization may end between two steps: what no step has taken trains neither part."""
    collection = make()
    collection.attach_to(optimizer := torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    bind(collection, servers)
    before = collection.state_dict()["embedding_bags.genres.weight"]
    collection(SparseFeatures(FEATURES, torch.tensor([0, 0, 0, 5]))).sum().backward()
    collection.unbind()
    optimizer.step()
    assert torch.equal(collection.state_dict()["embedding_bags.genres.weight"], before)


def test_failed_run_when_unbound_without_copying_then_the_stores_are_asked_for_nothing(servers):
    collection = make()
    collection.attach_to(optimizer := torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    before = {name: tensor.clone() for name, tensor in collection.state_dict().items()}
    bind(collection, servers)
    collection(batch("bags")).sum().backward()
    for server in servers:
        server.close()  # any request would raise now
    collection.unbind(copy_rows=False)
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in collection.state_dict().items())


class TravellingStore(MappedEmbeddingStore):
    """Pushes wait for flush, as with a remote store; what is asked of it goes into a log."""

    log: ClassVar[list] = []
    waiting: ClassVar[list] = []

    def begin_pooled_lookup(self, sparse):
        self.log.append("send")
        return lambda: (self.log.append("receive"), self.pooled_lookup(sparse))[1]

    def apply_gradients(self, *args, **kwargs):
        self.waiting.append((self, args, kwargs))

    def flush(self):
        self.log.append("flush")
        for store, args, kwargs in [x for x in self.waiting if x[0] is self]:
            MappedEmbeddingStore.apply_gradients(store, *args, **kwargs)
        self.waiting[:] = [x for x in self.waiting if x[0] is not self]


def test_remote_stores_when_looked_up_then_all_requests_leave_before_the_first_answer(servers, monkeypatch):
    monkeypatch.setattr("lightning_recsys.stores.mapped.MappedEmbeddingStore", TravellingStore)
    TravellingStore.log.clear()
    collection = make()
    backend = bind(collection, servers, copy_rows=False)
    pooled = collection(batch("bags"))
    assert TravellingStore.log == ["send", "send", "receive", "receive"]
    before = backend.read("genres", "weight")
    pooled.sum().backward()
    assert torch.equal(backend.read("genres", "weight"), before)
    collection.flush()
    assert not torch.equal(backend.read("genres", "weight"), before)
    collection(batch("bags")).sum().backward()
    TravellingStore.log.clear()
    collection.unbind()
    assert TravellingStore.log == ["flush", "flush"]
    assert not TravellingStore.waiting


def test_meta_collection_when_bound_then_the_stores_draw_its_rows(servers):
    collection = make(RowAdagrad(0.1), device="meta")
    assert all(parameter.is_meta for parameter in collection.parameters())
    with pytest.raises(
        RuntimeError, match=r"\['users', 'movies', 'genres'\] have no rows here \(device='meta'\).*store"
    ):
        collection(batch("bags"))
    backend = bind(collection, servers)
    assert not list(collection.parameters())
    weights = [tensor for key, tensor in collection.state_dict().items() if key.endswith("weight")]
    assert [0.3 < tensor.std() < 0.7 for tensor in weights] == [True] * 3
    users = backend.read("users", "weight")
    assert len({tuple(row) for row in users.tolist()}) == 40, "the parts of a table are drawn differently"
    collection(batch("bags")).sum().backward()
    assert collection.to("cpu") is collection
    collection.unbind()
    assert collection.cpu().embedding_bags.is_meta
    with pytest.raises(RuntimeError, match=r"no rows here.*bind a store before"):
        collection.load_state_dict(make(RowAdagrad(0.1)).state_dict())
    materialised = collection.to_empty(device="cpu")
    materialised.load_state_dict(make(RowAdagrad(0.1)).state_dict())
    assert materialised(batch("bags")).shape == (6, 4, 4)


def test_meta_option_when_given_to_a_model_then_its_tables_have_no_rows():
    model = DeepFM(num_dense=2, fields={"a": 10**12}, embedding_dim=4, device="meta")
    metas = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert metas
    assert all("embedding_bags" in name for name in metas)


def test_bind_when_it_does_not_fit_then_the_error_says_why(servers):
    collection = make()
    other = EmbeddingBagCollection(TABLES[:1], optimizer=RowSGD(0.1))
    backend = StoreBackend.create("other", other.layout, other.optimizer, servers=servers[:1])
    with pytest.raises(ValueError, match=r"the backend serves .*users.* the collection has .*movies"):
        collection.bind(backend)
    other.bind(backend)
    with pytest.raises(RuntimeError, match=r"bound to this collection already: unbind\(\) it first"):
        other.bind(backend)
    other.unbind()
    other.unbind()


@pytest.mark.parametrize(
    "parts",
    [
        (part("users", 0), part("movies", 0)),
        (part("users", 0), part("movies", 0), part("genres", 0, 0, 2)),
        (part("users", 0), part("movies", 0), part("genres", 0, 1, 2)),
        (part("users", 0), part("movies", 0), replace(part("genres", 0), num_rows=9)),
        (part("users", 0), part("movies", 0), part("genres", 0, 0, 2), part("genres", 1, 1, 3)),
        (part("users", 0), part("movies", 0), part("genres", 0), part("genres", 1)),
        (part("users", 0), part("movies", 0), part("genres", 0, 0, 2), part("genres", 1, 0, 2)),
        (part("users", 0), part("movies", 0), part("genres", 0), TablePart("net", "x", 1, server=0)),
    ],
)
def test_plan_when_a_row_has_no_place_or_two_then_it_is_refused(servers, parts):
    layout = make().layout
    with pytest.raises(ValueError, match=r"must place each row of table '\w+' \(of \d+\) on exactly one server"):
        StoreBackend.create("net", layout, RowSGD(), servers=servers[:2], plan=PlacementPlan("size", 2, parts))
    assert servers[0].status()["stores"] == 0


def test_plan_when_for_other_servers_then_it_is_refused(servers):
    with pytest.raises(ValueError, match="the plan places tables on 3 servers, got 2"):
        StoreBackend.create("net", make().layout, RowSGD(), servers=servers[:2], plan=PLANS["by_tables"])


@pytest.mark.parametrize("sensitivity", [None, 0.0, 1.0])
def test_plan_when_made_from_a_collection_then_bytes_are_those_of_the_stores(servers, sensitivity):
    collection = make(RowAdam())
    versions = None if sensitivity is None else StalenessNormalization("linear", sensitivity=sensitivity)
    options = {"normalization": versions}
    plan = place_tables(table_costs("net", collection.layout, collection.optimizer, **options), 3, method="size")
    StoreBackend.create("net", collection.layout, collection.optimizer, servers=servers, plan=plan, **options)
    for index, server in enumerate(servers):
        here = [x for x in plan.parts if x.server == index]
        assert server.status()["bytes"] == sum(x.num_bytes for x in here) + 8  # and the counter
        assert server.status()["rows"] == sum(x.num_rows for x in here)
    assert plan.imbalance == 1.125  # 20 + 20 | 30 | 10 rows


def test_copy_of_a_bound_collection_when_trained_then_it_trains_the_same_rows(servers):
    collection = make()
    backend = bind(collection, servers)
    copied = copy.deepcopy(collection)
    copied(batch("bags")).sum().backward()
    assert backend.step == 1


NUM_STORES = 4


def balance_of(tmp_path, ids: torch.Tensor, *, num_rows: int, dynamic: DynamicRows | None) -> list[int]:
    """How many of a batch's ids each store is asked for, where one table is cut over four of them."""
    layout = TableLayout((EmbeddingBagConfig("items", num_rows, 4, ("item",)),))
    plan = place_tables(table_costs("net", layout, RowSGD()), NUM_STORES, method="size")
    opened, asked = [], []
    for server in range(NUM_STORES):
        (tmp_path / str(server)).mkdir(parents=True)
        opened.append(MappedStores(tmp_path / str(server)))
    backend = StoreBackend.create("net", layout, RowSGD(), servers=opened, plan=plan, dynamic=dynamic)
    sparse = SparseFeatures(("item",), ids)
    for share in backend._shares:
        asked.append(share.select(backend._striped(sparse)).values.numel())
    assert backend.lookup_frozen(sparse).shape == (ids.numel(), 1, 4)
    for server in opened:
        server.close()
    return asked


@pytest.mark.parametrize("dynamic", [None, DynamicRows()], ids=["all rows", "dynamic rows"])
def test_stores_when_ids_are_numbered_by_frequency_then_each_is_asked_for_a_fair_share(tmp_path, dynamic):
    """A click log's ids at Zipf 1.1, as a vocabulary numbers them. The first alone has 14 % of the lookups."""
    weights = torch.arange(1, 100_001, dtype=torch.float64) ** -1.1
    ids = torch.multinomial(weights, 50_000, replacement=True, generator=torch.Generator().manual_seed(0))
    num_rows = 100_000 if dynamic is None else 10**12
    asked = balance_of(tmp_path / "all", ids, num_rows=num_rows, dynamic=dynamic)
    assert sum(asked) == 50_000
    assert max(asked) / 12_500 < 1.35
    for name, some in (("less the hottest", ids[ids >= NUM_STORES]), ("each row once", ids.unique())):
        asked = balance_of(tmp_path / name, some, num_rows=num_rows, dynamic=dynamic)
        assert max(asked) / (sum(asked) / NUM_STORES) < 1.1, name


def test_stores_when_ids_are_hashes_then_each_is_asked_for_a_fair_share(tmp_path):
    ids = torch.randint(2**50, (20_000,), generator=torch.Generator().manual_seed(0))
    asked = balance_of(tmp_path, ids, num_rows=2**50, dynamic=DynamicRows())
    assert sum(asked) == 20_000
    assert max(asked) / 5_000 < 1.1


@pytest.mark.parametrize("num_stripes", [1, 2, 3, 4, 7, 64, 100])
def test_stripes_when_ids_are_divided_then_equal_pythons(num_stripes):
    numbers = [0, 1, 2, 5, 63, 64, 10**6, 2**31, 2**53 + 1, 2**62 + 3]
    ids = np.array(numbers, dtype=np.int64)
    stripes, rows = np.empty(len(ids), dtype=np.int32), np.empty(len(ids), dtype=np.int64)
    stripe_rows(ids, np.array([0, len(ids)]), np.array([num_stripes]), stripes, rows)
    assert [*zip(rows.tolist(), stripes.tolist(), strict=True)] == [divmod(number, num_stripes) for number in numbers]


def test_places_when_keys_are_of_cut_and_whole_tables_then_each_is_the_row_that_has_it(servers):
    layout = make().layout
    plan, starts = PLANS["by_rows"], layout.table_starts
    by_store = [[x for x in plan.parts if x.server == server] for server in range(2)]
    places = RowPlaces(layout, by_store)
    keys = np.random.default_rng(0).permutation(80)
    expected = {}
    for store, parts in enumerate(by_store):
        row = 0
        for x in parts:
            ids = range(x.stripe, SIZES[x.table], x.num_stripes)
            expected |= {starts[x.table] + i: (store, row + place) for place, i in enumerate(ids)}
            row += x.num_rows
    found = {}
    for store, (which, rows) in enumerate(places.split(keys)):
        assert which.tolist() == sorted(which)
        found |= {int(key): (store, int(row)) for key, row in zip(keys[which], rows, strict=True)}
    assert found == expected
