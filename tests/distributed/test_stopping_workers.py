"""Free workers of which one is told to stop within an epoch: all end with that epoch, and nobody waits for ever."""

from __future__ import annotations

import pytest
from pytorch_lightning.callbacks import Callback, Timer
from test_lost_workers import ROWS, SIZE, WORLD, Counts, NumbersModule, make_trainer

from lightning_recsys.strategies import AsyncParameterServerStrategy, ShadowSyncStrategy, compose

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]

STEPS = 4  # of the worker that stops
LEASE = 8  # batches


class Stops(Callback):
    """Tells one worker to stop behind its fourth batch: by Lightning's flag, or because its own clock is far ahead."""

    def __init__(self, rank: int, timer: Timer | None = None) -> None:
        self.rank, self.timer = rank, timer

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == STEPS - 1:
            if self.timer is None:
                trainer.should_stop = True
            else:
                self.timer._offset = 7200.0


STRATEGIES = {
    "async_ps": AsyncParameterServerStrategy,
    "shadowsync": ShadowSyncStrategy,
    "foreground": lambda: ShadowSyncStrategy(algorithm="ma", rounds="foreground", gap=2),
    "teams": lambda: ShadowSyncStrategy(
        num_trainers=2, workers_per_trainer=2, algorithm="ma", rounds="foreground", gap=2
    ),
    "cached": lambda: compose(dense="servers", rows="cached", pace="free"),
}


@pytest.mark.parametrize(
    ("name", "rank", "by_clock", "validates"),
    [
        ("async_ps", 0, False, True),
        ("async_ps", 1, True, False),
        ("shadowsync", 2, True, True),
        ("foreground", 0, True, True),
        ("cached", 1, False, False),
    ],
)
def test_workers_when_one_is_told_to_stop_within_an_epoch_then_all_end_with_it(name, rank, by_clock, validates):
    timer = Timer({"hours": 1})
    callbacks = [Stops(rank, timer), timer] if by_clock else [Stops(rank)]
    model = Counts()
    trainer = make_trainer(
        STRATEGIES[name](), *callbacks, max_epochs=3, limit_val_batches=1.0 if validates else 0, num_sanity_val_steps=0
    )
    trainer.fit(model, NumbersModule())
    assert trainer.world_size == WORLD
    assert trainer.current_epoch == 1
    if validates:
        assert trainer.callback_metrics["world"] == WORLD
        assert trainer.callback_metrics["seen"] == ROWS
    if rank == 0:
        assert trainer.global_step == STEPS
    # Nothing twice, and the rest of the lease of the one that has stopped by nobody.
    counted = model.counted
    assert counted.max() == 1
    assert STEPS * SIZE <= counted.sum() <= ROWS - (LEASE - STEPS) * SIZE


@pytest.mark.parametrize(("name", "world"), [("async_ps", WORLD), ("teams", 4)])
def test_workers_with_fixed_shares_when_the_time_of_one_is_up_then_all_end_with_that_epoch(name, world):
    timer = Timer({"hours": 1})
    model = Counts()
    trainer = make_trainer(
        STRATEGIES[name](), Stops(1, timer), timer, max_epochs=3, limit_train_batches=20, devices=world
    )
    trainer.fit(model, NumbersModule())
    assert trainer.world_size == world
    assert trainer.current_epoch == 1
    assert trainer.global_step == 20
    assert model.counted.sum() == (20 * (world - 1) + STEPS) * SIZE
