"""What all data modules do for a trainer: a split that is not there is skipped, without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from prepared_folder import write_folder

from lightning_recsys.data import PreparedDataModule, SyntheticDataModule, TabularDataModule


class Recorder(pl.LightningModule):
    """Counts the steps of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps = {"training": 0, "validation": 0, "test": 0, "predict": 0}

    def _count(self, kind: str) -> torch.Tensor:
        self.steps[kind] += 1
        return self.weight**2

    def training_step(self, batch, batch_idx):
        return self._count("training")

    def validation_step(self, batch, batch_idx):
        self._count("validation")

    def test_step(self, batch, batch_idx):
        self._count("test")

    def predict_step(self, batch, batch_idx):
        self._count("predict")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_data_module_when_its_batches_have_no_rows_then_refused(batch_size):
    with pytest.raises(ValueError, match=f"data.batch_size must be at least 1, got {batch_size}"):
        SyntheticDataModule(batch_size=batch_size, train_rows=20)


def synthetic(folder: Path, *, rows: int) -> SyntheticDataModule:
    return SyntheticDataModule(
        batch_size=10, train_rows=20, val_rows=rows, test_rows=rows, cardinalities=(9,), num_dense=1
    )


def tabular(folder: Path, *, rows: int) -> TabularDataModule:
    (folder / "rows.csv").write_text("click,user\n" + "".join(f"{i % 2},u{i % 3}\n" for i in range(20 + 2 * rows)))
    share = rows / (20 + 2 * rows)
    split = {"validation": share, "test": share}
    schema = {"files": "rows.csv", "label": "click", "categorical": "user", "split": split}
    return TabularDataModule(schema=schema, root=folder, batch_size=10)


def prepared(folder: Path, *, rows: int) -> PreparedDataModule:
    sizes = (rows,) if rows else ()
    return PreparedDataModule(root=write_folder(folder, train=[20], validation=sizes, test=sizes), batch_size=10)


def trainer(folder: Path) -> pl.Trainer:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=1, default_root_dir=folder, **off)


@pytest.mark.parametrize("make", [synthetic, tabular, prepared])
def test_trainer_when_splits_are_not_there_then_skips_them_and_is_itself_again_after(make, tmp_path):
    """Warnings are errors here, those of Lightning about empty loaders among them."""
    model, own = Recorder(), trainer(tmp_path)
    data = make(tmp_path, rows=0)
    own.fit(model, datamodule=data)
    assert own.test(model, datamodule=data, verbose=False) == []
    assert own.validate(model, datamodule=data, verbose=False) == []
    assert not own.predict(model, datamodule=data)
    assert model.steps == {"training": 2, "validation": 0, "test": 0, "predict": 0}
    assert [own.limit_val_batches, own.limit_test_batches, own.limit_predict_batches] == [1.0, 1.0, 1.0]
    assert data.val_dataloader() == data.test_dataloader() == []


@pytest.mark.parametrize("make", [synthetic, tabular, prepared])
def test_trainer_when_splits_are_there_then_runs_through_them(make, tmp_path):
    model, own = Recorder(), trainer(tmp_path)
    own.fit(model, datamodule=make(tmp_path, rows=20))
    own.test(model, datamodule=make(tmp_path, rows=20), verbose=False)
    assert model.steps == {"training": 2, "validation": 3, "test": 2, "predict": 0}  # one is the sanity check
