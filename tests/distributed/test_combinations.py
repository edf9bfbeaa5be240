"""Strategies composed of a dense part, rows and a pace: sums of constant gradients, whoever trains the dense part."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowSGD
from lightning_recsys.strategies import CachedRows, compose

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NUM_ROWS, LR, STEPS, BATCH = 12, 0.5, 40, 4


def ids_of(rank: int) -> torch.Tensor:
    """A worker's ids, of which all workers have some: ``[STEPS, BATCH]``."""
    return torch.randint(NUM_ROWS, (STEPS, BATCH), generator=torch.Generator().manual_seed(rank))


class Batches:
    """A worker's own."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __iter__(self):
        return (SparseFeatures(("id",), ids) for ids in self.ids)

    def __len__(self):
        return len(self.ids)


class ConstantGradients(pl.LightningModule):
    """A sum over rows that start at 0: each row that a batch looks up has a gradient of 1 for each time."""

    def __init__(self) -> None:
        super().__init__()
        rows = EmbeddingBagCollection([EmbeddingBagConfig("t", NUM_ROWS, 2, ("id",))], optimizer=RowSGD(lr=LR))
        for weight in rows.parameters():
            nn.init.zeros_(weight)
        self.model = Summed(rows)

    def training_step(self, batch, batch_idx):
        self.log("world_size", float(dist.get_world_size()), batch_size=BATCH)
        return self.model(batch).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("early", self.trainer.strategy.telemetry().get("comm/early_lookups", 0.0), batch_size=BATCH)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)

    def train_dataloader(self):
        return Batches(ids_of(self.trainer.global_rank))


class Summed(nn.Module):
    """Rows, and a bias whose gradient is the number of examples."""

    def __init__(self, rows: EmbeddingBagCollection) -> None:
        super().__init__()
        self.rows = rows
        self.bias = nn.Linear(2, 2, bias=True)
        self.bias.weight.requires_grad_(False)
        nn.init.eye_(self.bias.weight)
        nn.init.zeros_(self.bias.bias)

    def forward(self, sparse):
        return self.bias(self.rows(sparse)[:, 0])


def fit(strategy) -> tuple[pl.Trainer, ConstantGradients]:
    task = ConstantGradients()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto" if type(strategy).__name__ == "HierarchicalStrategy" else 2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task)
    return trainer, task


CACHED = {"cache_rows": 5, "staleness": 3}


EASGD = {"dense": "easgd", "rows": CACHED, "alpha": 0.5}


@pytest.mark.parametrize(
    ("parts", "transport", "dense_updates"),
    [
        # What replicas come to depends on when they meet.
        (EASGD, "auto", None),
        (EASGD, "tcp", None),
        ({"dense": "ma", "rows": {**CACHED, "clock": "sum"}}, "tcp", None),
        # All pushes of both workers, on one copy.
        ({"dense": "servers", "rows": CACHED, "normalization": "identity"}, "auto", 2),
        ({"dense": "groups", "rows": {"cache_rows": 5, "max_missed_updates": 8}, "nets_per_trainer": 2}, "tcp", 2),
        # Rows asked for one step early.
        ({"dense": "easgd", "rows": "plain", "prefetch": True}, "tcp", None),
        ({"dense": "servers", "normalization": "identity", "prefetch": True}, "tcp", 2),
        ({"dense": "groups", "rows": "plain", "nets_per_trainer": 2, "prefetch": True}, "tcp", 2),
        # The mean of both, once.
        ({"dense": "ddp", "rows": "plain", "pace": "free"}, "tcp", 1),
    ],
    ids=[
        "easgd-cached-mapped",
        "easgd-cached",
        "ma-cached",
        "servers-cached-mapped",
        "groups-cached",
        "easgd-prefetched",
        "servers-prefetched",
        "groups-prefetched",
        "ddp-free",
    ],
)
def test_rows_when_composed_then_each_gradient_of_each_worker_counts_once(parts, transport, dense_updates):
    """The arithmetic: a row's value is minus LR times the number of its lookups; the bias's, of the updates made to it.

    Gradients do not depend on parameters, so neither staleness nor order changes a sum, only an update that is lost or
    made twice does. Powers of two leave no rounding.
    """
    rows = CachedRows(**parts["rows"]) if isinstance(parts.get("rows"), dict) else parts.get("rows")  # of one strategy
    trainer, task = fit(compose(**{**parts, "rows": rows}, transport=transport))
    assert trainer.callback_metrics["world_size"] == 2
    if parts.get("prefetch"):  # all steps of a worker but the first; group servers cut the model at it
        assert trainer.callback_metrics["early"] == STEPS - (2 if parts["dense"] == "groups" else 1)
    lookups = torch.bincount(torch.cat([ids_of(0), ids_of(1)]).flatten(), minlength=NUM_ROWS)
    rows = task.model.rows.state_dict()["embedding_bags.t.weight"]
    assert torch.equal(rows, (-LR * lookups)[:, None].expand(-1, 2))
    if dense_updates is not None:
        assert task.model.bias.bias.tolist() == [-0.25 * BATCH * STEPS * dense_updates] * 2
