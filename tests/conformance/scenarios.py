"""What every strategy is asked to do, on a problem small enough to do it many times.

Run as a script (``python scenarios.py STRATEGY DEVICES TASK FOLDER SCENARIO... [/ STRATEGY ...]``) it leaves what it
saw in ``FOLDER/observed.pt``: some strategies need a main process of their own.
"""

from __future__ import annotations

import copy
import csv
import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import lightning_recsys  # noqa: F401 - registers the strategies
from lightning_recsys.checkpoints import is_folder, to_file
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.models.layers import FieldwiseLinear
from lightning_recsys.optim import RowSGD

GLOBAL_BATCH = 8  # examples per step over all workers, so that every strategy trains on the same ones
ROWS_ND = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


class Share:
    """Batches, in turn to all that get batches of their own from the strategy; a checkpoint knows the position."""

    def __init__(self, rows: Tensor, batch_size: int, share: dict[str, int]) -> None:
        self.batches = rows.split(batch_size)[share["rank"] :: share["num_replicas"]]
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
    """64 examples, as many batches for all who share them; ``batch_size`` counts those of all."""

    rows = ROWS_ND

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Share:
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return Share(self.rows, self.batch_size // share["num_replicas"], share)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class UnevenRows(Rows):
    """61 examples; of two workers one gets 4 batches with 31 of them, the other 3 with 30."""

    rows = ROWS_ND[:61]

    def __init__(self) -> None:
        super().__init__(20)


class LoadedRows(Rows):
    """The same examples for training, read by processes that each rank forks beside its threads and connections."""

    def train_dataloader(self) -> DataLoader:
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(ReadByWorkers(), batch_size=self.batch_size // share["num_replicas"], num_workers=2)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Tensor:
        rows, parents = batch
        assert parents.eq(os.getpid()).all()
        return rows


class ReadByWorkers(Dataset):
    def __len__(self) -> int:
        return len(ROWS_ND)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return ROWS_ND[index], os.getppid()


class Regression(pl.LightningModule):
    """Two layers, momentum and a schedule: state that a careless strategy would lose."""

    momentum = 0.9

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)

    def loss(self, rows: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(rows), rows.sum(1, keepdim=True))

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(rows)
        self.log("train/loss", loss, sync_dist=True)
        self.log("world_size", torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(rows), sync_dist=True, batch_size=len(rows))

    def test_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("test/loss", self.loss(rows), sync_dist=True, batch_size=len(rows))

    def predict_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return self(rows)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=self.momentum)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class Recommendation(Regression):
    """Embedding rows beside the layers: ids are the numbers of the example, cut to integers."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig("first", 7, 4, ("a", "b")), EmbeddingBagConfig("second", 5, 4, ("c",))]
        self.embeddings = EmbeddingBagCollection(tables, optimizer=RowSGD(lr=0.05))
        self.head = nn.Linear(12, 1)

    def forward(self, rows: Tensor) -> Tensor:
        ids_FB = (rows.T * 3).long() % torch.tensor([[7], [7], [5]])
        embedded = self.embeddings(SparseFeatures(("a", "b", "c"), ids_FB.flatten()))
        return self.layers(rows) + self.head(embedded.flatten(1))

    def configure_optimizers(self) -> dict[str, Any]:
        configured = super().configure_optimizers()
        self.embeddings.attach_to(configured["optimizer"])
        configured["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(configured["optimizer"], 1, gamma=0.5)
        return configured


class PlainRecommendation(Recommendation):
    """Without momentum, which servers that train the dense part do not have."""

    momentum = 0.0


class HalfRecommendation(PlainRecommendation):
    """Its rows are kept in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        tables = [replace(table, dtype="bfloat16") for table in self.embeddings.tables]
        self.embeddings = EmbeddingBagCollection(tables, optimizer=RowSGD(lr=0.05))


class Machine(nn.Module):
    """A layer over fields, cut by them where a strategy asks for that."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig("first", 7, 4, ("a", "b")), EmbeddingBagConfig("second", 5, 4, ("c",))]
        self.embeddings = EmbeddingBagCollection(tables, optimizer=RowSGD(lr=0.05))
        self.head = FieldwiseLinear(3, num_fields=3, embedding_dim=4, out_features=1)

    def partition(self, fields: Sequence[int], group: Any) -> None:
        self.embeddings.partition(fields)
        self.head.partition(fields, group)

    def forward(self, rows: Tensor) -> Tensor:
        ids_FB = (rows.T * 3).long() % torch.tensor([[7], [7], [5]])
        return self.head(rows, self.embeddings(SparseFeatures(("a", "b", "c"), ids_FB.flatten())))


class Fields(Regression):
    """Embedding rows, and a layer that can be cut by the fields they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows) + self.machine(rows)

    def configure_optimizers(self) -> dict[str, Any]:
        configured = super().configure_optimizers()
        self.machine.embeddings.attach_to(configured["optimizer"])
        configured["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(configured["optimizer"], 1, gamma=0.5)
        return configured


TASKS: dict[str, type[Regression]] = {
    "regression": Regression,
    "recommendation": Recommendation,
    "plain": PlainRecommendation,
    "fields": Fields,
    "bfloat16": HalfRecommendation,
}


def by_steps(task: type[Regression]) -> type[Regression]:
    """The same with a learning rate that halves every third step."""
    return {
        Regression: RegressionBySteps,
        Recommendation: RecommendationBySteps,
        PlainRecommendation: PlainRecommendationBySteps,
        Fields: FieldsBySteps,
    }[task]


class RegressionBySteps(Regression):
    def configure_optimizers(self) -> dict[str, Any]:
        return _halve_every_third_step(super().configure_optimizers())


class RecommendationBySteps(Recommendation):
    def configure_optimizers(self) -> dict[str, Any]:
        return _halve_every_third_step(super().configure_optimizers())


class PlainRecommendationBySteps(PlainRecommendation):
    def configure_optimizers(self) -> dict[str, Any]:
        return _halve_every_third_step(super().configure_optimizers())


def _halve_every_third_step(configured: dict[str, Any]) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.StepLR(configured["optimizer"], 1, gamma=0.5)
    return configured | {"lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 3}}


class FieldsBySteps(Fields):
    def configure_optimizers(self) -> dict[str, Any]:
        return _halve_every_third_step(super().configure_optimizers())


class RecommendationWithoutOptimizer(Recommendation):
    """Its rows are all that is trained."""

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return self.loss(rows)

    def configure_optimizers(self) -> None:
        return None


class FieldsWithoutOptimizer(Fields):
    training_step = RecommendationWithoutOptimizer.training_step
    configure_optimizers = RecommendationWithoutOptimizer.configure_optimizers


WITHOUT_OPTIMIZER = {"recommendation": RecommendationWithoutOptimizer, "fields": FieldsWithoutOptimizer}


class FailsOnRank(Callback):
    """Raises in the third step of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 2:
            raise ZeroDivisionError(f"on rank {self.rank}")


class KilledOnRank(FailsOnRank):
    """Is killed there instead."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class HeldOnRank(Callback):
    """Holds a rank in its first step until rank 0 has taken all of its own, or for a minute."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        deadline = time.monotonic() + 60
        while trainer.global_rank == self.rank and batch_idx == 0 and time.monotonic() < deadline:
            if (self.folder / "last-step").exists():
                (self.folder / "overtaken").touch()
                break
            time.sleep(0.01)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx == trainer.num_training_batches - 1:
            (self.folder / "last-step").touch()


class CopiesItself(Callback):
    """Copies itself, with the metric that it holds, and the model while that is trained, as averages of models do."""

    def __init__(self) -> None:
        self.losses = MeanMetric()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.update(outputs["loss"])
        assert copy.deepcopy(self).losses.update_count == 1
        assert copy.deepcopy(pl_module).hparams == pl_module.hparams


@dataclass(frozen=True)
class Stage:
    """Where the scenarios play: a strategy on some workers, a task, and a folder for what they write.

    ``strategy`` is a registered name, or ``module:function`` for what the function returns.
    """

    strategy: str
    devices: int
    folder: Path
    task: str = "regression"

    def make_strategy(self) -> str | Strategy:
        module, _, function = self.strategy.partition(":")
        return getattr(import_module(module), function)() if function else self.strategy

    def make_task(self) -> Regression:
        return TASKS[self.task]()

    def trainer(self, **arguments: Any) -> pl.Trainer:
        settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **arguments}
        return pl.Trainer(
            accelerator="cpu",
            strategy=self.make_strategy(),
            devices=self.devices,
            default_root_dir=self.folder,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **settings,
        )

    def rows(self, *, accumulate: int = 1) -> Rows:
        return Rows(GLOBAL_BATCH // accumulate)


def parameters(task: pl.LightningModule) -> Tensor:
    """All that the task has learnt, embedding rows included; state dicts have the same keys whoever holds the rows."""
    return torch.cat([x.detach().double().flatten() for x in task.state_dict().values() if x.is_floating_point()])


def as_file(path: str) -> str:
    """A checkpoint that anybody can read: some strategies save folders."""
    if not is_folder(path):
        return path
    if not Path(f"{path}.file").exists():
        to_file(path, f"{path}.file")
    return f"{path}.file"


def fit(stage: Stage) -> dict[str, Any]:
    """Two epochs with validation, checkpoints and early stopping."""
    checkpoints = ModelCheckpoint(stage.folder / "fit", filename="{epoch}", monitor="val/loss")
    trainer = stage.trainer(callbacks=[checkpoints, EarlyStopping("val/loss")], enable_checkpointing=True)
    task = stage.make_task()
    before = parameters(task)
    trainer.fit(task, datamodule=stage.rows())
    return {
        "trained": not torch.equal(before, parameters(task)),
        "parameters": parameters(task),
        "saved": torch.load(as_file(checkpoints.best_model_path), weights_only=True)["state_dict"],
        "state_dict": task.state_dict(),
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
    task, trainer = stage.make_task(), stage.trainer()
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
    trainer.fit(stage.make_task(), datamodule=stage.rows())
    (metrics,) = trainer.test(ckpt_path="best", datamodule=stage.rows(), verbose=False)
    return {"test": metrics["test/loss"], "best_score": float(checkpoints.best_model_score)}


def accumulate(stage: Stage) -> dict[str, Any]:
    """Half the batch, twice the batches per update."""
    task, trainer = stage.make_task(), stage.trainer(accumulate_grad_batches=2)
    trainer.fit(task, datamodule=stage.rows(accumulate=2))
    return {"parameters": parameters(task), "global_step": trainer.global_step}


def fast_dev_run(stage: Stage) -> dict[str, Any]:
    """One batch of everything, with a callback that makes copies."""
    task, trainer = stage.make_task(), stage.trainer(fast_dev_run=True, callbacks=CopiesItself())
    before = parameters(task)
    trainer.fit(task, datamodule=stage.rows())
    return {"global_step": trainer.global_step, "trained": not torch.equal(before, parameters(task))}


def resume(stage: Stage) -> dict[str, Any]:
    """Two epochs in a new trainer, from checkpoints in the middle and at the end of the first epoch."""

    def trainer_for(name: str, max_epochs: int) -> pl.Trainer:
        checkpoints = ModelCheckpoint(stage.folder / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        return stage.trainer(callbacks=checkpoints, enable_checkpointing=True, max_epochs=max_epochs)

    trainer_for("interrupted", 1).fit(stage.make_task(), datamodule=stage.rows())
    resumed = {}
    for step in (5, 8):
        task, trainer = stage.make_task(), trainer_for(f"resumed-{step}", 2)
        trainer.fit(task, datamodule=stage.rows(), ckpt_path=stage.folder / "interrupted" / f"step={step}.ckpt")
        resumed[step] = {"parameters": parameters(task), "progress": (trainer.current_epoch, trainer.global_step)}
    return resumed


def fit_again(stage: Stage) -> dict[str, Any]:
    """One trainer, two fits."""
    task, trainer = stage.make_task(), stage.trainer(max_epochs=1)
    trainer.fit(task, datamodule=stage.rows())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, datamodule=stage.rows())
    return {"parameters": parameters(task), "progress": (trainer.current_epoch, trainer.global_step)}


def crash(stage: Stage) -> dict[str, Any]:
    """The last rank fails; then the same trainer is used again."""
    task, trainer = stage.make_task(), stage.trainer(callbacks=FailsOnRank(stage.devices - 1), max_epochs=1)
    before = parameters(task)
    error: BaseException | None = None
    try:
        trainer.fit(task, datamodule=stage.rows())
    except Exception as raised:
        error = raised
    trainer.callbacks.clear()
    trainer.fit(task, datamodule=stage.rows())
    return {"error": error, "status": trainer.state.status.value, "trained": not torch.equal(before, parameters(task))}


def kill(stage: Stage) -> dict[str, Any]:
    """The last rank is killed; then the same trainer is used again."""
    task, trainer = stage.make_task(), stage.trainer(callbacks=KilledOnRank(stage.devices - 1), max_epochs=1)
    error: BaseException | None = None
    try:
        trainer.fit(task, datamodule=stage.rows())
    except Exception as raised:
        error = raised
    trainer.callbacks.clear()
    trainer.fit(task, datamodule=stage.rows())
    return {"error": error, "status": trainer.state.status.value}


def straggle(stage: Stage) -> dict[str, Any]:
    """The last rank is held in its first step."""
    trainer = stage.trainer(callbacks=HeldOnRank(stage.devices - 1, stage.folder), max_epochs=1, limit_val_batches=0)
    trainer.fit(stage.make_task(), datamodule=stage.rows())
    return {"overtaken": (stage.folder / "overtaken").exists(), "status": trainer.state.status.value}


def uneven_fit(stage: Stage) -> dict[str, Any]:
    """One rank has fewer training batches than the other."""
    trainer = stage.trainer(max_epochs=1, limit_val_batches=0)
    error: BaseException | None = None
    try:
        trainer.fit(stage.make_task(), datamodule=UnevenRows())
    except Exception as raised:
        error = raised
    return {"error": error, "status": trainer.state.status.value}


def uneven_evaluation(stage: Stage) -> dict[str, Any]:
    """Ranks with different numbers of examples in their means."""
    (metrics,) = stage.trainer().validate(stage.make_task(), datamodule=UnevenRows(), verbose=False)
    return metrics


def load_by_workers(stage: Stage) -> dict[str, Any]:
    """Two epochs of batches from DataLoader processes, which each rank forks anew for each epoch."""
    task, trainer = stage.make_task(), stage.trainer(limit_val_batches=0)
    before = parameters(task)
    trainer.fit(task, datamodule=LoadedRows(GLOBAL_BATCH))
    return {
        "world_size": int(trainer.callback_metrics["world_size"]),
        "progress": (trainer.current_epoch, trainer.global_step),
        "trained": not torch.equal(before, parameters(task)),
    }


def limits(stage: Stage) -> dict[str, Any]:
    """Fewer batches than there are, then the same few over and over, then an end by steps."""
    progress = {}
    for name, arguments in {
        "limit_batches": {"limit_train_batches": 3, "limit_val_batches": 2},
        "overfit_batches": {"overfit_batches": 2},
        "max_steps": {"max_steps": 5, "max_epochs": -1, "check_val_every_n_epoch": None, "val_check_interval": 2},
    }.items():
        trainer = stage.trainer(**arguments)
        trainer.fit(stage.make_task(), datamodule=stage.rows())
        batches = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed
        progress[name] = (trainer.current_epoch, trainer.global_step, batches)
    return progress


def resume_without_optimizer(stage: Stage) -> dict[str, Any]:
    """Two epochs of a model without optimizer, the second one in a new trainer."""
    checkpoints = ModelCheckpoint(stage.folder / "rows")
    warnings.filterwarnings("ignore", ".*this fit will run with no optimizer")
    warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided")
    trainer = stage.trainer(callbacks=checkpoints, enable_checkpointing=True, max_epochs=1)
    trainer.fit(WITHOUT_OPTIMIZER[stage.task](), datamodule=stage.rows())
    task, resumed = WITHOUT_OPTIMIZER[stage.task](), stage.trainer()
    resumed.fit(task, datamodule=stage.rows(), ckpt_path=checkpoints.best_model_path)
    return {"parameters": parameters(task), "epochs": resumed.current_epoch}


def clip(stage: Stage) -> dict[str, Any]:
    """Gradients longer than a tenth are cut to that length, after they were averaged."""
    task, trainer = stage.make_task(), stage.trainer(gradient_clip_val=0.1, max_epochs=1)
    trainer.fit(task, datamodule=stage.rows())
    return {"parameters": parameters(task)}


def schedule(stage: Stage) -> dict[str, Any]:
    """A learning rate that changes with the steps."""
    task, trainer = by_steps(TASKS[stage.task])(), stage.trainer(max_epochs=1)
    trainer.fit(task, datamodule=stage.rows())
    rate = trainer.callback_metrics["lr"].item()
    return {"parameters": parameters(task), "lr": rate}


def log_to_files(stage: Stage) -> dict[str, Any]:
    """A logger, with a sanity check before training."""
    logger = CSVLogger(stage.folder, name="logs")
    trainer = stage.trainer(logger=logger, max_epochs=1)
    trainer.fit(stage.make_task(), datamodule=stage.rows())
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "steps": [int(row["step"]) for row in rows if row["train/loss"]],
        "losses": [float(row["train/loss"]) for row in rows if row["train/loss"]],
        "folders": sorted(x.name for x in Path(logger.root_dir).iterdir()),
        "hyperparameters": Path(logger.log_dir, "hparams.yaml").is_file(),
    }


def stop_early(stage: Stage) -> dict[str, Any]:
    """Nothing is ever good enough."""
    trainer = stage.trainer(callbacks=EarlyStopping("val/loss", min_delta=1e9, patience=2), max_epochs=9)
    trainer.fit(stage.make_task(), datamodule=stage.rows())
    return {"progress": (trainer.current_epoch, trainer.global_step)}


def save_weights_only(stage: Stage) -> dict[str, Any]:
    """A checkpoint that is a model and nothing else, read by itself and by a trainer."""
    checkpoints = ModelCheckpoint(stage.folder / "weights", save_weights_only=True)
    task, trainer = stage.make_task(), stage.trainer(callbacks=checkpoints, enable_checkpointing=True, max_epochs=1)
    trainer.fit(task, datamodule=stage.rows())
    path = checkpoints.best_model_path
    restored = type(task).load_from_checkpoint(as_file(path), weights_only=True)
    (metrics,) = stage.trainer().validate(
        stage.make_task(), datamodule=stage.rows(), ckpt_path=path, weights_only=True, verbose=False
    )
    return {
        "keys": set(torch.load(as_file(path), weights_only=True)),
        "parameters": parameters(task),
        "restored": torch.equal(parameters(restored), parameters(task)),
        "val/loss": (metrics["val/loss"], float(trainer.callback_metrics["val/loss"])),
    }


def average_weights(stage: Stage) -> dict[str, Any]:
    """Three epochs with a moving average that is validated and saved, the last one once more in a new trainer."""

    def trainer_for(name: str) -> tuple[pl.Trainer, ModelCheckpoint]:
        checkpoints = ModelCheckpoint(stage.folder / name, filename="{epoch}", save_top_k=-1)
        average = EMAWeightAveraging(decay=0.5)
        return stage.trainer(callbacks=[average, checkpoints], enable_checkpointing=True, max_epochs=3), checkpoints

    task, (trainer, checkpoints) = stage.make_task(), trainer_for("averaged")
    trainer.fit(task, datamodule=stage.rows())
    again, (resumed, _) = stage.make_task(), trainer_for("resumed")
    resumed.fit(again, datamodule=stage.rows(), ckpt_path=stage.folder / "averaged" / "epoch=1.ckpt")
    (metrics,) = stage.trainer().validate(task, datamodule=stage.rows(), verbose=False)
    return {
        "world_size": int(trainer.callback_metrics["world_size"]),
        "state_dict": task.state_dict(),
        "saved": torch.load(as_file(checkpoints.best_model_path), weights_only=True)["state_dict"],
        "resumed": again.state_dict(),
        "val/loss": (float(trainer.callback_metrics["val/loss"]), metrics["val/loss"]),
    }


def average_stochastically(stage: Stage) -> dict[str, Any]:
    """The mean of the weights at the starts of two epochs."""
    task = stage.make_task()
    average = StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1, device=None)
    trainer = stage.trainer(callbacks=average)
    trainer.fit(task, datamodule=stage.rows())
    return {"world_size": int(trainer.callback_metrics["world_size"]), "state_dict": task.state_dict()}


SCENARIOS: dict[str, Callable[[Stage], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        fit,
        evaluate,
        test_the_best,
        accumulate,
        fast_dev_run,
        resume,
        fit_again,
        limits,
        clip,
        schedule,
        log_to_files,
        stop_early,
        save_weights_only,
        uneven_evaluation,
        load_by_workers,
        average_weights,
        average_stochastically,
        resume_without_optimizer,
    )
}


if __name__ == "__main__":
    for is_next, words in itertools.groupby(sys.argv[1:], lambda word: word != "/"):
        if is_next:
            strategy, devices, task, folder, *names = words
            stage = Stage(strategy, int(devices), Path(folder), task)
            observed = {name: SCENARIOS[name](stage) for name in names}
            if pl.utilities.rank_zero_only.rank == 0:
                torch.save(observed, stage.folder / "observed.pt")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.destroy_process_group()
