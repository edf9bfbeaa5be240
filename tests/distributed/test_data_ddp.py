"""Rows on several workers: none lost, none twice, as many batches each, and the same order after a resume."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.data import Batch, SyntheticDataModule, TabularDataModule
from lightning_recsys.data.preparation import Preparation

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

NUM_TRAIN, NUM_VALIDATION, BATCH = 203, 51, 16


class Recorder(pl.LightningModule):
    """Writes down which rows each rank was given: a row is told by its first dense feature."""

    def __init__(self, folder: Path, save_after: int | None) -> None:
        super().__init__()
        self.folder, self.save_after = folder, save_after
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[list[float]]] = {"train": [], "validation": []}

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch.dense[:, 0].tolist())
        return self.weight**2

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen["validation"].append(batch.dense[:, 0].tolist())

    def setup(self, stage: str) -> None:
        warnings.filterwarnings("error", message="Total length of")  # of Lightning, about empty loaders

    def on_train_batch_end(self, *_) -> None:
        if self.trainer.global_step == self.save_after:
            self.trainer.save_checkpoint(self.folder / "stopped.ckpt")

    def on_train_end(self) -> None:
        path = self.folder / f"rank{torch.distributed.get_rank()}of{torch.distributed.get_world_size()}.json"
        path.write_text(json.dumps(self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_data(kind: str, folder: Path) -> pl.LightningDataModule:
    if kind == "synthetic":
        return SyntheticDataModule(
            batch_size=BATCH, train_rows=NUM_TRAIN, val_rows=NUM_VALIDATION, cardinalities=(9,), num_dense=1
        )
    for name, num_rows, first in (("train", NUM_TRAIN, 0), ("validation", NUM_VALIDATION, 1000)):
        lines = ["click,row,user,tags", *(f"{i % 2},{first + i},u{i % 9},{'a b'[: i % 4]}" for i in range(num_rows))]
        (folder / f"{name}.csv").write_text("\n".join(lines))
    schema = {
        "files": {"train": "train.csv", "validation": "validation.csv"},
        "label": "click",
        "dense": {"row": {"standardize": False}},
        "categorical": ["user"],
        "multi_valued": {"tags": {"separator": " "}},
        "split": {"test": 0},
    }
    return TabularDataModule(schema=schema, root=folder, batch_size=BATCH)


def fit(
    kind: str, folder: Path, *, data=None, save_after=None, ckpt_path=None, set_up=True, **options
) -> list[dict[str, list[list[float]]]]:
    """What each of two ranks was given."""
    folder.mkdir(exist_ok=True)
    data = data or make_data(kind, folder)
    if set_up:
        data.setup("fit")  # as a recipe does
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp_forkserver",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Recorder(folder, save_after), datamodule=data, ckpt_path=ckpt_path)
    return [json.loads((folder / f"rank{rank}of2.json").read_text()) for rank in range(2)]


class Noting(TabularDataModule):
    """Leaves a file for each time that rows are prepared, named by the rank."""

    def _prepare(self, origin):
        run, rank = Preparation.run, "main" if self.trainer is None else self.trainer.global_rank

        def noted(job):
            (self._root / f"{origin}-by-{rank}-{time.time_ns()}.note").touch()
            return run(job)

        with mock.patch.object(Preparation, "run", noted):
            super()._prepare(origin)


@pytest.mark.parametrize("set_up", [True, False])
def test_rows_when_two_workers_train_then_they_are_prepared_once_by_the_first_who_needs_them(tmp_path, set_up):
    """By the main process, where it asks what a model is built from; else by the first rank of the machine."""
    plain = make_data("tabular", tmp_path)
    data = Noting(schema=plain.schema, root=tmp_path, batch_size=BATCH, cache=tmp_path / "cache")
    ranks = fit("tabular", tmp_path, data=data, set_up=set_up, max_epochs=1)
    assert sorted(row for rank in ranks for batch in rank["train"] for row in batch) == list(range(NUM_TRAIN))
    who = "main" if set_up else "0"
    notes = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*.note"))
    assert notes == [f"train-by-{who}", f"validation-by-{who}"]


@pytest.mark.parametrize("kind", ["synthetic", "tabular"])
def test_rows_when_two_workers_train_and_validate_then_each_comes_once_and_a_resume_goes_on(kind, tmp_path):
    whole = fit(kind, tmp_path / "whole", max_epochs=2)
    data = make_data(kind, tmp_path)
    num_batches = len(whole[0]["train"]) // 2
    assert [len(rank["train"]) for rank in whole] == [2 * num_batches] * 2
    for split, epochs in (("train", 2), ("validation", 2)):
        rows = data.rows(split)
        expected = sorted(rows.take(torch.arange(len(rows))).dense[:, 0].tolist())
        for epoch in range(epochs):
            batches = [rank[split] for rank in whole]
            count = len(batches[0]) // epochs
            given = [batch for rank in batches for batch in rank[epoch * count : (epoch + 1) * count]]
            assert sorted(row for batch in given for row in batch) == expected

    stop = num_batches - 2
    before = fit(kind, tmp_path / "stopped", max_steps=stop, save_after=stop)
    resumed = fit(
        kind, tmp_path / "resumed", max_epochs=2, max_steps=-1, ckpt_path=tmp_path / "stopped" / "stopped.ckpt"
    )
    for rank in range(2):
        assert before[rank]["train"] + resumed[rank]["train"] == whole[rank]["train"]


def test_trainer_when_there_are_no_validation_rows_then_skips_them_without_a_warning(tmp_path):
    data = SyntheticDataModule(batch_size=BATCH, train_rows=NUM_TRAIN, val_rows=0, cardinalities=(9,), num_dense=1)
    ranks = fit("synthetic", tmp_path, data=data, max_epochs=1)
    assert sum(len(batch) for rank in ranks for batch in rank["train"]) == NUM_TRAIN
    assert [rank["validation"] for rank in ranks] == [[], []]
