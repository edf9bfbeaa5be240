"""HET on several workers: no update is lost or counted twice, and everybody sees what they are to see."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from des_runs import join
from forked import run_processes
from lightning_fabric.utilities import cloud_io
from ports import free_port
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.core import saving
from server_helpers import running
from torch import nn

import lightning_recsys
from lightning_recsys.callbacks import TelemetryMonitor
from lightning_recsys.checkpoints import is_folder, read_checkpoint, to_file
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowAdam, RowSGD, RowWiseAdagrad
from lightning_recsys.stores import DynamicRows
from lightning_recsys.strategies import ForkserverDDPStrategy, HETStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # what saved a checkpoint need not watch the run that goes on from it
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

STEPS, IDS = 8, 40
PACKAGE = str(Path(lightning_recsys.__file__).parent)
# Few ids are in most batches, as in life; the same for every step of a rank.
BATCHES_RSB = (torch.rand(2, STEPS, 16, generator=torch.Generator().manual_seed(0)) ** 3 * IDS).long()


class Batches:
    """One rank's, with a position that a checkpoint can hold."""

    def __init__(self, rank: int) -> None:
        self.ids, self.position = BATCHES_RSB[rank], 0

    def __iter__(self):
        self.position %= STEPS
        while self.position < STEPS:
            self.position += 1
            yield {"sparse": SparseFeatures(("a", "b"), self.ids[self.position - 1])}

    def __len__(self):
        return STEPS

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def counts(steps: int, ranks: int = 2) -> torch.Tensor:
    """How often each row was looked up in so many steps of all ranks, epochs one after the other."""
    times = [steps // STEPS + (step < steps % STEPS) for step in range(STEPS)]
    ids = [BATCHES_RSB[rank, step] for rank in range(ranks) for step in range(STEPS) for _ in range(times[step])]
    return torch.bincount(torch.cat(ids), minlength=IDS).float()


class Counting(pl.LightningModule):
    """Each lookup takes 1 from a row, or a worker's share of it: rows tell how many updates they have seen."""

    def __init__(self, *, share: float = 0.5, rule=None) -> None:
        super().__init__()
        self.share = share
        table = EmbeddingBagConfig("t", IDS, 4, ("a", "b"), init_std=0.0)
        self.rows = EmbeddingBagCollection([table], optimizer=rule or RowSGD(1.0))
        self.bias = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.log("world_size", dist.get_world_size())
        return self.rows(batch["sparse"]).sum() + self.bias.sum()

    def validation_step(self, ids, batch_idx):
        seen = self.rows(SparseFeatures(("a", "b"), ids))[:, 0, 0]
        if self.trainer.current_epoch == 0:
            expected = -self.share * counts(self.trainer.global_step, self.trainer.world_size)
            assert torch.equal(seen.cpu(), expected), "validation sees every update of every worker"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.bias], lr=0.1)
        self.rows.attach_to(optimizer)
        return optimizer

    def train_dataloader(self):
        return Batches(self.trainer.global_rank)

    def val_dataloader(self):
        return torch.arange(IDS).repeat(2).unsqueeze(0)  # one batch

    @property
    def counted(self) -> torch.Tensor:
        return self.rows.state_dict()["embedding_bags.t.weight"]


def make_trainer(strategy, *callbacks, devices=2, **arguments) -> pl.Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, **arguments}
    return pl.Trainer(
        devices=devices,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=saves,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def all_rows(values: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(1).expand(IDS, 4)


# --- Every update, once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"staleness": 0, "cache_rows": 5},
        {
            "staleness": 2,
            "cache_rows": 3,
            "policy": "lfu",
            "clock": "sum",
            "num_embedding_servers": 2,
            "transport": "tcp",
        },
        {"staleness": "inf", "policy": "light_lfu", "cache_fraction": 0.3, "transport": "tcp"},
        {"algorithm": "hybrid", "num_embedding_servers": 2},
    ],
    ids=str,
)
def test_updates_when_two_workers_train_then_each_counts_once_at_validation_in_checkpoints_and_at_the_end(
    tmp_path, arguments
):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(
        HETStrategy(table_placement="size", **arguments), saving, TelemetryMonitor(), val_check_interval=2
    )
    model = Counting()
    trainer.fit(model)
    assert trainer.callback_metrics["world_size"] == 2
    torch.testing.assert_close(model.counted, all_rows(-model.share * counts(STEPS)), rtol=0, atol=0)
    for step in (3, 6):
        saved = read_checkpoint(tmp_path / f"step={step}.ckpt")["state_dict"]["rows.embedding_bags.t.weight"]
        torch.testing.assert_close(saved, all_rows(-model.share * counts(step)), rtol=0, atol=0)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (metrics["cache/hit_rate"] > 0) == (trainer.strategy.rows.algorithm == "het")
    through_servers = (
        trainer.strategy.transport == "tcp" or trainer.strategy.rows.algorithm == "hybrid" or not arguments["staleness"]
    )
    assert (metrics["comm/sent_bytes"] > 0) == through_servers
    assert min(metrics["comm/rows_bytes"], metrics["comm/gradients_bytes"]) > 0
    assert metrics["cache/clock_lag/max"] >= metrics["cache/clock_lag/mean"] >= 0
    assert sum(share for name, share in metrics.items() if "clock_lag/share" in name) == pytest.approx(1.0)
    if arguments.get("staleness") == "inf":
        assert metrics["cache/stale_rate"] == metrics["cache/refresh_rate"] == 0


class KillsServer(Callback):
    """Before its fourth step rank 0 kills the server, which the main process starts again."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 3:
            path = trainer.strategy.endpoints["embedding"][0].removeprefix("ipc://")
            (pid,) = {x.pid for x in psutil.net_connections("unix") if x.laddr == path and x.pid}
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "arguments",
    [
        {"staleness": 1, "cache_rows": 5, "transport": "tcp", "compression": "bf16"},  # which has all numbers up to 256
        {"algorithm": "hybrid"},
    ],
    ids=str,
)
def test_server_when_killed_in_the_middle_then_no_update_is_lost_and_none_counts_twice(arguments):
    model, strategy = Counting(), HETStrategy(**arguments)
    make_trainer(strategy, KillsServer(), limit_val_batches=0).fit(model)
    torch.testing.assert_close(model.counted, all_rows(-model.share * counts(STEPS)), rtol=0, atol=0)
    assert model.bias.item() == pytest.approx(-0.1 * STEPS)


def test_checkpoint_when_other_numbers_of_workers_and_servers_go_on_then_all_updates_are_there(tmp_path):
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    trainer = make_trainer(HETStrategy(num_embedding_servers=2, table_placement="size"), saving, limit_val_batches=0)
    trainer.fit(Counting())
    path = Path(saving.best_model_path)
    assert is_folder(path)
    half, whole = 0.5 * counts(STEPS), counts(STEPS, ranks=1)
    for number, arguments in enumerate(
        [
            {"num_embedding_servers": 3, "table_placement": "size"},
            {"algorithm": "hybrid"},
        ]
    ):
        model = Counting(share=1.0)
        again = make_trainer(HETStrategy(**arguments), devices=1, max_epochs=2, limit_val_batches=0)
        again.fit(model, ckpt_path=path)
        assert again.global_step == 2 * STEPS, number
        torch.testing.assert_close(model.counted, all_rows(-half - whole), rtol=0, atol=0)
    to_file(path, tmp_path / "one.ckpt")
    model = Counting()
    model.load_state_dict(torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"])
    torch.testing.assert_close(model.counted, all_rows(-half), rtol=0, atol=0)


class GoesBack(Callback):
    """Behind its fifth step every rank loads what was saved after the third, by Lightning or as its strategy does."""

    def __init__(self, path, by: str) -> None:
        self.path, self.by = path, by

    def __setstate__(self, state):  # in a worker, which is here to have made no strategy, as importing this file does
        vars(self).update(state)
        saving.pl_load = cloud_io._load

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 4 and self.by == "module":
            time.sleep(0.3 * trainer.global_rank)  # who is early waits
            pl_module.load_state_dict(Counting.load_from_checkpoint(self.path).state_dict())
        elif batch_idx == 4:
            trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(self.path))


@pytest.mark.parametrize("by", ["strategy", "module"])
def test_checkpoint_when_loaded_in_the_middle_then_no_worker_goes_on_with_what_it_had(tmp_path, by):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    strategy = HETStrategy(staleness="inf", cache_rows=IDS, transport="tcp")
    trainer = make_trainer(strategy, saving, GoesBack(tmp_path / "step=3.ckpt", by), limit_val_batches=0)
    model = Counting()
    trainer.fit(model)
    assert trainer.callback_metrics["world_size"] == 2
    left_out = counts(5) - counts(3)
    torch.testing.assert_close(model.counted, all_rows(-model.share * (counts(STEPS) - left_out)), rtol=0, atol=0)
    assert model.bias.item() == pytest.approx(-0.1 * (STEPS - 2))


class SetsBias(Callback):
    """Each rank doubles the bias as training ends, and rank 1 loses it."""

    def on_train_end(self, trainer, pl_module):
        dist.barrier()
        pl_module.bias.data.mul_(2.0 if trainer.is_global_zero else 0.0)


def test_callback_when_it_writes_weights_as_training_ends_then_rank_0s_are_kept():
    model = Counting()
    make_trainer(HETStrategy(staleness=2, cache_rows=5), SetsBias(), limit_val_batches=0).fit(model)
    assert model.bias.item() == pytest.approx(-2 * 0.1 * STEPS)


@pytest.mark.parametrize(("staleness", "warns"), [(STEPS, True), (STEPS - 1, False), ("inf", False)])
def test_run_when_no_copy_can_become_too_old_then_says_so(staleness, warns, tmp_path):
    strategy = HETStrategy(staleness=staleness, cache_rows=5)
    make_trainer(strategy, KeepsLog(tmp_path), limit_val_batches=0).fit(Counting())
    logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert logs.keys() == {"0", "1"}
    assert f"strategy.staleness={staleness}, and this run has {STEPS} steps" in logs["0"] if warns else not logs["0"]
    assert not logs["1"], "rank 0 alone says it"


class WritesBound(Callback):
    """Each rank writes the bound of its copies at the first batch, and how many ranks there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        rule = pl_module.rows.embedding_bags._messages.rule
        (self.folder / f"bound-{trainer.global_rank}").write_text(f"{rule.staleness} {trainer.world_size}")


@pytest.mark.parametrize(("transport", "max_steps", "bound"), [("auto", 25, 2), ("tcp", 25, 2), ("auto", -1, 100)])
def test_staleness_when_left_to_the_length_of_the_run_then_copies_meet_ten_times(transport, max_steps, bound, tmp_path):
    strategy, ends = HETStrategy(transport=transport, cache_rows=5), EndsAt(4)
    callbacks = [WritesBound(tmp_path), KeepsLog(tmp_path, logging.INFO), ends]
    options = {"max_steps": max_steps, "max_epochs": -1, "limit_val_batches": 0}
    make_trainer(strategy, *callbacks, **options).fit(Counting())
    assert [(tmp_path / f"bound-{rank}").read_text() for rank in range(2)] == [f"{bound} 2"] * 2
    logs = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert ("strategy.staleness=auto is 2: each of 2 workers has 25 steps in" in logs[0]) == (bound == 2)
    assert "staleness" not in logs[1]


def test_staleness_when_a_run_is_resumed_then_is_that_of_the_whole_run(tmp_path):
    """The whole run's 30 steps make it 3, the 24 that are left would make it 2."""
    options = {"max_steps": 30, "max_epochs": -1, "limit_val_batches": 0}
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=6)
    make_trainer(HETStrategy(cache_rows=5), saving, EndsAt(6), **options).fit(model := Counting())
    (folder := tmp_path / "bounds").mkdir()
    again = make_trainer(HETStrategy(cache_rows=5), WritesBound(folder), EndsAt(8), **options)
    again.fit(model, ckpt_path=saving.best_model_path)
    assert {x.name: x.read_text() for x in folder.iterdir()} == {f"bound-{rank}": "3 2" for rank in range(2)}


class WritesMissed(Callback):
    """Writes how many updates of the other worker this one's reads lacked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        missed = trainer.strategy.telemetry()["cache/missed_updates/max"]
        (self.folder / f"missed-{trainer.global_rank}").write_text(f"{missed} {trainer.world_size}")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_missed_updates_when_two_workers_train_then_are_told_and_within_what_was_asked_for(transport, tmp_path):
    """With 12 a copy may be 3 updates ahead or behind, so that the server has at most 6 which it lacks."""
    strategy = HETStrategy(max_missed_updates=12, transport=transport, cache_rows=30)
    trainer = make_trainer(strategy, WritesMissed(tmp_path), WritesBound(tmp_path), max_epochs=4)
    trainer.fit(module := Counting())
    assert trainer.callback_metrics["world_size"] == 2
    assert [(tmp_path / f"bound-{rank}").read_text() for rank in range(2)] == ["3 2"] * 2
    missed, sizes = zip(*((tmp_path / f"missed-{rank}").read_text().split() for rank in range(2)), strict=True)
    assert sizes == ("2", "2")
    assert all(1 <= int(most) <= 6 for most in missed)
    assert torch.equal(module.counted, all_rows(-0.5 * counts(4 * STEPS)))


class EndsAt(Callback):
    """Ends the run on all ranks once so many steps were made."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.steps


class KeepsLog(Callback):
    """Writes what the strategy logs from a level on into a file for each rank."""

    def __init__(self, folder: Path, level: int = logging.WARNING) -> None:
        self.folder, self.level = folder, level

    def setup(self, trainer, pl_module, stage):
        handler = logging.FileHandler(self.folder / str(trainer.global_rank))
        handler.setLevel(self.level)
        logging.getLogger("pytorch_lightning.lightning_recsys.strategies.rows.cached").addHandler(handler)


# --- How it fails ----------------------------------------------------------------------------------------------------


class FailsOnRank1(Callback):
    """In the fourth step, once rank 0 has begun it: one that is behind may not get what the other sent before."""

    def __init__(self, folder: Path) -> None:
        self.begun = folder / "begun"

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 3:
            self.begun.touch()
        elif batch_idx == 3:
            while not self.begun.exists():
                time.sleep(0.01)
            raise ZeroDivisionError("in step 4")


def fail_and_save(rank, port, endpoint, tmp_path):
    """As under torchrun, with callbacks that would save what only all ranks can; says how it ended."""
    join(rank, 2, port)
    folder = tmp_path / "saved"
    saving = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_last=True, save_on_exception=True)]
    trainer = make_trainer(HETStrategy(servers=[endpoint]), FailsOnRank1(tmp_path), *saving, limit_val_batches=0)
    try:
        trainer.fit(Counting())
    except (ZeroDivisionError, RuntimeError) as raised:
        Path(folder, f"raised-{rank}").write_text(f"{trainer.world_size} {trainer.global_step} {raised}")
        os._exit(0)  # torch would wait at the exit for what the others do not send


def test_rank_when_it_raises_in_a_job_then_no_callback_that_saves_waits_for_the_others(tmp_path):
    (tmp_path / "stores").mkdir()
    (tmp_path / "saved").mkdir()
    with running(tmp_path / "stores") as server:
        run_processes(fail_and_save, free_port(), server.endpoint, tmp_path, nprocs=2)
    assert {x.name for x in (tmp_path / "saved").iterdir()} == {"raised-0", "raised-1"}, "no checkpoint"
    assert (tmp_path / "saved" / "raised-1").read_text() == "2 3 in step 4"
    assert re.match("2 3 .*onnection", (tmp_path / "saved" / "raised-0").read_text())


# --- What it equals --------------------------------------------------------------------------------------------------


class Ratings(pl.LightningModule):
    """Somebody's own model, with plain embedding modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.kinds, self.out = nn.Embedding(64, 4), nn.Embedding(5, 4), nn.Linear(8, 1)

    def training_step(self, ids, batch_idx):
        features = torch.cat([self.items(ids), self.kinds(ids % 5)], dim=1)
        return nn.functional.mse_loss(self.out(features).squeeze(1), ids / 64)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)  # 0.5 diverges in some orders of the batches

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(64), batch_size=8)


def test_plain_embeddings_when_cached_then_train_as_on_a_single_device():
    expected, actual = Ratings(), Ratings()
    settings = {"max_epochs": 3, "use_distributed_sampler": False, "devices": 1}
    make_trainer("auto", **settings).fit(expected)
    make_trainer(HETStrategy(min_rows=5, cache_fraction=0.5), **settings).fit(actual)
    assert type(actual.items) is nn.Embedding
    assert not torch.equal(actual.items.weight, Ratings().items.weight)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, rtol=1e-5, atol=1e-6)


class AllRatings(Ratings):
    """The batches of two workers have every row, so that a dense optimizer's weight decay is that of rows."""

    def configure_optimizers(self):
        groups = [{"params": self.items.parameters(), "weight_decay": 0.5}, {"params": self.kinds.parameters()}]
        optimizer = torch.optim.Adam([*groups, {"params": self.out.parameters()}], lr=0.05, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self):
        halves = torch.arange(64).view(32, 2)[:, self.trainer.global_rank].repeat(5)
        return torch.utils.data.DataLoader(halves, batch_size=32)


def test_plain_embeddings_when_two_workers_go_in_step_then_train_as_by_their_own_optimizer_under_ddp():
    """The same Adam, weight decays by group and schedule, on parameters after five steps."""
    averaged, served = AllRatings(), AllRatings()
    settings = {"max_epochs": 1, "use_distributed_sampler": False, "devices": 2}
    make_trainer(ForkserverDDPStrategy(), **settings).fit(averaged)
    trainer = make_trainer(HETStrategy(algorithm="hybrid", min_rows=5), **settings)
    trainer.fit(served)
    assert trainer.world_size == 2
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(served.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(served.items.weight, Ratings().items.weight, atol=1e-2)


def test_plain_embeddings_when_two_workers_are_resumed_then_the_row_optimizer_goes_on(tmp_path):
    def train(*callbacks, ckpt_path=None):
        model = Ratings()
        strategy = HETStrategy(algorithm="hybrid", embeddings=["items"], row_optimizer=RowAdagrad(0.5))
        trainer = make_trainer(strategy, *callbacks, max_epochs=2)
        trainer.fit(model, ckpt_path=ckpt_path)
        assert trainer.world_size == 2
        return model.items.weight.detach()

    straight = train(ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True))
    resumed = train(ckpt_path=tmp_path / "epoch=0.ckpt")
    torch.testing.assert_close(resumed, straight, rtol=1e-5, atol=1e-6)


class RowsAlone(pl.LightningModule):
    """Matrix factorization: no parameter asks for a gradient, and what buffers count is rank 0's at each batch.

    One buffer is written to, the other one is replaced by a new tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name, 64, 4, (name,), init_std=0.5) for name in ("user", "item")]
        self.rows = EmbeddingBagCollection(tables, optimizer=RowSGD(0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def training_step(self, users, batch_idx):
        if self.trainer.world_size > 1:
            of_rank_0 = torch.stack([self.seen, self.replaced])
            dist.broadcast(of_rank_0, 0)
            assert torch.equal(torch.stack([self.seen, self.replaced]), of_rank_0)
        self.seen += users.sum()
        self.replaced = self.replaced + users.sum()
        user, item = self.rows(SparseFeatures(("user", "item"), torch.cat([users, 63 - users]))).unbind(1)
        return nn.functional.mse_loss((user * item).sum(1), users / 64)

    def configure_optimizers(self):
        return None

    def train_dataloader(self):
        users = torch.arange(64).view(4, 2, 8)  # of both ranks at each step
        if self.trainer.world_size == 1:
            return torch.utils.data.DataLoader(users.flatten(1), batch_size=None)
        return torch.utils.data.DataLoader(users[:, self.trainer.global_rank], batch_size=None)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("strategy", [ForkserverDDPStrategy(), HETStrategy(staleness=0)], ids=["ddp", "het"])
def test_model_of_rows_alone_when_two_workers_train_then_equals_a_single_device(strategy):
    expected, actual = RowsAlone(), RowsAlone()
    make_trainer("auto", use_distributed_sampler=False, devices=1).fit(expected)
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    trainer.fit(actual)
    assert trainer.world_size == 2
    assert actual.seen == actual.replaced == torch.arange(64).view(4, 2, 8)[:, 0].sum(), "rank 0's"
    for name in ("user", "item"):
        trained = actual.rows.embedding_bags.read(name, "weight")
        torch.testing.assert_close(trained, expected.rows.embedding_bags.read(name, "weight"), rtol=1e-5, atol=1e-6)
        assert not torch.equal(trained, RowsAlone().rows.embedding_bags.read(name, "weight"))


class OnTheGPU(Callback):
    """The copies are in the worker's memory, the rows in the machine's."""

    def on_train_end(self, trainer, pl_module):
        backend = pl_module.rows.embedding_bags
        assert backend._held.cache.rows.device.type == pl_module.device.type == "cuda"
        assert {store.lookup(torch.tensor([0])).device.type for store in backend.stores} == {"cpu"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("arguments", [{"staleness": 2, "cache_rows": 5}, {"algorithm": "hybrid"}], ids=str)
def test_updates_when_the_worker_has_a_gpu_then_each_counts_once(arguments):
    model = Counting(share=1.0)
    strategy = HETStrategy(**arguments)
    make_trainer(strategy, OnTheGPU(), devices=1, accelerator="gpu", val_check_interval=3).fit(model)
    torch.testing.assert_close(model.counted.cpu(), all_rows(-counts(STEPS, ranks=1)), rtol=0, atol=0)


# --- What it looks at, and refuses -----------------------------------------------------------------------------------


class Announced(Callback):
    """Each batch but the first was announced one step before it came."""

    def on_train_start(self, trainer, pl_module):
        self.announced, collection = [], pl_module.rows
        prefetch = collection.prefetch

        def remember(sparse):
            self.announced.append(sparse.values)
            prefetch(sparse)

        object.__setattr__(collection, "prefetch", remember)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert len(self.announced) == batch_idx
        assert batch_idx == 0 or torch.equal(self.announced[-1], batch["sparse"].values)

    def on_train_end(self, trainer, pl_module):
        del pl_module.rows.__dict__["prefetch"]
        assert len(self.announced) == STEPS - 1


def test_batches_when_training_then_are_announced_one_step_early():
    strategy = HETStrategy(transport="tcp")
    trainer = make_trainer(strategy, Announced(), devices=1, limit_val_batches=0)
    trainer.fit(Counting(share=1.0))
    assert trainer.global_step == STEPS


def test_update_rule_when_its_state_is_no_sum_then_refused_by_name():
    with pytest.raises(TypeError, match="RowAdam"):
        make_trainer(HETStrategy(), devices=1).fit(Counting(rule=RowAdam(0.01)))


def test_dynamic_rows_when_no_table_has_use_for_them_then_refused_by_name():
    with pytest.raises(ValueError, match=r"strategy.dynamic_rows makes the rows of collections .* \['rows'\]"):
        make_trainer(HETStrategy(dynamic_rows=DynamicRows(), cache_rows=5), devices=1).fit(Counting())


def test_rowwise_adagrad_when_two_workers_train_then_its_state_is_saved_and_comes_back(tmp_path):
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    model = Counting(rule=RowWiseAdagrad(0.1))
    make_trainer(HETStrategy(staleness=3, cache_rows=4), saving, limit_val_batches=0).fit(model)
    state = model.rows.state_dict()["embedding_bags.t.sum"]
    saved = read_checkpoint(saving.best_model_path)["state_dict"]["rows.embedding_bags.t.sum"]
    assert torch.equal(state, saved)
    # The square of each step's gradient: a row's count in a worker's batch, halved.
    each = torch.stack([torch.bincount(ids, minlength=IDS) for ids in BATCHES_RSB.flatten(0, 1)]) / 2
    torch.testing.assert_close(state, each.square().sum(0))


# --- How much code a step passes through -----------------------------------------------------------------------------


class PackageFiles(pl.Callback):
    """Notes the files of the package whose functions run in one step, and refuses more than so many."""

    def __init__(self, *, step: int, limit: int) -> None:
        self.step, self.limit, self.files = step, limit, set()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.step:
            sys.setprofile(self.note)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.step:
            sys.setprofile(None)
            assert {"/embeddings/collection.py", "/row_cache/backend.py"} <= self.files, sorted(self.files)
            # Once for each connection, as soon as a worker has to wait for an answer: perhaps only now.
            self.files.discard("/parameter_server/sockets.py")
            assert len(self.files) <= self.limit, f"{len(self.files)} files: {sorted(self.files)}"
            module.log("num_files", len(self.files))

    def note(self, frame, event, argument):
        # Whether the process is to end is asked where an answer takes longer than 0.2 s, as on a busy machine.
        if frame.f_code.co_name == "is_asked_to_end":
            return
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE))


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_steady_step_when_followed_then_it_passes_through_20_files_of_the_package_at_most(transport):
    """By messages and in shared memory, with a batch announced and another one prefetched meanwhile."""
    strategy = HETStrategy(cache_rows=10, staleness=2, lookahead_batches=2, transport=transport)
    trainer = make_trainer(strategy, PackageFiles(step=5, limit=20))
    trainer.fit(Counting())
    assert trainer.callback_metrics["num_files"] > 10
