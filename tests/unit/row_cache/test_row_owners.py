"""Workers in step: one of those that have gradients of a row trains it with their sum, and all end as one process."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from thread_group import on_threads

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache import CachedBackend
from lightning_recsys.row_cache.owners import RowGradients, sum_at_owners
from lightning_recsys.stores import DynamicRows, MappedStores

CPU = torch.device("cpu")


# --- Sums at owners --------------------------------------------------------------------------------------------------


def gradients(keys: list[int], dim: int, rank: int) -> RowGradients:
    generator = torch.Generator().manual_seed(rank)
    return RowGradients(np.array(keys, dtype=np.int64), torch.randn(len(keys), dim, generator=generator))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shift", [0, 2**40, -(2**62)], ids=["", "large keys", "negative keys"])
def test_rows_when_summed_then_each_has_one_owner_among_those_that_have_gradients_of_it(size, shift):
    rng = np.random.default_rng(size)
    keys = [
        [(rng.choice(50, rng.integers(0, 40), replace=False) + shift).tolist() for _ in range(2)] for _ in range(size)
    ]
    # One worker has not looked the second collection up, nobody the third.
    given = [
        [
            gradients(keys[rank][0], 3, rank),
            gradients(keys[rank][1], 5, rank) if rank else None,
            None,
        ]
        for rank in range(size)
    ]
    before = copy.deepcopy(given)
    found = on_threads(size, lambda rank, group: sum_at_owners(given[rank], group, CPU))
    for part, dim in ((0, 3), (1, 5)):
        expected: dict[int, torch.Tensor] = {}
        for worker in before:
            if (own := worker[part]) is not None:
                for key, gradient in zip(own.keys.tolist(), own.sums, strict=True):
                    expected[key] = expected.get(key, torch.zeros(dim)) + gradient
        owned: dict[int, torch.Tensor] = {}
        for worker, result in zip(given, found, strict=True):
            if worker[part] is None:
                assert result.rows[part] is None if size == 1 else not len(result.rows[part])
                continue
            for row in result.rows[part].tolist():
                key = int(worker[part].keys[row])
                assert key not in owned, "two owners"
                owned[key] = worker[part].sums[row]
        assert owned.keys() == expected.keys()
        for key, total in expected.items():
            torch.testing.assert_close(owned[key], total, rtol=1e-6, atol=1e-6)
    assert all(result.rows[2] is None for result in found)


def test_bytes_when_rows_are_summed_then_every_gradient_that_another_worker_owns_crosses_once_and_keys_are_short():
    keys, dim = list(range(1000)), 16
    given = [[gradients(keys, dim, rank)] for rank in range(3)]
    found = on_threads(3, lambda rank, group: sum_at_owners(given[rank], group, CPU))
    owned = [len(result.rows[0]) for result in found]
    assert sum(owned) == 1000
    assert min(owned) > 270, "about a third each"
    for result, own in zip(found, owned, strict=True):
        sent, received = 1000 - own, 2 * own
        assert result.num_bytes == 4 * dim * (sent + received) + 2 * 2 * 4 * 1000
    nobody = on_threads(2, lambda rank, group: sum_at_owners([None, None], group, CPU))
    assert [(result.rows, result.num_bytes) for result in nobody] == [([None, None], 0)] * 2


# --- Training in step ------------------------------------------------------------------------------------------------

FEATURES = ("user", "friend", "movie")
TABLES = [
    EmbeddingBagConfig("users", 20, 4, ("user", "friend"), init_std=0.5),
    EmbeddingBagConfig("movies", 15, 4, ("movie",), "mean", init_std=0.5),
]
RULES = [RowSGD(0.1), RowAdagrad(0.1, weight_decay=0.2), RowWiseAdagrad(0.1)]
RULES += [RowAdam(0.01, weight_decay=0.2), RowFTRL(0.1, l1=0.01)]


def batch(rank: int, step: int) -> SparseFeatures:
    """Ranks differ in how many examples they have, as at the end of an epoch; ids repeat within and over them."""
    size, generator = 6 + rank, torch.Generator().manual_seed(100 * rank + step)
    lengths = torch.randint(1, 4, (3 * size,), generator=generator)
    bounds = [0, *lengths.view(3, -1).sum(1).cumsum(0).tolist()]
    limits = (20, 20, 15)
    values = [torch.randint(0, n, (bounds[f + 1] - bounds[f],), generator=generator) for f, n in enumerate(limits)]
    return SparseFeatures(FEATURES, torch.cat(values), lengths=lengths)


def loss(collection: EmbeddingBagCollection, sparse: SparseFeatures) -> torch.Tensor:
    return (collection(sparse) - 3).square().sum()  # far from what rows begin with, so that no gradients cancel


def finish(backend: CachedBackend, rank: int, group) -> None:
    owned = sum_at_owners([backend.take_gradients()], group, CPU)
    if owned.rows[0] is not None:
        backend.finish_step(owned.rows[0], counts=rank == 0)
    backend.flush()
    group.barrier().wait()


@pytest.fixture
def server(tmp_path):
    opened = MappedStores(tmp_path)
    yield opened
    opened.close()


def open_worker(start, server, rank, size, **options) -> EmbeddingBagCollection:
    worker = copy.deepcopy(start)
    options |= {"in_step": size > 1}
    backend = CachedBackend.create("net", worker.layout, worker.optimizer, servers=[server], **options)
    worker.bind(backend, copy_rows=rank == 0, gradient_scale=1 / size)
    return worker


def train(start, server, size, steps, rank, group, **options) -> dict[str, torch.Tensor]:
    if rank == 0:
        open_worker(start, server, rank, size, **options)
    group.barrier().wait()
    worker = open_worker(start, server, 1, size, **options)
    for step in range(steps):
        loss(worker, batch(rank, step)).backward()
        if size > 1:
            finish(worker.embedding_bags, rank, group)
    return worker.state_dict()


def mean_of_all(start, size, steps) -> dict[str, torch.Tensor]:
    """What one process comes to with the batches of all workers and the mean of their gradients."""
    alone = copy.deepcopy(start)
    for step in range(steps):
        (loss(alone, SparseFeatures.cat([batch(rank, step) for rank in range(size)])) / size).backward()
    return alone.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, {"cache_rows": 0, "staleness": 0, "any_rule": True}) for rule in RULES),
        *((rule, {"cache_rows": 12, "staleness": 0}) for rule in RULES[:3]),
        (RULES[1], {"cache_rows": 100, "staleness": 0, "clock": "sum"}),
    ],
    ids=str,
)
def test_workers_when_in_step_then_equal_one_process_with_the_mean_gradient(server, size, rule, options):
    torch.manual_seed(0)
    start = EmbeddingBagCollection(TABLES, optimizer=rule)
    expected = mean_of_all(start, size, 5)
    for trained in on_threads(size, partial(train, start, server, size, 5, **options)):
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                trained[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text
            )


def test_copies_when_in_step_then_owned_ones_are_checked_only_and_others_fetched_at_once(server):
    start = EmbeddingBagCollection([EmbeddingBagConfig("t", 30, 4, ("x",))], optimizer=RowAdagrad(0.1))
    ids = torch.arange(30)

    def work(rank, group):
        if rank == 0:
            open_worker(start, server, 0, 2, cache_rows=30, staleness=0)
        group.barrier().wait()
        worker = open_worker(start, server, 1, 2, cache_rows=30, staleness=0)
        backend, counts = worker.embedding_bags, []
        for _ in range(3):
            worker(SparseFeatures(("x",), ids)).square().sum().backward()
            finish(backend, rank, group)
            counts.append(backend.telemetry())
        return counts

    first, second = on_threads(2, work)
    refreshes = [[round(x["cache/refresh_rate"] * x["cache/reads"]) for x in counts] for counts in (first, second)]
    assert [sum(rows) for rows in zip(*refreshes, strict=True)] == [0, 30, 60], "each row is refreshed by one of them"
    assert all(x["cache/stale_rate"] == 0 for x in first + second), "who does not own a row knows that it is outdated"


@pytest.mark.parametrize("cache_rows", [0, 12])
def test_dynamic_rows_when_in_step_then_train_as_those_of_one_process(server, cache_rows):
    tables = [dataclasses.replace(table, init_std=0.0) for table in TABLES]
    alone, start = (EmbeddingBagCollection(tables, optimizer=RowAdagrad(0.1), device=x) for x in (None, "meta"))
    expected = copy.deepcopy(alone)
    expected.load_state_dict(mean_of_all(alone, 2, 5))

    options = {"cache_rows": cache_rows, "staleness": 0, "in_step": True}
    first = CachedBackend.create(
        "net", start.layout, start.optimizer, servers=[server], dynamic=DynamicRows(), **options
    )
    (store,) = first.stores  # which can be open once
    parts = [TablePart("net", x.name, x.num_embeddings, server=0) for x in tables]

    def work(rank, group):
        worker = copy.deepcopy(start)
        backend = CachedBackend(worker.layout, worker.optimizer, stores=[(store, parts)], **options)
        worker.bind(backend, gradient_scale=1 / 2)
        for step in range(5):
            loss(worker, batch(rank, step)).backward()
            finish(worker.embedding_bags, rank, group)
        with torch.no_grad():
            return [worker(batch(0, step)) for step in range(5)]

    for trained in on_threads(2, work):
        with torch.no_grad():
            torch.testing.assert_close(trained, [expected(batch(0, step)) for step in range(5)], rtol=1e-5, atol=1e-6)
    store.close()


def test_gradients_when_another_step_begins_before_they_have_met_then_refused_by_name(server):
    worker = open_worker(EmbeddingBagCollection(TABLES), server, 0, 2, cache_rows=0, staleness=0)
    loss(worker, batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"gradients of an earlier step still wait .* self\.manual_backward\(loss\)"):
        worker(batch(0, 1))


def test_lookups_of_one_step_when_several_then_make_one_update(server):
    start = EmbeddingBagCollection(TABLES, optimizer=RowAdagrad(0.1))

    def work(rank, group):
        if rank == 0:
            open_worker(start, server, 0, 2, cache_rows=5, staleness=0)
        group.barrier().wait()
        worker = open_worker(start, server, 1, 2, cache_rows=5, staleness=0)
        for step in range(3):
            # Rank 1 looks up once in the first step, and not at all in the second.
            steps = [2 * step, 2 * step + 1][: 2 if rank == 0 or step == 2 else 1 - step]
            sum((loss(worker, batch(rank, one)) for one in steps), torch.zeros((), requires_grad=True)).backward()
            finish(worker.embedding_bags, rank, group)
        return worker.state_dict()

    alone = copy.deepcopy(start)
    for step in range(3):
        batches = [batch(0, 2 * step), batch(0, 2 * step + 1), batch(1, 2 * step), batch(1, 2 * step + 1)]
        used = SparseFeatures.cat(batches[: [3, 2, 4][step]])
        (loss(alone, used) / 2).backward()
    for trained in on_threads(2, work):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
