"""Dense parameters and rows on servers, and workers that run free: every update counts once, with its staleness."""

from __future__ import annotations

import fcntl
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from des_runs import join
from forked import run_processes
from ports import free_port
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from test_het import (
    IDS,
    STEPS,
    Batches,
    Counting,
    GoesBack,
    KillsServer,
    Ratings,
    SetsBias,
    all_rows,
    counts,
    make_trainer,
)
from torch import nn

from lightning_recsys.callbacks import TelemetryMonitor
from lightning_recsys.checkpoints import read_checkpoint
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from lightning_recsys.errors import RequestRefusedError
from lightning_recsys.optim import RowAdagrad, RowAdam, RowSGD, RowSWAP, swap
from lightning_recsys.strategies import AsyncParameterServerStrategy, HETStrategy, ShadowSyncStrategy
from lightning_recsys.strategies.rows.row_tags import load_shares
from lightning_recsys.sync import StalenessNormalization

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def test_updates_when_two_workers_train_then_each_counts_once_at_validation_in_checkpoints_and_at_the_end(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    strategy = AsyncParameterServerStrategy(num_embedding_servers=2, table_placement="size", transport="tcp")
    trainer = make_trainer(strategy, saving, TelemetryMonitor(), val_check_interval=2)
    model = Counting(share=1.0)
    trainer.fit(model)
    assert trainer.callback_metrics["world_size"] == 2
    torch.testing.assert_close(model.counted, all_rows(-counts(STEPS)), rtol=0, atol=0)
    assert model.bias.item() == pytest.approx(-0.1 * 2 * STEPS)
    for step in (3, 6):
        saved = read_checkpoint(tmp_path / f"step={step}.ckpt")
        rows = saved["state_dict"]["rows.embedding_bags.t.weight"]
        torch.testing.assert_close(rows, all_rows(-counts(step)), rtol=0, atol=0)
        assert saved["state_dict"]["bias"].item() == pytest.approx(-0.1 * 2 * step)
        assert saved["async_ps"]["versions"] == [2 * step]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in ("staleness", "staleness/rows"):
        assert 1 <= metrics[f"{name}/mean"] <= metrics[f"{name}/p99"] <= metrics[f"{name}/max"] < 2 * STEPS
        assert sum(share for key, share in metrics.items() if key.startswith(f"{name}/share_")) == pytest.approx(1.0)
    assert min(metrics["comm/sent_bytes"], metrics["comm/received_bytes"]) > 0


class PlainCounting(pl.LightningModule):
    """Somebody's own table, whose parameter group has a rate of its own: each step of a worker takes that from all."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.bias = nn.Embedding(IDS, 4), nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.items.weight)

    def training_step(self, batch, batch_idx):
        self.log("world_size", torch.distributed.get_world_size())
        return self.items(torch.arange(IDS)).sum() + self.bias.sum()

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": [self.bias]}, {"params": [self.items.weight], "lr": 0.25}], lr=0.125)

    def train_dataloader(self):
        return Batches(self.trainer.global_rank)


@pytest.mark.parametrize("strategy", [AsyncParameterServerStrategy, partial(ShadowSyncStrategy, num_trainers=2)])
def test_plain_rows_when_free_workers_train_then_follow_their_own_parameter_group(strategy):
    model = PlainCounting()
    trainer = make_trainer(strategy(min_rows=IDS, transport="tcp"), limit_val_batches=0)
    trainer.fit(model)
    assert trainer.callback_metrics["world_size"] == 2
    assert torch.equal(model.items.weight.data, torch.full((IDS, 4), -0.25 * 2 * STEPS))


class Holds(Callback):
    """Rank 1 looks its first batch up, and computes until rank 0 has taken all its steps."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if trainer.global_rank == 1 and trainer.global_step == 0:
            while not (self.folder / "done").exists():
                pass

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == STEPS - 1:
            (self.folder / "done").touch()

    def on_train_end(self, trainer, pl_module):
        seen = trainer.strategy.dense._parameters.observed.counts
        (self.folder / f"seen-{trainer.global_rank}").write_text(repr(seen))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_staleness_when_one_worker_is_held_then_is_that_of_the_schedule_and_normalised(tmp_path, transport):
    strategy = AsyncParameterServerStrategy(normalization="linear", transport=transport)
    model = Counting(share=1.0)
    trainer = make_trainer(strategy, Holds(tmp_path), limit_val_batches=0)
    trainer.fit(model)
    assert trainer.callback_metrics["world_size"] == 2
    assert (tmp_path / "seen-0").read_text() == repr({1: STEPS})
    # Its first gradient has missed all of rank 0's updates; the later ones nothing.
    assert (tmp_path / "seen-1").read_text() == repr({1: STEPS - 1, STEPS + 1: 1})
    assert model.bias.item() == pytest.approx(-0.1 * (STEPS + STEPS - 1 + 1 / (STEPS + 1)))


def test_telemetry_when_all_have_met_then_has_the_staleness_of_every_workers_pushes(tmp_path):
    """Rank 0's own pushes all have a staleness of 1; the one that is stale is rank 1's first."""
    trainer = make_trainer(AsyncParameterServerStrategy(transport="tcp"), Holds(tmp_path), TelemetryMonitor())
    trainer.fit(Counting(share=1.0))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["world_size"] == 2
    assert metrics["staleness/max"] == metrics["staleness/p99"] == STEPS + 1
    assert metrics["staleness/mean"] == pytest.approx((2 * STEPS - 1 + STEPS + 1) / (2 * STEPS))
    assert metrics["staleness/share_1"] == pytest.approx(1 - 1 / (2 * STEPS))


def test_server_when_killed_in_the_middle_then_no_update_is_lost_and_none_counts_twice():
    model, strategy = Counting(share=1.0), AsyncParameterServerStrategy(transport="tcp", compression="bf16")
    make_trainer(strategy, KillsServer(), limit_val_batches=0).fit(model)
    torch.testing.assert_close(model.counted, all_rows(-counts(STEPS)), rtol=0, atol=0)
    assert model.bias.item() == pytest.approx(-0.1 * 2 * STEPS)


def test_checkpoint_when_loaded_in_the_middle_then_no_worker_goes_on_with_what_it_had(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    goes_back = GoesBack(tmp_path / "step=3.ckpt", "module")
    model = Counting(share=1.0)
    make_trainer(AsyncParameterServerStrategy(transport="tcp"), saving, goes_back, limit_val_batches=0).fit(model)
    left_out = counts(5) - counts(3)
    torch.testing.assert_close(model.counted, all_rows(-(counts(STEPS) - left_out)), rtol=0, atol=0)
    assert model.bias.item() == pytest.approx(-0.1 * (STEPS - 2) * 2)


def test_callback_when_it_writes_weights_as_training_ends_then_rank_0s_are_kept():
    model = Counting(share=1.0)
    make_trainer(AsyncParameterServerStrategy(transport="tcp"), SetsBias(), limit_val_batches=0).fit(model)
    assert model.bias.item() == pytest.approx(-2 * 0.1 * STEPS * 2)


class Small(Counting):
    """A small net beside rows, by one of some rules."""

    def __init__(self, rule: str) -> None:
        rules = {"sgd": RowSGD(0.1), "adagrad": RowAdagrad(0.1), "adam": RowAdam(0.05)}
        swapped = RowSWAP(inner=RowAdagrad(0.1), period=4, discount=0.5)
        super().__init__(share=1.0, rule=(rules | {"adagrad_swap": swapped})[rule])
        torch.manual_seed(0)
        table = EmbeddingBagConfig("t", IDS, 4, ("a", "b"), init_std=0.1)
        self.rows = EmbeddingBagCollection([table], optimizer=self.rows.optimizer)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
        self.rule = rule

    def training_step(self, batch, batch_idx):
        out = self.net(self.rows(batch["sparse"]).flatten(1))
        return (out - 1).square().mean() + self.bias.square().sum()

    def configure_optimizers(self):
        make = {
            "sgd": partial(torch.optim.SGD, lr=0.1),
            "adagrad": partial(torch.optim.Adagrad, lr=0.1),
            "adam": partial(torch.optim.Adam, lr=0.05),
            "adagrad_swap": partial(swap, inner=partial(torch.optim.Adagrad, lr=0.1), period=4, discount=0.5),
        }[self.rule]
        optimizer = make([*self.net.parameters(), self.bias])
        self.rows.attach_to(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return Batches(0)


def parameters_of(model: nn.Module) -> torch.Tensor:
    state = {name: x for name, x in model.state_dict().items() if not name.endswith(".step")}
    return torch.cat([x.flatten().float() for _, x in sorted(state.items())])


class NotesVersions(Callback):
    """What rows and dense parameters have at the end, and the staleness that was seen."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module):
        backend = pl_module.rows.embedding_bags
        tags = {name: backend.read_rows("t", name, 0, IDS) for name in ("version", "change")}
        versions, changes = zip(*trainer.strategy.dense._parameters.kept(), strict=True)
        torch.save((tags, list(versions), torch.tensor(changes), backend.observed.counts), self.path)


@pytest.mark.parametrize("rule", ["sgd", "adam", "adagrad_swap"])
def test_one_worker_when_it_trains_or_goes_on_then_equals_a_single_device(tmp_path, rule):
    expected = Small(rule)
    make_trainer("auto", devices=1, max_epochs=2, limit_val_batches=0).fit(expected)
    model, saving = Small(rule), ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    by_change = StalenessNormalization("power", sensitivity=1.0)
    strategy = partial(AsyncParameterServerStrategy, normalization=by_change)
    whole = NotesVersions(tmp_path / "whole.pt")
    make_trainer(strategy(), saving, whole, devices=1, max_epochs=2, limit_val_batches=0).fit(model)
    torch.testing.assert_close(parameters_of(model), parameters_of(expected), rtol=1e-4, atol=1e-6)
    path = tmp_path / "step=6.ckpt"  # within the first epoch
    saved = read_checkpoint(path)
    assert saved["async_ps"]["versions"] == [6] * 5
    if rule == "adam":
        assert {int(state["step"]) for state in saved["optimizer_states"][0]["state"].values()} == {6}
    again = Small(rule)
    noted = NotesVersions(tmp_path / "again.pt")
    make_trainer(strategy(num_embedding_servers=2), noted, devices=1, max_epochs=2, limit_val_batches=0).fit(
        again, ckpt_path=path
    )
    torch.testing.assert_close(parameters_of(again), parameters_of(expected), rtol=1e-4, atol=1e-6)
    (tags, versions, changes, seen), again = map(torch.load, (whole.path, noted.path))
    assert torch.equal(again[0]["version"], tags["version"])
    assert again[1] == versions == [2 * STEPS] * 5
    torch.testing.assert_close((again[0]["change"], again[2]), (tags["change"], changes), rtol=1e-3, atol=1e-6)
    assert tags["version"].max() > 1
    assert set(seen) == set(again[3]) == {1}


class NotesTagsOfItems(Callback):
    """What rows of a plain module have at the end."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module):
        rows = trainer.strategy.tables.collections["items"].embedding_bags
        torch.save({name: rows.read_rows("rows", name, 0, 64) for name in ("version", "change")}, self.path)


def test_rows_of_plain_modules_alone_when_training_goes_on_then_keep_versions_and_last_changes(tmp_path):
    """Such a checkpoint is a single file: there is nothing that the first worker does not have."""
    path = None
    by_change = StalenessNormalization("power", sensitivity=1.0)
    for epochs in (2, 3):
        strategy = AsyncParameterServerStrategy(normalization=by_change, min_rows=5, transport="tcp")
        saving = ModelCheckpoint(tmp_path / f"saved-{epochs}", filename="{epoch}", save_top_k=-1)
        noting = NotesTagsOfItems(tmp_path / f"{epochs}.pt")
        options = {"max_epochs": epochs, "limit_val_batches": 0}
        make_trainer(strategy, saving, noting, **options).fit(Ratings(), ckpt_path=path)
        path = tmp_path / "saved-2" / "epoch=0.ckpt"
        assert not path.is_dir()
    two, three = (torch.load(tmp_path / f"{epochs}.pt") for epochs in (2, 3))
    assert two["version"].tolist() == [2] * 64
    assert three["version"].tolist() == [3] * 64
    assert two["change"].min() > 0
    assert torch.load(path)["row_tags"]["items"]["rows"]["change"].min() > 0


SWAPPED = {
    "adagrad": (partial(torch.optim.Adagrad, lr=0.1), RowAdagrad(0.1)),
    "adam": (partial(torch.optim.Adam, lr=0.1), RowAdam(0.1)),
}
PERIODS = {"period": 5, "discount": 0.5}


class Alike(Counting):
    """Every gradient of every push is 1: what comes of the pushes does not depend on whose comes first.

    It depends on which comes first where one store has the last push of a period and the first of the next in another
    order than the store that has numbered them. So one worker at a time makes a step.
    """

    def __init__(self, rule: str, lock: Path) -> None:
        self.dense_rule, row_rule = SWAPPED[rule]
        self.lock = lock
        super().__init__(rule=RowSWAP(inner=row_rule, **PERIODS))
        self.weight = nn.Parameter(torch.zeros(3))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.weight.sum()

    def optimizer_step(self, *arguments, **options):
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            super().optimizer_step(*arguments, **options)

    def configure_optimizers(self):
        optimizer = swap([self.bias, self.weight], inner=self.dense_rule, **PERIODS)
        self.rows.attach_to(optimizer)
        return optimizer

    def train_dataloader(self):
        batches = Batches(self.trainer.global_rank)
        batches.ids = torch.arange(IDS).repeat(STEPS, 1)
        return batches


@pytest.mark.parametrize("rule", SWAPPED)
def test_swap_when_two_workers_go_on_in_the_midst_of_a_period_then_it_ends_where_it_would_have(tmp_path, rule):
    """The checkpoint has 6 pushes, one of them after a period's end; the next ends with the tenth push."""
    expected = nn.Parameter(torch.zeros(1))
    torchs = swap([expected], inner=SWAPPED[rule][0], **PERIODS)
    path = None
    for servers, step in ((2, 3), (1, STEPS)):
        saving = ModelCheckpoint(tmp_path / str(step), every_n_train_steps=step)
        strategy = AsyncParameterServerStrategy(num_embedding_servers=servers, transport="tcp")
        trainer = make_trainer(strategy, saving, max_steps=step, limit_val_batches=0)
        trainer.fit(model := Alike(rule, tmp_path / "lock"), ckpt_path=path)
        assert trainer.callback_metrics["world_size"] == 2
        saved = read_checkpoint(path := saving.best_model_path)
        while torchs.param_groups[0].get("swap_step", 0) < 2 * step:
            expected.grad = torch.ones(1)
            torchs.step()
        values, told, optimizer = saved["state_dict"], torchs.state[expected], saved["optimizer_states"][0]
        for value in (values["bias"], values["weight"], values["rows.embedding_bags.t.weight"], model.counted):
            torch.testing.assert_close(value, expected.detach().expand_as(value), rtol=1e-5, atol=1e-6)
        position = {"swap_step": 2 * step, "swap_period": 2 * step // 5 * 5 + 1}
        assert position.items() <= optimizer["param_groups"][0].items()
        for name, value in told.items():
            states = [state[name] for state in optimizer["state"].values()]
            states += [] if name == "step" else [values[f"rows.embedding_bags.t.{name}"]]
            for state in states:
                torch.testing.assert_close(state, value.expand_as(state), rtol=1e-5, atol=0)
        assert values["rows.embedding_bags.t.period"].unique().tolist() == [2 * step // 5 * 5 + 1]
        assert saved["async_ps"]["versions"] == [2 * step] * 2
        shares = load_shares(path, rank=0, num_ranks=1, weights_only=True)
        assert torch.cat([x["rows"]["t"]["version"] for x in shares]).tolist() == [2 * step] * IDS


def test_checkpoint_when_of_het_then_goes_on_here_and_back(tmp_path):
    paths = []
    for number, make in enumerate((HETStrategy, AsyncParameterServerStrategy, HETStrategy)):
        saving = ModelCheckpoint(tmp_path / str(number), save_on_train_epoch_end=True)
        model = Counting(share=1.0)
        trainer = make_trainer(make(), saving, devices=1, max_epochs=number + 1, limit_val_batches=0)
        trainer.fit(model, ckpt_path=paths[-1] if paths else None)
        paths.append(saving.best_model_path)
        assert trainer.global_step == (number + 1) * STEPS
        expected = -(number + 1) * counts(STEPS, ranks=1)
        torch.testing.assert_close(model.counted, all_rows(expected), rtol=0, atol=0)


def save_after_the_run(rank: int, port: int, folder: str) -> None:
    """As under torchrun: the process that trained saves once more, when the run and its servers are gone."""
    join(rank, 2, port)
    saving = ModelCheckpoint(folder, filename="within", save_on_train_epoch_end=True)
    trainer = make_trainer(AsyncParameterServerStrategy(), saving, limit_val_batches=0)
    trainer.fit(Small("adam"))
    assert trainer.world_size == torch.distributed.get_world_size() == 2
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    torch.distributed.destroy_process_group()


def test_checkpoint_when_saved_after_the_run_by_a_process_that_lives_on_then_has_the_servers_state(tmp_path):
    run_processes(save_after_the_run, free_port(), str(tmp_path), nprocs=2)
    within, after = read_checkpoint(tmp_path / "within.ckpt"), torch.load(tmp_path / "after.ckpt")
    assert within["async_ps"] == after["async_ps"] == {"versions": [2 * STEPS] * 5, "changes": [0.0] * 5}
    kept, saved = (x["optimizer_states"][0]["state"] for x in (within, after))
    assert [int(state["step"]) for state in saved.values()] == [2 * STEPS] * 5
    for index, state in kept.items():
        for name, value in state.items():
            assert torch.equal(saved[index][name], value), name
    for name in ("bias", "net.0.weight"):
        assert torch.equal(within["state_dict"][name], after["state_dict"][name])


class StepsPast(Counting):
    """Steps torch's optimizer in manual optimization, past Lightning and the strategy."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    "strategy",
    [AsyncParameterServerStrategy(), ShadowSyncStrategy(num_trainers=2, rounds="foreground", gap=2)],
    ids=["async_ps", "shadowsync"],
)
def test_step_when_it_goes_past_the_strategy_then_refused_by_what_it_would_not_do(strategy):
    told = {"async_ps": "trains a copy alone", "shadowsync": "makes no round"}[strategy.strategy_name]
    trainer = make_trainer(strategy, limit_val_batches=0)
    with pytest.raises(RuntimeError, match=rf"SGD\.step\(\) was called on the optimizer itself, .*{told}"):
        trainer.fit(StepsPast(share=1.0))
    assert trainer.world_size == 2


class Momentum(Counting):
    def configure_optimizers(self):
        return torch.optim.SGD([self.bias], lr=0.1, momentum=0.9)


def test_optimizer_when_stores_have_no_such_rule_then_refused_by_name():
    with pytest.raises(TypeError, match=r"strategy=async_ps trains .* got SGD\(lr=0.1, momentum=0.9\)"):
        make_trainer(AsyncParameterServerStrategy(), devices=1).fit(Momentum(share=1.0))


class StopsAlone(Callback):
    """Worker 1 ends after its first epoch, which only it knows of."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.global_rank == 1


def test_workers_when_one_stops_alone_then_the_run_ends_with_what_each_waits_for():
    trainer = make_trainer(AsyncParameterServerStrategy(), StopsAlone(), max_epochs=2)
    with pytest.raises(RequestRefusedError, match="each would wait for the other") as refused:
        trainer.fit(Counting(share=1.0))
    assert trainer.world_size == 2
    assert "'who validates all'" in str(refused.value)
    assert "'every update is on the servers all'" in str(refused.value)
