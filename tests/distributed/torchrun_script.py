"""What each process of a torchrun job does: ``torchrun ... torchrun_script.py ACTION NUM_NODES``."""

import os
import sys
import time

import torch
from served_strategy import Model, ServedStrategy, make_trainer, say

from lightning_recsys.optim import SGD


class Counting(Model):
    """Each step of each rank adds one to a vector behind each of the servers."""

    def on_train_start(self):
        stores = [opened for kind in ("embedding", "sync") for opened in self.trainer.strategy.stores(kind)]
        self.counters = [
            x.create_dense_store("counter", torch.zeros(1), optimizer=SGD(learning_rate=1.0)) for x in stores
        ]
        say("endpoints", *self.trainer.strategy.endpoints["embedding"], *self.trainer.strategy.endpoints["sync"])
        say("pid", os.getpid())
        say("types", *(type(x).__name__ for x in stores))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for counter in self.counters:
            counter.push_gradient(-torch.ones(1), learning_rate=1.0)

    def on_train_end(self):
        self.trainer.strategy.barrier()
        say("counted", *(int(x.pull()) for x in self.counters))


class Failing(Counting):
    """Fails in the third step of rank 1."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 2:
            raise ZeroDivisionError("in step 3")


class Endless(Counting):
    """Trains until somebody ends it."""

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


def train_over_the_wire(num_nodes):
    fit(Counting(), num_nodes)
    torch.distributed.destroy_process_group()


def crash(num_nodes):
    fit(Failing(), num_nodes)


def go_on(num_nodes):
    fit(Endless(), num_nodes, max_epochs=-1)


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]))
