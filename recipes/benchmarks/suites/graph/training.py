"""What a job of suite ``graph`` trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.suites.graph.sampling import power_law_graph
from benchmarks.suites.het.training import CrossedBytes, running

from lightning_recsys.data.graph import NodeData, NodeDataModule
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowSGD
from lightning_recsys.strategies import HETStrategy
from lightning_recsys.tasks import NodeClassificationTask

TRAINED = 0.66  # share of the nodes that are seeds, as in Reddit


def train(
    *,
    folder: Path,
    asker: int,
    num_nodes: int,
    num_edges: int,
    exponent: float,
    num_neighbors: Sequence[int],
    batch_size: int,
    dim: int,
    strategy: Mapping[str, Any],
    server: Sequence[str],
    interface: str,
) -> None:
    """Train until told to stop: a row for each node, by SGD as in the paper.

    Args:
        folder: As in :class:`~benchmarks.harness.jobs.training.StepTimes`.
        asker: Id of the process that wants the training.
        num_nodes: Of the graph.
        num_edges: Of the graph.
        exponent: Of its degrees.
        num_neighbors: Of each hop.
        batch_size: Seeds of a step.
        dim: Width of rows and layers.
        strategy: Arguments of the strategy.
        server: Command of a server to start beside the training, for another host.
        interface: Where bytes are counted after each step.
    """
    graph = power_law_graph(num_nodes, num_edges, exponent=exponent)
    data = NodeDataModule(
        NodeData(graph, np.arange(num_nodes) % 2),
        split={"test": 1 - TRAINED},
        num_neighbors=num_neighbors,
        batch_size=batch_size,
    )
    data.setup()
    options: dict[str, Any] = {"row_optimizer": RowSGD(lr=0.01), "device": "meta"}
    network = GraphSAGE(0, data.fields, num_classes=2, embedding_dim=dim, hidden=dim, **options)
    task = NodeClassificationTask(network, optimizer=partial(torch.optim.SGD, lr=0.01, fused=True))
    with running(server) as endpoint:
        assert endpoint is not None
        times = CrossedBytes(folder, asker=asker, interface=interface)
        quiet_trainer(times, strategy=HETStrategy(**strategy, servers=[endpoint])).fit(task, data.train_dataloader())
