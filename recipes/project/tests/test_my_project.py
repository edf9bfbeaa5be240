"""Run ``python -m pytest`` in the project's folder."""

import pytorch_lightning as pl
from my_project.model import MyModel
from my_project.task import MyTask

from lightning_recsys.data import SyntheticDataModule


def test_model_learns():
    pl.seed_everything(0)
    data = SyntheticDataModule(
        train_rows=8000, val_rows=2000, test_rows=2000, batch_size=200, cardinalities=(50, 20, 10), signal=3.0
    )
    task = MyTask(MyModel(data.num_dense, data.fields, embedding_dim=8), positive_weight=1.0)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(task, datamodule=data)
    assert trainer.callback_metrics["val/auc"] > 0.6  # 0.5 is a coin
