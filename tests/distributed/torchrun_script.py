"""What each process of a torchrun job does: ``torchrun ... torchrun_script.py ACTION NUM_NODES``."""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory

import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from served_strategy import Model, Ratings, ServedStrategy, make_trainer, say

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.models import DLRM
from lightning_recsys.optim import RowSGD
from lightning_recsys.strategies import HierarchicalStrategy, ShadowSyncStrategy
from lightning_recsys.strategies.common.workers import meeting
from lightning_recsys.tasks import CTRTask


class Counting(Model):
    """Each step of each rank adds one to a vector behind each of the servers."""

    def on_train_start(self):
        stores = [opened for kind in ("embedding", "sync") for opened in self.trainer.strategy.stores(kind)]
        self.counters = [x.create_dense_store("counter", torch.zeros(1), optimizer=RowSGD(lr=1.0)) for x in stores]
        say("endpoints", *self.trainer.strategy.endpoints["embedding"], *self.trainer.strategy.endpoints["sync"])
        say("pid", os.getpid())
        say("types", *(type(x).__name__ for x in stores))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for counter in self.counters:
            counter.push_gradient(-torch.ones(1), lr=1.0)

    def on_train_end(self):
        for counter in self.counters:
            counter.flush()
        self.trainer.strategy.barrier()
        say("counted", *(int(x.pull()) for x in self.counters))


class Late(Counting):
    """Rank 1 is longer on its way to the end than machines have for connecting."""

    def on_train_end(self):
        time.sleep(6 * self.trainer.global_rank)
        super().on_train_end()


class Failing(Model):
    """Fails in the third step of rank 1; has a table on servers, which all ranks save a part of."""

    def __init__(self):
        super().__init__()
        self.rows = EmbeddingBagCollection([EmbeddingBagConfig("items", 64, 4, ("item",))])

    def on_train_start(self):
        say("endpoints", *self.trainer.strategy.endpoints["embedding"], *self.trainer.strategy.endpoints["sync"])
        say("pid", os.getpid())

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 2:
            raise ZeroDivisionError("in step 3")

    def training_step(self, batch, batch_idx):
        ids = SparseFeatures(("item",), torch.tensor([batch_idx]))
        return super().training_step(batch, batch_idx) + self.rows(ids).sum()


class Endless(Counting):
    """Trains until somebody ends it."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.counters[0].pull()  # rank 0's server: others may be waiting for it when their SIGTERM comes

    def on_train_batch_start(self, batch, batch_idx):
        say(f"rank-{self.trainer.global_rank}-is", os.getpid())
        say("in", self.trainer.global_rank)
        time.sleep(0.2)


def fit(model, num_nodes, transport="tcp", **arguments):
    arguments |= {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": num_nodes}
    make_trainer(strategy=ServedStrategy(transport=transport), **arguments).fit(model)


def train(num_nodes):
    """Two runs in one job: over the wire, then as it comes."""
    for transport in ("tcp", "auto"):
        fit(Counting(), num_nodes, transport)
    torch.distributed.destroy_process_group()


class Synchronised(Ratings):
    """Trained by ShadowSync until both trainers have had a round, at least."""

    def on_train_start(self):
        strategy = self.trainer.strategy
        stores = [opened for kind in ("embedding", "sync") for opened in strategy.stores(kind)]
        say("shadowsync-types", *(type(x).__name__ for x in stores))
        say("shadowsync-keys", strategy.run_servers._started.keys is not None)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        deadline = time.monotonic() + 30
        while "sync/gap" not in (told := self.trainer.strategy.telemetry()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.trainer.is_last_batch:
            say("shadowsync-told", "sync/gap" in told, told["comm/sent_bytes"] > 0, told["load/embedding-1"] > 0)

    def on_fit_end(self):
        say("shadowsync-final", *(f"{x.double().sum().item():.12f}" for x in self.state_dict().values()))


def train_over_the_wire(num_nodes):
    """Three runs in one job: servers and nothing else, then ShadowSync, then Hierarchical Training."""
    meeting.MEETING_TIME = timedelta(seconds=5)  # for connections; others may be waited for longer
    fit(Late(), num_nodes)
    options = {"num_embedding_servers": 2, "num_sync_servers": 2, "min_rows": 60, "transport": "tcp"}
    make_trainer(strategy=ShadowSyncStrategy(num_trainers=2, **options), devices=1, num_nodes=num_nodes).fit(
        Synchronised()
    )
    train_groups(num_nodes)
    torch.distributed.destroy_process_group()


class Grouped(CTRTask):
    """Says by whom it is trained, and what it has in the end."""

    def on_train_start(self):
        strategy = self.trainer.strategy
        say("groups-world", self.trainer.world_size, strategy.num_nodes)
        say("groups-endpoints", *strategy.endpoints["group"])

    def on_fit_end(self):
        say("groups-final", *(f"{x.double().sum().item():.12f}" for x in self.model.parameters()))


def train_groups(num_nodes):
    """Hierarchical Training with a group on each node."""
    torch.manual_seed(0)
    model = DLRM(4, {"c0": 50, "c1": 30}, embedding_dim=4, bottom_hidden=(8,), top_hidden=(8,))
    sizes = {"train_rows": 512, "val_rows": 64, "test_rows": 64, "batch_size": 64}
    data = SyntheticDataModule(num_dense=4, cardinalities=(50, 30), **sizes)
    strategy = HierarchicalStrategy(num_groups=2, transport="tcp")
    task = Grouped(model, optimizer=partial(torch.optim.SGD, lr=0.05))
    say("groups-untrained", *(f"{x.double().sum().item():.12f}" for x in model.parameters()))
    make_trainer(strategy=strategy, devices=1, num_nodes=num_nodes).fit(task, data)


def meet(num_nodes):
    meeting.MEETING_TIME = timedelta(seconds=2)  # in which machines connect, once all ranks are there
    fit(Model(), num_nodes)


def crash(num_nodes):
    with TemporaryDirectory() as folder:
        callbacks = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_last=True, save_on_exception=True)]
        saving = {"callbacks": callbacks, "enable_checkpointing": True}
        strategy = ShadowSyncStrategy(num_trainers=2)
        try:
            make_trainer(strategy=strategy, num_nodes=num_nodes, **saving).fit(Failing())
        finally:
            say("saved", os.listdir(folder))


def go_on(num_nodes):
    fit(Endless(), num_nodes, max_epochs=-1)


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]))
