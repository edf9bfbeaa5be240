"""Another process takes the place of a worker that died, and trains on with the others."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from test_lost_workers import ROWS, SIZE, WORLD, Counts, NumbersModule, make_trainer

from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    CachedRows,
    HierarchicalStrategy,
    ShadowSyncStrategy,
    compose,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

EPOCHS, RATE = 3, 0.25


class Constant(torch.nn.Module):
    """Its weight has the gradient 1, whatever the batch and however stale the weight is."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense):
        return self.weight.expand(dense.shape[0])


class CountsTwice(Counts):
    """The dense part counts its updates, as rows count theirs, in steps whose length an epoch says."""

    def __init__(self):
        super().__init__()
        self.model = Constant()
        del self.bias

    def training_step(self, batch, batch_idx):
        return -self.rows(batch.sparse).sum() + self.model(batch.dense).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.rows.attach_to(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class Dies(Callback):
    """A worker dies in the second epoch, of which the others leave some until another one has taken its place."""

    def __init__(self, folder: Path, rank: int, *, deaths: int = 1) -> None:
        self.folder, self.rank, self.deaths = folder, rank, deaths

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        strategy, epoch = trainer.strategy, trainer.current_epoch
        died = len(list(self.folder.glob("died-*")))
        name = f"{trainer.global_rank}-{'later' if strategy.launched.replaces else 'first'}-{epoch}"
        with (self.folder / name).open("a") as file:
            file.write(f"{strategy.optimizers[0].param_groups[0]['lr']} {dist.get_rank()}\n")
        if trainer.global_rank == self.rank and epoch == 1 and batch_idx == 5 and died < self.deaths:
            (self.folder / f"died-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while trainer.global_rank != self.rank and epoch == 1 and batch_idx == 15 and not self._is_replaced():
            time.sleep(0.02)
            for check in strategy.run_servers.checks:  # as before each step
                check()

    def _is_replaced(self) -> bool:
        """Whether the last of the processes in that place has trained more than those that died there do."""
        path = self.folder / f"{self.rank}-later-1"
        return path.exists() and len(path.read_text().splitlines()) > 6 * self.deaths - 2

    def trained(self, when: str, epoch: int) -> list[list[str]]:
        """The rates and the places in the process group of the steps that were begun there."""
        path = self.folder / f"{self.rank}-{when}-{epoch}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def fit(strategy, callback, *callbacks, **options):
    model = CountsTwice()
    trainer = make_trainer(strategy, callback, *callbacks, max_epochs=EPOCHS, **options)
    trainer.fit(model, NumbersModule())
    return model, trainer


KINDS = {
    "async_ps": (lambda: AsyncParameterServerStrategy(max_replacements=1), 0),
    "async_ps-cached": (
        lambda: compose(
            dense="servers", rows=CachedRows(cache_rows=10, staleness=100), transport="tcp", max_replacements=1
        ),
        1,
    ),
    "easgd": (lambda: ShadowSyncStrategy(max_replacements=1), 0),
    "bmuf-foreground": (
        lambda: ShadowSyncStrategy(algorithm="bmuf", rounds="foreground", gap=3, max_replacements=1),
        1,
    ),
    "one_group": (lambda: HierarchicalStrategy(nets_per_trainer=WORLD, max_replacements=1), 0),
    "groups-ma": (
        lambda: HierarchicalStrategy(num_groups=2, nets_per_trainer=2, algorithm="ma", max_replacements=1),
        2,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_worker_when_it_dies_then_another_process_trains_in_its_place(kind, tmp_path, caplog):
    make, dead = KINDS[kind]
    callback = Dies(tmp_path, dead)
    saves = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, filename="{epoch}")
    best = ModelCheckpoint(
        tmp_path / "best", monitor="seen", mode="max", filename="{epoch}"
    )  # the first, of equal ones
    callbacks = callback, saves, best, EarlyStopping("val", patience=5)
    with caplog.at_level(logging.WARNING):
        model, trainer = fit(make(), *callbacks, devices="auto" if "group" in kind else WORLD)
    world = trainer.world_size
    assert trainer.callback_metrics["world"] == world
    assert trainer.callback_metrics["seen"] == ROWS
    assert trainer.current_epoch == EPOCHS
    assert sorted(x.name for x in (tmp_path / "saved").iterdir()) == [f"epoch={x}.ckpt" for x in range(EPOCHS)]
    assert [x.name for x in (tmp_path / "best").iterdir()] == ["epoch=0.ckpt"]  # the new process knows of it
    (told,) = [x for x in caplog.messages if "Another process is to take the place" in x]
    assert told == f"Another process is to take the place of worker {dead} (replacement 1 of at most 1)."
    # Every example was trained in each epoch, by its rate; what one lease had may be trained twice.
    once = 1 + 1 / 2 + 1 / 4
    assert model.counted.min() == once if "cached" not in kind else (model.counted < once).sum() <= 10 + SIZE
    assert model.counted.sum() <= once * ROWS + 8 * SIZE / 2
    if kind in ("async_ps", "one_group"):  # each update of the dense part is on servers, as each of a row is
        assert float(model.model.weight.detach()) == -RATE * float(model.counted.sum()) / SIZE
    # The new process trained some of the epoch of the death and a worker's share of those behind it, at their rates.
    assert len(callback.trained("first", 1)) == 6
    assert callback.trained("later", 0) == []
    assert len(callback.trained("later", 1)) >= 5
    assert len(callback.trained("later", 2)) >= 4
    assert {rate for rate, _ in callback.trained("later", 1)} == {str(RATE / 2)}
    assert {rate for rate, _ in callback.trained("later", 2)} == {str(RATE / 4)}
    assert {place for _, place in callback.trained("later", 2)} == {str(world - 1)}  # behind all others


def test_process_when_it_dies_as_well_then_the_next_takes_the_place_and_no_more_than_asked_for(tmp_path, caplog):
    callback = Dies(tmp_path, 1, deaths=2)
    with caplog.at_level(logging.WARNING):
        model, trainer = fit(AsyncParameterServerStrategy(max_replacements=2), callback)
    assert trainer.callback_metrics["world"] == WORLD
    assert model.counted.min() == 1 + 1 / 2 + 1 / 4
    assert len(callback.trained("later", 1)) > 10
    assert len([x for x in caplog.messages if "is to take the place" in x]) == 2
    assert len([x for x in caplog.messages if "was ended by SIGKILL" in x and "The other 2 go on" in x]) == 2


class Fails(Dies):
    """Its code cannot run in another process."""

    def setup(self, trainer, pl_module, stage):
        if trainer.strategy.launched.replaces:
            (self.folder / "failed").touch()
            raise ZeroDivisionError("in the setup of another process")

    def _is_replaced(self) -> bool:
        return (self.folder / "failed").exists()


def test_process_when_it_fails_before_it_takes_part_then_the_others_go_on_without_it(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        model, trainer = fit(AsyncParameterServerStrategy(max_replacements=3), Fails(tmp_path, 0))
    assert trainer.callback_metrics["world"] == WORLD - 1
    assert model.counted.min() == 1 + 1 / 2 + 1 / 4
    (said,) = [x for x in caplog.messages if "No process has taken the place" in x]
    assert "of worker 0: ZeroDivisionError: in the setup of another process" in said
    assert len([x for x in caplog.messages if "is to take the place" in x]) == 1  # an error would come again


class Forgets(Dies):
    """The checkpoint that the run went on from is gone when a worker dies."""

    def on_train_start(self, trainer, pl_module):
        shutil.rmtree(self.folder / "saved", ignore_errors=True)


def test_worker_of_a_resumed_run_when_it_dies_then_another_process_goes_on_from_where_the_others_are(tmp_path):
    saves = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, filename="{epoch}")
    make_trainer(ShadowSyncStrategy(), saves, max_epochs=1).fit(CountsTwice(), NumbersModule())
    model, callback = CountsTwice(), Forgets(tmp_path, 0)
    trainer = make_trainer(ShadowSyncStrategy(max_replacements=1), callback, max_epochs=EPOCHS)
    trainer.fit(model, NumbersModule(), ckpt_path=tmp_path / "saved" / "epoch=0.ckpt")
    assert (trainer.callback_metrics["world"], trainer.current_epoch) == (WORLD, EPOCHS)
    assert model.counted.min() == 1 + 1 / 2 + 1 / 4
    assert model.counted.sum() <= (1 + 1 / 2 + 1 / 4) * ROWS + 8 * SIZE / 2
    assert {rate for rate, _ in callback.trained("later", 1)} == {str(RATE / 2)}
    assert len(callback.trained("later", 2)) >= 4


def test_worker_when_epochs_follow_each_other_without_a_meeting_then_the_new_one_trains_the_same_epochs(tmp_path):
    callback = Dies(tmp_path, 0)
    model, trainer = fit(AsyncParameterServerStrategy(max_replacements=1), callback, limit_val_batches=0)
    assert trainer.current_epoch == EPOCHS
    assert model.counted.min() == 1 + 1 / 2 + 1 / 4
    assert model.counted.sum() <= (1 + 1 / 2 + 1 / 4) * ROWS + 8 * SIZE / 2
    assert len(callback.trained("later", 2)) >= 4
    assert callback.trained("later", 3) == []
