"""The callback in one process: when it publishes, what it says of the position, and what it refuses."""

import json
import pickle
import shutil
from dataclasses import replace
from typing import NamedTuple

import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.errors import PublishedVersionError, PublisherReplacedError
from lightning_recsys.models import LogisticRegression
from lightning_recsys.serving import ModelPublisher, ModelReader
from lightning_recsys.serving.dense import DensePart, _export
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.publishing import publisher
from lightning_recsys.tasks import CTRTask


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "p.pt2"
    _export(DensePart(model()), 2, path)
    return path


@pytest.fixture
def exported(program, monkeypatch):
    monkeypatch.setattr(publisher, "export_apart", lambda part, num_dense, target: shutil.copyfile(program, target))


def model():
    return LogisticRegression(2, {"c0": 60, "c1": 9})


def data():
    return SyntheticDataModule(train_rows=320, val_rows=8, batch_size=32, cardinalities=(60, 9), num_dense=2)


class Waits(pl.Callback):
    """Behind a publisher: trains on when what is due is written."""

    def __init__(self, callback):
        self.callback = callback

    def on_train_batch_end(self, *_):
        self.callback._work.wait()


def fit(callback, task=None, *, waits=True, **options):
    task = task or CTRTask(model())
    callbacks = [callback, Waits(callback)] if waits else [callback]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    options = {"max_epochs": 1, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **quiet, **options)
    trainer.fit(task, datamodule=data())
    return task


def positions(folder):
    found = [json.loads(path.read_text()) for path in folder.glob("versions/*/manifest.json")]
    return {x["version"]: (x["kind"], x["position"]["global_step"], x["position"]["examples"]) for x in found}


def test_run_when_it_publishes_every_three_steps_then_versions_say_where_and_the_last_is_the_trained_model(
    exported, tmp_path
):
    task = fit(ModelPublisher(tmp_path / "m", every_n_steps=3, compact_share=100))
    assert positions(tmp_path / "m") == {
        1: ("base", 3, 96),
        2: ("increment", 6, 192),
        3: ("increment", 9, 288),
        4: ("increment", 10, 320),
    }
    reader, batch = ModelReader(tmp_path / "m"), data().sample_batches(1)[0]
    with torch.no_grad():
        assert torch.equal(reader.model.logits(batch.dense, batch.sparse), task.eval()(batch))
    assert [x.name for x in (tmp_path / "m").iterdir() if x.name.startswith(".current")] == []
    fit(ModelPublisher(tmp_path / "m", every_n_steps=8), task.train())  # the next run goes on, with a base
    assert positions(tmp_path / "m")[5][0] == "base"
    assert reader.refresh()
    assert reader.version == 6


def test_publisher_when_due_by_seconds_then_it_publishes_at_multiples_of_them(exported, tmp_path, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(publisher.time, "time", lambda: float(next(now)))
    fit(ModelPublisher(tmp_path / "m", every_seconds=4, keep=100, compact_share=100))
    assert len(positions(tmp_path / "m")) >= 3


def test_publisher_when_resumed_then_it_goes_on_counting(exported, tmp_path):
    callback = ModelPublisher(tmp_path / "m", every_n_steps=100)
    fit(callback)
    other = pickle.loads(pickle.dumps(callback))
    other.load_state_dict(callback.state_dict())
    fit(other)
    manifest = ModelReader(tmp_path / "m").model.manifest
    assert (manifest.version, manifest.run, manifest.kind) == (2, callback._run, "base")
    assert manifest.position["examples"] == 640
    assert manifest.position["examples_are"] == "counted"
    fit(ModelPublisher(tmp_path / "m", keep=1))
    assert ModelReader(tmp_path / "m").model.manifest.run != callback._run
    assert ModelReader(tmp_path / "m", version=2).model.manifest == manifest  # another run's stays


def test_publisher_when_another_one_is_there_then_it_says_so(exported, tmp_path):
    with VersionFolder(tmp_path / "m").locked("run 7"), pytest.raises(ValueError, match=r"run 7 \(process \d+ on "):
        fit(ModelPublisher(tmp_path / "m"))


def test_model_when_it_cannot_be_exported_then_the_run_ends_with_what_torch_says(tmp_path, monkeypatch):
    def refuse(part, num_dense, target):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(publisher, "export_apart", refuse)
    with pytest.raises(RuntimeError, match="data-dependent"):
        fit(ModelPublisher(tmp_path / "m"))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PublishedVersionError("model/versions/2", "timed out")]
)
def test_disk_when_full_then_training_goes_on_and_a_later_version_is_a_base(exported, tmp_path, monkeypatch, error):
    write, failures = publisher.VersionWriter.publish, iter([False, True, False, False])

    def publish(self, *arguments):
        if next(failures):
            self._last_manifest = None
            raise error
        return write(self, *arguments)

    monkeypatch.setattr(publisher.VersionWriter, "publish", publish)
    fit(ModelPublisher(tmp_path / "m", every_n_steps=3, compact_share=100))
    assert {kind for kind, *_ in positions(tmp_path / "m").values()} == {"base", "increment"}
    assert ModelReader(tmp_path / "m").model.manifest.position["global_step"] == 10


def test_disk_when_full_while_the_dense_part_is_exported_then_it_is_exported_again(program, tmp_path, monkeypatch):
    failures = iter([True, True, False])

    def export(part, num_dense, target):
        if next(failures):
            raise OSError(28, "No space left on device")
        shutil.copyfile(program, target)

    monkeypatch.setattr(publisher, "export_apart", export)
    fit(ModelPublisher(tmp_path / "m", every_n_steps=3))
    assert positions(tmp_path / "m")[1] == ("base", 6, 192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 1, "every_seconds": 1}, "not both"),
        ({"every_n_steps": 0}, "every_n_steps must be a whole number above 0"),
        ({"keep": 0}, "keep must be a whole number above 0"),
        ({"keep": 2.5}, r"keep must be a whole number above 0, got 2\.5"),
        ({"every_seconds": 0}, "every_seconds must be above 0"),
    ],
)
def test_argument_when_wrong_then_it_says_so(options, message):
    with pytest.raises(ValueError, match=message):
        ModelPublisher("m", **options)


def test_module_when_it_is_not_there_then_it_says_so(tmp_path):
    with pytest.raises(ValueError, match="module=net: CTRTask has no such part"):
        fit(ModelPublisher(tmp_path / "m", module="net"))


def test_publisher_when_its_folder_is_refused_then_others_may_publish_there(exported, tmp_path):
    (tmp_path / "current.json").write_text("{}")
    with pytest.raises(PublishedVersionError, match="is damaged") as refused:
        fit(ModelPublisher(tmp_path))
    with VersionFolder(tmp_path).locked("run 7"):
        assert refused.tb is not None  # which holds whatever was begun


def test_publisher_when_another_one_has_its_place_then_it_says_so_once_and_training_goes_on(
    exported, tmp_path, monkeypatch
):
    asked, warnings = [], []

    def publish(*arguments):
        asked.append(arguments)
        raise PublisherReplacedError("model/versions/2", "run 2 publishes there")

    monkeypatch.setattr(publisher.VersionWriter, "publish", publish)
    monkeypatch.setattr(publisher.log, "warning", lambda text, *values: warnings.append(text % values))
    fit(ModelPublisher(tmp_path / "m", every_n_steps=3))
    assert len(asked) == 1
    assert len(warnings) == 1
    assert "publishes no more: model/versions/2: run 2 publishes there" in warnings[0]


class Rows(NamedTuple):
    """A batch of somebody's own; its length is that of a tuple."""

    dense: torch.Tensor
    sparse: SparseFeatures
    labels: torch.Tensor


class OwnTask(pl.LightningModule):
    """Somebody's own LightningModule, with batches of its own, which weigh their ids."""

    def __init__(self):
        super().__init__()
        self.model = model()

    def training_step(self, rows, batch_idx):
        logits = self.model(rows.dense, rows.sparse)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, rows.labels)

    def validation_step(self, rows, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        weighed = replace(batch.sparse, weights=torch.ones(len(batch.sparse.values)))
        return Rows(batch.dense, weighed, batch.labels)


def test_publisher_when_the_run_is_a_trial_then_publishes_nothing(tmp_path):
    fit(ModelPublisher(tmp_path / "m", every_n_steps=1), waits=False, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_batches_when_somebodys_own_with_weights_then_examples_are_counted_and_a_warning_tells(
    exported, tmp_path, caplog
):
    fit(ModelPublisher(tmp_path / "m", every_n_steps=100), OwnTask())
    assert positions(tmp_path / "m") == {1: ("base", 10, 320)}
    assert "Ids of ['c0', 'c1'] have weights in training, and those of requests have none" in caplog.text
