"""The callback in one process: when it publishes, what it says of the position, and what it refuses."""

import json
import pickle
import shutil
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.errors import PublishedVersionError, PublisherReplacedError
from lightning_recsys.models import LogisticRegression
from lightning_recsys.serving import ModelPublisher, ModelReader, list_versions
from lightning_recsys.serving import dense as serving_dense
from lightning_recsys.serving.dense import DensePart, _export
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.publishing import publisher
from lightning_recsys.serving.publishing.writer import Cut, _Clock, counts_of
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


def fit(callback, task=None, *, waits=True, callbacks=None, **options):
    task = task or CTRTask(model())
    callbacks = callbacks or ([callback, Waits(callback)] if waits else [callback])
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
    attempts = []

    def refuse(part, num_dense, target):
        attempts.append(target)
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(publisher, "export_apart", refuse)
    with pytest.raises(RuntimeError, match="data-dependent"):
        fit(ModelPublisher(tmp_path / "m"))
    assert len(attempts) == 2


def test_exporter_when_it_fails_once_then_the_next_attempt_counts(program, tmp_path, monkeypatch):
    """As where memory is short for a moment, which Python says and the system does not."""
    failures = iter([True, False])

    def export(part, num_dense, target):
        if next(failures):
            raise RuntimeError("MemoryError")
        shutil.copyfile(program, target)

    monkeypatch.setattr(publisher, "export_apart", export)
    fit(ModelPublisher(tmp_path / "m", every_n_steps=3))
    assert positions(tmp_path / "m")[1] == ("base", 3, 96)


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
    assert positions(tmp_path / "m")[1] == ("base", 9, 288)


@pytest.mark.parametrize(
    ("script", "cause"), [("kill -9 $$", "was ended by SIGKILL"), ("exec sleep 60", "0.3 seconds")]
)
def test_exporter_when_killed_or_slow_then_training_goes_on_and_another_one_exports(
    program, tmp_path, monkeypatch, caplog, script, cause
):
    attempts, export_apart = [], publisher.export_apart
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o700)
    monkeypatch.setattr(serving_dense, "_PATIENCE", 0.3)

    def export(part, num_dense, target):
        attempts.append(target)
        if len(attempts) > 2:
            return shutil.copyfile(program, target)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(interpreter))
            return export_apart(part, num_dense, target)

    monkeypatch.setattr(publisher, "export_apart", export)
    fit(ModelPublisher(tmp_path / "m", every_n_steps=3))
    assert len(attempts) == 3
    assert [record.levelname for record in caplog.records if cause in record.message] == ["WARNING"] * 2
    assert positions(tmp_path / "m") == {1: ("base", 9, 288), 2: ("increment", 10, 320)}


class Holds(pl.Callback):
    """Lets the version that was cut at step 3 be read at step 7."""

    def __init__(self, callback):
        self.callback, self.goes_on = callback, threading.Event()

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1:
            self.callback._work.wait()
        if trainer.global_step == 7:
            self.goes_on.set()
        if trainer.global_step >= 7:
            self.callback._work.wait()


def test_version_when_rows_are_read_after_the_dense_part_then_the_manifest_says_by_how_many_updates(
    exported, tmp_path, monkeypatch
):
    callback, publish = ModelPublisher(tmp_path / "m", every_n_steps=3), publisher.VersionWriter.publish
    holds = Holds(callback)

    def late(self, skeleton, cut):
        assert holds.goes_on.wait(60)
        return publish(self, skeleton, cut)

    monkeypatch.setattr(publisher.VersionWriter, "publish", late)
    fit(callback, waits=False, callbacks=[callback, holds])
    (first, *_), position = list_versions(tmp_path / "m")[1], "global_step"
    assert (first.position[position], first.cut["apart"]["updates"]) == (3, 7 - 3)
    assert first.cut["collections"]["first_order.embeddings"]["updates"] == [[7, 7]]


def test_distance_when_collections_lag_differently_then_it_is_that_of_the_part_that_is_furthest():
    """The dense part is copied, one collection is read soon after it, and another one 8 updates later."""

    @dataclass
    class Counter:
        step: int

    counters = {"soon": Counter(30), "later": Counter(5)}
    cut = Cut({}, {}, time.time(), counters, {"soon": 0, "later": 7}, counters, counts_of(counters))
    clock = _Clock(cut)
    for path, (before, meanwhile) in {"soon": (0, 1), "later": (2, 6)}.items():
        counters[path].step += before
        with clock.reading(path, []):
            counters[path].step += meanwhile
    found = clock.to_plain()
    assert found["apart"]["updates"] == 8
    assert found["apart"]["ms"] == found["collections"]["later"]["to_ms"]
    updates = {path: (x["dense_updates"], x["updates"], x["lag_updates"]) for path, x in found["collections"].items()}
    assert updates == {"soon": ([30], [[30, 31]], 0), "later": ([5], [[7, 13]], 7)}


@pytest.mark.parametrize("kind", ["mean", "exponential", "stochastic"])
def test_callback_when_it_averages_weights_then_its_average_is_published(exported, tmp_path, kind):
    averaging = {
        "mean": lambda: WeightAveraging(),
        "exponential": lambda: EMAWeightAveraging(decay=0.5),
        "stochastic": lambda: StochasticWeightAveraging(0.01, 2),
    }[kind]()
    callback, raw = ModelPublisher(tmp_path / "m", every_n_steps=4, keep=100, compact_share=100), []

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            raw.append({name: x.detach().clone() for name, x in pl_module.model.named_parameters()})

    fit(callback, waits=False, callbacks=[Notes(), averaging, callback, Waits(callback)], max_epochs=3)
    manifests = list_versions(tmp_path / "m")[1]
    for manifest in manifests:
        step, model = manifest.position["global_step"], ModelReader(tmp_path / "m", version=manifest.version).model
        name = {
            "mean": "WeightAveraging",
            "exponential": "EMAWeightAveraging",
            "stochastic": "StochasticWeightAveraging",
        }
        started = kind != "stochastic" or step > 10  # whose average begins with the second epoch
        assert manifest.cut["dense"]["average"] == (name[kind] if started else None)
        for path in ("first_order.bias", "first_order.embeddings.embedding_bags.rows"):
            seen = [x[path] for x in raw]
            if kind == "mean":
                expected = torch.stack(seen[:step]).mean(0)
            elif kind == "exponential":
                expected = seen[0]
                for x in seen[1:step]:
                    expected = 0.5 * expected + 0.5 * x
            else:  # at the start of the second epoch, and of the third
                points = [seen[9], seen[19]][: 0 if step <= 10 else 1 if step <= 20 else 2]
                expected = torch.stack(points).mean(0) if points else seen[step - 1]
            found = model.weights.get(path)
            if found is None:
                tables = [
                    model.rows_of("first_order.embeddings", t, torch.arange(n)) for t, n in (("c0", 60), ("c1", 9))
                ]
                found = torch.cat(tables)
            assert torch.allclose(found, expected, atol=1e-6), (path, step)


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
