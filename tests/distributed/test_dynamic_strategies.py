"""Strategies over tables with more ids than memory has room for: trained, saved and gone on with."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_recsys.checkpoints import read_checkpoint
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowSGD
from lightning_recsys.stores import DynamicRows
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

STEPS = 6
# Of hashes that use all of int64, about half of them negative.
IDS_RSB = torch.randint(30, (2, STEPS, 8), generator=torch.Generator().manual_seed(0)) * -7046029254386353131


class Batches:
    """One rank's."""

    def __init__(self, ids_SB: torch.Tensor) -> None:
        self.ids_SB = ids_SB

    def __iter__(self):
        return ({"sparse": SparseFeatures(("a",), ids)} for ids in self.ids_SB)

    def __len__(self):
        return len(self.ids_SB)


class Counting(pl.LightningModule):
    """Each lookup takes half a one from a row of a table of which every int64 but -1 is an id."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig("t", 2**64 - 1, 4, ("a",), init_std=0.0)
        self.rows = EmbeddingBagCollection([table], optimizer=RowSGD(0.5), device="meta")
        self.bias = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return self.rows(batch["sparse"]).sum() + self.bias.sum()

    def test_step(self, batch, batch_idx):
        self.log("total", self.rows(batch["sparse"]).sum(), batch_size=1, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.bias], lr=0.1)
        self.rows.attach_to(optimizer)
        return optimizer

    def train_dataloader(self):
        return Batches(IDS_RSB[self.trainer.global_rank])

    def test_dataloader(self):
        return Batches(IDS_RSB.unique().unsqueeze(0))


class GoesBack(Callback):
    """Behind the first step every rank loads what the run went on from; a row that came in between is gone then."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0 and self.path is not None:
            pl_module.rows.embedding_bags.dynamic.write("t", "weight", torch.tensor([7]), torch.ones(1, 4))
            trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(self.path))


def fit(folder, strategy, *, epochs, ckpt_path=None):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[GoesBack(ckpt_path), ModelCheckpoint(folder, filename="{step}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Counting(), ckpt_path=ckpt_path)
    assert trainer.world_size == 2
    return trainer, folder / f"step={epochs * STEPS}.ckpt"


@pytest.mark.parametrize("name", ["het", "shadowsync"])
def test_unbounded_ids_when_trained_saved_gone_on_with_and_loaded_again_then_every_update_is_there(tmp_path, name):
    # Nothing expires in so few steps; but copies travel with their updates then, and workers name what they keep.
    options = {"dynamic_rows": DynamicRows(expire_after=64), "transport": "tcp"}
    if name == "het":
        first = HETStrategy(cache_rows=12, staleness=2, num_embedding_servers=2, table_placement="size", **options)
        second = HETStrategy(cache_rows=40, staleness=5, num_embedding_servers=1, table_placement="size", **options)
    else:
        first, second = (
            ShadowSyncStrategy(num_embedding_servers=servers, table_placement="size", **options) for servers in (1, 2)
        )
    path = None
    ids, times = IDS_RSB.unique(return_counts=True)
    ids, times = torch.cat([ids[ids >= 0], ids[ids < 0]]), torch.cat([times[ids >= 0], times[ids < 0]])
    assert len(ids) > int((ids < 0).sum()) > 0
    undone = torch.stack([(IDS_RSB[:, 0] == x).sum() for x in ids])
    for epochs, strategy in ((1, first), (2, second)):
        trainer, path = fit(tmp_path / str(epochs), strategy, epochs=epochs, ckpt_path=path)
        state = read_checkpoint(path)["state_dict"]
        assert torch.equal(state["rows.embedding_bags.t.ids"], ids)
        share = 0.5 / (2 if name == "het" else 1)  # workers of HET train together, with their mean
        expected = (-share * (epochs * times - (epochs - 1) * undone).float()).unsqueeze(1).expand(-1, 4)
        assert torch.allclose(state["rows.embedding_bags.t.weight"], expected)
    (metrics,) = trainer.test(Counting(), ckpt_path=path, verbose=False)
    assert metrics["total"] == pytest.approx(float(expected.sum()))


def test_rows_when_evaluated_without_a_checkpoint_then_refused():
    trainer = pl.Trainer(
        accelerator="cpu", strategy=HETStrategy(dynamic_rows=DynamicRows(), cache_rows=9), logger=False
    )
    with pytest.raises(RuntimeError, match=r"have no rows here \(device='meta'\)"):
        trainer.test(Counting(), verbose=False)
