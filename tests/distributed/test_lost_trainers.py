"""Trainers that average among themselves go on without one that dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback
from test_lost_workers import ROWS, SIZE, WORLD, Counts, NumbersModule, make_trainer

from lightning_recsys.strategies import ShadowSyncStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]


class CountsApart(Counts):
    """Each trainer alone would bring the bias to its own value."""

    values = (0.0, 8.0, 2.0)

    def training_step(self, batch, batch_idx):
        apart = self.bias - self.values[self.trainer.global_rank]
        return -self.rows(batch.sparse).sum() + apart.square()


class DiesBetweenRounds(Callback):
    """A trainer ends in mid-epoch, behind some rounds; the others tell of theirs, and of their dense part.

    Neither of these takes most of the second epoch before the other one, nor all of it before a round.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.made = folder, rank, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        rounds = trainer.strategy.dense._run.driver.rounds
        if trainer.current_epoch == 0 and trainer.global_rank == self.rank and batch_idx == 20:
            while rounds.count == 0:
                time.sleep(0.01)
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while trainer.global_rank != self.rank and batch_idx == 25 and not (self.folder / "died").exists():
            time.sleep(0.01)
        if trainer.current_epoch == 1 and batch_idx == 30:
            (self.folder / f"far-{trainer.global_rank}").touch()
        if trainer.current_epoch == 1 and batch_idx == 40:  # some steps behind that, in which a round may be awaited
            while rounds.count == self.made or len(list(self.folder.glob("far-*"))) < 2:
                time.sleep(0.01)

    def on_train_epoch_end(self, trainer, pl_module):
        rounds = trainer.strategy.dense._run.driver.rounds
        self.made = rounds.count
        with (self.folder / f"rounds-{trainer.global_rank}").open("a") as file:
            file.write(f"{rounds.count} {rounds.num_trainers}\n")

    def on_train_end(self, trainer, pl_module):
        remembered = trainer.strategy.dense._run.driver.rounds.algorithm.state_dict()
        state = {"bias": pl_module.bias.detach().clone(), "world": dist.get_world_size(), **remembered}
        torch.save(state, self.folder / f"end-{trainer.global_rank}")


@pytest.mark.parametrize(
    ("options", "dead"),
    [
        ({"algorithm": "ma", "rounds": "background", "interval": 0.02}, 0),
        ({"algorithm": "bmuf", "rounds": "foreground", "gap": 3, "block_momentum": 0.5}, 1),
    ],
    ids=["ma-background", "bmuf-foreground"],
)
def test_trainer_when_killed_in_mid_epoch_then_the_others_go_on_averaging_and_train_all_examples(
    tmp_path, options, dead
):
    strategy = ShadowSyncStrategy(final="average", **options)
    model, trainer = CountsApart(), make_trainer(strategy, DiesBetweenRounds(tmp_path, rank=dead))
    trainer.fit(model, NumbersModule())
    assert trainer.callback_metrics["world"] == WORLD - 1
    assert trainer.callback_metrics["seen"] == ROWS
    assert model.counted.min() >= 2
    assert model.counted.sum() <= 2 * ROWS + 8 * SIZE  # what one lease had may be trained twice
    living = [rank for rank in range(WORLD) if rank != dead]
    first, last = (torch.load(tmp_path / f"end-{rank}") for rank in living)
    assert first["world"] == last["world"] == WORLD - 1
    for name, tensor in first.items():
        assert name == "world" or torch.equal(tensor, last[name])
    assert torch.equal(first["bias"], model.bias.detach())
    values = sorted(CountsApart.values[rank] for rank in living)
    assert values[0] < model.bias < values[1]  # the dead one drew it elsewhere
    for rank in living:
        told = [line.split() for line in (tmp_path / f"rounds-{rank}").read_text().splitlines()]
        assert [num_trainers for _, num_trainers in told] == ["2", "2"]
        assert 0 < int(told[0][0]) < int(told[1][0])
