"""A strategy with servers and nothing else, its workers running free; for tests of what all strategies share."""

import os
import signal
import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_recsys.launchers import ServerSpec
from lightning_recsys.strategies import RecsysStrategy


class ServedStrategy(RecsysStrategy):
    """Two servers of one kind, one of another."""

    asynchronous = True
    wraps_model = False

    def server_specs(self):
        return [ServerSpec("embedding", 0), ServerSpec("embedding", 1), ServerSpec("sync", 0)]


class Batches:
    """Four of one example."""

    def __iter__(self):
        return iter([torch.ones(1, 2)] * 4)

    def __len__(self):
        return 4


class Model(pl.LightningModule):
    """Does something in its third step, on rank 1."""

    def __init__(self, third_step=None, *args):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.third_step, self.args = third_step, args

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 1 and self.third_step is not None:
            self.third_step(self, *self.args)
        self.log("world_size", torch.distributed.get_world_size())
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return Batches()


class Ratings(pl.LightningModule):
    """Somebody's own model, with plain embedding modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.kinds, self.out = nn.Embedding(64, 4), nn.Embedding(5, 4), nn.Linear(8, 1)

    def training_step(self, ids, batch_idx):
        features = torch.cat([self.items(ids), self.kinds(ids % 5)], dim=1)
        return nn.functional.mse_loss(self.out(features).squeeze(1), ids / 64)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)  # 0.5 diverges in some orders of the batches
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    def train_dataloader(self):
        return DataLoader(torch.arange(64), batch_size=8)


class Ids(Dataset):
    """64 ids, each with the parent of the process that reads it."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([index, os.getppid()])


class LoadedByWorkers(Ratings):
    """Its batches come from processes that each rank forks while its threads run and its connections are open."""

    def training_step(self, batch, batch_idx):
        assert batch[:, 1].eq(os.getpid()).all()
        self.log("world_size", torch.distributed.get_world_size())
        return super().training_step(batch[:, 0], batch_idx)

    def train_dataloader(self):
        return DataLoader(Ids(), batch_size=8, num_workers=2)


def say(*words):
    """A line in one piece: several processes talk."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def make_trainer(**arguments):
    defaults = {"devices": 2, "strategy": ServedStrategy(), "max_epochs": 1, "enable_checkpointing": False}
    arguments = defaults | arguments
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fail(model):
    raise ZeroDivisionError("in step 3")


def die(model):
    os.kill(os.getpid(), signal.SIGKILL)
