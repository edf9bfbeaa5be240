"""What no strategy takes: parts of the trainer that would go wrong later, and less clearly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy


def refuse_tuners(trainer: pl.Trainer, *, strategy: str) -> None:
    """Refuse callbacks that set the run up a second time; rows on servers and cut models are set up once.

    Args:
        trainer: The trainer that is about to fit.
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


def refuse_other_namespace(*objects: object) -> None:
    """Classes of ``lightning.pytorch`` are not those of ``pytorch_lightning``, and half of what they do gets lost."""
    for thing in objects:
        if any(base.__module__.partition(".")[0] == "lightning" for base in type(thing).__mro__):
            raise TypeError(
                f"{type(thing).__name__} is built on lightning.pytorch, this package and your trainer on"
                " pytorch_lightning; they do not mix. Import it from pytorch_lightning instead."
            )


def refuse_other_namespace_in(trainer: pl.Trainer) -> None:
    """The same for all that a trainer holds."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # all set by connectors
    data, profiler = trainer.datamodule, trainer.profiler  # type: ignore[attr-defined]
    refuse_other_namespace(*callbacks, *trainer.loggers, data, profiler)


def refuse_useless_arguments(strategy: RecsysStrategy) -> None:
    """Refuse arguments for ``DistributedDataParallel`` where the model is not wrapped in it.

    Raises:
        TypeError: there are some.
    """
    named = {
        "ddp_comm_state": strategy._ddp_comm_state,
        "ddp_comm_hook": strategy._ddp_comm_hook,
        "ddp_comm_wrapper": strategy._ddp_comm_wrapper,
        "model_averaging_period": strategy._model_averaging_period,
    }
    useless = [*strategy._ddp_kwargs, *(name for name, value in named.items() if value is not None)]
    if useless:
        raise TypeError(
            f"{type(strategy).__name__} does not use DistributedDataParallel, so it has no use for {useless}."
        )
