"""The callback that writes checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint as LightningModelCheckpoint

from lightning_recsys.callbacks import LeanCallback
from lightning_recsys.checkpoints import is_folder


class ModelCheckpoint(LeanCallback, LightningModelCheckpoint):
    """Lightning's, with a ``last`` that is the last, and which costs a step nothing where it saves nothing within one.

    * Lightning (2.6) writes ``last`` only beside a checkpoint that it keeps for its metric, so that a run whose metric
      does not improve any more would have nothing to go on from but its best epoch. Here ``last`` is written at the end
      of every epoch, and after every validation within one.
    * Lightning looks at every batch at the state of the trainer, before it sees that there is nothing to do (measured:
      30 microseconds, half a percent of a small step).
    * ``ckpt_path=last`` passes over a folder whose first save was cut off: there is nothing to go on from yet.
    * It knows in which epoch a checkpoint was written (:attr:`best_epoch`).

    Args:
        *args: As for Lightning's.
        save_last: Write ``last``. A link is refused: it would name the best checkpoint.
        **kwargs: As for Lightning's. With ``every_n_epochs`` ``last`` is written as rarely.

    Raises:
        ValueError: ``save_last`` is ``"link"``.
    """

    def __init__(self, *args: Any, save_last: bool | None = None, **kwargs: Any) -> None:
        if isinstance(save_last, str):
            raise ValueError(
                f"callbacks.model_checkpoint.save_last must be true or false, got {save_last!r}: `last` is a checkpoint"
                " of its own, also where the best one is older."
            )
        super().__init__(*args, save_last=save_last, **kwargs)
        self._epochs: dict[str, int] = {}  # in which each file was written, the first one being 1

    @property
    def best_epoch(self) -> int | None:
        """The epoch of the best checkpoint, the first one being 1; ``None`` where there is none."""
        return self._epochs.get(self.best_model_path)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self._epochs[filepath] = trainer.current_epoch + 1
        super()._save_checkpoint(trainer, filepath)

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        return {x for x in super()._find_last_checkpoints(trainer) if not Path(x).is_dir() or is_folder(x)}

    def state_dict(self) -> dict[str, Any]:
        """Lightning's, with the epochs."""
        return {**super().state_dict(), "epochs": dict(self._epochs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's, with the epochs where there are some."""
        super().load_state_dict(state_dict)
        self._epochs = dict(state_dict.get("epochs", {}))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Pass over the batches where nothing is to be saved after one."""
        super().setup(trainer, pl_module, stage)
        if self._every_n_train_steps < 1 and self._train_time_interval is None:
            self.on_train_batch_end = None  # type: ignore[assignment,method-assign]  # Lightning passes over None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the best, then ``last``, whether or not the epoch was validated and the best is of this epoch."""
        super().on_train_epoch_end(trainer, pl_module)
        self._write_last(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After a validation within an epoch the same; the one that ends an epoch leaves it to the epoch's end."""
        super().on_validation_end(trainer, pl_module)
        if not self._should_save_on_train_epoch_end(trainer):
            self._write_last(trainer)

    def _write_last(self, trainer: pl.Trainer) -> None:
        """Write ``last`` unless that has been done at this step."""
        every = self._every_n_epochs
        due = self.save_last and every > 0 and (trainer.current_epoch + 1) % every == 0
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
