"""What every strategy is asked to do, on a problem small enough to do it many times.

Run as a script (``python scenarios.py STRATEGY DEVICES FOLDER SCENARIO...``) it leaves what it saw in
``FOLDER/observed.pt``: some strategies need a main process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

import lightning_recsys  # noqa: F401 - registers the strategies

GLOBAL_BATCH = 8  # examples per step over all workers, so that every strategy trains on the same ones
ROWS_ND = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


class Share:
    """Batches, dealt out to the workers in turn, as many for each of them; a checkpoint knows the position."""

    def __init__(self, batch_size: int, trainer: pl.Trainer) -> None:
        self.batches = ROWS_ND.split(batch_size)[trainer.global_rank :: trainer.world_size]
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position %= len(self)
        while self.position < len(self):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __len__(self) -> int:
        return len(self.batches)


class Rows(pl.LightningDataModule):
    """64 examples; ``batch_size`` counts one worker's."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Share:
        return Share(self.batch_size, self.trainer)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Regression(pl.LightningModule):
    """Two layers, momentum and a schedule: state that a careless strategy would lose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, rows: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(rows), rows.sum(1, keepdim=True))

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(rows)
        self.log("train/loss", loss, sync_dist=True)
        self.log("world_size", torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
        return loss

    def validation_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(rows), sync_dist=True)

    def test_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("test/loss", self.loss(rows), sync_dist=True)

    def predict_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return self.layers(rows)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class FailsOnRank(Callback):
    """Raises in the third step of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 2:
            raise ZeroDivisionError(f"on rank {self.rank}")


@dataclass(frozen=True)
class Stage:
    """Where the scenarios play: a strategy on some workers, and a folder for what they write."""

    strategy: str
    devices: int
    folder: Path

    def trainer(self, **arguments: Any) -> pl.Trainer:
        settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **arguments}
        return pl.Trainer(
            accelerator="cpu",
            strategy=self.strategy,
            devices=self.devices,
            default_root_dir=self.folder,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **settings,
        )

    def rows(self, *, accumulate: int = 1) -> Rows:
        return Rows(GLOBAL_BATCH // self.devices // accumulate)


def parameters(task: pl.LightningModule) -> Tensor:
    return nn.utils.parameters_to_vector(task.parameters()).detach().clone()


def fit(stage: Stage) -> dict[str, Any]:
    """Two epochs with validation, checkpoints and early stopping."""
    checkpoints = ModelCheckpoint(stage.folder / "fit", filename="{epoch}", monitor="val/loss")
    trainer = stage.trainer(callbacks=[checkpoints, EarlyStopping("val/loss")], enable_checkpointing=True)
    task = Regression()
    trainer.fit(task, datamodule=stage.rows())
    return {
        "parameters": parameters(task),
        "saved": torch.load(checkpoints.best_model_path, weights_only=True)["state_dict"]["layers.0.weight"],
        "weight": task.layers[0].weight.detach().clone(),
        "progress": (trainer.current_epoch, trainer.global_step),
        "state": (trainer.state.status.value, trainer.state.fn.value),
        "callback_metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged_metrics": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "best_score": checkpoints.best_model_score,
        "best_path": checkpoints.best_model_path,
        "early_stopping": trainer.early_stopping_callback.best_score,
    }


def evaluate(stage: Stage) -> dict[str, Any]:
    """Validate, test and predict with fresh weights."""
    task, trainer = Regression(), stage.trainer()
    before = parameters(task)
    validated = trainer.validate(task, datamodule=stage.rows(), verbose=False)
    tested = trainer.test(task, datamodule=stage.rows(), verbose=False)
    predictions = trainer.predict(task, datamodule=stage.rows())
    return {
        "validate": validated,
        "test": tested,
        "predictions": torch.cat(predictions),
        "unchanged": torch.equal(before, parameters(task)),
    }


def test_the_best(stage: Stage) -> dict[str, Any]:
    """Fit, then ask for the best checkpoint by name."""
    checkpoints = ModelCheckpoint(stage.folder / "best", monitor="val/loss")
    trainer = stage.trainer(callbacks=checkpoints, enable_checkpointing=True)
    trainer.fit(Regression(), datamodule=stage.rows())
    (metrics,) = trainer.test(ckpt_path="best", datamodule=stage.rows(), verbose=False)
    return {"test": metrics["test/loss"], "best_score": float(checkpoints.best_model_score)}


def accumulate(stage: Stage) -> dict[str, Any]:
    """Half the batch, twice the batches per update."""
    task, trainer = Regression(), stage.trainer(accumulate_grad_batches=2)
    trainer.fit(task, datamodule=stage.rows(accumulate=2))
    return {"parameters": parameters(task), "global_step": trainer.global_step}


def fast_dev_run(stage: Stage) -> dict[str, Any]:
    """One batch of everything."""
    task, trainer = Regression(), stage.trainer(fast_dev_run=True)
    before = parameters(task)
    trainer.fit(task, datamodule=stage.rows())
    return {"global_step": trainer.global_step, "trained": not torch.equal(before, parameters(task))}


def resume(stage: Stage) -> dict[str, Any]:
    """Two epochs in a new trainer, from checkpoints in the middle and at the end of the first epoch."""

    def trainer_for(name: str, max_epochs: int) -> pl.Trainer:
        checkpoints = ModelCheckpoint(stage.folder / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        return stage.trainer(callbacks=checkpoints, enable_checkpointing=True, max_epochs=max_epochs)

    trainer_for("interrupted", 1).fit(Regression(), datamodule=stage.rows())
    resumed = {}
    for step in (5, 8):
        task, trainer = Regression(), trainer_for(f"resumed-{step}", 2)
        trainer.fit(task, datamodule=stage.rows(), ckpt_path=stage.folder / "interrupted" / f"step={step}.ckpt")
        resumed[step] = {"parameters": parameters(task), "progress": (trainer.current_epoch, trainer.global_step)}
    return resumed


def fit_again(stage: Stage) -> dict[str, Any]:
    """One trainer, two fits."""
    task, trainer = Regression(), stage.trainer(max_epochs=1)
    trainer.fit(task, datamodule=stage.rows())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, datamodule=stage.rows())
    return {"parameters": parameters(task), "progress": (trainer.current_epoch, trainer.global_step)}


def crash(stage: Stage) -> dict[str, Any]:
    """The last rank fails; then the same trainer is used again."""
    task, trainer = Regression(), stage.trainer(callbacks=FailsOnRank(stage.devices - 1), max_epochs=1)
    before = parameters(task)
    error: BaseException | None = None
    try:
        trainer.fit(task, datamodule=stage.rows())
    except Exception as raised:
        error = raised
    trainer.callbacks.clear()
    trainer.fit(task, datamodule=stage.rows())
    return {"error": error, "status": trainer.state.status.value, "trained": not torch.equal(before, parameters(task))}


SCENARIOS: dict[str, Callable[[Stage], dict[str, Any]]] = {
    function.__name__: function
    for function in (fit, evaluate, test_the_best, accumulate, fast_dev_run, resume, fit_again)
}


if __name__ == "__main__":
    stage = Stage(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    observed = {name: SCENARIOS[name](stage) for name in sys.argv[4:]}
    if pl.utilities.rank_zero_only.rank == 0:
        torch.save(observed, stage.folder / "observed.pt")
