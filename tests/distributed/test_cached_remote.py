"""A cache over two servers, behind their sockets: it trains as the local tables do, and messages that overlap agree."""

import copy
import threading
from itertools import pairwise

import pytest
import torch
from server_helpers import running

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowSGD, RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.placement import place_tables
from lightning_recsys.row_cache import CachedBackend
from lightning_recsys.stores import table_costs

pytestmark = pytest.mark.distributed

TABLES = [
    EmbeddingBagConfig("users", 400, 8, ("user",), init_std=0.5),  # more than a fair share: cut by rows
    EmbeddingBagConfig("movies", 100, 8, ("movie", "seen"), "mean", init_std=0.5),
    EmbeddingBagConfig("genres", 20, 8, ("genre",), init_std=0.5),
]
FEATURES = ("user", "movie", "seen", "genre")


@pytest.fixture
def endpoints(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    with running(tmp_path / "a") as first, running(tmp_path / "b") as second:
        yield [first.endpoint, second.endpoint]


def bind(collection, endpoints, *, copy_rows=True, **options):
    opened = [connect(endpoint, transport="tcp") for endpoint in endpoints]
    plan = place_tables(table_costs("net", collection.layout, collection.optimizer), 2, method="size")
    assert len({part.server for part in plan.parts if part.table == "users"}) == 2
    backend = CachedBackend.create("net", collection.layout, collection.optimizer, servers=opened, plan=plan, **options)
    collection.bind(backend, copy_rows=copy_rows)
    return backend, opened


def batch(kind: str, size: int = 16) -> SparseFeatures:
    lengths = torch.ones(4 * size).long() if kind == "single" else torch.randint(0, 4, (4 * size,))
    bounds = [0, *lengths.view(4, -1).sum(1).cumsum(0).tolist()]
    rows = (400, 100, 100, 20)
    values = torch.cat([torch.randint(0, n, (bounds[f + 1] - bounds[f],)) for f, n in enumerate(rows)])
    weights = torch.rand(values.numel()) if kind == "weighted" else None
    return SparseFeatures(FEATURES, values, lengths=None if kind == "single" else lengths, weights=weights)


@pytest.mark.parametrize("rule", [RowSGD(0.1), RowAdagrad(0.1), RowWiseAdagrad(0.1)], ids=lambda x: type(x).__name__)
def test_collection_when_cached_before_two_servers_then_20_steps_equal_the_local_ones(endpoints, rule):
    local = EmbeddingBagCollection(TABLES, optimizer=rule)
    remote = copy.deepcopy(local)
    backend, opened = bind(remote, endpoints, cache_rows=60, staleness=2)
    steps = [batch(["single", "bags", "weighted"][step % 3]) for step in range(21)]
    for sparse, coming in pairwise(steps):
        expected, pooled = local(sparse), remote(sparse)
        remote.prefetch(coming)
        torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
        for result in (expected, pooled):
            (result - 1).square().sum().backward()
    told = backend.telemetry()
    assert told["cache/stale_rate"] == 0
    assert told["cache/evictions"] > 0
    assert told["cache/refresh_rate"] > 0
    arrays = sum(told[f"comm/{kind}_bytes"] for kind in ("rows", "clocks", "gradients"))
    assert arrays > 0
    assert backend.step == 20
    trained = remote.state_dict()
    for key, tensor in local.state_dict().items():
        torch.testing.assert_close(trained[key], tensor, rtol=1e-5, atol=1e-5)
    for stores in opened:
        stores.close()


@pytest.mark.parametrize("staleness", [0, 3, None])
def test_workers_when_they_train_at_once_then_the_servers_have_every_update(endpoints, staleness):
    table = EmbeddingBagConfig("users", 40, 2, ("user",), init_std=0.0)
    workers = [EmbeddingBagCollection([table], optimizer=RowSGD(1.0)) for _ in range(2)]
    done = torch.zeros(2, 40)
    opened = []
    for index, worker in enumerate(workers):
        opened.append([connect(endpoint, transport="tcp") for endpoint in endpoints])
        plan = place_tables(table_costs("net", worker.layout, worker.optimizer), 2, method="size")
        options = {"cache_rows": 10, "staleness": staleness, "plan": plan, "servers": opened[index]}
        worker.bind(CachedBackend.create("net", worker.layout, worker.optimizer, **options), copy_rows=not index)
    failures = []

    def run(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        steps = [torch.randint(0, 40, (12,), generator=generator) for _ in range(30)]
        worker = workers[index]
        try:
            for ids, coming in zip(steps, [*steps[1:], None], strict=True):
                pooled = worker(SparseFeatures(("user",), ids))
                if coming is not None:
                    worker.prefetch(SparseFeatures(("user",), coming))
                assert torch.equal(pooled[:, 0, index], -done[index, ids]), "read my updates"
                pooled[:, 0, index].sum().backward()
                done[index] += torch.bincount(ids, minlength=40)
            worker.flush()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.equal(workers[0].embedding_bags.read("users", "weight"), -done.t())
    for stores in (*opened[0], *opened[1]):
        stores.close()
