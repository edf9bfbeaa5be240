"""Dynamic rows behind a server: the same rows as in the process, whoever asks, and however they are cut."""

import pytest
import torch
from server_helpers import running

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures, Ticket
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.errors import RequestRefusedError
from lightning_recsys.optim import RowAdagrad, RowAdam, RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.placement import PlacementPlan, TablePart, rows_in_stripe
from lightning_recsys.row_cache import CachedBackend
from lightning_recsys.stores import DynamicRows, MappedStores, StoreBackend
from lightning_recsys.stores.digests import DIGEST
from lightning_recsys.stores.exchange import RowExchange

LAYOUT = TableLayout(
    (
        EmbeddingBagConfig("a", 10**12, 8, ("x", "y"), init_std=0.5),
        EmbeddingBagConfig("b", 500, 8, ("z",), init_std=0.1),
    )
)
KEYS = ("x", "y", "z")


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    with running(tmp_path / "served") as server:
        yield server


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local").mkdir()
    stores = MappedStores(tmp_path / "local")
    yield stores
    stores.close()


def batch(size=6, rows=300):
    return SparseFeatures(KEYS, torch.randint(rows, (3 * size,)))


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_served_rows_when_trained_then_they_equal_those_of_a_store_in_the_process(server, local, transport):
    remote = connect(server.endpoint, transport=transport)
    stores = [
        x.create_embedding_store("t", LAYOUT, RowAdam(0.1), seed=3, dynamic=DynamicRows()) for x in (remote, local)
    ]
    for _ in range(10):
        sparse, rows = batch(), torch.randperm(10**6)[:5]
        pooled = [store.pooled_lookup(sparse) for store in stores]
        assert torch.equal(*pooled)
        for store in stores:
            store.apply_gradients(sparse, pooled[0] + 1, lr=0.1)
            store.apply_row_gradients(rows, torch.ones(5, 8), lr=0.1)
    served, own = stores
    own.insert(torch.tensor([77]))
    served.insert(torch.tensor([77]))
    rows = served.live_rows()
    assert torch.equal(rows, own.live_rows())
    assert served.num_live == own.num_live == len(rows)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(served.read_rows(name, rows), own.read_rows(name, rows))
    assert torch.equal(served.read_rows(DIGEST, rows), own.read_rows(DIGEST, rows))
    assert served.seed == own.seed == 3
    assert remote.status()["live_rows"] == len(rows)
    again = connect(server.endpoint, transport=transport)
    opened = again.create_embedding_store("t", LAYOUT, RowAdam(0.1), seed=3, dynamic=DynamicRows())
    assert torch.equal(opened.lookup(rows), own.lookup(rows))
    assert torch.equal(again.embedding_store("t").lookup(rows), own.lookup(rows))
    with pytest.raises(RequestRefusedError, match="other tables or another rule"):
        again.create_embedding_store("t", LAYOUT, RowAdam(0.1), seed=3, dynamic=DynamicRows(admission=2))
    opened.clear()
    assert served.num_live == 0
    again.remove("t")
    assert remote.status()["stores"] == 0
    again.close()
    remote.close()


def test_served_exchange_when_rows_are_new_then_the_answer_is_that_of_a_store_in_the_process(server, local):
    remote = connect(server.endpoint, transport="tcp")
    dynamic = DynamicRows(admission=2, expire_after=3)
    stores = [x.create_embedding_store("t", LAYOUT, RowAdagrad(0.1), seed=3, dynamic=dynamic) for x in (remote, local)]
    for step in range(12):
        rows = torch.arange(6) * 10**11 + step // 3
        request = RowExchange(
            push_rows=rows[:4],
            push_clocks=torch.full((4,), step, dtype=torch.int32),
            updates={"weight": torch.randn(4, 8), "sum": torch.rand(4, 8)},
            push_counts=torch.tensor([1, 2, 1, 3], dtype=torch.int32),
            copies={"weight": torch.randn(4, 8), "sum": torch.rand(4, 8)} if step % 4 else {},
            num_steps=1,
            fetch_rows=rows,
            check_rows=rows[2:],
            check_clocks=torch.tensor([0, 9, 0, 9], dtype=torch.int32),
            staleness=2,
        )
        ours, theirs = (store.begin_exchange(request)() for store in stores)
        assert torch.equal(ours.clocks, theirs.clocks)
        assert torch.equal(ours.stale, theirs.stale)
        assert all(torch.equal(ours.values[name], theirs.values[name]) for name in ("weight", "sum"))
    assert torch.equal(stores[0].live_rows(), stores[1].live_rows())
    remote.close()


def test_collection_when_cut_over_servers_then_rows_and_training_are_those_of_one(tmp_path, server, local):
    tables = LAYOUT.tables
    whole = StoreBackend.create("net", LAYOUT, RowSGD(0.1), servers=[local], seed=5, dynamic=DynamicRows())
    (tmp_path / "second").mkdir()
    with running(tmp_path / "second") as second:
        servers = [connect(x.endpoint, transport="tcp") for x in (server, second)]
        cuts = [("b", 167, 1, 0), ("a", 10**12 // 3, 0, 1), ("a", 10**12 // 3 + 1, 1, 0), ("b", 167, 0, 1)]
        cuts += [("b", 166, 1, 2), ("a", 10**12 // 3, 1, 2)]
        parts = tuple(TablePart("net", t, rows, at, stripe=stripe, num_stripes=3) for t, rows, at, stripe in cuts)
        plan = PlacementPlan("size", 2, parts)
        cut = StoreBackend.create("net", LAYOUT, RowSGD(0.1), servers=servers, plan=plan, seed=5, dynamic=DynamicRows())
        collections = []
        for backend in (whole, cut):
            collection = EmbeddingBagCollection(tables, optimizer=RowSGD(0.1), device="meta")
            collection.bind(backend)
            collections.append(collection)
        for _ in range(5):
            sparse = batch()
            outputs = [collection(sparse) for collection in collections]
            assert torch.allclose(*outputs)
            for output in outputs:
                output.square().sum().backward()
        saved = collections[1].state_dict()
        reference = collections[0].state_dict()
        assert (
            saved.keys()
            == reference.keys()
            == {f"embedding_bags.{table}.{name}" for table in "ab" for name in ("ids", "weight", "step")}
        )
        assert all(torch.allclose(saved[key], reference[key]) for key in saved)
        assert len(saved["embedding_bags.a.ids"]) < 61
        collections[0](batch(50)).sum().backward()
        collections[0].load_state_dict(saved)  # from two servers to one
        assert all(torch.equal(x, saved[key]) for key, x in collections[0].state_dict().items())
        probe = batch(100, rows=500)
        assert torch.allclose(collections[0](probe), collections[1](probe))
        for connection in servers:
            connection.close()


def test_state_dict_when_it_does_not_fit_then_nothing_is_changed_and_the_error_names_the_key(local):
    layout = TableLayout((EmbeddingBagConfig("t", 20, 4, ("t",), init_std=0.5),))
    backend = StoreBackend.create("net", layout, RowSGD(1.0), servers=[local], dynamic=DynamicRows())
    backend.apply_gradients([Ticket(SparseFeatures(("t",), torch.tensor([3, 4])))], torch.ones(2, 1, 4), lr=1.0)
    before = backend.state_dict()
    wrong = before | {"t.ids": torch.tensor([1])}
    with pytest.raises(RuntimeError, match=r"size mismatch for t.weight.*\[2, 4\].*1 rows of t.ids"):
        backend.load_state_dict(wrong)
    assert all(torch.equal(x, before[key]) for key, x in backend.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key.*t.weight"):
        backend.load_state_dict({key: x for key, x in before.items() if key != "t.weight"})
    dense = {"t.weight": torch.randn(20, 4), "t.step": torch.tensor(7)}
    backend.load_state_dict(dense)  # of a table whose rows all exist
    assert torch.equal(backend.read("t", "weight"), dense["t.weight"])
    assert backend.step == 7


def test_requests_when_they_are_wrong_then_refused_and_nothing_is_changed(server):
    remote = connect(server.endpoint, transport="tcp")
    store = remote.create_embedding_store("t", LAYOUT, RowSGD(0.1), seed=0, dynamic=DynamicRows())
    remote.create_embedding_store("all", TableLayout(LAYOUT.tables[1:]), RowSGD(0.1), seed=0)
    refused = [
        ("read", {"array": "sum"}, [torch.tensor([1])], "has \\['weight'\\], got 'sum'"),
        ("read", {"array": "weight"}, [torch.tensor([-1])], "rows must be in"),
        ("live_rows", {"first_slot": -1, "num_slots": 1}, [], "slots from 0 on"),
        ("live_rows", {"first_slot": 0, "num_slots": 2**40}, [], "slots from 0 on"),
        ("size", {"more": 1}, [], "takes the arguments"),
    ]
    for operation, arguments, arrays, message in refused:
        with pytest.raises(RequestRefusedError, match=message):
            remote.connection.request(operation, store="t", arguments=arguments, arrays=arrays)
    pushed = [
        ("insert", {}, [torch.tensor([2**50])], "rows must be in"),
        ("write", {"array": "weight"}, [torch.tensor([1])], "takes one array of values"),
        ("write", {"array": "weight"}, [torch.tensor([1]), torch.ones(2, 8)], r"shape \[1, 8\], got .* \[2, 8\]"),
        ("write", {"array": "weight"}, [torch.tensor([1]), torch.ones(1, 8).double()], "takes torch.float32"),
        ("clear", {}, [torch.tensor([1])], "takes 0 arrays"),
    ]
    for operation, arguments, arrays, message in pushed:
        with pytest.raises(RequestRefusedError, match=message):
            remote.connection.wait(remote.connection.push(operation, store="t", arguments=arguments, arrays=arrays))
    with pytest.raises(KeyError, match="'all' has no dynamic rows, which size is for"):
        remote.connection.request("size", store="all")
    assert store.num_live == 0
    remote.close()


def test_hashes_as_ids_when_cut_over_servers_then_rows_and_training_are_those_of_one(tmp_path, server, local):
    table = EmbeddingBagConfig("t", 2**64 - 1, 8, ("x",), init_std=0.5)
    hashes = torch.randint(-(2**63), 2**63 - 1, (40,))
    hashes[:4] = torch.tensor([0, 2**63 - 1, -(2**63), -2])
    hashes[hashes == -1] = 7
    (tmp_path / "second").mkdir()
    with running(tmp_path / "second") as second:
        servers = [connect(x.endpoint, transport="tcp") for x in (server, second)]
        stripes = [(rows_in_stripe(2**64 - 1, i, 2), i) for i in range(2)]
        parts = tuple(TablePart("net", "t", rows, server=i, stripe=i, num_stripes=2) for rows, i in stripes)
        collections = []
        for stores, plan, kind, options in (
            ([local], None, StoreBackend, {}),
            (servers, PlacementPlan("size", 2, parts), StoreBackend, {}),
            (servers, PlacementPlan("size", 2, parts), CachedBackend, {"cache_rows": 9, "staleness": 0}),
        ):
            collection = EmbeddingBagCollection([table], optimizer=RowSGD(0.5), device="meta")
            options = options | {"servers": stores, "plan": plan, "seed": 5, "dynamic": DynamicRows()}
            collection.bind(kind.create("net", collection.layout, RowSGD(0.5), **options))
            collections.append(collection)
            for _ in range(3):
                for ids in hashes.view(4, 10):
                    collection(SparseFeatures(("x",), ids)).square().sum().backward()
            collection.flush()
            saved = collection.state_dict()
            for key, value in collections[0].state_dict().items():
                torch.testing.assert_close(saved[key], value, msg=key)
            if plan is not None:
                for each in servers:
                    assert 0 < each.embedding_store("net").num_live < 40
                    each.remove("net")
        store = servers[0].create_embedding_store("u", collection.layout, RowSGD(), seed=0, dynamic=DynamicRows())
        with pytest.raises(RequestRefusedError, match=r"ids must be in"):
            store.pooled_lookup(SparseFeatures(("x",), torch.tensor([-1])))
        for each in servers:
            each.close()
