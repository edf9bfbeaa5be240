"""Two virtual workers of HET beside two real ones: the bytes that they move, and what they learn."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from test_het import make_trainer

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.metrics import NormalizedEntropy
from lightning_recsys.models import DeepFM
from lightning_recsys.optim import RowAdagrad
from lightning_recsys.simulation import HETCluster
from lightning_recsys.strategies import HETStrategy
from lightning_recsys.tasks import CTRTask

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]
KINDS = ("rows", "clocks", "gradients")
STEPS = 60


class Told(Callback):
    """Adds up what both workers have moved in training, of which the loader and the end are no part."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == STEPS - 1:
            told = trainer.strategy.telemetry()
            moved = torch.tensor([float(told[f"comm/{kind}_bytes"]) for kind in KINDS])
            torch.distributed.all_reduce(moved)
            for kind, value in zip(KINDS, moved, strict=True):
                pl_module.log(f"moved/{kind}", value / (STEPS * trainer.world_size))
            pl_module.log("world_size", float(trainer.world_size))


def dealt(data):
    """The batches of two ranks, in turn."""
    ranks = [{"num_replicas": 2, "rank": rank} for rank in range(2)]
    loaders = []
    for kwargs in ranks:
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=kwargs, overfit_batches=0)
        loaders.append(data.train_dataloader())
    data.trainer = None
    return (batch for both in zip(*loaders, strict=True) for batch in both)


def test_two_workers_then_virtual_ones_move_the_same_bytes_and_learn_as_much():
    data = SyntheticDataModule(
        batch_size=64, train_rows=64 * 2 * STEPS, test_rows=10_000, cardinalities=(3000, 800, 60), num_dense=3
    )

    def make_task():
        torch.manual_seed(3)
        model = DeepFM(3, data.fields, embedding_dim=8, hidden=[16], row_optimizer=RowAdagrad(0.05))
        return CTRTask(model, optimizer=partial(torch.optim.Adam, lr=0.005))

    def entropy(task):
        metric = NormalizedEntropy(from_logits=True)
        task.eval()
        with torch.no_grad():
            for batch in data.test_dataloader():
                metric.update(task(batch), batch.labels)
        return float(metric.compute())

    options = {"cache_fraction": 0.1, "staleness": 5, "policy": "lru"}
    strategy = HETStrategy(transport="tcp", lookahead_batches=0, **options)
    trainer, real = make_trainer(strategy, Told(), limit_val_batches=0), make_task()
    trainer.fit(real, train_dataloaders=data)
    assert trainer.callback_metrics["world_size"] == 2
    virtual = make_task()
    results = HETCluster(num_workers=2, **options).train(virtual, dealt(data))
    assert results.counts["steps"] == STEPS
    for kind in KINDS:
        moved = float(trainer.callback_metrics[f"moved/{kind}"])
        assert results.metrics[f"comm/{kind}_bytes_per_step"] == pytest.approx(moved, rel=0.02), kind
    assert entropy(virtual) == pytest.approx(entropy(real), rel=0.003)
