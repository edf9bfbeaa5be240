"""Test accuracy of suite ``graph`` beside PyG's layers, on the same splits, batches and widths."""

from __future__ import annotations

import logging
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.peers.pyg_sage import PyGSAGE
from benchmarks.suites.het.cache import Columns
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_recsys.data.graph import NodeDataModule
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.tasks import NodeClassificationTask

log = logging.getLogger("benchmark")
RATE = 0.01


def measure(
    *, data: Sequence[str], seeds: Sequence[int], epochs: int, batch_size: int, hidden: int, dropout: float, root: str
) -> Measured:
    """Train both on each graph, with its features and with nodes' rows alone.

    Args:
        data: Files in ``graphs``.
        seeds: Of the splits, weights and orders.
        epochs: Of each training; that with the best validation accuracy is tested.
        batch_size: Seeds of a batch.
        hidden: Width of layers and rows.
        dropout: Between layers.
        root: Folder of the data sets.
    """
    lines: list[list[str]] = []
    bars: list[Bar] = []
    for name in data:
        for inputs, options in (("words", {"node_ids": False}), ("rows of nodes", {"features": False})):
            means = {}
            for model in ("GraphSAGE", "PyG"):
                found = []
                for seed in seeds:
                    nodes = NodeDataModule(
                        file=f"graphs/{name}.npz",
                        root=root,
                        split={"validation": 0.1, "test": 0.1, "seed": seed},
                        num_neighbors=(25, 10),
                        eval_num_neighbors=(-1, -1),
                        batch_size=batch_size,
                        seed=seed,
                        **options,  # type: ignore[arg-type]
                    )
                    found.append(accuracy(nodes, model, seed=seed, epochs=epochs, hidden=hidden, dropout=dropout))
                    log.info("%s, %s, %s, seed %d: %.4f", name, inputs, model, seed, found[-1])
                means[model] = 100 * statistics.mean(found)
                spread = 100 * statistics.stdev(found) if len(found) > 1 else 0.0
                lines.append([name, inputs, model, f"{means[model]:.1f} ± {spread:.1f}"])
            below = means["PyG"] - means["GraphSAGE"]
            bars.append(Bar(f"points below PyG's layers, {name}, {inputs}", below, "at most", 1.0))
    return [Columns("test accuracy, percent", ("graph", "from", "layers", "accuracy"), lines)], bars


def accuracy(nodes: NodeDataModule, model: str, *, seed: int, epochs: int, hidden: int, dropout: float) -> float:
    """Test accuracy of one training."""
    pl.seed_everything(seed, verbose=False)
    warnings.filterwarnings("ignore", category=UserWarning)
    nodes.setup()
    common: dict[str, Any] = {"num_classes": nodes.num_classes, "hidden": hidden, "dropout": dropout}
    network: torch.nn.Module
    if model == "PyG":
        network = PyGSAGE(nodes.fields, **common)
    else:
        rule = RowWiseAdagrad(lr=0.02)
        network = GraphSAGE(0, nodes.fields, **common, embedding_dim=hidden, pooling="mean", row_optimizer=rule)
    task = NodeClassificationTask(network, optimizer=partial(torch.optim.Adam, lr=RATE))
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(Path(folder), monitor="val/accuracy", mode="max")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[best],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, datamodule=nodes)
        trainer.test(task, datamodule=nodes, ckpt_path=best.best_model_path, verbose=False)
    return float(trainer.callback_metrics["test/accuracy"])
