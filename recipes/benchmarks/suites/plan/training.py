"""What the jobs of suite ``plan`` train, and what is measured beforehand: the same task on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from benchmarks.harness.jobs.training import StepTimes
from benchmarks.harness.ours import MODELS, TaskAlone
from benchmarks.harness.trainer import quiet_trainer
from benchmarks.harness.workload import Workload
from benchmarks.suites.graph.sampling import power_law_graph
from benchmarks.suites.graph.training import TRAINED
from benchmarks.suites.het.training import CrossedBytes, running

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.data.graph import NodeData, NodeDataModule
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.planning.methods import METHODS
from lightning_recsys.tasks import NodeClassificationTask

GRAPH = "graphsage"
NUM_NEIGHBORS = (10, 5)
EDGES_OF_NODE = 20


def make(model: str, *, batch_size: int, dim: int, rows: int) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """A model with its update rules, and what it trains on: rows of Criteo's shape, or for GraphSAGE a graph's nodes.

    Args:
        model: One of ``benchmarks.harness.ours.MODELS``, or :data:`GRAPH`.
        batch_size: Examples of a step.
        dim: Width of the rows.
        rows: Examples of an epoch, or nodes of the graph.
    """
    rule, optimizer = RowWiseAdagrad(lr=0.01), partial(torch.optim.Adagrad, lr=0.01, fused=True)
    if model == GRAPH:
        nodes = _nodes(batch_size, rows)
        sage = GraphSAGE(0, nodes.fields, num_classes=2, embedding_dim=dim, hidden=dim, row_optimizer=rule)
        return NodeClassificationTask(sage, optimizer=optimizer), nodes
    work = Workload(dim=dim)
    network = MODELS[model](work.num_dense, work.fields, embedding_dim=dim, row_optimizer=rule)
    return TaskAlone(network, optimizer=optimizer), _examples(work, batch_size, rows)


def _nodes(batch_size: int, num_nodes: int) -> NodeDataModule:
    graph = power_law_graph(num_nodes, EDGES_OF_NODE * num_nodes)
    labels = np.arange(num_nodes) % 2
    split = {"test": 1 - TRAINED}
    made = NodeDataModule(NodeData(graph, labels), split=split, num_neighbors=NUM_NEIGHBORS, batch_size=batch_size)
    made.setup("fit")
    return made


def _examples(work: Workload, batch_size: int, rows: int) -> SyntheticDataModule:
    made = SyntheticDataModule(
        batch_size=batch_size,
        train_rows=rows,
        val_rows=0,
        test_rows=0,
        cardinalities=work.cardinalities,
        num_dense=work.num_dense,
        zipf_exponent=work.zipf_exponent,
    )
    made.prepare_data()
    made.setup("fit")
    return made


def train(
    *,
    folder: Path,
    asker: int,
    model: str,
    batch_size: int,
    dim: int,
    rows: int,
    method: str,
    num_nodes: int = 1,
    server: Sequence[str] | None = None,
    key_file: str | None = None,
    interface: str | None = None,
) -> None:
    """Train until told to stop.

    Args:
        folder: As in :class:`~benchmarks.harness.jobs.training.StepTimes`.
        asker: Id of the process that wants the training.
        model: One of ``benchmarks.harness.ours.MODELS``, or :data:`GRAPH`.
        batch_size: Examples of a worker's step, or of all workers' where they share it.
        dim: Width of the rows.
        rows: Examples of an epoch, or nodes of the graph; there is no last one.
        method: One of ``lightning_recsys.planning.methods.METHODS``.
        num_nodes: Lightning's.
        server: Command of a server to start beside the training, for another host.
        key_file: Of that server.
        interface: Where bytes are counted after each step of a worker that has a server.
    """
    times: StepTimes = StepTimes(folder, asker=asker)
    if interface is not None:
        times = CrossedBytes(folder, asker=asker, interface=interface)
    with running(server) as endpoint:
        served = {} if endpoint is None else {"servers": [endpoint], "key_file": key_file, "transport": "tcp"}
        chosen = METHODS[method]
        if chosen.grouped:  # a group on each host
            strategy = chosen.make(1, num_groups=num_nodes, num_embedding_servers=num_nodes)
        else:
            strategy = chosen.make(num_nodes, **served)
        trainer = quiet_trainer(times, strategy=strategy, num_nodes=num_nodes, limit_val_batches=0)
        task, data = make(model, batch_size=batch_size, dim=dim, rows=rows)
        trainer.fit(task, datamodule=data)
