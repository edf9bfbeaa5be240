"""A collection whose rows lie on two servers, behind their sockets, trains and saves as the local one does."""

import copy

import pytest
import torch
from server_helpers import running

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.substitution import substitute_embeddings
from lightning_recsys.optim import RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.placement import place_tables
from lightning_recsys.stores import StoreBackend, table_costs
from lightning_recsys.sync import StalenessNormalization

pytestmark = pytest.mark.distributed

TABLES = [
    EmbeddingBagConfig("users", 400, 8, ("user",), init_std=0.5),  # more than a fair share: cut by rows
    EmbeddingBagConfig("movies", 100, 8, ("movie", "seen"), "mean", init_std=0.5),
    EmbeddingBagConfig("genres", 20, 8, ("genre",), init_std=0.5),
]
FEATURES = ("user", "movie", "seen", "genre")


@pytest.fixture
def servers(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    with running(tmp_path / "a") as first, running(tmp_path / "b") as second:
        opened = [connect(server.endpoint, transport="tcp") for server in (first, second)]
        yield opened
        for stores in opened:
            stores.close()


def batch(kind: str, size: int = 16) -> SparseFeatures:
    lengths = torch.ones(4 * size).long() if kind == "single" else torch.randint(0, 4, (4 * size,))
    bounds = [0, *lengths.view(4, -1).sum(1).cumsum(0).tolist()]
    rows = (400, 100, 100, 20)
    values = torch.cat([torch.randint(0, n, (bounds[f + 1] - bounds[f],)) for f, n in enumerate(rows)])
    weights = torch.rand(values.numel()) if kind == "weighted" else None
    return SparseFeatures(FEATURES, values, lengths=None if kind == "single" else lengths, weights=weights)


def plan_for(name, collection):
    return place_tables(table_costs(name, collection.layout, collection.optimizer), 2, method="size")


@pytest.mark.parametrize(
    "rule", [RowWiseAdagrad(0.1), RowAdam(0.01, weight_decay=0.1), RowFTRL(0.1)], ids=lambda x: type(x).__name__
)
def test_collection_when_cut_over_two_servers_then_20_steps_equal_the_local_ones(servers, rule):
    local = EmbeddingBagCollection(TABLES, optimizer=rule)
    remote = copy.deepcopy(local)
    plan = plan_for("net", remote)
    assert len({part.server for part in plan.parts if part.table == "users"}) == 2
    backend = StoreBackend.create("net", remote.layout, rule, servers=servers, plan=plan)
    remote.bind(backend)
    for step in range(20):
        sparse = batch(["single", "bags", "weighted"][step % 3])
        expected, pooled = local(sparse), remote(sparse)
        torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
        for result in (expected, pooled):
            (result - 1).square().sum().backward()
    remote.flush()
    assert backend.step == 20
    saved = remote.state_dict()
    assert list(saved) == list(local.state_dict())
    remote.unbind()
    for key, tensor in local.state_dict().items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-5, atol=1e-5)
        assert torch.equal(remote.state_dict()[key], saved[key])


def prefetching(servers, *, normalization=None) -> EmbeddingBagCollection:
    """Rows that start at 0, on both servers, and move by 1 for each gradient of 1."""
    tables = [EmbeddingBagConfig(x.name, x.num_embeddings, 8, x.feature_names, init_std=0.0) for x in TABLES]
    collection = EmbeddingBagCollection(tables, optimizer=RowSGD(1.0))
    plan, layout = plan_for("net", collection), collection.layout
    options = {"servers": servers, "plan": plan, "normalization": normalization}
    collection.bind(StoreBackend.create("net", layout, collection.optimizer, **options))
    return collection


@pytest.mark.parametrize("kind", ["single", "bags", "weighted"])
def test_prefetch_then_rows_lack_the_last_update_and_sums_are_exact(servers, kind):
    collection, steps = prefetching(servers), [batch(kind) for _ in range(12)]
    expected = EmbeddingBagCollection(collection.tables, optimizer=RowSGD(1.0))
    before_the_last = expected(steps[0]).detach()
    for step, sparse in enumerate(steps):
        pooled = collection(sparse)
        torch.testing.assert_close(pooled, before_the_last, rtol=1e-5, atol=1e-5)
        if step + 1 < len(steps):
            collection.prefetch(steps[step + 1])
            before_the_last = expected(steps[step + 1]).detach()
        pooled.sum().backward()
        expected(sparse).sum().backward()
    collection.flush()
    assert collection.embedding_bags.num_early_lookups == len(steps) - 1
    assert not any(server.connection._pending for server in servers)
    for key, rows in expected.state_dict().items():
        torch.testing.assert_close(collection.state_dict()[key], rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", ["ids", "weights", "none"])
def test_prefetch_when_another_batch_comes_then_its_rows_are_fetched(servers, other):
    collection, announced = prefetching(servers), batch("weighted")
    for _ in range(2):
        collection(announced).sum().backward()
    collection.prefetch(announced)
    weights = None if other == "none" else announced.weights * (2 if other == "weights" else 1)
    values = announced.values.flip(0) % 20 if other == "ids" else announced.values
    another = SparseFeatures(FEATURES, values, lengths=announced.lengths, weights=weights)
    expected = collection.embedding_bags.lookup_frozen(collection.resolve(another))
    torch.testing.assert_close(collection(another), expected)
    assert collection.embedding_bags.num_early_lookups == 0
    collection.flush()
    assert not any(server.connection._pending for server in servers)


def test_prefetch_when_rows_are_written_then_the_next_lookup_sees_them(servers):
    collection, sparse = prefetching(servers), batch("single")
    collection(sparse).sum().backward()
    collection.prefetch(sparse)
    collection.load_state_dict({key: torch.full_like(rows, 3.0) for key, rows in collection.state_dict().items()})
    assert (collection(sparse) == 3.0).all()


def test_prefetch_then_versions_count_the_update_that_an_early_lookup_lacks(servers):
    collection, sparse = prefetching(servers, normalization=StalenessNormalization("identity")), batch("single")
    for _ in range(5):
        pooled = collection(sparse)
        collection.prefetch(sparse)
        pooled.sum().backward()
    collection.flush()
    observed = collection.embedding_bags.observed
    rows = len(torch.unique(torch.cat([sparse.values[:16], 400 + sparse.values[16:48], 500 + sparse.values[48:]])))
    assert observed.counts == {1: rows, 2: 4 * rows}, "a fresh gradient counts 1: its own update"


def test_plain_embedding_when_cut_over_two_servers_then_it_trains_as_torchs(servers):
    plain = torch.nn.Sequential(torch.nn.Embedding(300, 8, padding_idx=0), torch.nn.Flatten(), torch.nn.Linear(16, 1))
    served = copy.deepcopy(plain)
    substitution = substitute_embeddings(served, optimizer=RowSGD(0.1), names=["0"])
    (collection,) = substitution.collections.values()
    backend = StoreBackend.create(
        "0", collection.layout, collection.optimizer, servers=servers, plan=plan_for("0", collection)
    )
    assert len(backend.stores) == 2
    collection.bind(backend)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, served)]
    substitution.attach_to(optimizers[1:])
    for _ in range(5):
        ids = torch.randint(0, 300, (32, 2))
        for module, optimizer in zip((plain, served), optimizers, strict=True):
            optimizer.zero_grad()
            (module(ids) - 1).square().mean().backward()
            optimizer.step()
    collection.unbind()
    substitution.restore()
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(served.state_dict()[key], tensor, rtol=1e-5, atol=1e-6)
