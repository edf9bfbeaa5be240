"""The callback that writes checkpoints."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint as LightningModelCheckpoint

from lightning_recsys.callbacks import LeanCallback


class ModelCheckpoint(LeanCallback, LightningModelCheckpoint):
    """Lightning's, which costs a step nothing where it saves nothing within an epoch.

    Lightning's own looks at every batch at the state of the trainer, before it sees that there is nothing to do
    (measured: 30 microseconds, half a percent of a small step).
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Pass over the batches where nothing is to be saved after one."""
        super().setup(trainer, pl_module, stage)
        if self._every_n_train_steps < 1 and self._train_time_interval is None:
            self.on_train_batch_end = None  # type: ignore[assignment,method-assign]  # Lightning passes over None
