"""What workers train in test_graphsage_strategies.py; apart, so that they can import it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_recsys.data.graph import (
    Bags,
    CSRGraph,
    InteractionDataModule,
    Interactions,
    NodeData,
    NodeDataModule,
)
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowSGD
from lightning_recsys.tasks import LinkPredictionTask, NodeClassificationTask

State = dict[str, torch.Tensor]


class CountedTask(NodeClassificationTask):
    """Logs how many processes train."""

    def on_train_epoch_end(self) -> None:
        self.log("world_size", float(self.trainer.world_size), sync_dist=True)


class CountedLinkTask(LinkPredictionTask):
    """Logs how many processes train."""

    def on_train_epoch_end(self) -> None:
        self.log("world_size", float(self.trainer.world_size), sync_dist=True)


def make_data(batch_size: int) -> NodeDataModule:
    """80 nodes in two classes; all neighbours are drawn, so that two ranks see what one with twice the batch does."""
    random = np.random.default_rng(0)
    labels = np.arange(80) % 2
    edges = random.integers(0, 40, (2, 300)) * 2 + random.integers(0, 2, 300)
    bags = {"words": Bags(np.arange(81) * 2, random.integers(0, 9, 160), 9)}
    nodes = NodeData(CSRGraph.from_edge_index(edges, num_nodes=80, undirected=True), labels, bags)
    split = {"validation": 0.1, "test": 0.1}
    return NodeDataModule(nodes, split=split, num_neighbors=[-1, -1], batch_size=batch_size)


def make_task() -> CountedTask:
    """What learns the classes, as it is before training; by steps so small that the workers' order hardly matters.

    With ten times these rates the rows of two free workers went 1.6 to 3.1 times as far as those of one.
    """
    torch.manual_seed(0)
    fields = {"node": 80, "words": 9}
    rows = RowSGD(lr=0.05)
    model = GraphSAGE(0, fields, num_classes=2, embedding_dim=4, hidden=4, pooling="mean", row_optimizer=rows)
    return CountedTask(model, optimizer=partial(torch.optim.SGD, lr=0.05))


def make_link_data(batch_size: int) -> InteractionDataModule:
    """30 users and 20 items; neighbours are drawn, as many in each hop, so that two ranks draw what one would."""
    pairs = np.random.default_rng(0).choice(600, 160, replace=False)
    taken = Interactions(pairs // 20, pairs % 20, 30, 20)
    options = {"num_negatives": 2, "num_candidates": 5, "num_neighbors": [3, 3], "drop_last": True}
    return InteractionDataModule(taken, batch_size=batch_size, **options)


def make_link_task() -> CountedLinkTask:
    """What learns who takes what, as it is before training."""
    torch.manual_seed(0)
    model = GraphSAGE(0, {"node": 50}, num_classes=None, embedding_dim=4, hidden=4, row_optimizer=RowSGD(lr=0.5))
    model.node_embeddings.embedding_bags.rows.data.normal_()
    return CountedLinkTask(model, top_k=3, optimizer=partial(torch.optim.SGD, lr=0.5))


def weights(task: pl.LightningModule) -> State:
    """All that is trained."""
    return {name: x.detach().clone() for name, x in task.state_dict().items() if "metrics" not in name}


def loss_on_all(learned: State) -> float:
    """Of the classes of all training nodes, by these weights."""
    task = make_task()
    task.load_state_dict(learned, strict=False)
    (batch,) = make_data(80).sample_batches(1)
    with torch.no_grad():
        return float(task.loss(task(batch), batch))


def train(strategy: Any, devices: int) -> tuple[State, dict[str, float]]:
    """Two epochs of eight updates; what was learned, and logged."""
    return _fit(make_task(), make_data(8 // devices), strategy, devices)


def train_link(strategy: Any, devices: int) -> tuple[State, dict[str, float]]:
    """Two epochs of eight updates of the task on links."""
    return _fit(make_link_task(), make_link_data(16 // devices), strategy, devices)


def _fit(
    task: pl.LightningModule, data: pl.LightningDataModule, strategy: Any, devices: int
) -> tuple[State, dict[str, float]]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(task, datamodule=data)
    return weights(task), {name: float(x) for name, x in trainer.callback_metrics.items()}
