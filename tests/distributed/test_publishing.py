"""Publishing under strategies with two workers: the last version has the bits of the rows that were trained."""

import json

import pytest
import pytorch_lightning as pl
import torch
from publishing_runs import Held
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_recsys.checkpoints import is_folder, read_checkpoint
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.models import WideDeep
from lightning_recsys.serving import ModelPublisher, ModelReader, list_versions
from lightning_recsys.serving import dense as serving_dense
from lightning_recsys.stores import DynamicRows
from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    DESStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)
from lightning_recsys.tasks import CTRTask

COME_AND_GO = DynamicRows(admission=2, expire_after=8)
STRATEGIES = {
    "shadowsync": (lambda: ShadowSyncStrategy(num_trainers=2, dynamic_rows=COME_AND_GO), True),
    "het": (lambda: HETStrategy(dynamic_rows=COME_AND_GO, cache_rows=100, staleness=3), True),
    "async_ps": (lambda: AsyncParameterServerStrategy(num_embedding_servers=2, dynamic_rows=COME_AND_GO), True),
    "des": (lambda: DESStrategy(), False),
    "hierarchical": (lambda: HierarchicalStrategy(trainers_per_group=2, dynamic_rows=COME_AND_GO), True),
}


CARDINALITIES = (400, 300, 20)


def wide_deep(**options):
    fields = {f"c{i}": count for i, count in enumerate(CARDINALITIES)}
    return WideDeep(2, fields, embedding_dim=4, hidden=(4,), **options)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "p.pt2"
    serving_dense._export(serving_dense.DensePart(wide_deep()), 2, path)
    return path


@pytest.mark.distributed
@pytest.mark.parametrize("name", STRATEGIES)
def test_last_version_when_two_workers_have_trained_then_it_has_the_bits_of_their_rows(name, program, tmp_path):
    make_strategy, dynamic = STRATEGIES[name]
    data = SyntheticDataModule(train_rows=1280, val_rows=64, batch_size=32, cardinalities=CARDINALITIES, num_dense=2)
    options = {"device": "meta"} if dynamic else {}
    publisher = ModelPublisher(tmp_path / "model", every_n_steps=4, keep=50, compact_share=1e9)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(),
        callbacks=[
            publisher,
            Held(publisher, program, tmp_path / "result.json"),
            ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=7, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_train_batches=40
        if name == "des"
        else 20,  # all: shares that are leased would leave open how many of them are rank 0's
        limit_val_batches=0,
    )
    task = CTRTask(wide_deep(**options))
    trainer.fit(task, datamodule=data)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["wrong"] == []
    assert result["world_size"] == 2
    dense = [manifest.files["model.safetensors"].sha256 for manifest in list_versions(tmp_path / "model")[1]]
    assert len(set(dense)) >= len(dense) - 1 >= 5  # trained on between any two, wherever that happens
    saved = sorted((tmp_path / "checkpoints").iterdir())
    assert len(saved) >= 2
    state = read_checkpoint(saved[0]) if is_folder(saved[0]) else torch.load(saved[0], weights_only=False)
    assert state["callbacks"][publisher.state_key]["run"] == publisher._run
    of_replica = {"replicas": 2 if name == "shadowsync" else 1, "average": None}
    parts = [manifest.cut["dense"] for manifest in list_versions(tmp_path / "model")[1]]
    assert parts == [of_replica | {"replica": 0}] * (len(parts) - 1) + [of_replica | {"replica": None}]
    assert result["version"] >= 6
    assert (result["gone"] > 0) == dynamic
    assert result["examples"] == 2560
    assert (result["live"] > 0) == dynamic
    assert set(result["cut"]["collections"]) == {"embeddings", "first_order.embeddings"}
    reader = ModelReader(tmp_path / "model")
    batch = data.sample_batches(1)[0]
    logits = reader.model.logits(batch.dense, batch.sparse)
    assert logits.isfinite().all()
    if not dynamic:  # this process has the trained rows, too
        with torch.no_grad():
            assert torch.allclose(logits, task.eval()(batch), atol=1e-6)
