"""ShadowSync on several workers: what it equals, what it shares, how it ends."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, WeightAveraging
from served_strategy import Ratings
from torch import nn

from lightning_recsys.callbacks import TelemetryMonitor
from lightning_recsys.checkpoints import read_checkpoint, read_extras
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.launchers.sidecars import SHARED_MEMORY
from lightning_recsys.models import DLRM, WideDeep
from lightning_recsys.optim import RowAdagrad, RowSGD
from lightning_recsys.runtime import configure_worker
from lightning_recsys.strategies import ForkserverDDPStrategy, ShadowSyncStrategy
from lightning_recsys.sync import ModelAveraging, SyncAlgorithm, Topology
from lightning_recsys.tasks import CTRTask

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # what saved a checkpoint need not watch the run that goes on from it, and the batches may start again
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]

ROWS_ND = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))


class Batches:
    """``counts[rank]`` batches of 4 rows, each rank's own."""

    def __init__(self, rank: int, counts: tuple[int, ...]) -> None:
        self.batches = ROWS_ND.split(4)[rank :: len(counts)][: counts[rank]]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Regression(pl.LightningModule):
    """A dense model with a buffer; ``counts`` batches on the ranks."""

    def __init__(self, counts: tuple[int, ...], *, optimizer=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts, self.make_optimizer = counts, optimizer or partial(torch.optim.SGD, lr=0.05)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def loss(self, rows):
        return nn.functional.mse_loss(self.layers(rows), rows.sum(1, keepdim=True))

    def training_step(self, rows, batch_idx):
        return self.loss(rows)

    def validation_step(self, rows, batch_idx):
        self.log("val/loss", self.loss(rows), sync_dist=True)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def train_dataloader(self):
        return Batches(self.trainer.global_rank, self.counts)

    def val_dataloader(self):
        return Batches(self.trainer.global_rank, (2,) * len(self.counts))


def make_trainer(strategy, *callbacks, **arguments) -> pl.Trainer:
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **arguments}
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def parameters(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def over_ranks(value) -> list:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


# --- What it equals --------------------------------------------------------------------------------------------------


def train_dlrm(strategy, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    pl.seed_everything(0, verbose=False)
    data = SyntheticDataModule(
        batch_size=32,
        train_rows=640,
        val_rows=200,
        test_rows=200,
        cardinalities=(50, 7, 300),
        multi_hot={"c2": 3},
        num_dense=2,
    )
    data.setup("fit")
    model = DLRM(data.num_dense, data.fields, embedding_dim=8, row_optimizer=RowAdagrad(0.05))
    task = CTRTask(model, optimizer=partial(torch.optim.Adagrad, lr=0.02, fused=True))
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False, default_root_dir=folder)
    trainer.fit(task, datamodule=data)
    return task.state_dict(), {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_one_trainer_with_one_worker_when_trained_then_equals_a_single_device_exactly(tmp_path):
    expected, expected_metrics = train_dlrm("auto", tmp_path)
    actual, metrics = train_dlrm(ShadowSyncStrategy(num_trainers=1), tmp_path)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert metrics == expected_metrics


class ReplacesData(Callback):
    """Gives parameters other memory with the same values, as optimizers and callbacks that swap weights do."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        nn.utils.vector_to_parameters(parameters(pl_module), pl_module.parameters())

    def on_after_backward(self, trainer, pl_module):
        self.on_train_batch_start(trainer, pl_module, None, 0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_validation_start(self, trainer, pl_module):
        """Swaps, as averages of weights do."""
        self.own = [x.data for x in pl_module.parameters()]
        self.on_train_batch_start(trainer, pl_module, None, 0)

    def on_validation_end(self, trainer, pl_module):
        for parameter, own in zip(pl_module.parameters(), self.own, strict=True):
            assert trainer.strategy.dense._run.team.replica.holds(own)
            parameter.data = own


def test_foreground_averaging_at_every_step_when_trained_with_sgd_then_equals_ddp():
    averaged, reduced = Regression((5, 5)), Regression((5, 5))
    strategy = ShadowSyncStrategy(num_trainers=2, algorithm="ma", rounds="foreground", alpha=1.0, gap=1)
    make_trainer(strategy, ReplacesData()).fit(averaged)
    make_trainer(ForkserverDDPStrategy(), devices=2).fit(reduced)
    assert not torch.allclose(parameters(reduced), parameters(Regression((5, 5))), atol=1e-3)  # it did train
    torch.testing.assert_close(parameters(averaged), parameters(reduced), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"min_rows": 60}, {"embeddings": ["items", "kinds"], "num_embedding_servers": 2, "row_optimizer": RowSGD(0.1)}],
)
def test_plain_embeddings_when_served_then_train_as_on_a_single_device(options):
    expected, actual = Ratings(), Ratings()
    settings = {"max_epochs": 3, "use_distributed_sampler": False}
    make_trainer("auto", **settings).fit(expected)
    make_trainer(ShadowSyncStrategy(num_trainers=1, **options), **settings).fit(actual)
    assert type(actual.items) is nn.Embedding
    assert not torch.equal(actual.items.weight, Ratings().items.weight)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, rtol=1e-5, atol=1e-6)


# --- Who waits for whom ----------------------------------------------------------------------------------------------


class HoldsBack(Callback):
    """Rank 1 does not start its second batch before rank 0 has trained on its last one."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "rank 0 has finished"

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            while not self.flag.exists():  # for ever, if rank 0 waits for this rank
                time.sleep(0.01)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == len(trainer.train_dataloader) - 1:
            self.flag.touch()


class EndsAlike(Callback):
    """At the end every rank has the same weights, and its own number of steps."""

    def on_fit_end(self, trainer, pl_module):
        weights = over_ranks(parameters(pl_module))
        assert all(torch.equal(other, weights[0]) for other in weights)
        assert over_ranks(trainer.global_step) == [trainer.max_epochs * count for count in pl_module.counts]


@pytest.mark.parametrize(("algorithm", "final"), [("easgd", "trainer0"), ("ma", "average"), ("bmuf", "average")])
def test_straggler_when_in_the_background_then_nobody_waits_for_it(tmp_path, algorithm, final):
    strategy = ShadowSyncStrategy(num_trainers=2, algorithm=algorithm, final=final)
    make_trainer(strategy, HoldsBack(tmp_path), EndsAlike()).fit(Regression((6, 3)))
    assert (tmp_path / "rank 0 has finished").exists()


class LogsEpoch(Callback):
    """All ranks meet at the end of an epoch to reduce this."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("ranks", 1.0, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")


@pytest.mark.parametrize(
    ("algorithm", "counts", "validates"),
    [("easgd", (9, 2), 1), ("ma", (9, 2), None), ("bmuf", (2, 9), 1), ("ma", (2, 9), 2)],
)
def test_unequal_numbers_of_batches_when_in_the_foreground_then_all_finish(algorithm, counts, validates):
    """Validating every ``validates`` epochs; loaders are first set up then."""
    model = Regression(counts)
    strategy = ShadowSyncStrategy(
        num_trainers=2, algorithm=algorithm, rounds="foreground", gap=2, timeout=timedelta(seconds=60)
    )
    validation = {"check_val_every_n_epoch": validates} if validates else {"limit_val_batches": 0}
    trainer = make_trainer(strategy, EndsAlike(), LogsEpoch(), max_epochs=2, **validation)
    trainer.fit(model)
    assert trainer.callback_metrics["ranks"] == sum(counts)
    assert not torch.equal(parameters(model), parameters(Regression(counts)))


@pytest.mark.parametrize("algorithm", ["ma", "bmuf"])
def test_saving_by_steps_when_averaged_in_the_foreground_by_the_time_then_refused(tmp_path, algorithm):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    strategy = ShadowSyncStrategy(num_trainers=2, algorithm=algorithm, rounds="foreground", interval=0.1)
    with pytest.raises(ValueError, match=r"strategy\.interval=0\.1 .*every_n_train_steps=2"):
        make_trainer(strategy, saving, enable_checkpointing=True).fit(Regression((4, 4)))


class SinceRound(Callback):
    """How many steps each trainer has made since a round, when training begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            assert over_ranks(int(trainer.strategy.dense._run.team.since_round[0])) == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # is not empty
def test_trainer_when_it_joins_trainers_that_average_in_the_foreground_then_its_rounds_come_at_their_steps(tmp_path):
    def averages(num_trainers):
        return ShadowSyncStrategy(
            num_trainers=num_trainers, algorithm="ma", rounds="foreground", gap=4, timeout=timedelta(seconds=60)
        )

    saving = ModelCheckpoint(tmp_path, filename="saved", save_on_train_epoch_end=True)
    make_trainer(averages(2), saving, enable_checkpointing=True).fit(Regression((3, 3)))
    again = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(averages(3), again, SinceRound(), enable_checkpointing=True, max_epochs=2)
    trainer.fit(Regression((3, 3, 3)), ckpt_path=tmp_path / "saved.ckpt")
    assert (trainer.world_size, trainer.global_step) == (3, 6)


class StandsStill(ModelAveraging):
    """Takes its time, in which nothing moves the replica."""

    def fold(self, replica, answer):
        before = replica.clone()
        time.sleep(0.05)  # steps take a millisecond or two
        assert torch.equal(replica, before), "a worker of the trainer has trained on during the round"
        super().fold(replica, answer)


def test_workers_of_a_trainer_when_it_averages_in_the_foreground_then_stand_still():
    strategy = ShadowSyncStrategy(
        num_trainers=2, workers_per_trainer=2, algorithm=StandsStill(alpha=1.0), rounds="foreground", gap=2
    )
    trainer = make_trainer(strategy, EndsAlike(), LogsEpoch(), limit_val_batches=0)
    trainer.fit(Regression((12, 10, 8, 12)))
    assert trainer.world_size == 4
    assert trainer.callback_metrics["ranks"] == 42


def test_clock_when_all_workers_would_wait_for_it_at_every_batch_then_refused():
    trainer = make_trainer(ShadowSyncStrategy(num_trainers=2), val_check_interval={"hours": 1})
    with pytest.raises(ValueError, match=r"val_check_interval makes every worker wait for all others at every batch"):
        trainer.fit(Regression((4, 4)))


def test_schedules_when_the_first_of_two_callbacks_differs_then_refused(tmp_path):
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=n, filename=str(n)) for n in (4, 100)]
    trainer = make_trainer(ShadowSyncStrategy(num_trainers=2), *callbacks, enable_checkpointing=True)
    with pytest.raises(ValueError, match="ModelCheckpoint 0's every_n_train_steps=4 the ranks"):
        trainer.fit(Regression((9, 3)))


@pytest.mark.parametrize("arguments", [{"val_check_interval": 2}, {"every_n_train_steps": 4}])
def test_unequal_numbers_of_batches_when_ranks_would_wait_within_the_epoch_then_refused(tmp_path, arguments):
    callbacks = [ModelCheckpoint(tmp_path, **arguments)] if "every_n_train_steps" in arguments else []
    trainer = make_trainer(
        ShadowSyncStrategy(num_trainers=2),
        *callbacks,
        enable_checkpointing=bool(callbacks),
        **({} if callbacks else arguments),
    )
    with pytest.raises(
        ValueError, match=rf"{next(iter(arguments))}=\d the ranks.* stop .*\[\d, \d\] times in an epoch"
    ):
        trainer.fit(Regression((9, 3)))


class Thaws(Callback):
    """The first layer is frozen for an epoch."""

    def setup(self, trainer, pl_module, stage):
        pl_module.layers[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.layers[0].requires_grad_(trainer.current_epoch > 0)


@pytest.mark.parametrize(
    "strategy",
    [ShadowSyncStrategy(num_trainers=2), ShadowSyncStrategy(num_trainers=1, workers_per_trainer=2), "ddp_forkserver"],
    ids=["trainers", "workers", "ddp"],
)
def test_parameter_when_it_is_thawed_while_training_then_refused_instead_of_trained_by_each_worker_alone(strategy):
    trainer = make_trainer(strategy, Thaws(), devices=2, max_epochs=2)
    with pytest.raises(ValueError, match=r"layers\.0\.weight was frozen when training began"):
        trainer.fit(Regression((2, 2)))
    assert trainer.world_size == 2


# --- What callbacks write at the end ---------------------------------------------------------------------------------


class Rewrites(Callback):
    """At the end of training each rank writes its own number to the first layer, which all of them find alike."""

    def on_train_end(self, trainer, pl_module):
        found = over_ranks(parameters(pl_module))
        assert all(torch.equal(other, found[0]) for other in found)
        dist.barrier()
        pl_module.layers[0].weight.data.fill_(trainer.global_rank + 7.0)
        dist.barrier()
        time.sleep(0.1 * trainer.global_rank)  # where memory is shared the last one's number would stay


class RemembersReplica(Callback):
    """Rank 0's replica and the mean of all, after the last step."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "replicas.pt"

    def on_train_epoch_end(self, trainer, pl_module):
        replicas = over_ranks(parameters(pl_module))
        if trainer.is_global_zero:
            torch.save({"trainer0": replicas[0], "average": torch.stack(replicas).mean(0)}, self.file)


@pytest.mark.parametrize(
    ("layout", "final", "validates"),
    [((2, 1), "trainer0", True), ((2, 1), "average", False), ((1, 2), "trainer0", True), ((2, 2), "average", True)],
)
def test_callback_when_it_writes_weights_as_training_ends_then_rank_0s_are_kept(tmp_path, layout, final, validates):
    num_trainers, workers = layout
    model = Regression((4,) * (num_trainers * workers))
    strategy = ShadowSyncStrategy(
        num_trainers=num_trainers, workers_per_trainer=workers, rounds="foreground", gap=1000, final=final
    )
    callbacks = RemembersReplica(tmp_path), Rewrites(), EndsAlike()
    trainer = make_trainer(strategy, *callbacks, limit_val_batches=1.0 if validates else 0)
    trainer.fit(model)
    assert trainer.world_size == num_trainers * workers
    first = model.layers[0].weight
    assert torch.equal(first, torch.full_like(first, 7.0)), "what a callback of rank 0 wrote"
    if not validates or num_trainers == 1:  # otherwise the epoch ends with the average in place
        expected = torch.load(tmp_path / "replicas.pt")[final]
        torch.testing.assert_close(parameters(model)[first.numel() :], expected[first.numel() :])


class SavesAverage(WeightAveraging):
    """Lightning's, which says what each rank has averaged after its last step, and what becomes of that."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = folder / "averages.pt"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.own = parameters(self._average_model.module)

    def on_train_end(self, trainer, pl_module):
        own, found = over_ranks(self.own), over_ranks(parameters(self._average_model.module))
        if trainer.is_global_zero:
            torch.save((own, found), self.file)
        super().on_train_end(trainer, pl_module)


def test_weight_averaging_when_in_the_background_then_the_model_is_the_mean_of_what_the_trainers_averaged(tmp_path):
    model = Regression((6, 6))
    make_trainer(ShadowSyncStrategy(num_trainers=2), SavesAverage(tmp_path), EndsAlike()).fit(model)
    own, found = torch.load(tmp_path / "averages.pt")
    assert not torch.equal(own[0], own[1])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], torch.stack(own).mean(0))
    torch.testing.assert_close(parameters(model), found[0], rtol=0, atol=0)


# --- Hogwild workers -------------------------------------------------------------------------------------------------


class OneReplica(Callback):
    """Workers of a trainer write to the same parameters and the same optimizer state; trainers have their own."""

    def __init__(self, num_trainers: int) -> None:
        self.num_trainers = num_trainers

    def on_train_epoch_end(self, trainer, pl_module):
        dist.barrier()
        optimizer, rank = trainer.optimizers[0], trainer.global_rank
        layout = trainer.strategy.dense.layout
        for tensor in (pl_module.layers[0].weight.data, optimizer.state[pl_module.layers[0].weight]["exp_avg"]):
            for writer in range(trainer.world_size):
                if rank == writer:
                    tensor[0, 0] = 1000.0 + writer
                dist.barrier()
                same_trainer = layout.trainer_of(rank) == layout.trainer_of(writer)
                assert (tensor[0, 0] == 1000.0 + writer) == same_trainer
                dist.barrier()
        steps = {float(state["step"]) for state in optimizer.state.values()}
        ranks = [other for other in range(trainer.world_size) if layout.trainer_of(other) == layout.trainer_of(rank)]
        counts = [pl_module.counts[worker] for worker in ranks]
        (step,) = steps
        # Without locks one of two updates at once may not count, and a worker alone has no more than its own.
        assert max(counts) < step <= sum(counts), "the updates of all workers count"


@pytest.mark.parametrize(("num_trainers", "fused"), [(1, True), (2, False)])
def test_workers_of_a_trainer_when_training_then_share_replica_and_optimizer_state(num_trainers, fused):
    counts = (5, 3) * num_trainers
    model = Regression(counts, optimizer=partial(torch.optim.Adam, lr=0.01, fused=fused))
    layout = {"num_trainers": num_trainers, "workers_per_trainer": 2}
    strategy = ShadowSyncStrategy(**layout, rounds="foreground", gap=1000, final="average")
    callbacks = OneReplica(num_trainers), EndsAlike(), TelemetryMonitor()
    trainer = make_trainer(strategy, *callbacks, log_every_n_steps=1, limit_val_batches=0)
    trainer.fit(model)
    assert trainer.world_size == 2 * num_trainers
    assert 0 <= trainer.callback_metrics["staleness/hogwild/mean"] <= 3
    last_writers = range(1, 2 * num_trainers, 2)  # of each trainer's replica
    assert model.layers[0].weight[0, 0] == 1000 + sum(last_writers) / num_trainers


# --- One set of weights ----------------------------------------------------------------------------------------------


class OneSetOfWeights(Callback):
    """Validation sees the mean of the replicas on every rank; afterwards every trainer has its own again."""

    def __init__(self) -> None:
        self.validated = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.before = parameters(pl_module)
        self.statistics = pl_module.layers[2].running_mean.clone()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0:
            replicas, seen = over_ranks(self.before), over_ranks(parameters(pl_module))
            assert all(torch.equal(other, seen[0]) for other in seen)
            buffers = over_ranks([buffer.clone() for buffer in pl_module.buffers()])
            assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))
            own = over_ranks(self.statistics)
            assert not torch.equal(own[0], own[1]), "each worker has its own while it trains"
            torch.testing.assert_close(pl_module.layers[2].running_mean, torch.stack(own).mean(0))
            if trainer.strategy.dense.rounds == "foreground":  # in the background a replica moves after the last batch
                assert not torch.equal(replicas[0], replicas[1])
                torch.testing.assert_close(seen[0], torch.stack(replicas).mean(0))
            self.validated += 1

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if self.validated and trainer.strategy.dense.rounds == "foreground":  # the next step has begun
            assert torch.equal(parameters(pl_module), self.before), "the replica is back"

    def on_fit_end(self, trainer, pl_module):
        assert self.validated == 4


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [("easgd", "background"), ("ma", "background"), ("easgd", "foreground"), ("bmuf", "foreground")],
)
def test_validation_when_replicas_differ_then_sees_their_average_on_every_rank(algorithm, rounds):
    steps = {"gap": 1000} if rounds == "foreground" else {}
    strategy = ShadowSyncStrategy(num_trainers=2, algorithm=algorithm, rounds=rounds, **steps)
    make_trainer(strategy, OneSetOfWeights(), max_epochs=2, val_check_interval=4).fit(Regression((8, 8)))


def test_checkpoint_when_saved_after_validation_then_holds_what_was_validated(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, monitor="val/loss")
    model = Regression((6, 6))
    trainer = make_trainer(ShadowSyncStrategy(num_trainers=2), checkpoints, enable_checkpointing=True)
    trainer.fit(model)
    validated = trainer.callback_metrics["val/loss"].item()
    (again,) = trainer.validate(model, ckpt_path=checkpoints.best_model_path, verbose=False)
    assert again["val/loss"] == pytest.approx(validated, rel=1e-5)


@pytest.mark.parametrize(("algorithm", "workers"), [("easgd", 1), ("bmuf", 1), ("bmuf", 2)])
def test_run_when_resumed_then_goes_on_with_all_its_memory(tmp_path, algorithm, workers):
    counts = (6,) * (2 * workers)
    make = partial(torch.optim.Adam, lr=0.01)
    options = {
        "num_trainers": 2,
        "workers_per_trainer": workers,
        "algorithm": algorithm,
        "rounds": "foreground",
        "gap": 3,
    }
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    make_trainer(ShadowSyncStrategy(**options), saving, enable_checkpointing=True).fit(
        Regression(counts, optimizer=make)
    )
    (path,) = tmp_path.glob("*.ckpt")
    saved = read_checkpoint(path)
    names = {"easgd": {"algorithm", "state", "center"}}.get(algorithm, {"algorithm", "state"})
    assert saved["shadowsync"].keys() == names
    assert saved["shadowsync"]["state"].keys() == ({"global", "momentum"} if algorithm == "bmuf" else set())
    assert {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()} == {4.0 * workers}
    assert read_extras(path, 1)["shadowsync"]["since_round"].tolist() == (
        [1] if workers == 1 else [1, 0]
    )  # of 4 steps, rounds each 3
    trainer = make_trainer(ShadowSyncStrategy(**options), StartsFrom(path))
    trainer.fit(Regression(counts, optimizer=make), ckpt_path=path)
    assert trainer.global_step == 6


class StartsFrom(Callback):
    """The first batch of a resumed run finds what the checkpoint holds; the next round comes at step 6."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != 4 or hasattr(self, "seen"):
            return
        self.seen = True
        saved, strategy = read_checkpoint(self.path), trainer.strategy
        index = strategy.dense.layout.trainer_of(strategy.global_rank)
        mine = read_extras(self.path, index)["shadowsync"]
        if strategy.dense.workers_per_trainer == 1:  # else a worker may be a step ahead
            assert torch.equal(strategy.dense._run.team.replica.flat, mine["replica"])
            assert not torch.equal(mine["replica"], read_extras(self.path, 1 - index)["shadowsync"]["replica"])
            momentum = mine["optimizer_states"][0]["state"][0]["exp_avg"]
            assert torch.equal(trainer.optimizers[0].state_dict()["state"][0]["exp_avg"], momentum)
        driver = trainer.strategy.dense._run.driver
        if driver is not None:
            assert driver._schedule._steps == 1
        if driver is not None and trainer.is_global_zero:
            for name, value in saved["shadowsync"]["state"].items():
                assert torch.equal(driver.rounds.algorithm.state_dict()[name], value)

    def on_train_epoch_end(self, trainer, pl_module):
        driver = trainer.strategy.dense._run.driver
        if driver is not None:
            assert (trainer.global_step, driver.rounds.count) == (6, 1)


# --- How it ends -----------------------------------------------------------------------------------------------------


class Breaks(SyncAlgorithm):
    """Fails in the third round."""

    topology = Topology.ALL_REDUCE
    rounds = 0

    def fold(self, replica, answer):
        self.rounds += 1
        if self.rounds == 3:
            raise ZeroDivisionError("in the third round")


class Endless(Batches):
    """Batches until somebody raises."""

    def __iter__(self):
        while True:
            yield from super().__iter__()
            time.sleep(0.01)

    def __len__(self):
        return 1_000_000


class EndlessRegression(Regression):
    def train_dataloader(self):
        return Endless(self.trainer.global_rank, self.counts)


def test_shadow_thread_when_it_fails_then_its_error_ends_the_run():
    strategy = ShadowSyncStrategy(num_trainers=2, algorithm=Breaks(), interval=0.01)
    with pytest.raises(ZeroDivisionError, match="in the third round") as raised:
        make_trainer(strategy).fit(EndlessRegression((2, 2)))
    notes = "\n".join(raised.value.__notes__)
    assert "Raised in the shadow thread" in notes
    assert "in fold" in notes  # the traceback


class FailsInStep3(Callback):
    """Raises in a worker."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 3:
            raise ZeroDivisionError("in step 3")


@pytest.mark.parametrize("algorithm", ["easgd", "ma"])
def test_worker_when_it_fails_then_nothing_is_left_and_the_trainer_is_usable(algorithm):
    model = Regression((8, 8, 8, 8))
    trainer = make_trainer(
        ShadowSyncStrategy(num_trainers=2, workers_per_trainer=2, algorithm=algorithm), FailsInStep3()
    )
    with pytest.raises(ZeroDivisionError, match="in step 3"):
        trainer.fit(model)
    trainer.callbacks.clear()
    trainer.fit(model)
    assert trainer.state.finished


class Tells(Callback):
    """Says which process trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (self.folder / f"rank-{trainer.global_rank}-{os.getpid()}").touch()


def test_run_when_interrupted_then_nothing_is_left(tmp_path):
    """Ctrl-C reaches all processes of a terminal's foreground group at once."""

    def interrupt() -> None:
        while len(workers := [int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir()]) < 2:
            time.sleep(0.01)
        assert len(list(SHARED_MEMORY.glob(f"lightning_recsys-{os.getpid()}-*"))) == 1
        for pid in (*workers, os.getpid()):
            os.kill(pid, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor() as threads:
            interrupted = threads.submit(interrupt)
            with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
                make_trainer(ShadowSyncStrategy(num_trainers=2), Tells(tmp_path)).fit(EndlessRegression((2, 2)))
            interrupted.result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(SHARED_MEMORY.glob(f"lightning_recsys-{os.getpid()}-*")) == []  # processes, ports, ...: conftest.py


# --- What it tells ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "transport"), [("easgd", "auto"), ("easgd", "tcp"), ("ma", "auto")])
def test_telemetry_when_logged_then_counts_rounds_and_bytes(algorithm, transport):
    options = {"algorithm": algorithm, "rounds": "foreground", "gap": 2, "transport": transport}
    servers = {"num_sync_servers": 2} if algorithm == "easgd" else {}
    trainer = make_trainer(
        ShadowSyncStrategy(num_trainers=2, **servers, **options), TelemetryMonitor(), log_every_n_steps=1
    )
    model = Regression((8, 8))
    trainer.fit(model)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["sync/gap"] == 2.0
    assert metrics["sync/rounds"] > 0
    assert metrics["sync/divergence"] > 0
    size = sum(-(-parameter.numel() // 16) * 16 for parameter in model.parameters())  # from one cache line to the next
    if algorithm == "ma":
        rounds = 4 + 1  # of a ring of two, with a vote beside the vector; the last one is the vote to leave
        assert metrics["comm/sent_bytes"] == metrics["comm/received_bytes"] == rounds * 4 * (size + 1)
    elif transport == "tcp":
        assert metrics["comm/sent_bytes"] >= 4 * 4 * size
        assert metrics["comm/received_bytes"] >= 4 * 4 * size
        assert metrics["load/sync-0"] == metrics["load/sync-1"] >= 4
    else:
        assert metrics["comm/sent_bytes"] == metrics["comm/received_bytes"] == 0


# --- What it costs ---------------------------------------------------------------------------------------------------


def normalized_entropy(strategy) -> float:
    """Of Wide & Deep after one pass over 500 000 synthetic rows: enough for half the steps to arrive as well."""
    pl.seed_everything(0, verbose=False)
    configure_worker()  # as in workers: one thread, no denormals
    data = SyntheticDataModule(
        batch_size=100, train_rows=500_000, val_rows=30_000, test_rows=1000, cardinalities=(10, 20, 50), num_dense=4
    )
    data.setup("fit")
    model = WideDeep(data.num_dense, data.fields, embedding_dim=4, hidden=[16], row_optimizer=RowAdagrad(0.1))
    task = CTRTask(model, optimizer=partial(torch.optim.Adagrad, lr=0.1, fused=True))
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    trainer.fit(task, datamodule=data)
    return trainer.callback_metrics["val/ne"].item()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trainers_of_two_workers_when_trained_on_synthetic_rows_then_are_as_good_as_one_process():
    reference = normalized_entropy("auto")
    ne = normalized_entropy(ShadowSyncStrategy(num_trainers=2, workers_per_trainer=2))
    assert reference < 0.75, "the reference has learned"
    assert ne <= 1.003 * reference
