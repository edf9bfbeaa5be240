"""Every update rule under HET in step, and under Lightning's own ddp: many small runs in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from des_runs import join
from torch import nn
from torch.utils.data import DataLoader

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.strategies import HETStrategy

RULES = {
    "sgd": RowSGD(0.1),
    "adagrad": RowAdagrad(0.1),
    "rowwise": RowWiseAdagrad(0.1, weight_decay=0.1),
    "adam": RowAdam(0.01, weight_decay=0.1),
    "ftrl": RowFTRL(0.1),
}
CACHEABLE = ("sgd", "adagrad", "rowwise")
RUNS: dict[str, tuple[dict[str, Any] | None, Sequence[str]]] = {
    "ddp": (None, tuple(RULES)),
    "hybrid": ({"algorithm": "hybrid"}, tuple(RULES)),
    "staleness=0": ({"staleness": 0, "cache_fraction": 0.2}, CACHEABLE),
}
ACCUMULATED, UPDATES, IDS, EXAMPLES = 2, 5, 40, 4
LENGTHS = torch.tensor([1] * EXAMPLES + [2, 0, 3, 3])  # of the bags of both features
IDS_RSN = torch.randint(IDS, (3, ACCUMULATED * UPDATES, int(LENGTHS.sum())), generator=torch.Generator().manual_seed(1))


class EveryRule(pl.LightningModule):
    """A collection for each rule and one without an optimizer, all far from their goal, so that no gradients cancel."""

    def __init__(self, rules: Sequence[str]) -> None:
        super().__init__()
        table = EmbeddingBagConfig("t", IDS, 4, ("a", "b"), init_std=0.5)
        self.rows = nn.ModuleDict()
        for seed, (name, rule) in enumerate({name: RULES[name] for name in rules}.items()):
            torch.manual_seed(seed)
            self.rows[name] = EmbeddingBagCollection([table], optimizer=rule)
        torch.manual_seed(len(RULES))
        self.alone = EmbeddingBagCollection([table], optimizer=RowAdagrad(0.1))
        self.dense = nn.Linear(4, 1)

    def training_step(self, ids, batch_idx):
        collections = [*self.rows.values(), self.alone]
        bags = [x(SparseFeatures(("a", "b"), ids, lengths=LENGTHS)) for x in collections]
        numbers = torch.stack([ids[:EXAMPLES] / IDS] * 4, dim=1)
        return sum((x - 3).square().mean() for x in [*bags, self.dense(numbers)])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.1)
        for collection in self.rows.values():
            collection.attach_to(optimizer)
        return optimizer

    def train_dataloader(self):
        return DataLoader(IDS_RSN[self.trainer.global_rank], batch_size=None)


def train_in_step(rank: int, ports: Mapping[int, int], endpoints: Sequence[str], folder: str) -> None:
    """Fit under every strategy, among so many processes as each port is for; what this one's module holds is saved."""
    for world, port in ports.items():
        if rank >= world:
            continue
        join(rank, world, port)
        seen: dict[str, Any] = {}
        for name, (options, rules) in RUNS.items():
            model = EveryRule(rules)
            placed = {"servers": list(endpoints), "table_placement": "size"}
            trainer = pl.Trainer(
                accelerator="cpu",
                strategy="ddp" if options is None else HETStrategy(**options, **placed),
                devices=world,
                max_epochs=1,
                accumulate_grad_batches=ACCUMULATED,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(model)
            seen[name] = dict(model.state_dict())
            seen[f"{name} ran"] = (dist.get_world_size(), trainer.global_step)
        torch.save(seen, f"{folder}/{world}-{rank}.pt")
        dist.destroy_process_group()
