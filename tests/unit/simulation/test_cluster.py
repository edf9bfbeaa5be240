"""A virtual cluster trains: like one process where there is one worker, as its rules say where there are several."""

import copy
import math
from functools import partial
from itertools import repeat

import pytest
import torch
from click_module import ClickModule, make_batch

from lightning_recsys.data import BatchLoader, SyntheticDataModule
from lightning_recsys.models import DeepFM
from lightning_recsys.optim import RowAdagrad, RowSGD, RowSWAP, swap
from lightning_recsys.optim.schedules import cosine, one_cycle
from lightning_recsys.placement import Network
from lightning_recsys.simulation import (
    Constant,
    Exponential,
    Normal,
    Servers,
    Synchronization,
    VirtualCluster,
    Workers,
)
from lightning_recsys.simulation.replica import Gradient
from lightning_recsys.sync import StalenessNormalization
from lightning_recsys.tasks import CTRTask


def make_data(rows=640):
    return SyntheticDataModule(
        batch_size=32, train_rows=rows, cardinalities=(20, 50), multi_hot={"c1": 3}, num_dense=3, val_rows=320
    )


ADAM, ADAGRAD = partial(torch.optim.Adam, lr=0.01), RowAdagrad(lr=0.1)


def make_task(data, *, rows=ADAGRAD, optimizer=ADAM, **options):
    torch.manual_seed(3)
    model = DeepFM(3, data.fields, embedding_dim=4, hidden=[8], row_optimizer=rows)
    return CTRTask(model, optimizer=optimizer, **options)


def equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_batches_when_made_together_then_the_cluster_comes_to_the_same_bits():
    data = SyntheticDataModule(batch_size=5, train_rows=600, cardinalities=(20, 50), num_dense=3)
    rows, results, tasks = data.rows("train"), [], []
    one_by_one = [rows.take(torch.arange(start, start + 5)) for start in range(0, 600, 5)]
    cluster = VirtualCluster(workers_per_replica=7, workers=Workers(compute=Exponential(1.0)))
    for loader in (one_by_one, BatchLoader(rows, batch_size=5)):
        tasks.append(make_task(data))
        results.append(cluster.train(tasks[-1], loader).to_dict())
    assert equal(*tasks)
    assert results[0] == results[1]


def test_one_worker_then_trains_as_a_plain_loop_does_bit_for_bit():
    data = make_data()
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5)
    task = make_task(data, scheduler=schedule)
    plain = copy.deepcopy(task)
    results = VirtualCluster(workers=Workers(compute=Exponential(1.0))).train(task, data.train_dataloader())
    configured = plain.configure_optimizers()
    for step, batch in enumerate(data.train_dataloader()):
        plain.training_step(batch, step)["loss"].backward()
        configured["optimizer"].step()
        configured["optimizer"].zero_grad()
        configured["lr_scheduler"]["scheduler"].step()
    assert equal(task, plain)
    assert results.counts["pushes"] == 20
    assert results.metrics["staleness/dense_max"] == results.metrics["staleness/rows_max"] == 1


@pytest.mark.parametrize(
    "cluster",
    [
        VirtualCluster(
            workers_per_replica=7,
            workers=Workers(compute=Exponential(1.0), speed_deviation=0.2, failures=Exponential(4.0)),
            staleness=StalenessNormalization(target=2, sensitivity=1.0),
        ),
        VirtualCluster(
            num_replicas=3,
            workers_per_replica=2,
            dense_on_servers=False,
            workers=Workers(compute=Normal(1.0, deviation=0.3)),
            synchronization=Synchronization("easgd", interval=2.5, servers=Servers(link=Network(bandwidth=1e3))),
        ),
        VirtualCluster(
            num_replicas=3,
            workers_per_replica=2,
            dense_on_servers=False,
            workers=Workers(compute=Normal(1.0, deviation=0.3)),
            synchronization=Synchronization("bmuf", rounds="foreground", options={"block_momentum": 0.5}, gap=2),
        ),
    ],
    ids=["asynchronous", "easgd", "bmuf"],
)
def test_cluster_when_run_again_then_same_seed_same_result_bit_for_bit(cluster):
    data, runs = make_data(), []
    for seed in (1, 1, 2):
        task = make_task(data)
        results = cluster.train(task, data.train_dataloader(), seed=seed, mark_every=100)
        runs.append((task, results.to_dict()))
    (first, told), (again, told_again), (other, _) = runs
    assert equal(first, again)
    assert told == told_again
    assert not equal(first, other)
    assert told["examples"] == 640
    assert [point["examples"] for point in told["curve"]][-1] == 640


class Sum(ClickModule):
    """The gradient of its weights is 1, so that they tell the sum of all learning rates."""

    def __init__(self, make_scheduler):
        super().__init__()
        self.weights, self.make_scheduler = torch.nn.Parameter(torch.zeros(2)), make_scheduler

    def training_step(self, batch, batch_idx):
        return {"loss": self.weights.sum(), "logits": torch.zeros(len(batch.labels))}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.weights], lr=0.1)
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def test_schedule_when_over_the_whole_run_then_updates_have_the_rates_of_the_closed_form():
    """The factors (1 + cos(pi t / T)) / 2 of the steps t from 0 to T - 1 add up to (T + 1) / 2."""
    cluster = VirtualCluster(workers_per_replica=3, workers=Workers(compute=Exponential(1.0)))
    assert cluster.num_updates(20) == 20
    module = Sum(partial(cosine, total_steps=cluster.num_updates(20)))
    cluster.train(module, [make_batch(2) for _ in range(20)])
    torch.testing.assert_close(module.weights.detach(), torch.full((2,), -0.1 * 21 / 2))


def test_schedule_when_a_replica_is_faster_than_the_others_then_stays_at_its_end():
    """The slow one of two replicas computes one or two batches of 21 while the fast one trains all the others."""
    workers = Workers(compute=Constant(1.0), straggler_share=0.5, straggler_factor=10.0)
    sync = Synchronization("ma", rounds="background", interval=1e9)
    cluster = VirtualCluster(num_replicas=2, workers=workers, synchronization=sync, link=Network(latency=1e-3))
    assert cluster.num_updates(21) == 11
    module = Sum(partial(one_cycle, total_steps=cluster.num_updates(21)))
    assert cluster.train(module, [make_batch(2) for _ in range(21)]).counts["pushes"] == 21


def test_two_workers_then_staleness_is_that_of_the_schedule():
    """Constant times, one worker half as fast: of three pushes the fast one makes two, around one of the other's."""
    torch.manual_seed(0)
    workers = Workers(compute=Constant(1.0), straggler_share=0.5, straggler_factor=2.0)
    cluster = VirtualCluster(workers_per_replica=2, workers=workers)
    bins = cluster.train(ClickModule(), [make_batch(4) for _ in range(60)]).to_dict()["staleness"]["dense"]["bins"]
    assert len(bins) == 4
    assert bins[0] == 0
    assert bins[1:] == [pytest.approx(20, abs=3)] * 3  # the fast worker's without the other's, with it; the slow one's


def test_averaging_after_each_step_with_sgd_then_is_training_on_the_joined_batches():
    torch.manual_seed(0)
    batches = [make_batch(16) for _ in range(20)]
    module = ClickModule()
    joined = copy.deepcopy(module)
    cluster = VirtualCluster(
        num_replicas=2,
        dense_on_servers=False,
        workers=Workers(compute=Constant(1.0)),
        synchronization=Synchronization("ma", rounds="foreground", gap=1, options={"alpha": 1.0}),
    )
    results = cluster.train(module, batches)
    optimizer = joined.configure_optimizers()
    for one, other in zip(batches[::2], batches[1::2], strict=True):
        loss = (joined.training_step(one, 0)["loss"] + joined.training_step(other, 0)["loss"]) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(module.layer.weight, joined.layer.weight, rtol=1e-5, atol=1e-6)
    assert results.counts["rounds"] == 20  # ten for each of two replicas
    assert results.metrics["sync/gap"] == 1


def test_background_easgd_then_a_round_sends_then_folds_the_answer():
    torch.manual_seed(0)
    batches = [make_batch(16) for _ in range(3)]
    module = ClickModule()
    expected = copy.deepcopy(module)
    cluster = VirtualCluster(
        dense_on_servers=False,
        workers=Workers(compute=Constant(2.0)),
        synchronization=Synchronization("easgd", interval=1.5, servers=Servers(link=Network(latency=1.0))),
    )
    cluster.train(module, batches[:1])
    optimizer = expected.configure_optimizers()
    start = {name: value.clone() for name, value in expected.state_dict().items()}
    expected.training_step(batches[0], 0)["loss"].backward()
    optimizer.step()
    for name, value in module.state_dict().items():  # the centre and what was sent were the start
        torch.testing.assert_close(value, 0.5 * start[name] + 0.5 * expected.state_dict()[name])


def test_staleness_when_linear_then_each_gradient_is_divided_by_it():
    """Two workers in turn: every gradient but the first is 2 updates old, and computed before the one ahead of it."""
    torch.manual_seed(0)
    batches = [make_batch(16) for _ in range(6)]
    module = ClickModule()
    expected = copy.deepcopy(module)
    workers = Workers(compute=Constant(1.0))
    VirtualCluster(workers_per_replica=2, workers=workers, staleness=StalenessNormalization("linear")).train(
        module, batches
    )
    parameters = list(expected.parameters())

    def gradient(batch):
        return torch.autograd.grad(expected.training_step(batch, 0)["loss"], parameters)

    waiting = [gradient(batches[0]), gradient(batches[1])]
    for i in range(6):
        with torch.no_grad():
            for parameter, grad in zip(parameters, waiting.pop(0), strict=True):
                parameter -= 0.1 * grad / (1 if i == 0 else 2)
        if i + 2 < 6:
            waiting.append(gradient(batches[i + 2]))
    torch.testing.assert_close(list(module.parameters()), parameters)


def test_staleness_when_named_then_is_the_rule_and_what_is_none_is_refused_before_anything_is_trained():
    assert VirtualCluster(staleness="power").normalization == StalenessNormalization("power")
    with pytest.raises(ValueError, match="staleness rule must be one of identity, linear"):
        VirtualCluster(staleness="square")
    with pytest.raises(TypeError, match=r"cluster.staleness is null, .* such as linear, .* got \{'rule': 'linear'\}"):
        VirtualCluster(staleness={"rule": "linear"})


def test_rows_when_stale_then_they_are_damped_and_the_module_has_them_back():
    data = make_data(rows=640)
    moved = []
    for rule in (None, StalenessNormalization("power", power=50.0)):
        task = make_task(data, rows=RowSGD(lr=0.5), optimizer=partial(torch.optim.SGD, lr=0.0))
        start = task.model.embeddings.embedding_bags.read("c0", "weight").clone()
        cluster = VirtualCluster(workers_per_replica=8, workers=Workers(compute=Constant(1.0)), staleness=rule)
        cluster.train(task, data.train_dataloader())
        moved.append(float((task.model.embeddings.embedding_bags.read("c0", "weight") - start).norm()))
    assert 0 < moved[1] < 0.5 * moved[0]  # of the first pushes some found their rows as they had read them


def test_failures_then_every_example_is_trained_once_and_time_is_lost():
    data = make_data(rows=3200)
    steady, failing = (
        VirtualCluster(workers_per_replica=4, workers=Workers(compute=Constant(1.0), **options)).train(
            make_task(data), data.train_dataloader()
        )
        for options in ({}, {"failures": Exponential(5.0), "restart": Constant(3.0)})
    )
    assert steady.counts["failures"] == 0
    assert failing.counts["failures"] > 5
    assert failing.examples == steady.examples == 3200
    assert failing.seconds > 1.5 * steady.seconds


def test_failures_then_throughput_is_that_of_the_renewal_process_and_none_loses_a_batch_between_batches():
    """Computing begins anew after a failure; what lies elsewhere ends with one. Exponential lives have no memory."""
    compute, elsewhere, life, restart, number = 1.0, 3.0, 5.0, 2.0, 20_000
    workers = Workers(Constant(compute), Constant(elsewhere), failures=Exponential(life), restart=Constant(restart))
    counted = Counted()
    results = VirtualCluster(workers=workers).simulate([counted], repeat(make_batch(2), number))
    a_batch = (life + restart) * (math.exp(compute / life) - 1) + (life + restart) * (1 - math.exp(-elsewhere / life))
    assert results.seconds / number == pytest.approx(a_batch, rel=0.01)
    lost_each = math.exp(compute / life) - 1  # tries of a batch beyond the one that ends
    assert counted.computed / number - 1 == pytest.approx(lost_each, rel=0.05)


class Counted:
    """A learner that only counts."""

    def __init__(self):
        self.flat, self.dense_bytes, self.computed = torch.zeros(1), 0, 0

    def gradient(self, batch):
        self.computed += 1
        return Gradient(batch, torch.zeros(len(batch.labels)), [], [], 0)

    def apply(self, gradient, normalization):
        return 1, []


def test_round_when_it_takes_no_time_then_error_instead_of_no_end():
    data = make_data(rows=64)
    cluster = VirtualCluster(num_replicas=2, dense_on_servers=False, synchronization=Synchronization("ma"))
    with pytest.raises(ValueError, match="a round takes no time"):
        cluster.train(make_task(data), data.train_dataloader())


def test_module_when_its_optimizers_are_not_one_then_error_names_them():
    module = ClickModule()
    module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), lr=0.1)] * 2
    with pytest.raises(TypeError, match="one optimizer, and ClickModule"):
        VirtualCluster().train(module, [make_batch(4)])


@pytest.mark.parametrize("of_rows", [True, False])
def test_swap_when_its_periods_are_seconds_of_the_real_clock_then_refused(of_rows):
    hour, data = {"seconds": 3600, "discount": 0.5}, make_data(rows=64)
    rules = {"rows": RowSWAP(inner=ADAGRAD, **hour)} if of_rows else {}
    task = make_task(data, **rules or {"optimizer": partial(swap, inner=torch.optim.Adagrad, **hour)})
    with pytest.raises(ValueError, match=r"SWAP's seconds are those of this machine's clock.* optim.dense.period"):
        VirtualCluster().train(task, data.train_dataloader())


def test_evaluation_then_is_asked_for_at_every_mark_and_at_the_end():
    torch.manual_seed(0)
    results = VirtualCluster().train(
        ClickModule(), [make_batch(10) for _ in range(7)], mark_every=30, evaluate=lambda module: {"val/x": 1.0}
    )
    assert [(point["examples"], point["val/x"]) for point in results.curve] == [(30, 1.0), (60, 1.0), (70, 1.0)]
    assert results.metrics["val/x"] == 1.0


def test_workers_when_they_always_fail_while_they_pull_then_the_run_ends_with_an_error():
    """A batch takes a second, but its rows arrive after ten, when the worker has failed long ago."""
    workers = Workers(compute=Constant(1.0), failures=Constant(2.0))
    cluster = VirtualCluster(workers=workers, link=Network(latency=5.0))
    with pytest.raises(ValueError, match=r"workers.failures: one batch was lost 100 times in a row"):
        cluster.train(ClickModule(), [make_batch(4)])
