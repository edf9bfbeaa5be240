"""What workers train in test_graphsage.py; apart, so that they can import it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_recsys.data.graph import Bags, CSRGraph, NodeData, NodeDataModule
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowSGD
from lightning_recsys.tasks import NodeClassificationTask


class CountedTask(NodeClassificationTask):
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


def train(strategy: Any, devices: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Two epochs of eight updates; what was learned, and logged."""
    data = make_data(8 // devices)
    torch.manual_seed(0)
    fields = {"node": 80, "words": 9}
    model = GraphSAGE(0, fields, num_classes=2, embedding_dim=4, hidden=4, pooling="mean", row_optimizer=RowSGD(lr=0.5))
    task = CountedTask(model, optimizer=partial(torch.optim.SGD, lr=0.5))
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
    learned = {name: x.detach().clone() for name, x in task.state_dict().items() if "metrics" not in name}
    return learned, {name: float(x) for name, x in trainer.callback_metrics.items()}
