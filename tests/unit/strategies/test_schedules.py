"""Which schedules are refused where ranks have unequal numbers of batches, and which do no harm."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint, Timer

from lightning_recsys.strategies import ShadowSyncStrategy
from lightning_recsys.strategies.common import schedules as _schedules
from lightning_recsys.strategies.common.schedules import (
    refuse_clocks,
    refuse_different_schedules,
    refuse_saving_by_steps,
)


def trainer(batches, *, every_n_train_steps=0, val_check_interval=None, **settings):
    saving = ModelCheckpoint(every_n_train_steps=every_n_train_steps) if every_n_train_steps else ModelCheckpoint()
    defaults = {
        "max_epochs": 1000,  # Lightning's
        "max_steps": -1,
        "min_steps": None,
        "global_step": 0,
        "accumulate_grad_batches": 1,
        "check_val_every_n_epoch": 1,
        "enable_validation": True,
        "val_check_batch": val_check_interval or batches,
        "checkpoint_callbacks": [saving],
    }
    return SimpleNamespace(num_training_batches=batches, **defaults | settings)


@pytest.fixture
def refuse(monkeypatch):
    """The check of rank 0, with ranks of so many batches."""

    def check(batches, **settings):
        def gather(per_rank, own):
            per_rank[:] = [(n, [x.times for x in _schedules._schedules(trainer(n, **settings), n)]) for n in batches]
            assert per_rank[0] == own

        monkeypatch.setattr(dist, "get_world_size", lambda: len(batches))
        monkeypatch.setattr(dist, "all_gather_object", gather)
        refuse_different_schedules(trainer(batches[0], **settings))

    return check


@pytest.mark.parametrize(
    "settings",
    [
        {},  # at the ends of epochs
        {"every_n_train_steps": 4, "max_epochs": 1},  # two times each
        {"every_n_train_steps": 5, "max_epochs": 1, "accumulate_grad_batches": 3},  # no time: three steps each
        {"val_check_interval": 4},  # two times each, in every epoch
        {"max_steps": 7, "max_epochs": -1, "every_n_train_steps": 3},  # ends before the first rank's first epoch does
        {"min_steps": 16, "max_epochs": 1},  # both end with their only epoch
    ],
)
def test_unequal_batches_when_ranks_stop_equally_often_then_accepted(refuse, settings):
    refuse([9, 8], **settings)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"every_n_train_steps": 4}, "ModelCheckpoint 0's every_n_train_steps=4 counts"),
        ({"every_n_train_steps": 4, "max_epochs": 4}, "every_n_train_steps=4 counts"),  # 9 against 8 in the fourth
        ({"every_n_train_steps": 4, "max_epochs": 1, "global_step": 3}, "every_n_train_steps=4 counts"),  # resumed
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, "trainer.val_check_interval=4 counts"),
        ({"max_steps": 20, "max_epochs": -1}, "trainer.max_steps=20 counts"),
        ({"min_steps": 16}, "trainer.min_steps=16 counts"),  # one rank may end an epoch before the other
    ],
)
def test_unequal_batches_when_a_schedule_counts_over_epochs_then_refused(refuse, settings, setting):
    with pytest.raises(ValueError, match=rf"{setting} steps over all epochs, of which the ranks have \[9, 8\]"):
        refuse([9, 8], **settings)
    refuse([9, 9], **settings)


@pytest.mark.parametrize(
    ("settings", "setting", "times"),
    [
        ({"every_n_train_steps": 3}, "ModelCheckpoint 0's every_n_train_steps=3", r"\[3, 2\]"),
        (
            {"every_n_train_steps": 5, "accumulate_grad_batches": 2},
            "ModelCheckpoint 0's every_n_train_steps=5",
            r"\[1, 0\]",
        ),  # 4.5 steps
        ({"val_check_interval": 3}, "trainer.val_check_interval=3", r"\[3, 2\]"),
        ({"max_steps": 8}, "trainer.max_steps=8", r"\[0, 1\]"),
    ],
)
def test_unequal_batches_when_ranks_stop_unequally_often_then_refused(refuse, settings, setting, times):
    with pytest.raises(ValueError, match=rf"with {setting} the ranks, .* would stop {times} times in an epoch"):
        refuse([9, 8], max_epochs=1, **settings)


def test_batches_when_nobody_knows_their_number_then_accepted(refuse):
    refuse([float("inf"), float("inf")], every_n_train_steps=4)
    with pytest.raises(ValueError, match="every_n_train_steps=4 counts"):
        refuse([9, 8], every_n_train_steps=4)


class Validates(pl.LightningModule):
    def validation_step(self, batch):
        pass


def two_workers(**arguments):
    return pl.Trainer(strategy=ShadowSyncStrategy(num_trainers=2), accelerator="cpu", logger=False, **arguments)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"callbacks": ModelCheckpoint(train_time_interval=timedelta(hours=1))}, "train_time_interval"),
        ({"val_check_interval": timedelta(hours=1)}, r"trainer\.val_check_interval"),
    ],
    ids=["checkpoints", "validation"],
)
def test_clock_when_all_workers_would_wait_for_it_at_every_batch_then_refused(arguments, what):
    with pytest.raises(ValueError, match=f"{what}.* makes every worker wait for all others at every batch"):
        refuse_clocks(two_workers(**arguments))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"val_check_interval": 1}, r"trainer\.val_check_interval"),
        ({"val_check_interval": 0.5}, r"trainer\.val_check_interval"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, r"trainer\.val_check_interval"),
        ({"callbacks": ModelCheckpoint(every_n_train_steps=4)}, "every_n_train_steps"),
        ({"max_steps": 9}, r"trainer\.max_steps"),
        ({"min_steps": 9}, r"trainer\.min_steps"),
    ],
)
def test_time_when_ranks_stop_at_numbers_of_steps_as_well_then_refused(arguments, what):
    trainer = two_workers(max_time={"hours": 1}, **arguments)
    trainer.fit_loop.epoch_loop.val_loop._data_source.instance = ()  # loaders: it validates
    trainer.strategy._lightning_module = Validates()
    with pytest.raises(ValueError, match=f"max_time .*ends training at each worker's own step, and {what}.* equal"):
        refuse_clocks(trainer)


@pytest.mark.parametrize(
    "arguments",
    [{"callbacks": Timer()}, {"callbacks": Timer({"hours": 1}, interval="epoch")}, {"max_time": {"hours": 1}}],
)
def test_time_when_it_stops_nobody_at_a_step_of_its_own_or_nothing_else_does_then_accepted(arguments):
    refuse_clocks(two_workers(**arguments))


def test_saving_by_steps_when_rounds_go_by_the_time_then_refused():
    refuse_saving_by_steps(trainer(9), setting="strategy.interval=1")
    with pytest.raises(ValueError, match=r"strategy\.interval=1 .* callbacks\.model_checkpoint\.every_n_train_steps=4"):
        refuse_saving_by_steps(trainer(9, every_n_train_steps=4), setting="strategy.interval=1")
