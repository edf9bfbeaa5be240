"""A Lightning trainer for measurements: it tells a turn about every step, and nothing else distracts it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from benchmarks.harness.turns import Turn


class StepsToTurn(pl.Callback):
    """Reports each training step to a turn. Last in the list, so that the other callbacks' time counts."""

    def __init__(self, turn: Turn, batch_size: int) -> None:
        self.turn, self.batch_size = turn, batch_size

    def on_train_batch_end(self, *_: Any) -> None:
        self.turn.step_done(self.batch_size)


def quiet_trainer(last: pl.Callback, *, callbacks: Sequence[pl.Callback] = (), **kwargs: Any) -> pl.Trainer:
    """A CPU trainer that runs until the last of its callbacks stops it."""
    for message in (
        "You defined a `validation_step` but have no `val_dataloader`",
        "Total length of `list` across ranks",
    ):
        warnings.filterwarnings("ignore", message=message)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=[*callbacks, last], **(defaults | kwargs))
