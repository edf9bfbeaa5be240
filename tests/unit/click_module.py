"""A Lightning module as a user might have it, and batches for it: no model or task of this package."""

from collections.abc import Sequence

import pytorch_lightning as pl
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_recsys.data.batch import Batch
from lightning_recsys.embeddings import SparseFeatures


class ClickModule(pl.LightningModule):
    """Logistic regression on the dense features."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def step(self, batch):
        logits = self.layer(batch.dense).squeeze(1)
        return {"loss": binary_cross_entropy_with_logits(logits, batch.labels), "logits": logits.detach()}

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.step(batch)

    def test_step(self, batch, batch_idx):
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loader:
    """An iterable of batches; a bare list would be several loaders to Lightning."""

    def __init__(self, batches: Sequence):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def make_batch(size: int) -> Batch:
    dense = torch.randn(size, 3)
    labels = (torch.rand(size) < (dense[:, 0] - 1).sigmoid()).float()
    labels[:2] = torch.tensor([0.0, 1.0])[:size]
    return Batch(dense, SparseFeatures(("a",), torch.zeros(size, dtype=torch.int64)), labels)


def make_loader(*sizes: int) -> Loader:
    return Loader([make_batch(size) for size in sizes])


def make_trainer(folder, **options) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**defaults, **options})
