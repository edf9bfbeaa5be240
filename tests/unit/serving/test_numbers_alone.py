"""A table of numbers alone: guessed, trained, published and read."""

import json

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_recsys.data import TabularDataModule, guess_schema
from lightning_recsys.metrics import NormalizedEntropy
from lightning_recsys.models import DeepFM
from lightning_recsys.serving import ModelReader, dense, export, export_model
from lightning_recsys.tasks import CTRTask


def test_table_of_numbers_alone_when_published_then_scores_as_the_trained_model_does(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)  # in this process, which has imported everything
    pl.seed_everything(0)
    generator = np.random.default_rng(0)
    radius, texture, area = generator.lognormal(size=(3, 800))
    malignant = np.log(radius) - np.log(texture) + 0.3 * generator.normal(size=800) > 0
    rows = [{"mean_radius": a, "mean_texture": b, "area": c} for a, b, c in zip(radius, texture, area, strict=True)]
    lines = [
        f"{','.join(map(repr, map(float, row.values())))},{int(x)}" for row, x in zip(rows, malignant, strict=True)
    ]
    path = tmp_path / "cells.csv"
    path.write_text("\n".join(["mean_radius,mean_texture,area,target", *lines]))
    schema = guess_schema(path)
    assert set(schema.dense) == {"mean_radius", "mean_texture", "area"}

    data = TabularDataModule(schema=schema, cache=tmp_path / "cache", batch_size=32)
    data.prepare_data()
    data.setup("fit")
    assert data.fields == {}
    task = CTRTask(DeepFM(data.num_dense, data.fields))
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    entropy, task = NormalizedEntropy(), task.eval()
    with torch.no_grad():
        for batch in data.val_dataloader():
            entropy.update(torch.sigmoid(task.model(batch.dense, batch.sparse)), batch.labels)
    assert float(entropy.compute()) < 0.9

    export_model(task.model, str(tmp_path / "model"), num_dense=data.num_dense, datamodule=data)
    model = ModelReader(str(tmp_path / "model")).model
    inputs = model.encoder.encode(json.loads(json.dumps([{k: float(v) for k, v in r.items()} for r in rows])))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(*inputs), task.model(*inputs))
