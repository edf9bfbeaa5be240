"""A model of a nominal 10^12 parameters: rows that are made when they are first trained take memory, others do not."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytorch_lightning as pl
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.ours import TaskAlone
from benchmarks.harness.report import Columns, Result
from benchmarks.harness.trainer import quiet_trainer
from recipe_tools.quiet import be_quiet
from torch.utils.data import IterableDataset

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures
from lightning_recsys.models import WideDeep
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.strategies import HETStrategy


class RandomIds(IterableDataset[Batch]):
    """Batches of ids from all over the tables, so that almost every one is new.

    Args:
        num_ids: Of each table.
        num_tables: Fields.
        batch_size: Examples of a batch.
        num_batches: Batches.
    """

    def __init__(self, num_ids: int, num_tables: int, batch_size: int, num_batches: int) -> None:
        self.num_ids, self.num_tables = num_ids, num_tables
        self.batch_size, self.num_batches = batch_size, num_batches

    def __iter__(self) -> Iterator[Batch]:
        generator = np.random.default_rng(0)
        names = tuple(f"field{i}" for i in range(self.num_tables))
        for _ in range(self.num_batches):
            ids = torch.from_numpy(generator.integers(self.num_ids, size=self.num_tables * self.batch_size))
            labels = torch.from_numpy(generator.integers(2, size=self.batch_size).astype(np.float32))
            yield Batch(torch.zeros(self.batch_size, 0), SparseFeatures(names, ids), labels)


class Memory(pl.Callback):
    """Writes down what the worker and its servers hold after certain steps.

    Args:
        file: Where to.
        steps: Which steps.
    """

    def __init__(self, file: Path, steps: Sequence[int]) -> None:
        self.file, self.steps = file, set(steps)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step in self.steps:
            assert isinstance(trainer.strategy, HETStrategy)
            rows = 0
            for module in pl_module.modules():
                if isinstance(module, EmbeddingBagCollection):
                    module.flush()
                    assert isinstance(module.embedding_bags, StoreBackend)
                    rows += sum(store.num_live for store in module.embedding_bags.stores)
            held = sum(int(stores.status()["bytes"]) for stores in trainer.strategy.stores("embedding"))
            worker = psutil.Process().memory_info().rss
            with self.file.open("a") as file:
                file.write(f"{trainer.global_step} {rows} {held} {worker}\n")


def measure(
    *, ids: int, tables: int, dim: int, batch_size: int, steps: Sequence[int]
) -> tuple[list[Result], list[Bar]]:
    """Train, and watch the memory.

    Args:
        ids: Of each table.
        tables: Their number.
        dim: Width of the rows.
        batch_size: Examples of a step; each brings one id for each table.
        steps: When to look.
    """
    be_quiet()
    warnings.filterwarnings("ignore")
    pl.seed_everything(0, verbose=False)
    fields = {f"field{i}": ids for i in range(tables)}
    optimizer = RowWiseAdagrad(lr=0.01)
    network = WideDeep(0, fields, embedding_dim=dim, hidden=(64,), row_optimizer=optimizer, device="meta")
    task = TaskAlone(network, optimizer=partial(torch.optim.SGD, lr=0.01))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "memory"
        strategy = HETStrategy(cache_rows=batch_size * tables, dynamic_rows=DynamicRows(), transport="tcp")
        trainer = quiet_trainer(Memory(file, steps), strategy=strategy, max_steps=max(steps))
        data = RandomIds(ids, tables, batch_size, max(steps))
        trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=None))
        told = [[int(x) for x in line.split()] for line in file.read_text().splitlines()]
    parameters = ids * tables * (dim + 1)
    touched = [step * batch_size * tables * 2 for step, *_ in told]  # wide weights and vectors
    lines = [
        [str(step), f"{rows:,}", f"{held / 2**20:,.0f}", f"{worker / 2**20:,.0f}"] for step, rows, held, worker in told
    ]
    title = f"{parameters:.3g} nominal parameters: {tables} tables of {ids:,} ids, D={dim}"
    header = ("steps", "rows that exist", "MiB of stores", "MiB of the worker")
    (first, _, before, _), (last, _, after, _) = told[0], told[-1]
    per_row = (after - before) / (batch_size * tables * (last - first))
    bars = [
        Bar("nominal parameters", parameters / 1e12, "at least", 1.0, "e12"),
        Bar("rows that exist / rows touched", told[-1][1] / touched[-1], "at most", 1.0),
        Bar("bytes of stores a touched row / bytes of its weights", per_row / (4 * dim), "at most", 1.5),
    ]
    return [Columns(title, header, lines)], bars
