"""Workers that run free go on without one that dies, and train what it had not."""

from __future__ import annotations

import csv
import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_recsys.callbacks import ExamplesPerSecond
from lightning_recsys.checkpoints import folder, read_checkpoint
from lightning_recsys.data import CTRDataModule, SyntheticDataModule
from lightning_recsys.data.batch import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.launchers import results
from lightning_recsys.metrics import LogLoss
from lightning_recsys.models import WideDeep
from lightning_recsys.optim import RowSGD
from lightning_recsys.serving import ModelPublisher, ModelReader, list_versions
from lightning_recsys.strategies import AsyncParameterServerStrategy, CachedRows, ShadowSyncStrategy, compose
from lightning_recsys.strategies.async_ps.pushed_parameters import PushedParameters
from lightning_recsys.strategies.shadowsync import replicas
from lightning_recsys.tasks import CTRTask

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

WORLD, ROWS, SIZE = 3, 360, 2  # 60 batches for each of three workers
SHARE = ROWS // WORLD // SIZE


class Numbers:
    """Rows of which each is told apart by its id."""

    def __len__(self):
        return ROWS

    def take(self, rows):
        return Batch(torch.zeros(len(rows), 0), SparseFeatures(("id",), rows), (rows % 2).float())


class NumbersModule(CTRDataModule):
    num_dense, fields = 0, {"id": ROWS}

    def __init__(self):
        super().__init__(batch_size=SIZE, seed=0, drop_last=False)

    def rows(self, split):
        return None if split == "test" else Numbers()


class Counts(pl.LightningModule):
    """Each row's embedding counts the steps that it was in."""

    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig("t", ROWS, 1, ("id",), init_std=0.0)
        self.rows = EmbeddingBagCollection([table], optimizer=RowSGD(1.0))
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.loss = LogLoss()
        self.validated = []

    def training_step(self, batch, batch_idx):
        return -self.rows(batch.sparse).sum() + 0.0 * self.bias

    def validation_step(self, batch, batch_idx):
        self.loss.update(torch.full((len(batch),), 0.5), batch.labels)
        self.log("val", self.loss, batch_size=len(batch))
        self.log("seen", float(len(batch)), reduce_fx="sum", sync_dist=True, batch_size=len(batch))
        self.log("world", float(dist.get_world_size()), sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.bias], lr=0.1)
        self.rows.attach_to(optimizer)
        return optimizer

    @property
    def counted(self):
        return self.state_dict()["rows.embedding_bags.t.weight"].flatten()


class Dies(Callback):
    """One worker ends in mid-epoch, without a word, and the first waits until it has."""

    def __init__(self, folder: Path, rank: int = 1, batch: int = 20) -> None:
        self.folder, self.rank, self.batch = folder, rank, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with (self.folder / f"batches-{trainer.global_rank}-{trainer.current_epoch}").open("a") as file:
            file.write(f"{batch.sparse.values.tolist()}\n")
        if trainer.current_epoch == 0 and batch_idx == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        while trainer.global_rank != self.rank and batch_idx == self.batch + 1 and not self._has_come_far():
            time.sleep(0.01)

    def _has_come_far(self) -> bool:
        path = self.folder / f"batches-{self.rank}-0"
        return path.exists() and len(path.read_text().splitlines()) > self.batch


class Shown(ProgressBar):
    """Tells how many batches bars show."""

    def disable(self):
        pass

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("shown", float(self.total_train_batches))
        pl_module.log("early", trainer.strategy.telemetry().get("comm/early_lookups", 0.0))


class CountsInSteps(Counts):
    """With a schedule that refuses more steps than it was made for, and a first worker that is slow."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02 * (self.trainer.global_rank == 0))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=SHARE, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_trainer(strategy, *callbacks, **options):
    options = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False} | options
    options = {"devices": WORLD} | options
    saving = any(isinstance(x, ModelCheckpoint) for x in callbacks)
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        enable_checkpointing=saving,
        **options,
    )


@pytest.mark.parametrize(("name", "accumulated", "dead"), [("async_ps", 7, 1), ("shadowsync", 1, 0)])
def test_worker_when_killed_in_mid_epoch_then_the_others_train_all_examples_and_the_run_can_be_resumed(
    tmp_path, caplog, name, accumulated, dead
):
    """Where gradients accumulate, the dead worker has not pushed those of the batches from the 14th on.

    Workers lease their batches as well where they ask for rows one step early.
    """
    make = {
        "async_ps": AsyncParameterServerStrategy,
        "shadowsync": partial(ShadowSyncStrategy, prefetch=True),
    }[name]
    options = {"accumulate_grad_batches": accumulated}
    saving = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    model = Counts()
    strategy = make(transport="tcp", min_workers=2)
    dies = Dies(tmp_path, rank=dead, batch=18)
    trainer = make_trainer(strategy, saving, dies, Shown(), enable_progress_bar=True, **options)
    trainer.fit(model, NumbersModule())
    assert trainer.callback_metrics["world"] == WORLD - 1
    assert trainer.callback_metrics["shown"] == SHARE
    assert trainer.callback_metrics["seen"] == ROWS  # validation is shared out anew
    assert (trainer.callback_metrics["early"] > SHARE) == (name == "shadowsync")  # in two epochs
    said = f"Worker {dead} was ended by SIGKILL"
    assert len([x for x in caplog.messages if said in x and "The other 2 go on" in x]) == 1
    path = tmp_path / "saved" / "epoch=0.ckpt"
    first = read_checkpoint(path)["state_dict"]["rows.embedding_bags.t.weight"].flatten() * accumulated
    assert first.min() >= 1 - 1e-4
    assert first.sum() <= ROWS + 4 * (1 + accumulated) * SIZE + 1e-2  # a lease
    second = torch.ones(ROWS)  # nobody dies in the second epoch
    torch.testing.assert_close(model.counted * accumulated - first, second, rtol=0, atol=1e-4)
    world = {"async_ps": WORLD, "shadowsync": WORLD - 1}[name]
    again, resumed = Counts(), make_trainer(make(transport="tcp"), devices=world, **options)
    resumed.fit(again, NumbersModule(), ckpt_path=path)
    assert resumed.callback_metrics["world"] == world
    torch.testing.assert_close(again.counted * accumulated - first, second, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dense", "dead"), [("easgd", 0), ("servers", 1)])
def test_worker_with_cached_rows_when_killed_then_only_what_it_had_not_pushed_is_lost(tmp_path, dense, dead):
    """No id comes twice in an epoch, so a cache pushes a change where it needs the row's place for another one."""
    places = 10
    saving = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    rows = CachedRows(cache_rows=places, staleness=100)
    strategy = compose(dense=dense, rows=rows, transport="tcp", min_workers=2)
    trainer = make_trainer(strategy, saving, Dies(tmp_path, rank=dead, batch=18))
    trainer.fit(model := Counts(), NumbersModule())
    assert (trainer.callback_metrics["world"], trainer.callback_metrics["seen"]) == (WORLD - 1, ROWS)
    first = read_checkpoint(tmp_path / "saved" / "epoch=0.ckpt")["state_dict"]["rows.embedding_bags.t.weight"].flatten()
    assert 0 < (first == 0).sum() <= places + SIZE  # a batch is there as a whole, however few the places
    assert first.sum() <= ROWS + 8 * SIZE  # a lease
    torch.testing.assert_close(model.counted - first, torch.ones(ROWS), rtol=0, atol=0)  # nobody dies in the second


def test_workers_when_too_few_are_left_then_the_run_ends_and_says_so(tmp_path):
    trainer = make_trainer(AsyncParameterServerStrategy(min_workers=3), Dies(tmp_path))
    with pytest.raises(ProcessExitedException, match="Worker 1 was ended by SIGKILL") as caught:
        trainer.fit(Counts(), NumbersModule())
    assert any("leaves 2 workers, fewer than strategy.min_workers=3" in note for note in caught.value.__notes__)


def test_share_when_a_schedule_follows_steps_then_is_fixed_however_slow_another_worker_is():
    model = CountsInSteps()
    trainer = make_trainer(AsyncParameterServerStrategy(), max_epochs=1)
    trainer.fit(model, NumbersModule())
    assert trainer.callback_metrics["world"] == WORLD
    assert (model.counted > 0).all()  # by the rate of its step
    assert trainer.global_step == SHARE


class DiesWhereAllMeet(Callback):
    """A worker ends in a validation, before training begins; another one while it writes its share of a checkpoint."""

    def __init__(self, validates: int, saves: int) -> None:
        self.validates, self.saves = validates, saves

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_rank == self.validates and trainer.sanity_checking and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.global_rank == self.saves and trainer.current_epoch == 1:
            folder._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_epoch_end(self, trainer, pl_module):
        """A sum and its number are of the same workers, also in the validation in which one dies."""
        assert float(pl_module.loss.compute()) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("name", "validates", "saves"),
    [("async_ps", 2, 1), ("async_ps", 1, 0), ("shadowsync", 0, 1), ("shadowsync", 1, 0)],
)
def test_worker_when_killed_in_validation_or_in_a_checkpoint_then_the_others_do_it_again_without_it(
    tmp_path, name, validates, saves
):
    make = {"async_ps": AsyncParameterServerStrategy, "shadowsync": ShadowSyncStrategy}[name]
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    model = Counts()
    trainer = make_trainer(make(), saving, DiesWhereAllMeet(validates, saves), max_epochs=3)
    trainer.fit(model, NumbersModule())
    assert trainer.callback_metrics["world"] == 1
    assert trainer.callback_metrics["seen"] == ROWS
    epochs = [read_checkpoint(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(3)]
    counted = [x["state_dict"]["rows.embedding_bags.t.weight"].flatten() for x in epochs]
    assert torch.equal(counted[0], torch.ones(ROWS))  # the share of the first who died, too
    assert torch.equal(counted[1] - counted[0], torch.ones(ROWS))  # nobody died while training
    assert torch.equal(counted[2] - counted[1], torch.ones(ROWS))
    assert trainer.callback_metrics["val"] == pytest.approx(math.log(2))


class Line(pl.LightningModule):
    """A model without tables, whose checkpoints are single files that the first worker writes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch.labels[:, None]).sum()

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class DiesOverFile(Callback):
    """The first worker ends as it writes the first epoch's file."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.global_rank == 0:
            trainer.strategy.checkpoint_io.save_checkpoint = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def test_first_worker_when_killed_over_a_single_file_then_the_next_one_writes_it_with_all_that_belongs_to_it(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(AsyncParameterServerStrategy(), saving, DiesOverFile())
    trainer.fit(Line(), NumbersModule())
    first, second = (torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=False) for epoch in range(2))
    assert first.keys() == second.keys()
    assert [x["epoch"] for x in (first, second)] == [0, 1]
    for saved in (first, second):
        (adam,) = saved["optimizer_states"]
        assert sorted(adam["state"]) == [0, 1]  # of the weight and the bias, which servers have while they train
        assert all(x["exp_avg_sq"].all() for x in adam["state"].values())


class LeaderDies(Dies):
    """A trainer's first worker ends; whoever makes its rounds tells of them as the next epoch ends."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if (trainer.current_epoch, batch_idx) != (1, 2):
            return
        driver = trainer.strategy.dense._run.driver
        while driver is not None and driver.rounds.count == 0:
            time.sleep(0.01)
        while not (self.folder / "batches-3-1").exists():  # nobody takes all of the epoch before
            time.sleep(0.01)

    def on_train_epoch_end(self, trainer, pl_module):
        run = trainer.strategy.dense._run
        if trainer.current_epoch == 1 and run.driver is not None:
            told = f"{run.team.leads} {run.driver.rounds.count} {run.team.own_steps}"
            (self.folder / f"leads-{trainer.global_rank}").write_text(told)


@pytest.mark.parametrize("dead", [2, 0])
def test_first_worker_of_a_trainer_when_killed_then_the_next_one_makes_its_rounds(tmp_path, dead):
    strategy = ShadowSyncStrategy(num_trainers=2, workers_per_trainer=2, interval=0)
    model, trainer = Counts(), make_trainer(strategy, LeaderDies(tmp_path, rank=dead), devices="auto")
    trainer.fit(model, NumbersModule())
    assert trainer.callback_metrics["world"] == 3
    assert trainer.callback_metrics["seen"] == ROWS
    assert {path.name for path in tmp_path.glob("leads-*")} == {f"leads-{dead + 1}", f"leads-{2 - dead}"}
    leads, rounds, steps = (tmp_path / f"leads-{dead + 1}").read_text().split()
    assert leads == "True"
    assert int(rounds) > 0
    assert int(steps) > 0
    assert model.counted.min() >= 2  # both epochs were trained whole


class FirstDies(Callback):
    """The first worker ends in the middle of the only epoch; others go on once the next one has seen it.

    Args:
        folder: For a sign that it has died.
        where: ``training``, or ``results`` for what it does last.
    """

    def __init__(self, folder: Path, where: str = "training") -> None:
        self.folder, self.where, self.loaded = folder, where, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.where != "training" or batch_idx != 20:
            return
        if trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (self.folder / "seen").exists():
            time.sleep(0.05)
            for check in trainer.strategy.run_servers.checks if trainer.global_rank == 1 else ():
                check()
            if trainer.is_global_zero:
                (self.folder / "seen").touch()

    def on_train_end(self, trainer, pl_module):
        if self.where == "results" and trainer.global_rank == 0:
            results.torch = SimpleNamespace(save=lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def state_dict(self):
        return {"process": os.getpid()}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["process"]


def test_first_worker_when_killed_then_the_next_one_logs_in_the_same_file_and_saves(tmp_path, caplog):
    """Between two meetings: there is one epoch, of which most is behind the death."""
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    saving = ModelCheckpoint(tmp_path / "saved")
    trainer = make_trainer(
        AsyncParameterServerStrategy(),
        *(saving, FirstDies(tmp_path), ExamplesPerSecond(window_size=5, warmup_steps=1)),
        max_epochs=1,
        logger=logger,
        log_every_n_steps=5,
    )
    trainer.fit(model := Counts(), NumbersModule())
    assert trainer.callback_metrics["world"] == WORLD - 1
    assert model.counted.min() >= 1
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = [int(row["step"]) for row in rows if row["eps/rank_0"]]
    assert logged[0] < 20 < 30 < logged[-1]
    assert [row["seen"] for row in rows if row["seen"]] == [str(float(ROWS))]
    assert os.listdir(tmp_path / "lightning_logs") == ["version_0"]
    assert read_checkpoint(saving.best_model_path)["epoch"] == 0


@pytest.mark.parametrize("name", ["async_ps", "shadowsync"])
def test_first_worker_when_killed_over_its_results_then_those_of_the_next_one_come_back(tmp_path, name):
    make = {"async_ps": AsyncParameterServerStrategy, "shadowsync": ShadowSyncStrategy}[name]
    trainer = make_trainer(make(), dies := FirstDies(tmp_path, where="results"), max_epochs=1)
    trainer.fit(model := Counts(), NumbersModule())
    assert trainer.callback_metrics["seen"] == ROWS
    assert torch.equal(model.counted, torch.ones(ROWS))
    assert dies.loaded not in (None, os.getpid())


class DiesBringing(Callback):
    """The first worker ends once it has brought something to the servers, before the others know that it is there."""

    def __init__(self, what: str) -> None:
        self.what = what

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank != 0:
            return
        owner, name = {
            "rows": (trainer.strategy.rows, "_bind"),
            "dense part": (PushedParameters, "create"),
            "center": (replicas, "make_center"),
        }[self.what]
        bring = getattr(owner, name)

        def dies(*args, **kwargs):
            bring(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, dies)


@pytest.mark.parametrize(("name", "what"), [("async_ps", "rows"), ("async_ps", "dense part"), ("shadowsync", "center")])
def test_first_worker_when_killed_before_others_know_what_it_has_brought_then_the_next_one_brings_it(name, what):
    make = {"async_ps": AsyncParameterServerStrategy, "shadowsync": ShadowSyncStrategy}[name]
    trainer = make_trainer(make(), DiesBringing(what), max_epochs=1)
    trainer.fit(model := Counts(), NumbersModule())
    assert (trainer.callback_metrics["world"], trainer.callback_metrics["seen"]) == (WORLD - 1, ROWS)
    assert torch.equal(model.counted, torch.ones(ROWS))


def test_first_worker_when_killed_then_the_next_one_publishes_as_the_same_run(tmp_path):
    publisher = ModelPublisher(tmp_path / "model", every_n_steps=2, keep=100)
    data = SyntheticDataModule(train_rows=3200, val_rows=64, batch_size=16, cardinalities=(40, 30), num_dense=2)
    task = CTRTask(WideDeep(2, {"c0": 40, "c1": 30}, embedding_dim=4, hidden=(4,)))
    trainer = make_trainer(
        AsyncParameterServerStrategy(), publisher, DiesOncePublished(tmp_path, publisher), max_epochs=1, devices=2
    )
    trainer.fit(task, datamodule=data)
    _, manifests = list_versions(tmp_path / "model")
    first = int((tmp_path / "published").read_text())  # versions of the first worker
    assert len(manifests) > first >= 1
    assert {manifest.run for manifest in manifests} == {publisher._run}
    examples = [manifest.position["examples"] for manifest in manifests]
    assert examples == sorted(examples)
    reader = ModelReader(tmp_path / "model")
    state = task.model.state_dict()
    for name, value in reader.model.weights.items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)


class DiesOncePublished(Callback):
    """The first worker ends when it has published, and the other one waits for that."""

    def __init__(self, folder: Path, publisher: ModelPublisher) -> None:
        self.folder, self.publisher = folder, publisher

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx != 10:
            return
        told = self.folder / "published"
        if trainer.global_rank == 0:
            self.publisher._work.wait()
            self.publisher._publish(trainer, batch_idx)
            self.publisher._work.wait()
            told.write_text(str(len(list_versions(self.folder / "model")[1])))
            os.kill(os.getpid(), signal.SIGKILL)
        while not told.exists():
            time.sleep(0.01)
