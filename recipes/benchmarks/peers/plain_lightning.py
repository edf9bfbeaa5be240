"""The same models as most people write them in Lightning: one ``nn.Embedding`` per field, dense gradients, Adam.

Fed with batches that are ready in memory: its reader costs nothing.
"""

# Shape suffixes: B batch, F fields.

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from benchmarks.harness.trainer import StepsToTurn, quiet_trainer
from benchmarks.harness.turns import Turn
from benchmarks.harness.workload import Workload
from benchmarks.peers.floor import DENSE, WITH_FIRST_ORDER
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

Example = tuple[Tensor, Tensor, Tensor]


class PlainModule(pl.LightningModule):
    def __init__(self, work: Workload, model: str) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, work.dim) for rows in work.fields.values())
        self.first_order = nn.ModuleList(
            nn.Embedding(rows, 1) for rows in work.fields.values() if model in WITH_FIRST_ORDER
        )
        for table in [*self.embeddings, *self.first_order]:
            nn.init.normal_(table.weight, 0.0, 0.01)
        self.dense_part = DENSE[model](work)

    def training_step(self, batch: Example, batch_idx: int) -> Tensor:
        dense, ids_BF, labels = batch
        inputs = [dense, torch.stack([table(ids_BF[:, f]) for f, table in enumerate(self.embeddings)], 1)]
        if self.first_order:
            inputs.append(torch.cat([table(ids_BF[:, f]) for f, table in enumerate(self.first_order)], 1))
        return F.binary_cross_entropy_with_logits(self.dense_part(*inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ReadyBatches(IterableDataset[Example]):
    def __init__(self, batches: list[Example]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Example]:
        return cycle(self.batches)


def variant(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """Plain Lightning as a variant of :func:`benchmarks.harness.turns.in_turns`."""

    def run(turn: Turn) -> None:
        batches = [
            (batch.dense, batch.sparse.values.view(work.num_fields, -1).t().contiguous(), batch.labels)
            for batch in work.batches(batch_size)
        ]
        loader = DataLoader(ReadyBatches(batches), batch_size=None)
        quiet_trainer(StepsToTurn(turn, batch_size)).fit(PlainModule(work, model), loader)

    return run
