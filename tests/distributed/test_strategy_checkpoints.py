"""Checkpoints of strategies whose rows lie in stores: saved by all ranks, read by any number of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_recsys.checkpoints import FolderCheckpointIO, is_folder, read_checkpoint, to_file, to_folder
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.models import DeepFM
from lightning_recsys.optim import RowAdam
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy
from lightning_recsys.tasks import CTRTask

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(280),
    # what saved a checkpoint need not watch the run that goes on from it
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

FIELDS = {"c0": 50, "c1": 7, "c2": 300}
STEPS = 12  # in an epoch of one process


def make_task(*, seed: int = 0) -> CTRTask:
    torch.manual_seed(seed)
    model = DeepFM(4, FIELDS, embedding_dim=8, hidden=(16,), row_optimizer=RowAdam(lr=0.01))
    return CTRTask(model, optimizer=partial(torch.optim.Adam, lr=0.01))


def make_data() -> SyntheticDataModule:
    rows = {"train_rows": 32 * STEPS, "val_rows": 64, "test_rows": 64}
    return SyntheticDataModule(
        batch_size=32, num_dense=4, cardinalities=tuple(FIELDS.values()), multi_hot={"c2": 3}, seed=1, **rows
    )


def make_trainer(strategy, *callbacks: Callback, **arguments) -> pl.Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {"max_steps": STEPS, "logger": False, "limit_val_batches": 0, **arguments}
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def synchronous(**layout) -> ShadowSyncStrategy:
    return ShadowSyncStrategy(rounds="foreground", algorithm="ma", gap=1, table_placement="size", **layout)


def train(strategy, *callbacks: Callback, ckpt_path: Path | None = None, **arguments) -> tuple[pl.Trainer, CTRTask]:
    pl.seed_everything(0, verbose=False)
    task = make_task()
    trainer = make_trainer(strategy, *callbacks, **arguments)
    trainer.fit(task, datamodule=make_data(), ckpt_path=ckpt_path)
    return trainer, task


def one_epoch(strategy, folder: Path, **arguments) -> Path:
    """The checkpoint at its end: another number of workers cannot go on inside an epoch."""
    saving = ModelCheckpoint(folder, save_on_train_epoch_end=True)
    train(strategy, saving, max_steps=-1, max_epochs=1, **arguments)
    return Path(saving.best_model_path)


def assert_same(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, msg=name)


@pytest.fixture(scope="module")
def two_by_one(tmp_path_factory) -> Path:
    """A checkpoint of 2 trainers and 2 embedding servers after 6 steps."""
    path = one_epoch(synchronous(num_trainers=2, num_embedding_servers=2), tmp_path_factory.mktemp("two_by_one"))
    assert is_folder(path)
    return path


def test_one_worker_when_resumed_then_equals_an_uninterrupted_run_bit_for_bit(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="at-{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)
    _, whole = train(synchronous(num_trainers=1), saving)
    path = tmp_path / f"at-step={STEPS // 2}.ckpt"
    assert is_folder(path)
    trainer, resumed = train(synchronous(num_trainers=1), ckpt_path=path)
    assert trainer.global_step == STEPS
    assert_same(resumed.state_dict(), whole.state_dict())
    with pytest.warns(
        UserWarning, match=r"after\.ckpt has no state of optimizers and schedulers: it ended with the work"
    ):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert_same(torch.load(tmp_path / "weights.ckpt")["state_dict"], whole.state_dict())


def test_checkpoint_when_read_as_a_file_then_has_the_users_keys_and_every_rank_share(two_by_one, tmp_path):
    to_file(two_by_one, tmp_path / "one.ckpt")
    task = make_task(seed=5)
    task.load_state_dict(torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"])
    steps = {name: int(value) for name, value in task.state_dict().items() if name.endswith(".step")}
    assert set(steps.values()) == {STEPS}, "both trainers' updates of the rows count"
    fresh = make_task().state_dict()
    moved = [name for name, value in task.state_dict().items() if not torch.equal(value, fresh[name])]
    assert {name for name in moved if name.endswith("c0.exp_avg")}, "the rows' optimizer state is saved"


@pytest.mark.parametrize(
    "layout",
    [
        {"num_trainers": 1, "num_embedding_servers": 1},
        {"num_trainers": 1, "workers_per_trainer": 2, "num_embedding_servers": 3},
        {"num_trainers": 3, "num_embedding_servers": 2},
    ],
    ids=["1x1", "1x2", "3x1"],
)
def test_checkpoint_when_loaded_by_another_layout_then_starts_from_all_that_was_saved(two_by_one, layout):
    starts = StartsFrom(two_by_one)
    trainer, _ = train(synchronous(**layout), starts, ckpt_path=two_by_one, max_steps=STEPS // 2 + 1)
    assert trainer.global_step == STEPS // 2 + 1
    assert trainer.callback_metrics["compared"] == len(read_checkpoint(two_by_one)["state_dict"])


class StartsFrom(Callback):
    """Before the first step, the first rank's model is the saved one: rows, their state and dense part."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer, pl_module):
        own, saved = pl_module.state_dict(), read_checkpoint(self.path)["state_dict"]
        assert_same(own, saved)
        self.compared = float(len(saved))
        trainer.strategy.barrier("everybody has compared")

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.log("compared", self.compared)


def test_single_device_file_when_loaded_by_trainers_then_starts_from_it(tmp_path):
    path = one_epoch("auto", tmp_path, devices=1)
    assert path.is_file()
    to_folder(path, tmp_path / "folder.ckpt")
    starts = StartsFrom(tmp_path / "folder.ckpt")
    trainer, _ = train(synchronous(num_trainers=2), starts, ckpt_path=path, max_steps=STEPS + 1)
    assert trainer.global_step == STEPS + 1


class Towers(nn.Module):
    """Two layers over the same vectors, each of which has the collection as its own."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name, num_ids, 8, (name,)) for name, num_ids in FIELDS.items()]
        collection = EmbeddingBagCollection(tables, optimizer=RowAdam(lr=0.01))
        self.first, self.second = (nn.ModuleDict({"rows": collection, "head": nn.Linear(24, 1)}) for _ in range(2))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return sum(x["head"](x["rows"](sparse).flatten(1)).squeeze(1) for x in (self.first, self.second))


def test_folder_when_two_modules_share_a_collection_then_has_the_keys_of_both(tmp_path):
    saving, task = ModelCheckpoint(tmp_path), CTRTask(Towers())
    trainer = make_trainer(HETStrategy(algorithm="hybrid", table_placement="size"), saving, devices=2)
    trainer.fit(task, datamodule=make_data())
    assert trainer.world_size == 2
    assert_same(read_checkpoint(saving.best_model_path)["state_dict"], task.state_dict())
    alone = make_trainer("auto", devices=1, max_steps=STEPS + 1, plugins=[FolderCheckpointIO()])
    alone.fit(CTRTask(Towers()), datamodule=make_data(), ckpt_path=saving.best_model_path)
    assert alone.global_step == STEPS + 1


class AllParameters(CTRTask):
    """Its optimizer is given all that ``parameters()`` has, which is more where the rows are in the process."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        for collection in (x for x in self.modules() if isinstance(x, EmbeddingBagCollection)):
            collection.attach_to(optimizer)
        return optimizer


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # a run that goes on elsewhere, on purpose
def test_optimizer_when_it_was_given_all_parameters_then_its_state_fits_wherever_the_rows_are(tmp_path):
    def served() -> HETStrategy:
        return HETStrategy(algorithm="hybrid", table_placement="size")

    for number, strategy in enumerate(("auto", served(), "auto")):
        saving = ModelCheckpoint(tmp_path / str(number), filename="last")
        plugins = [FolderCheckpointIO()] if strategy == "auto" else []
        trainer = make_trainer(strategy, saving, devices=1, max_steps=STEPS + number, plugins=plugins)
        before = {"ckpt_path": tmp_path / str(number - 1) / "last.ckpt"} if number else {}
        trainer.fit(AllParameters(make_task().model), datamodule=make_data(), **before)
        assert trainer.global_step == STEPS + number


@pytest.mark.parametrize("average", [WeightAveraging, partial(StochasticWeightAveraging, 0.01, 1)], ids=["mean", "swa"])
@pytest.mark.filterwarnings("ignore:.*Swapping scheduler")
def test_folder_with_an_average_when_resumed_on_a_single_device_then_every_copy_has_the_rows(tmp_path, average):
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    strategy = HETStrategy(algorithm="hybrid", table_placement="size")
    trainer, _ = train(strategy, saving, average(), max_steps=-1, max_epochs=2, devices=2)
    assert trainer.world_size == 2
    settings = {"max_steps": -1, "max_epochs": 3, "devices": 1, "plugins": [FolderCheckpointIO()]}
    alone, _ = train("auto", average(), ckpt_path=Path(saving.best_model_path), **settings)
    assert alone.current_epoch == 3


def test_folder_when_evaluated_without_servers_then_every_rank_reads_the_whole_model(two_by_one):
    trainer = make_trainer(ShadowSyncStrategy(num_trainers=2), limit_val_batches=None)
    (seen,) = trainer.validate(make_task(seed=5), datamodule=make_data(), ckpt_path=two_by_one, verbose=False)
    task = make_task(seed=7)
    task.load_state_dict(read_checkpoint(two_by_one)["state_dict"])
    alone = make_trainer("auto", limit_val_batches=None, devices=1)
    (expected,) = alone.validate(task, datamodule=make_data(), verbose=False)
    assert seen["val/auc"] == pytest.approx(expected["val/auc"], abs=1e-6)
