"""How many updates of all others a read lacks, told by the rows themselves: each update subtracts one."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing

import pytest
import torch
from server_helpers import running

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache import CachedBackend
from lightning_recsys.sync.clocks import missed_updates, staleness_for

pytestmark = pytest.mark.distributed

WORKERS, ROWS, PER_BATCH, STEPS = 8, 6, 3, 150


def most_missed(
    endpoint: str, *, staleness: int, clock: str, prefetch: bool, window: int, cache_rows: int
) -> tuple[int, int]:
    """The most updates of others that a read lacked, and what the workers tell of those that were pushed.

    They go in step, in another order at each.
    """
    table = EmbeddingBagConfig("t", ROWS, 4, ("x",), init_std=0.0)
    layout, draw = TableLayout((table,)), random.Random(0)
    made = torch.zeros(ROWS)
    worst = 0
    with ExitStack() as stack:
        workers = []
        for _ in range(WORKERS):
            stores = stack.enter_context(closing(connect(endpoint, transport="tcp")))
            store = stores.create_embedding_store("rows", layout, RowSGD(1.0), seed=0)
            parts = [TablePart("rows", "t", ROWS, server=0)]
            options = {"cache_rows": cache_rows, "staleness": staleness, "clock": clock}
            workers.append(CachedBackend(layout, RowSGD(1.0), stores=[(store, parts)], **options))
        rows = [[torch.tensor(draw.sample(range(ROWS), PER_BATCH)) for _ in range(STEPS)] for _ in range(WORKERS)]
        batches = [[SparseFeatures(("x",), ids) for ids in each] for each in rows]
        begun = workers[0].read_rows("t", "weight", 0, ROWS)[:, 0].clone()
        for step in range(STEPS):
            tickets = {}
            for which in draw.sample(range(WORKERS), WORKERS):
                pooled, tickets[which] = workers[which].lookup(batches[which][step])
                ids = rows[which][step]
                worst = max(worst, int((made[ids] - (begun[ids] - pooled[:, 0, 0])).round().max()))
                for ahead in range(1, window + 1):
                    if step + ahead < STEPS and (ahead == window or not step):
                        workers[which].announce(batches[which][step + ahead], ahead=ahead - 1)
                if prefetch and step + 1 < STEPS:
                    workers[which].prefetch(batches[which][step + 1])
            for which in draw.sample(range(WORKERS), WORKERS):
                workers[which].apply_gradients([tickets[which]], torch.ones(PER_BATCH, 1, 4), lr=1.0)
                made[rows[which][step]] += 1
        for worker in workers:
            worker.flush()
        assert (begun - workers[0].read_rows("t", "weight", 0, ROWS)[:, 0]).tolist() == made.tolist()
        told = max(int(worker.telemetry().get("cache/missed_updates/max", 0)) for worker in workers)
    return worst, told


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize(("cache_rows", "window"), [(ROWS, 0), (2, 3)], ids=["all rows stay", "rows leave"])
def test_sum_when_8_workers_train_then_no_read_lacks_more_than_was_asked_for(tmp_path, prefetch, cache_rows, window):
    most = 60
    staleness = staleness_for(most, num_workers=WORKERS, prefetch=prefetch)
    assert missed_updates(staleness, num_workers=WORKERS, prefetch=prefetch) <= most
    assert missed_updates(staleness + 1, num_workers=WORKERS, prefetch=prefetch) > most
    with running(tmp_path) as server:
        common = {"staleness": staleness, "prefetch": prefetch, "window": window, "cache_rows": cache_rows}
        worst, told = most_missed(server.endpoint, clock="sum", **common)
    assert worst <= most
    # Pushed updates are told, and there is a bound for the others, which no worker knows of.
    assert 0 < told <= 2 * staleness
    assert worst <= told + (WORKERS - 1) * (staleness + 1 + 2 * prefetch)
    if not window:  # the bound is not an idle one
        assert worst > most / 3


def test_sum_when_one_trains_between_two_reads_of_another_then_the_bound_is_reached(tmp_path):
    """The reader's own updates hide as many pushed ones, and each other worker keeps one more than it may read with."""
    staleness = 4
    lacks = missed_updates(staleness, num_workers=3, prefetch=False)
    table = EmbeddingBagConfig("t", 2, 4, ("x",), init_std=0.0)
    layout, batch, other = TableLayout((table,)), *(SparseFeatures(("x",), torch.tensor([row])) for row in (0, 1))
    with running(tmp_path) as server, ExitStack() as stack:
        workers = []
        for _ in range(3):
            stores = stack.enter_context(closing(connect(server.endpoint, transport="tcp")))
            store = stores.create_embedding_store("rows", layout, RowSGD(1.0), seed=0)
            parts = [TablePart("rows", "t", 2, server=0)]
            options = {"cache_rows": 1, "staleness": staleness, "clock": "sum", "policy": "lru"}
            workers.append(CachedBackend(layout, RowSGD(1.0), stores=[(store, parts)], **options))

        def train(which: int, times: int) -> float:
            for _ in range(times):
                pooled, ticket = workers[which].lookup(batch)
                workers[which].apply_gradients([ticket], torch.ones(1, 1, 4), lr=1.0)
            return float(pooled[0, 0, 0])

        reader, *others = range(3)
        begun = train(reader, staleness)
        begun += staleness - 1  # of the row before its first update
        for which in others:
            train(which, staleness)
            for _ in range(2):  # the row leaves the cache, and what it owes goes to the server
                workers[which].lookup(other)
            workers[which].flush()
        for which in others:
            train(which, staleness + 1)  # and is kept
        pooled, _ = workers[reader].lookup(batch)
        seen = begun - float(pooled[0, 0, 0])
        made = staleness + 2 * staleness + 2 * (staleness + 1)
    assert made - seen == lacks


def test_max_when_8_workers_train_then_a_read_lacks_more_than_sum_lets_it(tmp_path):
    staleness = staleness_for(60, num_workers=WORKERS, prefetch=False)
    with running(tmp_path) as server:
        options = {"staleness": staleness, "prefetch": False, "window": 0, "cache_rows": ROWS}
        worst, told = most_missed(server.endpoint, clock="max", **options)
    assert (worst > 60, told) == (True, 0)


def test_staleness_for_when_too_small_then_the_smallest_is_named():
    with pytest.raises(ValueError, match=r"must be at least 30 for 8 workers with prefetch, got 29.*staleness=0"):
        staleness_for(29, num_workers=8, prefetch=True)
    assert staleness_for(30, num_workers=8, prefetch=True) == 1
