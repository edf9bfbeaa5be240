"""``trainer.max_epochs=auto``: the validation rows say when a run ends."""

from __future__ import annotations

import math

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping
from recipe_tools.build import Config, required

MOST_EPOCHS = 100
PATIENCE = 2  # epochs in a row without a better validation that end a run; as many more as it takes for so many steps
LEAST_STEPS = 200
BETTER = 1e-4  # of the monitored metric


def take_auto_epochs(config: Config) -> None:
    """Set ``trainer.max_epochs=auto`` to a number that is never reached, and have the run end by its validations.

    A callback for early stopping that the run has already stays as it is.

    Raises:
        ValueError: the learning rates go by the share of the run that is over, which nobody knows then.
    """
    trainer = config["trainer"]
    if trainer["max_epochs"] != "auto":
        return
    scheduler = (config["optim"].get("scheduler") or {}).get("_target_")
    if scheduler is not None and "total_steps" in required(scheduler):
        raise ValueError(
            f"trainer.max_epochs=auto ends a run when it learns no more, and optim.scheduler ({scheduler}) has to know"
            " its length. Write a number of epochs, or choose optim/scheduler=plateau."
        )
    trainer["max_epochs"] = MOST_EPOCHS
    callbacks = config["callbacks"] or {}
    if not any(str((x or {}).get("_target_")).endswith("EarlyStopping") for x in callbacks.values()):
        own = {
            "_target_": f"{__name__}.{PatientEarlyStopping.__name__}",
            "monitor": config["monitor"]["metric"],
            "mode": config["monitor"]["mode"],
        }
        config["callbacks"] = {**callbacks, "early_stopping": own}


class PatientEarlyStopping(EarlyStopping):
    """Ends a run after two epochs without a validation that is better by .0001; after more, where they have few steps.

    Args:
        monitor: A metric of validation.
        mode: ``min`` or ``max``: the better direction.
    """

    def __init__(self, monitor: str, mode: str) -> None:
        super().__init__(monitor, mode=mode, patience=PATIENCE, min_delta=BETTER)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.patience = max(PATIENCE, math.ceil(LEAST_STEPS / trainer.num_training_batches))
