"""A virtual HET cluster trains and counts as its caches do: closed forms of its rows, bytes and times."""

import copy
from functools import partial

import pytest
import torch

from lightning_recsys.data import Batch, SyntheticDataModule
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import DeepFM, LogisticRegression
from lightning_recsys.optim import RowAdagrad, RowAdam, RowSGD
from lightning_recsys.placement import Network
from lightning_recsys.simulation import Constant, Exponential, HETCluster, Normal, Servers, Workers
from lightning_recsys.tasks import CTRTask

SGD = partial(torch.optim.SGD, lr=0.1)


def make_data(rows=640):
    return SyntheticDataModule(
        batch_size=32, train_rows=rows, cardinalities=(20, 50), multi_hot={"c1": 3}, num_dense=3, val_rows=320
    )


def make_task(data, rows):
    torch.manual_seed(3)
    return CTRTask(DeepFM(3, data.fields, embedding_dim=4, hidden=[8], row_optimizer=rows), optimizer=SGD)


def parameters(module):
    return {key: value for key, value in module.state_dict().items() if not key.endswith(".step")}


def train_plainly(task, batches):
    optimizer = task.configure_optimizers()
    for step, batch in enumerate(batches):
        task.training_step(batch, step)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def joined(batches, count):
    """Batches of several workers as one."""
    parts = list(batches)
    return [
        Batch(
            torch.cat([part.dense for part in some]),
            SparseFeatures.cat([part.sparse for part in some]),
            torch.cat([part.labels for part in some]),
        )
        for some in (parts[i : i + count] for i in range(0, len(parts), count))
    ]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"num_workers": 1, "staleness": None}, RowAdagrad(0.1)),
        ({"num_workers": 1, "staleness": 3, "cache_fraction": 0.2, "lookahead_batches": 4}, RowSGD(0.125)),
        ({"num_workers": 4, "algorithm": "hybrid"}, RowAdam(0.01)),
        ({"num_workers": 4, "staleness": 0, "cache_fraction": 0.2}, RowAdagrad(0.1)),
    ],
    ids=["one worker", "one small cache", "hybrid", "in step"],
)
def test_cluster_without_stale_rows_then_it_trains_as_one_process_with_the_joined_batches(options, rows):
    data = make_data(rows=320 if options["num_workers"] == 1 else 640)
    task = make_task(data, rows)
    too_few = [x for _, x in zip(range(options["num_workers"] - 1), data.train_dataloader(), strict=False)]
    with pytest.raises(ValueError, match="nothing was trained: a step takes a batch for each of"):
        HETCluster(**options).train(task, too_few)
    plain = copy.deepcopy(task)
    results = HETCluster(**options).train(task, data.train_dataloader())
    train_plainly(plain, joined(data.train_dataloader(), options["num_workers"]))
    assert results.counts["steps"] == (10 if options["num_workers"] == 1 else 5)
    for key, value in parameters(plain).items():
        torch.testing.assert_close(parameters(task)[key], value, rtol=1e-4, atol=1e-5)


def test_cluster_when_run_again_then_same_seed_same_result_bit_for_bit():
    runs = []
    for seed in (1, 1, 2):
        data = make_data(rows=288)
        cluster = HETCluster(
            num_workers=3,
            cache_fraction=0.3,
            staleness=2,
            workers=Workers(compute=Normal(0.01, 0.002), speed_deviation=0.1),
            servers=Servers(link=Network(bandwidth=1e5)),
        )
        task = make_task(data, RowAdagrad(0.1))
        results = cluster.train(task, data.train_dataloader(), seed=seed, mark_every=96)
        runs.append((results.to_dict(), parameters(task)))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0]["seconds"] != runs[2][0]["seconds"]
    assert all(torch.equal(value, runs[1][1][key]) for key, value in runs[0][1].items())


class SameRows:
    """Clicks whose batches all have the same rows."""

    def __init__(self, num_rows):
        self.data = SyntheticDataModule(batch_size=num_rows, train_rows=64, cardinalities=(num_rows,), num_dense=0)
        ids = SparseFeatures(("c0",), torch.arange(num_rows))
        self.batch = Batch(torch.zeros(num_rows, 0), ids, (torch.arange(num_rows) % 2).float())

    def task(self):
        model = LogisticRegression(0, self.data.fields, row_optimizer=RowSGD(0.1))
        return CTRTask(model, optimizer=SGD)


@pytest.mark.parametrize("staleness", [1, 4])
def test_rows_when_all_are_in_every_batch_then_each_is_refreshed_once_in_s_plus_1_updates(staleness):
    rows, steps = SameRows(40), 10 * (staleness + 1)
    cluster = HETCluster(num_workers=1, cache_fraction=1.0, staleness=staleness, prefetch=False)
    found = cluster.train(rows.task(), [rows.batch] * steps)
    assert found.metrics["cache/miss_rate"] == pytest.approx(1 / steps)
    assert found.metrics["cache/refresh_rate"] == pytest.approx(1 / (staleness + 1), abs=1.5 / steps)
    pushes = fetches = 40 * steps / (staleness + 1)
    assert found.traffic["gradients"] == pytest.approx(pushes * (4 + 4), rel=0.11)  # number and weight
    assert found.traffic["rows"] == pytest.approx(fetches * (4 + 4), rel=0.11)


def test_hybrid_then_bytes_and_seconds_are_those_of_every_row_of_every_batch():
    rows, steps = SameRows(50), 8
    cluster = HETCluster(
        num_workers=1,
        algorithm="hybrid",
        embedding_dim=128,
        workers=Workers(compute=Constant(0.01)),
        servers=Servers(link=Network(bandwidth=1e6)),
    )
    found = cluster.train(rows.task(), [rows.batch] * steps)
    assert found.traffic["rows"] == found.traffic["gradients"] == steps * 50 * (4 + 512)
    assert found.traffic["clocks"] == steps * 2 * 50 * 4
    # Numbers go out, rows with clocks come back, and behind each batch gradients with clocks go out.
    asked, answered, pushed = 50 * 4, 50 * (512 + 4), 50 * (4 + 512 + 4)
    assert found.seconds == pytest.approx(steps * ((asked + answered + pushed) / 1e6 + 0.01))


def test_all_reduce_and_slowest_worker_then_they_set_the_time_of_a_step():
    rows = SameRows(16)
    workers = Workers(compute=Constant(0.01), straggler_share=0.25, straggler_factor=3.0)
    cluster = HETCluster(num_workers=4, dense_bytes=4000, workers=workers, link=Network(latency=0.001, bandwidth=1e6))
    found = cluster.train(rows.task(), [rows.batch] * 4 * 20)
    ring = 6 * (0.001 + 1000 / 1e6)
    assert found.seconds / 20 == pytest.approx(0.03 + ring, rel=0.02)  # rows travel meanwhile
    assert found.traffic["dense"] == 20 * 6 * 4000
    assert found.utilization["workers"] == pytest.approx((0.01 + 0.01 + 0.01 + 0.03) / 4 / (0.03 + ring), rel=0.02)


def test_last_batches_when_too_few_for_a_step_then_they_are_left_out():
    data = make_data(rows=32 * 11)
    found = HETCluster(num_workers=4).train(make_task(data, RowSGD(0.1)), data.train_dataloader())
    assert (found.counts["steps"], found.examples) == (2, 2 * 4 * 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "ps"}, "must be het or hybrid, got 'ps'"),
        ({"policy": "fifo"}, "cluster.policy must be one of"),
        ({"cache_fraction": 0.0}, r"cluster.cache_fraction must be in \(0, 1\], got 0.0"),
        ({"staleness": -1}, "staleness must be a whole number of at least 0, got -1"),
        ({"staleness": 2.5}, "staleness must be a whole number of at least 0, got 2.5"),
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1"),
        ({"embedding_dim": 0}, "embedding_dim must be a whole number of at least 1"),
        ({"workers": Workers(failures=Exponential(100.0))}, "leave failures and cores null"),
    ],
)
def test_cluster_when_it_cannot_be_then_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HETCluster(**options)
