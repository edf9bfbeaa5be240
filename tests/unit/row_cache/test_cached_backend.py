"""A collection over stores with a cache: whatever is kept here, no update is lost, doubled or seen too late."""

import copy
import gc
from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mapped_servers import mapped_servers

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.errors import StoreReplacedError
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.accumulating import CURRENT, UNSENT
from lightning_recsys.placement import PlacementPlan, TablePart
from lightning_recsys.row_cache import CachedBackend, SharedIndex
from lightning_recsys.stores import MappedStores, StoreBackend
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore
from lightning_recsys.sync.clocks import MAX_CLOCK

TABLES = [
    EmbeddingBagConfig("users", 40, 4, ("user", "friend"), init_std=0.5),
    EmbeddingBagConfig("movies", 30, 4, ("movie",), "mean", init_std=0.5),
    EmbeddingBagConfig("genres", 10, 4, ("genre",), init_std=0.5),
]
FEATURES = ("user", "friend", "movie", "genre")
SIZES = {"users": 40, "movies": 30, "genres": 10}
RULES = [RowSGD(0.125), RowAdagrad(0.1), RowWiseAdagrad(0.1)]


def part(table: str, server: int, stripe: int = 0, num_stripes: int = 1) -> TablePart:
    rows = len(range(stripe, SIZES[table], num_stripes))
    return TablePart("net", table, rows, server, stripe=stripe, num_stripes=num_stripes)


BY_ROWS = PlacementPlan(
    "size",
    2,
    (
        part("users", 1, 0, 3),
        part("users", 0, 1, 3),
        part("users", 1, 2, 3),
        part("movies", 0, 0, 2),
        part("movies", 1, 1, 2),
        part("genres", 0),
    ),
)


def batch(kind: str = "single", size: int = 6) -> SparseFeatures:
    lengths = torch.ones(4 * size).long() if kind == "single" else torch.randint(0, 4, (4 * size,))
    bounds = [0, *lengths.view(4, -1).sum(1).cumsum(0).tolist()]
    limits = (40, 40, 30, 10)
    values = torch.cat([torch.randint(0, n, (bounds[f + 1] - bounds[f],)) for f, n in enumerate(limits)])
    weights = torch.rand(values.numel()) if kind == "weighted" else None
    return SparseFeatures(FEATURES, values, lengths=None if kind == "single" else lengths, weights=weights)


def batches(count: int) -> list[SparseFeatures]:
    kinds = ["single", "bags", "weighted"]
    return [batch(kinds[step % 3], size=0 if step == 7 else 6) for step in range(count)]


def train(collection: EmbeddingBagCollection, steps: list[SparseFeatures], *, prefetch: bool, window: int = 0) -> None:
    for step, (sparse, coming) in enumerate(zip(steps, [*steps[1:], None], strict=True)):
        pooled = collection(sparse)
        for ahead, later in enumerate(steps[step + 1 : step + 1 + window]):
            if not step or ahead == window - 1:
                collection.announce(later, ahead=ahead)
        if prefetch and coming is not None:
            collection.prefetch(coming)
        (pooled - 1).square().sum().backward()


@pytest.fixture(params=["in place", "by messages"])
def servers(tmp_path, request, monkeypatch):
    """Two of them, whose rows this process maps, or whose rows it has to ask for."""
    if request.param == "by messages":
        monkeypatch.setattr("lightning_recsys.stores.mapped.MappedEmbeddingStore", Recorded)
    with mapped_servers(tmp_path, 2) as opened:
        yield opened


def bind(collection, servers, *, name="net", plan=None, copy_rows=True, **options) -> CachedBackend:
    """With a cache that holds everything for ever, unless told otherwise."""
    options = {"cache_rows": 1000, "staleness": None} | options
    make = CachedBackend if options["cache_rows"] is not None else StoreBackend
    if make is StoreBackend:
        options = {}
    backend = make.create(
        name if plan is None else "net",
        collection.layout,
        collection.optimizer,
        servers=servers if plan else servers[:1],
        plan=plan,
        **options,
    )
    collection.bind(backend, copy_rows=copy_rows)
    return backend


class Recorded(MappedEmbeddingStore):
    """Keeps the requests that it gets."""

    requests: ClassVar[list] = []

    def begin_exchange(self, request):
        self.requests.append(request)
        return super().begin_exchange(request)


class Late(MappedEmbeddingStore):
    """Does what it is asked for when somebody waits for it, as a busy server would; in the order it was asked."""

    waiting: ClassVar[list] = []

    def begin_exchange(self, request):
        entry = [request]
        self.waiting.append((self, entry))

        def answer():
            while len(entry) < 2:
                store, first = self.waiting.pop(0)
                first.append(MappedEmbeddingStore.begin_exchange(store, first[0])())
            return entry[1]

        return answer

    def flush(self):
        while self.waiting:
            store, first = self.waiting.pop(0)
            first.append(MappedEmbeddingStore.begin_exchange(store, first[0])())


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("lightning_recsys.stores.mapped.MappedEmbeddingStore", Recorded)
    Recorded.requests.clear()
    return Recorded.requests


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("cache_rows", [0, 7, 1000])
@pytest.mark.parametrize("rule", RULES, ids=lambda x: type(x).__name__)
def test_one_worker_when_rows_are_cached_then_20_steps_equal_those_without(servers, rule, cache_rows, prefetch):
    plain = EmbeddingBagCollection(TABLES, optimizer=rule)
    start, steps = copy.deepcopy(plain), batches(20)
    train(plain, steps, prefetch=False)
    for staleness in (0, 3, None):
        for plan in (None, BY_ROWS):
            cached = copy.deepcopy(start)
            backend = bind(cached, servers, plan=plan, cache_rows=cache_rows, staleness=staleness)
            train(cached, steps, prefetch=prefetch)
            assert backend.step == 20
            trained = cached.state_dict()
            assert list(trained) == list(plain.state_dict())
            for key, tensor in plain.state_dict().items():
                torch.testing.assert_close(trained[key], tensor, rtol=1e-5, atol=1e-6)
                if isinstance(rule, RowSGD) and staleness == 0:  # its rate is a power of 2: a product is not rounded
                    assert torch.equal(trained[key], tensor), key
            for server in servers:
                if "net" in server._stored():
                    server.remove("net")


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("rule", RULES, ids=lambda x: type(x).__name__)
def test_one_worker_when_nothing_may_be_stale_then_it_equals_no_cache_bit_for_bit(servers, rule, prefetch):
    uncached = EmbeddingBagCollection(TABLES, optimizer=rule)
    cached, steps = copy.deepcopy(uncached), batches(20)
    bind(uncached, servers, name="uncached", cache_rows=0, staleness=0)
    bind(cached, servers, name="cached", cache_rows=20, staleness=0)
    train(uncached, steps, prefetch=False)
    train(cached, steps, prefetch=prefetch)
    assert all(torch.equal(tensor, uncached.state_dict()[key]) for key, tensor in cached.state_dict().items())


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_messages_when_a_server_takes_its_time_then_they_say_what_they_said_when_they_were_sent(
    servers, monkeypatch, staleness, prefetch
):
    plain = EmbeddingBagCollection(TABLES, optimizer=RowAdagrad(0.1))
    cached, steps = copy.deepcopy(plain), batches(20)
    monkeypatch.setattr("lightning_recsys.stores.mapped.MappedEmbeddingStore", Late)
    bind(cached, servers, plan=BY_ROWS, cache_rows=15, staleness=staleness)
    train(plain, steps, prefetch=False)
    train(cached, steps, prefetch=prefetch)
    for key, tensor in cached.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[key], tensor, rtol=1e-5, atol=1e-6)
    assert not Late.waiting


def one_table(servers, count, *, rows=12, **options) -> list[EmbeddingBagCollection]:
    """Workers of one table of zeros; each trains a column of its own, and every update subtracts exactly 1."""
    table = EmbeddingBagConfig("t", rows, count, ("x",), init_std=0.0)
    workers = [EmbeddingBagCollection([table], optimizer=RowSGD(1.0)) for _ in range(count)]
    for index, worker in enumerate(workers):
        bind(worker, servers, copy_rows=not index, **options)
    return workers


def ids(*values: int) -> SparseFeatures:
    return SparseFeatures(("x",), torch.tensor(values, dtype=torch.int64))


def update(worker: EmbeddingBagCollection, index: int, sparse: SparseFeatures, *, check=None) -> torch.Tensor:
    """One step of worker ``index``; each occurrence of an id subtracts 1 from its column."""
    pooled = worker(sparse)
    if check is not None:
        check(worker.embedding_bags)
    pooled[..., index].sum().backward()
    return pooled.detach()[:, 0]


STEP = st.tuples(
    st.integers(0, 2),
    st.lists(st.integers(0, 11), min_size=0, max_size=5),
    st.sampled_from(["step"] * 8 + ["flush", "invalidate", "evaluate", "look", "skip", "announce"]),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(STEP, max_size=40),
    st.sampled_from([0, 1, 3, None]),
    st.sampled_from([0, 2, 5, 100]),
    st.sampled_from(["max", "sum"]),
    st.sampled_from(["lru", "lfu", "light_lfu"]),
)
def test_workers_when_they_interleave_then_no_update_is_lost_or_doubled_and_each_sees_its_own(
    servers, events, staleness, cache_rows, clock, policy
):
    options = {"staleness": staleness, "cache_rows": cache_rows, "clock": clock, "policy": policy}
    workers = one_table(servers, 3, **options)
    (store,) = workers[0].embedding_bags.stores
    done = torch.zeros(12, 3)
    announced = set()

    def check_clocks(backend):
        cache, plan = backend._held.cache, max(backend._held._waiting, key=lambda ticket: ticket.plan.number).plan
        start, current, server = (
            cache.start[plan.slots_U],
            cache.current[plan.slots_U],
            store.clocks.numpy()[plan.keys_U],
        )
        assert staleness is None or ((current - start <= staleness) & (server - current <= staleness)).all()

    for index, values, kind in events:
        worker, sparse = workers[index], ids(*values)
        if kind == "step":
            looked_up = update(worker, index, sparse, check=None if index in announced else check_clocks)
            assert torch.equal(looked_up[:, index], -done[values, index]), "read my updates"
            assert (looked_up >= -done[values]).all(), "what others did at most"
            announced.discard(index)
            done[:, index] += torch.bincount(sparse.values, minlength=12)
        elif kind == "announce":
            worker.prefetch(sparse)
            announced.add(index)  # its checks are older than its lookup
        elif kind == "evaluate":
            expected = store.rows[list(values)].clone()
            expected[:, index] = -done[values, index]  # that others have not pushed cannot be seen
            with torch.no_grad():
                assert torch.equal(worker.eval()(sparse)[:, 0], expected)
            worker.train()
        elif kind == "look":
            with torch.no_grad():
                looked_up = worker(sparse)[:, 0]
            assert torch.equal(looked_up[:, index], -done[values, index])
            assert (looked_up >= -done[values]).all()
        elif kind == "skip":
            worker(sparse)  # and no gradient comes
        else:
            getattr(worker.embedding_bags, kind)()
    for worker in workers:
        worker.flush()
    assert torch.equal(workers[0].embedding_bags.read("t", "weight"), -done)
    servers[0].remove("net")


def test_synchronous_workers_when_nothing_may_be_stale_then_they_equal_no_cache(servers):
    plain = EmbeddingBagCollection(TABLES, optimizer=RowWiseAdagrad(0.1))
    start, steps = copy.deepcopy(plain), [(batch(), batch("weighted")) for _ in range(10)]
    results = []
    for name, cache_rows in (("without", 0), ("with", 25)):
        workers = [copy.deepcopy(start), copy.deepcopy(start)]
        for index, worker in enumerate(workers):
            bind(worker, servers, name=name, copy_rows=not index, cache_rows=cache_rows, staleness=0)
        for parts in steps:
            pooled = [worker(sparse) for worker, sparse in zip(workers, parts, strict=True)]
            for result in pooled:
                (result - 1).square().sum().backward()
            for worker in workers:
                worker.flush()
        results.append(workers[1].state_dict())
    for key, tensor in results[0].items():
        torch.testing.assert_close(results[1][key], tensor, rtol=1e-6, atol=1e-6)


def kinds(request) -> tuple[int, int, int]:
    """Rows pushed, fetched and checked."""
    return request.push_rows.numel(), request.fetch_rows.numel(), request.check_rows.numel()


def test_messages_when_there_is_no_bound_then_rows_travel_once_and_when_evicted_only(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=12, staleness=None)
    recorded.clear()
    for values in [(0, 1, 2), (1, 1, 0), (2, 2), (), (0, 1, 2)] * 3:
        update(worker, 0, ids(*values))
    assert list(map(kinds, recorded)) == [(0, 3, 0)]
    worker.flush()
    assert list(map(kinds, recorded[1:])) == [(3, 0, 0)]
    worker.flush()
    assert len(recorded) == 2
    (small,) = one_table(servers, 1, name="small", cache_rows=2, staleness=None)
    recorded.clear()
    for values in [(0, 1), (1, 2), (1, 2), (1, 0)]:
        update(small, 0, ids(*values))
    # 0 was evicted after the second step, 2 after the fourth: it has to be sent yet
    assert list(map(kinds, recorded)) == [(0, 2, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0)]
    small.flush()
    assert sum(kinds(request)[0] for request in recorded[4:]) == 3
    assert sum(request.num_steps for request in recorded) == 4


def test_messages_when_rows_are_bounded_then_one_a_step_has_everything_fused(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=3, staleness=1)
    recorded.clear()
    for values in [(0, 1, 2), (0, 1, 3), (0, 4)]:
        update(worker, 0, ids(*values))
    # 2 left after the second step. 0 was updated twice and may be one ahead: it is pushed and fetched again.
    assert list(map(kinds, recorded)) == [(0, 3, 0), (0, 1, 2), (2, 2, 0)]
    assert recorded[2].push_rows.tolist() == [2, 0]
    assert recorded[2].fetch_rows.tolist() == [4, 0]


def test_messages_when_the_next_batch_is_announced_then_they_leave_before_the_update(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=4, staleness=1)
    recorded.clear()
    pooled = worker(ids(0, 1))
    worker.prefetch(ids(0, 2))
    assert list(map(kinds, recorded)) == [(0, 2, 0), (0, 1, 1)]
    pooled.sum().backward()
    pooled = worker(ids(0, 2))
    assert len(recorded) == 2, "one update ahead is allowed"
    assert pooled.flatten().tolist() == [-1, 0]
    worker.prefetch(ids(0))
    assert list(map(kinds, recorded[2:])) == [(1, 1, 0)], "the update at hand will be the second, so the first goes now"
    pooled.sum().backward()
    assert worker(ids(0)).flatten().tolist() == [-2], "it was made again to what came"
    assert len(recorded) == 3
    worker.flush()
    assert recorded[3].push_clocks.tolist() == [2, 1, 1]


def test_stale_copy_when_it_is_found_then_a_second_message_brings_the_row_with_both_updates(servers, recorded):
    first, second = one_table(servers, 2, cache_rows=12, staleness=1)
    update(first, 0, ids(5))
    for _ in range(5):
        update(second, 1, ids(5))
    second.flush()
    recorded.clear()
    assert update(first, 0, ids(5, 6)).tolist() == [[-1, -5], [0, 0]]
    assert list(map(kinds, recorded)) == [(0, 1, 1), (1, 1, 0)]
    assert first.embedding_bags.telemetry()["cache/stale_rate"] == 1 / 3


@pytest.mark.parametrize("cache_rows", [0, 100])
def test_duplicates_when_a_batch_repeats_a_row_then_it_travels_once(servers, recorded, cache_rows):
    (worker,) = one_table(servers, 1, cache_rows=cache_rows, staleness=0)
    recorded.clear()
    for _ in range(3):
        update(worker, 0, ids(*[7] * 50, *[3] * 20))
    worker.flush()
    for request in recorded:
        for rows in (request.push_rows, request.fetch_rows, request.check_rows):
            assert rows.unique().numel() == rows.numel() <= 2
    counts = worker.embedding_bags.telemetry()
    # 3 x 2 rows, each a number of 4 bytes and one float each way; a clock with every row.
    assert tuple(counts[f"comm/{kind}_bytes"] for kind in ("rows", "gradients", "clocks")) == (48, 48, 48)


def test_copy_when_too_far_ahead_then_it_is_pushed_and_its_row_comes_back(servers):
    first, second = one_table(servers, 2, cache_rows=12, staleness=1)
    looked_up, received = [], []

    def step(worker, index):
        before = worker.embedding_bags.telemetry()["comm/rows_bytes"]
        looked_up.append(update(worker, index, ids(5))[0].tolist())
        received.append(worker.embedding_bags.telemetry()["comm/rows_bytes"] - before)

    for worker, index in [(first, 0), (second, 1), (first, 0), (first, 0), (second, 1), (second, 1)]:
        step(worker, index)
    assert received == [4 + 8, 4 + 8, 0, 4 + 8, 0, 4 + 8]
    assert looked_up[-1] == [-2, -2]
    for _ in range(2):
        step(first, 0)
    assert received[-2:] == [0, 4 + 8]
    assert looked_up[-1] == [-4, -2]


def test_batch_when_announced_but_not_the_next_then_its_rows_are_there_all_the_same(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=6, staleness=None)
    pooled = worker(ids(0))
    worker.prefetch(ids(1, 2))
    pooled.sum().backward()
    recorded.clear()
    with torch.no_grad():
        assert worker.eval()(ids(2, 9, 0)).flatten().tolist() == [0, 0, -1]
    assert list(map(kinds, recorded)) == [(0, 3, 0)], "evaluation pushes nothing and reads past the cache"
    worker.train()
    recorded.clear()
    update(worker, 0, ids(0, 1))
    assert not recorded
    pooled = worker(ids(2))
    worker.prefetch(ids(3))
    worker.prefetch(ids(3))
    worker.prefetch(ids(4))
    assert list(map(kinds, recorded)) == [(0, 1, 0), (0, 1, 0)]
    worker.embedding_bags.invalidate()
    pooled.sum().backward()
    assert update(worker, 0, ids(0, 1, 2, 3, 4)).flatten().tolist() == [-2, -1, -1, 0, 0]


def test_evaluation_when_rows_are_cached_then_it_reads_through_and_leaves_cache_and_clocks_alone(servers, recorded):
    plain = EmbeddingBagCollection(TABLES, optimizer=RowSGD(0.125))
    cached = copy.deepcopy(plain)
    backend = bind(cached, servers, plan=BY_ROWS, cache_rows=1000, staleness=5)
    train(plain, steps := batches(4), prefetch=False)
    train(cached, steps, prefetch=False)
    held = len(backend._held.cache.index)
    backend.flush()
    clocks, counts = [store.clocks.clone() for store in backend.stores], backend.telemetry()
    recorded.clear()
    cached.eval()
    for sparse in batches(9):
        with torch.no_grad():
            torch.testing.assert_close(cached(sparse), plain(sparse))
    assert len(backend._held.cache.index) == held
    assert all(torch.equal(store.clocks, before) for store, before in zip(backend.stores, clocks, strict=True))
    assert {name: backend.telemetry()[name] for name in ("cache/hit_rate", "cache/miss_rate")} == {
        name: counts[name] for name in ("cache/hit_rate", "cache/miss_rate")
    }
    assert all(kinds(request)[::2] == (0, 0) for request in recorded), "only fetches"
    frozen = cached.requires_grad_(False)(sparse)
    assert not frozen.requires_grad
    assert len(backend._held.cache.index) > held, "frozen rows are kept where others train"


def test_evaluation_when_in_inference_mode_then_one_outside_of_it_works_as_well(servers):
    (worker,) = one_table(servers, 1, cache_rows=3, staleness=2)
    pooled = worker(ids(1, 2))
    worker.prefetch(ids(1, 3))
    with torch.inference_mode():
        assert worker(ids(1, 1)).flatten().tolist() == [0, 0]
    pooled.sum().backward()
    with torch.no_grad():
        assert worker(ids(2, 3)).flatten().tolist() == [-1, 0]
    assert update(worker, 0, ids(1, 3)).flatten().tolist() == [-1, 0]
    with torch.inference_mode():
        assert worker(ids(*range(12))).flatten().tolist() == [0, -2, -1, -1, *[0] * 8]
    with torch.no_grad():
        assert worker(ids()).shape == (0, 1, 1)


def test_gradient_accumulation_when_rows_are_cached_then_micro_batches_make_one_update(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=1, staleness=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    worker.attach_to(optimizer)
    recorded.clear()
    for values in [(0, 1), (1, 2), (3, 3)]:
        worker(ids(*values)).sum().backward()
    optimizer.step()
    assert list(map(kinds, recorded)) == [(0, 2, 0), (0, 1, 1), (0, 1, 0)], "rows wait for their gradients"
    worker.flush()
    assert worker.embedding_bags.read("t", "weight")[:4].flatten().tolist() == [-1, -2, -1, -2]
    assert worker.embedding_bags.stores[0].clocks[:4].tolist() == [1, 1, 1, 1]
    assert worker.embedding_bags.step == 1
    assert worker.embedding_bags.telemetry()["cache/reads"] == 5


def test_step_when_servers_hear_of_it_at_different_times_then_each_update_counts_once(servers):
    collection = EmbeddingBagCollection(TABLES, optimizer=RowSGD(0.1))
    backend = bind(collection, servers, plan=BY_ROWS, cache_rows=1, staleness=None)
    for user in (0, 1, 13, 14):  # the second server has 0 to 12, the first the others and all genres
        collection(SparseFeatures(FEATURES, torch.tensor([user, user, 0, 0]))).sum().backward()
    sent = [store.step for store in backend.stores]
    if isinstance(backend.stores[0], Recorded):  # steps ride on messages
        assert sent[0] != sent[1]
    assert backend.step == 4
    backend.flush()
    assert [store.step for store in backend.stores] == [4, 4]


def test_lookups_when_their_gradients_never_come_then_the_cache_keeps_its_size(servers):
    (worker,) = one_table(servers, 1, cache_rows=3, staleness=None)
    for first in range(10):
        pooled = worker(ids(first, first + 1))
    assert len(worker.embedding_bags._held.cache.index) <= 5
    pooled.sum().backward()
    worker.flush()
    assert worker.embedding_bags.read("t", "weight").flatten().tolist() == [0] * 9 + [-1, -1, 0]


def test_lookups_when_their_gradients_never_come_and_all_rows_stay_then_nothing_of_them_piles_up(servers):
    (worker,) = one_table(servers, 1, cache_rows=100, staleness=None)
    for first in range(10):
        worker(ids(first, first + 1))
    assert not worker.embedding_bags._held._waiting


def test_store_when_somebody_removes_it_then_the_next_step_and_flush_say_so(servers):
    (worker,) = one_table(servers, 1, cache_rows=100, staleness=None)
    update(worker, 0, ids(1))
    servers[0].remove("net")
    with pytest.raises(StoreReplacedError):
        worker(ids(2))
    with pytest.raises(StoreReplacedError):
        worker.flush()


def test_two_lookups_when_of_one_step_then_each_gets_its_gradient(servers):
    (worker,) = one_table(servers, 1, cache_rows=1, staleness=0)
    for _ in range(3):
        (worker(ids(0, 1)).sum() + 2 * worker(ids(1, 2)).sum()).backward()
    worker.flush()
    assert worker.embedding_bags.read("t", "weight")[:3].flatten().tolist() == [-3, -9, -6]


def test_lookups_of_one_step_when_joined_by_a_step_then_each_row_is_updated_once_with_what_its_lookup_fetched(
    servers, recorded
):
    (worker,) = one_table(servers, 1, cache_rows=1, staleness=0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    worker.attach_to(optimizer)
    for _ in range(3):
        recorded.clear()
        (worker(ids(0, 1)).sum() + 2 * worker(ids(1, 2, 1)).sum()).backward()
        looked_up = len(recorded)
        optimizer.step()
        assert not any(request.fetch_rows.numel() for request in recorded[looked_up:]), (
            "the rows of both lookups are still here"
        )
    worker.flush()
    assert worker.embedding_bags.read("t", "weight")[:3].flatten().tolist() == [-3, -15, -6]
    assert worker.embedding_bags.stores[0].clocks[:3].tolist() == [3, 3, 3]
    assert worker.embedding_bags.step == 3


def test_gradients_when_they_come_twice_or_behind_a_flush_of_all_copies_then_they_count_all_the_same(servers):
    (worker,) = one_table(servers, 1, cache_rows=1, staleness=None)
    pooled = worker(ids(0, 1)).sum()
    pooled.backward(retain_graph=True)
    update(worker, 0, ids(5, 6, 7))  # whose rows take the place of the batch's
    pooled.backward()
    pooled = worker(ids(0, 3)).sum()
    worker.embedding_bags.invalidate()
    pooled.backward()
    worker.flush()
    assert worker.embedding_bags.read("t", "weight")[:4].flatten().tolist() == [-3, -2, 0, -1]


def test_rows_when_written_or_loaded_then_copies_are_dropped_and_updates_come_before(servers):
    source = EmbeddingBagCollection(TABLES, optimizer=RowAdagrad(0.1))
    cached = copy.deepcopy(source)
    backend = bind(cached, servers, plan=BY_ROWS, cache_rows=1000, staleness=None)
    train(source, steps := batches(6), prefetch=False)
    train(cached, steps, prefetch=True)
    saved = cached.state_dict()
    assert saved["embedding_bags.users.step"] == 6
    torch.testing.assert_close(saved, source.state_dict())
    other = EmbeddingBagCollection(TABLES, optimizer=RowAdagrad(0.1))
    cached.load_state_dict(other.state_dict())
    train(other, steps, prefetch=False)
    train(cached, steps, prefetch=True)
    backend.write_rows("genres", "weight", 2, torch.full((2, 4), 7.0))
    assert cached(SparseFeatures(FEATURES, torch.tensor([0, 0, 0, 3])))[0, 3].tolist() == [7.0] * 4
    other.embedding_bags.write("users", "weight", torch.zeros(40, 4))
    backend.write("users", "weight", torch.zeros(40, 4))
    other.state_dict()["embedding_bags.genres.weight"][2:4] = 7.0
    backend.step = 6
    torch.testing.assert_close(cached.state_dict(), other.state_dict())


def test_copy_when_a_bound_collection_is_copied_then_no_update_is_pushed_twice(servers):
    (worker,) = one_table(servers, 1, cache_rows=12, staleness=None)
    pooled = worker(ids(1, 2))
    worker.prefetch(ids(3))
    pooled.sum().backward()
    copied = copy.deepcopy(worker)
    for collection in (copied, worker):
        update(collection, 0, ids(1))
        collection.flush()
    assert worker.embedding_bags.read("t", "weight")[:3].flatten().tolist() == [0, -3, -1]


def test_telemetry_when_three_steps_are_done_then_it_counts_them(servers):
    (worker,) = one_table(servers, 1, cache_rows=2, staleness=1)
    for values in [(0, 0, 1), (0, 2), (0, 2)]:
        update(worker, 0, ids(*values))
    told = worker.embedding_bags.telemetry()
    assert told["cache/clock_lag"].tolist() == [0, 1]
    assert {name: value for name, value in told.items() if name.startswith("cache") and "lag" not in name} == {
        "cache/reads": 6,
        "cache/hit_rate": 3 / 6,
        "cache/miss_rate": 3 / 6,
        "cache/stale_rate": 0,
        "cache/refresh_rate": 1 / 6,
        "cache/evictions": 1,
    }
    assert told["comm/messages"] == 3
    assert told["comm/ahead_bytes"] == 0


def test_bytes_when_rows_are_asked_for_ahead_then_those_are_told_apart(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=12, staleness=10)
    told = worker.embedding_bags.telemetry

    def sent():
        return sum(told()[f"comm/{kind}_bytes"] for kind in ("rows", "clocks", "gradients"))

    update(worker, 0, ids(1, 2))
    first = sent()
    assert told()["comm/ahead_bytes"] == 0
    worker.prefetch(ids(3, 4, 5))
    assert 0 < told()["comm/ahead_bytes"] == sent() - first
    ahead = told()["comm/ahead_bytes"]
    update(worker, 0, ids(3, 4, 5))
    assert sent() - first == ahead, "they were here"
    update(worker, 0, ids(6))
    assert sent() - first > ahead == told()["comm/ahead_bytes"]


def test_dynamic_rows_when_cached_then_they_are_made_trained_saved_and_loaded_as_without(servers):
    table = EmbeddingBagConfig("t", 10**12, 4, ("x",), init_std=0.5)
    rule, saved = RowWiseAdagrad(0.1), {}
    steps = [ids(*(torch.randint(0, 30, (6,)) * 33_000_000_001).tolist()) for _ in range(20)]
    for name in ("cached", "plain"):
        collection = EmbeddingBagCollection([table], optimizer=rule, device="meta")
        options = {"servers": servers[:1], "seed": 3, "dynamic": DynamicRows()}
        if name == "cached":
            backend = CachedBackend.create(name, collection.layout, rule, cache_rows=8, staleness=2, **options)
        else:
            backend = StoreBackend.create(name, collection.layout, rule, **options)
        collection.bind(backend, copy_rows=False)
        train(collection, steps, prefetch=True)
        saved[name] = collection.state_dict()
        with torch.no_grad():
            trained = collection(steps[0])
        train(collection, steps[:3], prefetch=True)
        collection.load_state_dict(saved[name])
        torch.testing.assert_close(collection(steps[0]).detach(), trained)
    assert len(saved["cached"]["embedding_bags.t.ids"]) == len({id for step in steps for id in step.values.tolist()})
    torch.testing.assert_close(saved["cached"], saved["plain"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [RowAdam(), RowFTRL()], ids=lambda x: type(x).__name__)
def test_rule_when_its_state_is_no_sum_then_it_is_refused_by_name(servers, rule):
    collection = EmbeddingBagCollection(TABLES, optimizer=rule)
    with pytest.raises(TypeError, match=f"{type(rule).__name__}.*SGD"):
        bind(collection, servers)


def test_numbers_when_negative_then_they_are_refused(servers):
    collection = EmbeddingBagCollection(TABLES, optimizer=RowSGD())
    with pytest.raises(ValueError, match=r"staleness must be at least 0.*got -1"):
        bind(collection, servers, staleness=-1)
    with pytest.raises(ValueError, match=r"-2"):
        bind(collection, servers, cache_rows=-2)
    assert "cache_rows=1000, staleness=None" in repr(bind(collection, servers))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("staleness", [0, 3, None])
def test_training_when_the_copies_are_on_a_gpu_then_it_equals_the_one_on_the_cpu(servers, rule, staleness):
    on_cpu = EmbeddingBagCollection(TABLES, optimizer=rule)
    on_gpu, steps = copy.deepcopy(on_cpu), batches(12)
    backend = bind(on_gpu, servers, plan=BY_ROWS, cache_rows=20, staleness=staleness, device="cuda")
    assert backend._held.cache.rows.is_cuda
    train(on_cpu, steps, prefetch=False)
    train(on_gpu, [sparse.to("cuda") for sparse in steps], prefetch=True)
    trained = on_gpu.state_dict()
    for key, tensor in on_cpu.state_dict().items():
        torch.testing.assert_close(trained[key], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("servers", ["by messages"], indirect=True)
@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_one_worker_when_batches_are_announced_then_its_rows_are_the_same_and_fewer_travel(servers, prefetch):
    steps, results, misses = batches(24), [], []
    for window in (0, 6):
        torch.manual_seed(0)
        collection = EmbeddingBagCollection(TABLES, optimizer=RowSGD(0.125))
        backend = bind(collection, servers, name=f"net{window}", cache_rows=30, staleness=0)
        train(collection, steps, prefetch=prefetch, window=window)
        results.append(collection.state_dict())
        misses.append(backend.telemetry()["cache/miss_rate"])
        assert not backend._held._coming
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert misses[1] < misses[0]


@pytest.mark.parametrize("servers", ["by messages"], indirect=True)
def test_announced_batches_when_others_come_then_they_are_given_up(servers):
    (worker,) = one_table(servers, 1, cache_rows=3, staleness=None)
    backend = worker.embedding_bags
    for first in range(4):
        worker.announce(ids(first), ahead=2)
        worker.announce(ids(first, 9), ahead=2)
        worker(ids(5)).sum().backward()
        assert len(backend._held._coming) <= 3
    worker.announce(ids(1), ahead=0)
    worker.announce(ids(2), ahead=1)
    worker(ids(2)).sum().backward()  # overtakes
    assert not backend._held._coming
    assert worker(ids(1, 2, 5)).flatten().tolist() == [0, -1, -4]


@pytest.mark.parametrize("seed", range(3))
def test_collections_of_the_same_ids_when_they_share_an_index_then_each_trains_as_if_alone(servers, seed):
    torch.manual_seed(seed)
    narrow = [EmbeddingBagConfig(x.name, x.num_embeddings, 1, x.feature_names, x.pooling) for x in TABLES]
    rules = (RowAdagrad(0.1), RowSGD(0.125))
    alone = [EmbeddingBagCollection(x, optimizer=rule) for x, rule in zip((TABLES, narrow), rules, strict=True)]
    sharing = copy.deepcopy(alone)
    shared = SharedIndex(9, policy="lfu")
    for name, collection in zip(("wide", "narrow"), sharing, strict=True):
        bind(collection, servers, name=name, cache_rows=9, staleness=1, policy="lfu", shared=shared)
    both = 0
    for step, sparse in enumerate(batches(40)):
        used = [(0, 1), (1, 0), (0, 1), (0,), (1,)][step % 5]
        both += len(used) == 2
        for collections in (alone, sharing):
            pooled = [collections[i](sparse) for i in used]
            if step % 7:  # else the gradients never come
                sum((x - 1).square().sum() for x in pooled).backward()
            del pooled
            if step % 11 == 10:
                collections[used[0]].embedding_bags.invalidate() if collections is sharing else None
            if step % 6 == 5:
                with torch.no_grad():
                    collections[0].eval()(sparse)
                collections[0].train()
    for one, other in zip(alone, sharing, strict=True):
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-5, atol=1e-6)
    if not isinstance(sharing[0].embedding_bags.stores[0], Recorded):
        assert shared.index.num_plans == 40, "one for each batch, whether one looks it up or both"
        assert both == 24
        assert all(x.embedding_bags.telemetry()["cache/evictions"] > 0 for x in sharing)


def test_collections_that_share_an_index_when_one_is_copied_or_gone_then_the_others_go_on(servers):
    shared = SharedIndex(2, policy="lru")
    make = partial(one_table, servers, 1, cache_rows=2, staleness=None, policy="lru", shared=shared)
    (first,), (second,) = make(), make()
    for worker in (first, second):
        update(worker, 0, ids(1, 2))
    copied = copy.deepcopy(second)
    del second
    gc.collect()
    for worker in (first, copied):
        update(worker, 0, ids(3, 4, 5))
        worker.flush()
    assert first.embedding_bags.read("t", "weight")[:6].flatten().tolist() == [0, -2, -2, -2, -2, -2]


def dynamic_workers(server, count, dynamic, *, rows=12, **options) -> list[EmbeddingBagCollection]:
    """As :func:`one_table`, whose rows are dynamic: zeros until they are made."""
    table = EmbeddingBagConfig("t", rows, count, ("x",), init_std=0.0)
    workers = [EmbeddingBagCollection([table], optimizer=RowSGD(1.0), device="meta") for _ in range(count)]
    store = server.create_embedding_store("net", workers[0].layout, RowSGD(1.0), seed=0, dynamic=dynamic)
    parts = [TablePart("net", "t", rows, server=0)]
    for worker in workers:
        worker.bind(CachedBackend(worker.layout, RowSGD(1.0), stores=[(store, parts)], **options))
    return workers


@pytest.fixture
def server(tmp_path):
    opened = MappedStores(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("clock", ["max", "sum"])
@pytest.mark.parametrize(
    ("cache_rows", "staleness", "pushed"), [(0, 0, 1), (9, 0, 1), (9, 2, 3), (9, 10, 11), (9, None, 25)]
)
@pytest.mark.parametrize("admission", [1, 2, 7, 11, 12, 25, 26])
def test_admission_behind_a_cache_when_pushes_sum_updates_then_whole_ones_before_the_threshold_are_lost(
    server, clock, cache_rows, staleness, pushed, admission
):
    options = {"clock": clock, "cache_rows": cache_rows, "staleness": staleness}
    (worker,) = dynamic_workers(server, 1, DynamicRows(admission=admission), **options)
    for _ in range(25):
        update(worker, 0, ids(5))
    worker.flush()
    # The k-th update is in push number ceil(k / pushed); all that come before it are dropped.
    lost = (admission - 1) // pushed * pushed if admission <= 25 else 25
    assert lost <= admission - 1
    (store,) = worker.embedding_bags.stores
    assert store.read("weight", 5, 1).item() == -(25 - lost)
    assert store.num_live == (admission <= 25)


def test_admission_when_several_workers_push_sums_then_their_updates_are_counted_together(server):
    first, second = dynamic_workers(server, 2, DynamicRows(admission=10), cache_rows=9, staleness=None)
    (store,) = first.embedding_bags.stores
    for worker, index, count in ((first, 0, 4), (second, 1, 5), (first, 0, 1)):
        for _ in range(count):
            update(worker, index, ids(5))
        worker.flush()
        assert store.num_live == (worker is first and count == 1)
    assert store.read("weight", 5, 1).tolist() == [[-1, 0]], "what came before the tenth is lost, as without a cache"


@pytest.mark.parametrize("rule", RULES, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("staleness", [3, None])
def test_expired_row_when_a_worker_still_holds_it_then_its_push_brings_it_back_as_its_copy_is(server, rule, staleness):
    table = EmbeddingBagConfig("t", 12, 4, ("x",), init_std=0.5)
    workers = [EmbeddingBagCollection([table], optimizer=rule, device="meta") for _ in range(2)]
    dynamic = DynamicRows(expire_after=4)
    store = server.create_embedding_store("net", workers[0].layout, rule, seed=0, dynamic=dynamic)
    parts = [TablePart("net", "t", 12, server=0)]
    for worker in workers:
        options = {"cache_rows": 9, "staleness": staleness}
        worker.bind(CachedBackend(worker.layout, rule, stores=[(store, parts)], **options))
    first, second = workers
    alone = EmbeddingBagCollection([table], optimizer=rule)
    for name in store.row_shapes:
        alone.embedding_bags.write("t", name, store.read(name, 0, 12))
    for turn in range(3):
        for worker in (first, alone):
            for _ in range(turn + 1):
                worker(ids(5)).square().sum().backward()
        first.flush()
        assert 5 in store.live_rows().tolist()
        for _ in range(8):  # while the first one stands still
            second(ids(7)).square().sum().backward()
            second.flush()
        assert 5 not in store.live_rows().tolist()
    for worker in (first, alone):
        worker(ids(5)).square().sum().backward()
    first.embedding_bags.invalidate()
    for name in store.row_shapes:
        torch.testing.assert_close(store.read(name, 5, 1), alone.embedding_bags.read("t", name)[5:6])


@pytest.mark.parametrize("staleness", [0, 3, 1000, None])
def test_rows_that_expire_when_workers_train_copies_of_them_then_they_stay(server, staleness):
    options = {"cache_rows": 9, "staleness": staleness}
    first, second = dynamic_workers(server, 2, DynamicRows(expire_after=20), **options)
    (store,) = first.embedding_bags.stores
    for step in range(150):
        update(first, 0, ids(5))
        update(second, 1, ids(7))
        if step in (0, 60):
            first.flush()
            second.flush()
        if step % 5 == 0:
            second.embedding_bags.flush()
        assert {5, 7} <= set(store.live_rows().tolist())
    first.flush()
    second.flush()
    assert store.read("weight", 5, 3).tolist() == [[-150, 0], [0, 0], [0, -150]]
    second.embedding_bags.invalidate()  # it holds nothing
    for _ in range(21):
        update(first, 0, ids(4))
        first.flush()
    assert store.live_rows().tolist() == [4, 5], "that of which nobody has a copy goes"


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("staleness", [1, None])
def test_limit_when_a_lookup_gets_no_gradient_then_the_cache_keeps_to_it_though_the_batch_lives_on(
    servers, staleness, prefetch
):
    (worker,) = one_table(servers, 1, rows=3000, cache_rows=64, staleness=staleness)
    backend = worker.embedding_bags
    steps = [ids(*range(10 * step, 10 * step + 10)) for step in range(300)]  # as a data set in memory holds them
    for step, sparse in enumerate(steps):
        pooled = worker(sparse)
        if prefetch and step < 299:
            worker.prefetch(steps[step + 1])
        if step % 50 != 20:  # else as a training_step that returns None
            pooled.sum().backward()
        del pooled
        assert len(backend._held.cache.index) <= 64 + 5 * 10, (
            "at most the batches of which a plan is remembered come on top"
        )
    worker.flush()
    expected = [0.0 if row // 10 % 50 == 20 else -1.0 for row in range(3000)]
    assert backend.read("t", "weight").flatten().tolist() == expected


def traffic(worker) -> tuple[int, int]:
    """Bytes of gradients and of rows so far."""
    counts = worker.embedding_bags.telemetry()
    return counts["comm/gradients_bytes"], counts["comm/rows_bytes"]


@pytest.mark.parametrize("mode", ["no_grad", "eval", "inference"])
def test_lookups_without_gradient_while_training_then_they_push_nothing_and_see_what_this_worker_did(servers, mode):
    first, second = one_table(servers, 2, cache_rows=12, staleness=None)
    (store,) = first.embedding_bags.stores
    update(first, 0, ids(1, 2, 3))
    update(second, 1, ids(2, 7))
    second.flush()
    pushed = traffic(first)[0]
    for step in range(20):
        update(first, 0, ids(1, 2, 3))
        first.train(mode == "no_grad")
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            looked_up = first(ids(3, 2, 9, 2)).clone()[:, 0]
        first.train()
        seen = 0 if mode == "no_grad" else -1  # a copy without bound, or what the store has
        own = -2.0 - step
        assert looked_up.tolist() == [[own, 0], [own, seen], [0, 0], [own, seen]]
    assert traffic(first)[0] == pushed
    assert store.rows[:, 0].any().item() is False
    first.flush()
    assert store.read("weight", 1, 3)[:, 0].tolist() == [-21, -21, -21]


@pytest.mark.parametrize("staleness", [0, 3, None])
def test_frozen_rows_when_looked_up_again_then_they_are_cached_within_the_limit(servers, staleness):
    (worker,) = one_table(servers, 1, cache_rows=6, staleness=staleness)
    update(worker, 0, ids(1))
    worker.requires_grad_(False)
    looked_up = [worker(ids(0, 1, 2)).flatten().tolist() for _ in range(2)]
    before = traffic(worker)
    looked_up += [worker(ids(0, 1, 2)).flatten().tolist() for _ in range(10)]
    assert looked_up == [[0, -1, 0]] * 12
    assert traffic(worker) == before
    for first in range(12):
        worker(ids(first, (first + 1) % 12))
        assert len(worker.embedding_bags._held.cache.index) <= 6 + 2
    worker.requires_grad_(True)
    update(worker, 0, ids(1))
    worker.flush()
    assert worker.embedding_bags.read("t", "weight")[:3].flatten().tolist() == [0, -2, 0]


@pytest.mark.parametrize("servers", ["by messages"], indirect=True)
def test_lookup_without_gradient_when_the_batch_was_announced_then_its_training_still_comes_early(servers, recorded):
    (worker,) = one_table(servers, 1, cache_rows=6, staleness=None)
    pooled = worker(ids(0))
    worker.announce(ids(1, 2), ahead=0)
    worker.prefetch(ids(1, 2))
    recorded.clear()
    with torch.no_grad():
        assert worker(ids(1, 2)).flatten().tolist() == [0, 0]
    pooled.sum().backward()
    update(worker, 0, ids(1, 2))
    assert not recorded, "the rows were on their way"
    assert len(worker.embedding_bags._held.cache.index) == 3


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("clock", ["max", "sum"])
@pytest.mark.parametrize("staleness", [0, 3, None])
def test_clocks_when_they_reach_their_end_then_no_update_is_lost_and_such_rows_are_exact(
    servers, staleness, clock, prefetch
):
    workers = one_table(servers, 2, cache_rows=12, staleness=staleness, clock=clock)
    (store,) = workers[0].embedding_bags.stores
    store.clocks[5] = MAX_CLOCK - 4
    for _ in range(12):
        for index, worker in enumerate(workers):
            pooled = worker(ids(5))
            if prefetch:
                worker.prefetch(ids(5, 6))
                pooled[..., index].sum().backward()
                pooled = worker(ids(5, 6))
            pooled[..., index].sum().backward()
            cache = worker.embedding_bags._held.cache
            assert (cache.clocks[: len(cache.index)] >= 0).all()
    if staleness is not None and not prefetch:
        assert store.clocks[5] == MAX_CLOCK
        seen = [worker(ids(5)).flatten().tolist() for worker in workers]
        assert seen[1] == [-12, -12], "a copy with such a clock is pushed and fetched whenever it is read"
    for worker in workers:
        worker.flush()
    times = 2 if prefetch else 1
    assert store.read("weight", 5, 1).tolist() == [[-12 * times, -12 * times]]


def test_copy_when_it_has_as_many_updates_as_can_be_counted_then_it_still_owes_them(servers):
    (worker,) = one_table(servers, 1, cache_rows=12, staleness=None)
    update(worker, 0, ids(5))
    worker.embedding_bags._held.cache.clocks[:, [CURRENT, UNSENT]] = MAX_CLOCK - 1
    for _ in range(3):
        update(worker, 0, ids(5))
    worker.flush()
    assert worker.embedding_bags.read("t", "weight")[5].tolist() == [-4]


@pytest.mark.parametrize("cache_rows", [0, 3, 100])
def test_ids_when_all_of_int64_but_one_are_then_a_cache_serves_them_and_is_saved_and_loaded_by_them(server, cache_rows):
    table = EmbeddingBagConfig("t", 2**64 - 1, 4, ("x",), init_std=0.5)
    bound = []
    for name in ("one", "other"):
        collection = EmbeddingBagCollection([table], optimizer=RowSGD(1.0), device="meta")
        options = {"cache_rows": cache_rows, "staleness": 1, "dynamic": DynamicRows(), "servers": [server]}
        collection.bind(CachedBackend.create(name, collection.layout, RowSGD(1.0), **options))
        bound.append(collection)
    one, other = bound
    hashes = [0, 2**63 - 1, -(2**63), -3, -2]  # rising as unsigned numbers
    before = one(ids(*hashes)).detach()
    for step in range(12):
        sparse = ids(*(hashes[(step + i) % 5] for i in range(3)))
        pooled = one(sparse)
        one.prefetch(ids(*(hashes[(step + 1 + i) % 5] for i in range(3))))
        pooled.sum().backward()
    times = torch.tensor([[sum((step + i) % 5 == k for step in range(12) for i in range(3))] for k in range(5)])
    torch.testing.assert_close(one(ids(*hashes)), before - times.unsqueeze(1))
    with torch.no_grad():
        torch.testing.assert_close(one.eval()(ids(*hashes)), before - times.unsqueeze(1))
    saved = one.state_dict()
    assert saved["embedding_bags.t.ids"].tolist() == hashes
    other.load_state_dict(saved)
    torch.testing.assert_close(other(ids(*hashes)), before - times.unsqueeze(1))
    with pytest.raises(IndexError, match=r"id -1 is outside"):
        one(ids(5, -1))
