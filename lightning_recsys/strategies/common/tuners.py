"""Callbacks that train on trial inside ``fit`` and then put everything back."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder


def refuse_tuners(trainer: pl.Trainer, *, strategy: str) -> None:
    """Refuse callbacks that set the run up a second time; rows on servers and cut models are set up once.

    Args:
        trainer: That fits.
        strategy: Name of its class, for the message.

    Raises:
        TypeError: the trainer has such a callback.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise TypeError(
                f"callback {type(callback).__name__} trains on trial and puts weights and optimizers back, which"
                f" {strategy} cannot. Find the value on one device (strategy=auto) and set it."
            )
