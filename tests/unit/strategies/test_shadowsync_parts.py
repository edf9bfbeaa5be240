"""The parts of ShadowSync one by one: arguments, processes, replica, rounds, drivers. No worker is started."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import StrategyRegistry
from torch import nn

from lightning_recsys.checkpoints import save_folder
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.errors import NoRoomError
from lightning_recsys.optim import RowSGD
from lightning_recsys.stores.mapped import MappedStores
from lightning_recsys.strategies import ShadowSyncStrategy
from lightning_recsys.strategies.common.samples import sample_features
from lightning_recsys.strategies.replicas.drivers import ForegroundHook, ShadowThread
from lightning_recsys.strategies.replicas.replica import Replica, share_optimizer_state
from lightning_recsys.strategies.replicas.rounds import CenterRounds, Rounds
from lightning_recsys.strategies.rows.tables import (
    ServedTables,
    ids_in,
    measure_costs,
    plan_placement,
    rooms_of,
)
from lightning_recsys.strategies.shadowsync.standstill import Standstill
from lightning_recsys.sync import BMUF, EASGD, ModelAveraging, RoundSchedule, register_algorithm, registry


def make_trainer(strategy, **arguments) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, **arguments)


# --- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("shadowsync", EASGD),
        ("shadowsync_easgd", EASGD),
        ("shadowsync_ma", ModelAveraging),
        ("shadowsync_bmuf", BMUF),
    ],
)
def test_name_when_registered_then_the_trainer_finds_it(name, algorithm):
    assert isinstance(StrategyRegistry.get(name).dense.algorithm, algorithm)
    trainer = make_trainer(name, devices=3)
    assert (trainer.world_size, trainer.strategy.dense.layout.num_trainers) == (3, 3)


class OwnDefault(ModelAveraging):
    def __init__(self, *, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)


def test_algorithm_of_ones_own_when_alpha_is_left_out_then_keeps_its_own_default(monkeypatch):
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    register_algorithm("own_default", OwnDefault)
    assert ShadowSyncStrategy(algorithm="own_default").dense.algorithm.alpha == 1.0
    assert ShadowSyncStrategy(algorithm="own_default", alpha=0.25).dense.algorithm.alpha == 0.25
    assert ShadowSyncStrategy().dense.algorithm.alpha == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": "async"}, r"strategy\.rounds must be one of background, foreground, got 'async'"),
        (
            {"table_placement": "random"},
            r"strategy\.table_placement must be one of round_robin, size, profiled, got 'random'",
        ),
        ({"final": "best"}, r"strategy\.final must be one of trainer0, average, got 'best'"),
        ({"num_trainers": 0}, r"strategy\.num_trainers must be at least 1, got 0"),
        ({"workers_per_trainer": 0}, r"strategy\.workers_per_trainer must be at least 1, got 0"),
        ({"gap": 0}, r"strategy\.gap must be at least 1, got 0"),
        ({"num_embedding_servers": 0}, r"strategy\.num_embedding_servers must be at least 1, got 0"),
        ({"num_sync_servers": -1}, r"strategy\.num_sync_servers must be at least 1, got -1"),
        ({"interval": -0.1}, r"strategy\.interval must be a finite number of seconds, at least 0, got -0\.1"),
        ({"algorithm": "sgd"}, r"strategy\.algorithm must be one of .*, got 'sgd'"),
        ({"alpha": 2.0}, r"strategy\.alpha must be in \(0, 1\], got 2\.0"),
        ({"num_sync_servers": 2, "algorithm": "ma"}, r"num_sync_servers=2 means .* strategy\.algorithm=ma, whose"),
        ({"num_sync_servers": 3, "algorithm": BMUF(alpha=0.5)}, r"num_sync_servers=3 .* strategy\.algorithm=BMUF"),
        ({"gap": 10}, r"strategy\.gap=10 means nothing with strategy\.rounds=background, .* Leave strategy\.gap out"),
        (
            {"gap": 10, "rounds": "foreground", "interval": 0.5},
            r"strategy\.gap=10 means nothing beside strategy\.interv",
        ),
        ({"alpha": "0.5"}, r"strategy\.alpha must be a number, got '0\.5'"),
        ({"interval": "1"}, r"strategy\.interval must be a number, got '1'"),
        ({"num_trainers": 2.0}, r"strategy\.num_trainers must be a whole number, got 2\.0"),
        ({"alpha": 0.3, "algorithm": BMUF(alpha=0.5)}, r"strategy\.alpha=0\.3 means nothing .* an object: BMUF has"),
        ({"eta": 0.5}, r"strategy\.eta means nothing to strategy\.algorithm=easgd"),
    ],
)
def test_argument_when_wrong_then_refused_by_its_place_in_the_config(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShadowSyncStrategy(**arguments)


def test_strategy_when_pickled_then_keeps_its_settings():
    strategy = ShadowSyncStrategy(num_trainers=3, algorithm="bmuf", eta=0.5, rounds="foreground", gap=7)
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.dense.num_trainers, copy.dense.rounds, copy.dense.gap) == (3, "foreground", 7)
    assert isinstance(copy.dense.algorithm, BMUF)
    assert copy.dense.algorithm.eta == 0.5


def test_servers_when_the_algorithm_has_no_center_then_are_for_rows_only():
    def kinds(**arguments) -> list[str]:
        strategy = make_trainer(ShadowSyncStrategy(num_embedding_servers=2, **arguments)).strategy
        return [str(spec) for spec in strategy.server_specs()]

    center = {"num_sync_servers": 2}
    assert kinds(num_trainers=2, **center) == ["embedding-0", "embedding-1", "sync-0", "sync-1"]
    assert kinds(num_trainers=2, algorithm="ma") == ["embedding-0", "embedding-1"]
    assert kinds(num_trainers=1, **center) == ["embedding-0", "embedding-1"]


# --- Processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "layout"),
    [
        ({"num_trainers": 2}, {}, (2, 1)),
        ({"num_trainers": 2, "workers_per_trainer": 2}, {}, (2, 2)),
        ({"num_trainers": 2, "workers_per_trainer": 2}, {"devices": 4}, (2, 2)),
        ({"workers_per_trainer": 2}, {"devices": 4}, (2, 2)),
        ({"workers_per_trainer": 3}, {}, (1, 3)),
        ({}, {"devices": 2}, (2, 1)),
        ({}, {}, (1, 1)),
        ({"num_trainers": 4, "workers_per_trainer": 2}, {"num_nodes": 2}, (4, 2)),
    ],
)
def test_processes_when_devices_are_left_out_then_follow_the_trainers(arguments, settings, layout):
    trainer = make_trainer(ShadowSyncStrategy(**arguments), **settings)
    assert (trainer.strategy.dense.layout.num_trainers, trainer.strategy.dense.layout.workers_per_trainer) == layout
    assert trainer.world_size == layout[0] * layout[1]
    assert trainer.num_devices == trainer.world_size // settings.get("num_nodes", 1)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"num_trainers": 2}, {"devices": 3}, r"needs 2 processes on each of 1 nodes, but there is trainer\.devices=3"),
        ({"workers_per_trainer": 2}, {"devices": 3}, r"3 ranks are no whole number of trainers with .*=2"),
        ({"num_trainers": 3}, {"num_nodes": 2}, r"strategy\.num_trainers=3 is not a multiple of the 2 nodes"),
    ],
)
def test_processes_when_they_do_not_fit_then_refused_with_the_way_out(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(ShadowSyncStrategy(**arguments), **settings)


def test_processes_when_torchrun_started_another_number_then_refused(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "run", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="needs 2 processes on each of 1 nodes, but there is torchrun --nproc-per-node=3"
    ):
        make_trainer(ShadowSyncStrategy(num_trainers=2))
    assert make_trainer(ShadowSyncStrategy(workers_per_trainer=3)).world_size == 3


# --- Replica ---------------------------------------------------------------------------------------------------------


def test_replica_when_attached_then_parameters_are_views_and_train_in_it():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    model[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replica = Replica((name, x) for name, x in model.named_parameters() if x.requires_grad)
    replica.attach(torch.zeros(replica.size))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(x.data_ptr() % 64 == 0 for x in model.parameters() if x.requires_grad)
    assert [replica.holds(x) for x in model.parameters()] == [True, False, True, True]
    model(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert replica.flat.sum().item() == pytest.approx(
        sum(x.sum().item() for x in model.parameters() if x.requires_grad), rel=1e-5
    )
    replica.flat.zero_()
    assert not model[1].weight.any()
    replica.detach()
    replica.flat.fill_(1.0)
    assert not model[1].weight.any()


def test_replica_when_a_parameter_is_not_float32_then_refused_by_name():
    with pytest.raises(TypeError, match=r"weight is torch\.float64\. Use trainer\.precision=32-true"):
        Replica(nn.Linear(2, 2, dtype=torch.float64).named_parameters())


def test_replica_when_a_parameters_data_is_replaced_then_it_comes_back_unless_others_share_it():
    model = nn.Linear(2, 2)
    replica = Replica(model.named_parameters())
    replica.attach(torch.zeros(replica.size))
    replica.bring_back(is_shared=True)  # all are there
    model.bias.data = torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match=r"bias\.data was replaced while training, .* bias\.data\.copy_"):
        replica.bring_back(is_shared=True)
    replica.bring_back(is_shared=False)
    assert replica.holds(model.bias.data)
    assert model.bias.tolist() == [3.0, 4.0]
    replica.flat.fill_(7.0)
    assert model.bias.tolist() == [7.0, 7.0]
    model.weight.data = model.weight.data.double()
    with pytest.raises(ValueError, match=r"weight\.data was replaced while training, by \[2, 2\] of torch\.float64"):
        replica.bring_back(is_shared=False)


class HeavyBall(torch.optim.Optimizer):
    """Somebody's own optimizer, which makes its state as it steps; ``eager`` adds to it without a gradient, too."""

    def __init__(self, parameters, lr: float, *, eager: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1, "eager": eager})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state["step"] += 1
                gradient = parameter.grad + group["weight_decay"] * parameter
                speed = state.setdefault("speed", torch.zeros_like(parameter)).mul_(0.9).add_(gradient)
                if group["eager"]:
                    speed.add_(1.0)
                parameter.sub_(speed, alpha=group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9, fused=True),
        lambda x: torch.optim.Adam(x, lr=0.1, weight_decay=0.1),
        lambda x: torch.optim.Adam(x, lr=0.1, amsgrad=True, fused=True),
        lambda x: torch.optim.AdamW(x, lr=0.1, weight_decay=0.1),
        lambda x: torch.optim.Adagrad(x, lr=0.1, initial_accumulator_value=0.1, fused=True),
        lambda x: torch.optim.RMSprop(x, lr=0.1, momentum=0.9),
        lambda x: torch.optim.Adadelta(x, lr=0.1),
        lambda x: torch.optim.NAdam(x, lr=0.1, weight_decay=0.1),
        lambda x: torch.optim.RAdam(x, lr=0.1),
        lambda x: torch.optim.Adamax(x, lr=0.1),
        lambda x: torch.optim.ASGD(x, lr=0.1, t0=1),
        lambda x: torch.optim.Rprop(x, lr=0.1),
        lambda x: HeavyBall(x, lr=0.1),
    ],
    ids=[
        "sgd",
        "sgd-fused",
        "adam",
        "adam-fused",
        "adamw",
        "adagrad-fused",
        "rmsprop",
        "adadelta",
        "nadam",
        "radam",
        "adamax",
        "asgd",
        "rprop",
        "own",
    ],
)
def test_optimizer_state_when_made_before_the_first_step_then_training_is_as_without(make):
    def train(prepare: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer, hooked = make(model.parameters()), []
        optimizer.register_step_post_hook(lambda *_: hooked.append(True))
        if prepare:
            before = nn.utils.parameters_to_vector(model.parameters()).clone()
            share_optimizer_state([optimizer], team_size=1)
            assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
            assert all(optimizer.state[x] and x.grad is None for x in model.parameters())
            for name, value in optimizer.defaults.items():
                assert optimizer.param_groups[0][name] == value
            assert not hooked, "no step was taken"
        for rows in torch.randn(5, 16, 4, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    torch.testing.assert_close(train(True), train(False), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9, dampening=0.5), "state of SGD .* first step is not like"),
        (lambda x: HeavyBall(x, lr=0.1, eager=True), "state of HeavyBall .* first step is not like"),
        (lambda x: torch.optim.LBFGS(x), r"state of LBFGS .* does not make it without training \(.*closure"),
    ],
    ids=["sgd-dampening", "own", "lbfgs"],
)
def test_optimizer_state_when_the_first_step_is_another_then_refused_by_name(make, message):
    with pytest.raises(TypeError, match=rf"strategy\.workers_per_trainer above 1 needs the {message}"):
        share_optimizer_state([make(nn.Linear(4, 2).parameters())], team_size=1)


def test_optimizer_state_when_it_is_there_then_stays():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[weight].items()}
    share_optimizer_state([optimizer], team_size=1)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state[weight].items())


# --- Rounds ----------------------------------------------------------------------------------------------------------


def test_center_when_cut_over_servers_then_a_round_equals_one_with_a_whole_center(tmp_path):
    replica, initial = torch.arange(7.0), torch.full((7,), 10.0)
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    pieces = [
        MappedStores(tmp_path / str(i)).create_dense_store("center", part.clone())
        for i, part in enumerate(initial.split([4, 3]))
    ]
    rounds = CenterRounds(EASGD(alpha=0.25), replica, pieces=pieces)
    assert not rounds.run(leaving=False)
    center = 0.75 * initial + 0.25 * torch.arange(7.0)
    torch.testing.assert_close(rounds.pull_center(), center)
    torch.testing.assert_close(replica, 0.75 * torch.arange(7.0) + 0.25 * center)
    assert rounds.divergence == pytest.approx(((torch.arange(7.0) - center).norm() / center.norm()).item())
    assert rounds.run(leaving=True)
    assert rounds.count == 1


# --- Drivers ---------------------------------------------------------------------------------------------------------


class Recorded(Rounds):
    """Does nothing but to remember; the others want to leave after ``more`` rounds in which this one does."""

    def __init__(self, *, more: int = 0, fails_at: int | None = None) -> None:
        super().__init__(ModelAveraging(), torch.zeros(1))
        self.more, self.fails_at = more, fails_at
        self.threads: set[str] = set()
        self.settings: set[tuple[int, float]] = set()
        self.reached = threading.Event()

    def _exchange(self, *, leaving: bool) -> tuple[torch.Tensor, int]:
        self.threads.add(threading.current_thread().name)
        self.settings.add((torch.get_num_threads(), (torch.tensor([1e-39]) * 1).item()))
        if self.count == self.fails_at:
            raise ZeroDivisionError("in a round")
        self.more -= leaving
        if self.count >= 3:
            self.reached.set()
        return torch.zeros(1), int(leaving and self.more < 0)


@pytest.mark.parametrize("interval", [None, 0.001])
def test_shadow_thread_when_started_then_loops_until_it_may_leave(interval):
    torch.set_num_threads(2)
    rounds = Recorded(more=2)
    driver = ShadowThread(rounds, interval=interval)
    for _ in range(2):  # as around a validation
        rounds.reached.clear()
        driver.start()
        assert rounds.reached.wait(10)
        driver.stop()
        assert not [x for x in threading.enumerate() if x.name == "shadow"]
        stopped = rounds.count
        driver.stop()  # once is enough
        assert rounds.count == stopped
    assert rounds.threads == {"shadow"}
    assert rounds.settings == {(1, 0.0)}, "a thread has settings of its own"
    assert torch.get_num_threads() == 2
    assert driver.active_seconds > 0


def test_shadow_thread_when_a_round_fails_then_the_error_is_raised_once_and_the_thread_is_gone():
    driver = ShadowThread(Recorded(fails_at=2), interval=0.0)
    driver.start()
    driver._thread.join(10)
    with pytest.raises(ZeroDivisionError, match="in a round") as raised:
        driver.check()
    assert raised.value.__notes__ == ["Raised in the shadow thread, which synchronises this trainer in the background."]
    assert driver.active_seconds > 0, "training's until then"
    driver.check()
    driver.stop()


def test_shadow_thread_when_the_error_was_not_seen_then_stopping_raises_it():
    driver = ShadowThread(Recorded(fails_at=0))
    driver.start()
    with pytest.raises(ZeroDivisionError, match="in a round"):
        driver.stop()


def test_shadow_thread_when_the_pause_is_long_then_stopping_does_not_wait_for_it():
    driver = ShadowThread(Recorded(), interval=1e6)
    driver.start()
    thread = driver._thread
    driver.stop()
    assert not thread.is_alive()
    driver.abandon()
    assert driver._started is None


def test_foreground_when_steps_are_made_then_a_round_follows_each_gap():
    rounds = Recorded(more=2)
    driver = ForegroundHook(rounds, schedule=RoundSchedule(gap=3))
    driver.start()
    counts = []
    for _ in range(7):
        driver.after_step()
        counts.append(rounds.count)
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    driver.stop()
    assert rounds.count == 4  # others needed it twice
    driver.start()
    driver.after_step()
    driver.after_step()
    assert rounds.count == 5, "the step before the pause counts"


def test_foreground_when_its_steps_are_kept_then_the_next_round_comes_where_it_would_have():
    kept, within = np.zeros(3, dtype=np.int64), []

    @contextmanager
    def alone():
        within.append(rounds.count)
        yield
        within.append(rounds.count)

    rounds = Recorded(more=1)
    driver = ForegroundHook(rounds, schedule=RoundSchedule(gap=3, steps=kept[1:2]), alone=alone)
    driver.start()
    for _ in range(4):
        driver.after_step()
    assert kept.tolist() == [0, 1, 0]
    driver.stop()
    assert within == [0, 1, 1, 2, 2, 2], "around each round, those for others too"
    assert kept.tolist() == [0, 1, 0], "rounds for others are not its own"
    resumed = ForegroundHook(rounds := Recorded(), schedule=RoundSchedule(gap=3, steps=kept[1:2]))
    resumed.start()
    resumed.after_step()
    assert rounds.count == 0
    resumed.after_step()
    assert rounds.count == 1


def test_foreground_when_paced_by_time_then_steps_do_not_count(monkeypatch):
    now = 0.0
    monkeypatch.setattr("lightning_recsys.strategies.replicas.drivers.time.monotonic", lambda: now)
    rounds = Recorded()
    driver = ForegroundHook(rounds, schedule=RoundSchedule(gap=1, interval=10.0))
    driver.start()
    for now, expected in ((9.0, 0), (10.0, 1), (19.0, 1), (21.0, 2)):  # noqa: B007 - read by the clock
        driver.after_step()
        assert rounds.count == expected


# --- Standing still --------------------------------------------------------------------------------------------------


@pytest.fixture
def team(tmp_path):
    """Three workers' ends of the same two locks."""
    for name in ("turnstile", "room"):
        (tmp_path / name).touch()
    files = [[os.open(tmp_path / name, os.O_RDWR) for name in ("turnstile", "room")] for _ in range(3)]
    ends = [Standstill(*pair) for pair in files]
    yield ends
    for end in ends:
        end.close()


def test_round_when_a_worker_updates_then_waits_for_the_update_and_the_next_one_waits_for_the_round(team):
    leader, first, second = team
    seen: list[str] = []
    begun, computed, rounds_over = threading.Event(), threading.Event(), threading.Event()

    def run_round():
        with leader.alone():
            seen.append("round")
            rounds_over.wait(10)
            seen.append("round is over")

    def update():
        with second.update_after(lambda: (seen.append("compute"), computed.set())) as closure:
            begun.set()
            closure()
            seen.append("update")

    with first.update_after(lambda: 7) as closure:
        assert closure() == 7
        with second.update_after(lambda: 8) as other:  # without a round nobody waits for anybody
            assert other() == 8
        thread = threading.Thread(target=run_round)
        thread.start()
        thread.join(0.2)
        assert closure() == 7, "again, as LBFGS does, while the round waits for this update"
        assert not seen
    while not seen:
        thread.join(0.01)
    late = threading.Thread(target=update)
    late.start()
    begun.wait(10)
    assert not computed.wait(0.2), "it waits outside"
    rounds_over.set()
    thread.join(10)
    late.join(10)
    assert seen == ["round", "round is over", "compute", "update"]


def test_round_when_it_begins_while_a_worker_computes_then_the_update_comes_after_it(team):
    leader, worker, _ = team
    seen = []

    def compute():
        with leader.alone():  # would wait for ever if computing were part of the update
            seen.append("round")

    with worker.update_after(compute) as closure:
        closure()
        seen.append("update")
    assert seen == ["round", "update"]


def test_update_when_it_fails_then_rounds_go_on(team):
    leader, worker, _ = team
    with pytest.raises(ZeroDivisionError), worker.update_after(lambda: None) as closure:
        1 / bool(closure())
    with pytest.raises(ZeroDivisionError), leader.alone():
        raise ZeroDivisionError
    with worker.update_after(lambda: None) as closure:
        closure()


# --- Embedding servers -----------------------------------------------------------------------------------------------


def test_placement_when_profiled_then_measures_every_table_and_leaves_the_random_numbers_alone():
    tables = [EmbeddingBagConfig("small", 10, 4, ("a",)), EmbeddingBagConfig("large", 5000, 4, ("b", "c"))]
    model = nn.ModuleDict({"embeddings": EmbeddingBagCollection(tables)})
    state = torch.get_rng_state()
    collections = ServedTables(model).collections
    assert list(collections) == ["embeddings"]
    costs = measure_costs(collections["embeddings"])
    assert costs.keys() == {"small", "large"}
    assert all(cost > 0 for cost in costs.values())
    plan = plan_placement(collections, 2, method="profiled")
    assert {part.server for part in plan.parts} == {0, 1}
    assert "imbalance" in str(plan)
    assert torch.equal(torch.get_rng_state(), state)


def test_placement_when_profiled_then_measures_with_the_bags_of_the_batches_that_have_them(monkeypatch):
    looked_up: dict[str, list[SparseFeatures]] = {}

    class Kernel:
        def lookup(self, weight, sparse):
            looked_up.setdefault(sparse.keys[0], []).append(sparse)

        def apply_gradients(self, weight, state, sparse, gradient, **_):
            assert gradient.shape == (sparse.batch_size, len(sparse.keys), 4)

    monkeypatch.setattr("lightning_recsys.strategies.rows.tables.choose_kernel", lambda *_: Kernel())
    tables = [EmbeddingBagConfig("a", 10, 4, ("a",)), EmbeddingBagConfig("b", 3_000_000, 4, ("b",), pooling="mean")]
    collection = EmbeddingBagCollection(tables, device="meta")
    bags = SparseFeatures(("b", "a"), torch.tensor([7, 2_000_001, 3, 4]), lengths=torch.tensor([2, 0, 1, 1]))
    other = SparseFeatures(("c",), torch.tensor([5]))
    assert measure_costs(collection, [other, bags]).keys() == {"a", "b"}
    assert [x.values.tolist() for x in looked_up["a"]] == [[3, 4]] * 6
    for sparse in looked_up["b"]:  # a large table is measured with fewer rows
        assert (sparse.values.tolist(), sparse.bag_offsets().tolist()) == ([7, 1], [0, 2, 2])
        assert sparse.weights.tolist() == [0.5, 0.5]


def test_placement_when_profiled_then_a_cut_tables_cost_follows_the_rows_that_its_batches_looked_up(monkeypatch):
    monkeypatch.setattr(
        "lightning_recsys.strategies.rows.tables.measure_costs",
        lambda *_: {"a": 3.0, "b": 1.0, "unseen": 0.0},
    )
    features = {"a": ("x",), "b": ("y", "z"), "unseen": ("u",)}
    tables = [EmbeddingBagConfig(name, 8, 4, own) for name, own in features.items()]
    collections = {"net": EmbeddingBagCollection(tables, device="meta")}
    keys = ("x", "y", "z", "u")
    batch = SparseFeatures(keys, torch.tensor([0, 0, 2, 5, 1, 1]), lengths=torch.tensor([4, 1, 1, 0]))
    other = SparseFeatures(("c",), torch.tensor([5]))
    assert {name: ids.tolist() for name, ids in ids_in(collections["net"], [other, batch]).items()} == {
        "a": [0, 0, 2, 5],
        "b": [1, 1],
        "unseen": [],
    }
    plan = plan_placement(collections, 2, method="profiled", samples=lambda _: [other, batch])
    assert {(x.table, x.stripe): x.cost for x in plan.parts if x.table == "a"} == {("a", 0): 2.25, ("a", 1): 0.75}
    assert plan.imbalance == pytest.approx(2.25 / 2)
    assert "by the rows of 6 lookups" in str(plan)


def test_placement_when_the_servers_lack_room_then_says_so_and_tables_that_grow_may_still_be_placed(tmp_path):
    class Server:
        def status(self):
            return told

    told = {"place": "here", "free_bytes": 10_000}
    rooms = rooms_of([Server(), Server()])
    tables = [EmbeddingBagConfig("a", 1000, 4, ("x",))]
    collections = {"net": EmbeddingBagCollection(tables, optimizer=RowSGD(), device="meta")}
    with pytest.raises(NoRoomError, match=r"table net.a needs [0-9,]+ bytes .* server 0 [0-9,]+ of 10,000"):
        plan_placement(collections, 2, method="size", rooms=rooms)
    assert plan_placement(collections, 2, method="size", rooms=rooms, growing=["net"]).num_servers == 2
    told = {"rows": 3}
    assert rooms_of([Server()]) is None
    assert plan_placement(collections, 2, method="size").num_servers == 2


class SparseDataset(torch.utils.data.Dataset):
    """Examples with an id each; making one draws a random number, as augmentation does."""

    def __len__(self):
        return 5

    def __getitem__(self, row):
        torch.rand(1)
        return row


def collate(rows):
    return {"features": SparseFeatures(("a",), torch.tensor(rows)), "labels": torch.ones(len(rows))}


def source_of(trainer, **source):
    """Let the trainer have the loader, or the data module."""
    trainer._data_connector.attach_data(pl.LightningModule(), **source)
    return trainer


@pytest.fixture
def trainer():
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_samples_when_the_data_module_is_ours_then_are_training_rows_and_its_loaders_stay(trainer):
    def rows(loader):
        return [batch.sparse.values.tolist() for batch in loader]

    data = SyntheticDataModule(batch_size=8, train_rows=20, val_rows=8, test_rows=8, cardinalities=(50, 7), num_dense=1)
    data.setup("fit")
    expected, loader = rows(data.train_dataloader()), data.train_dataloader()
    state = torch.get_rng_state()
    samples = sample_features(source_of(trainer, datamodule=data), 9)
    assert [x.batch_size for x in samples] == [8, 8, 4]
    assert {x.keys for x in samples} == {tuple(data.fields)}
    assert rows(loader) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_when_there_is_a_loader_then_its_sampler_and_random_numbers_stay(trainer):
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(
        SparseDataset(), batch_size=2, shuffle=True, generator=generator, collate_fn=collate
    )
    states = torch.get_rng_state(), generator.get_state()
    samples = sample_features(source_of(trainer, train_dataloaders=loader), 2)
    assert [x.values.tolist() for x in samples] == [[0, 1], [2, 3]]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def test_samples_when_only_an_iteration_or_a_hook_could_give_them_then_there_are_none(trainer):
    assert sample_features(source_of(trainer, train_dataloaders=iter([])), 2) == []
    assert sample_features(source_of(trainer, datamodule=pl.LightningDataModule()), 2) == []


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoint_when_hierarchical_groups_wrote_it_then_their_replicas_are_left_out(tmp_path):
    checkpoint = {"state_dict": {"weight": torch.ones(1)}, "optimizer_states": [{"state": "mean"}], "global_step": 3}
    own = {"group": 0, "num_groups": 2, "replica": {"weight": torch.zeros(1)}, "optimizer_states": [{"state": "own"}]}
    save_folder(tmp_path / "last.ckpt", checkpoint, extras={"hierarchical": own})
    strategy = make_trainer(ShadowSyncStrategy(num_trainers=2)).strategy
    loaded = dict(checkpoint)
    strategy.dense.load_own(tmp_path / "last.ckpt", loaded, weights_only=False)
    assert loaded["optimizer_states"] == [{"state": "mean"}]
    assert strategy.dense._restored_trainer is None
