"""``trainer.max_epochs=auto``, and the experiment that compares models by it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from recipe_helpers import TINY, TINY_DATA, plain, train_here
from recipe_tools.epochs import take_auto_epochs
from recipe_tools.jobs import training

QUIET = ["trainer=cpu", "callbacks/progress_bar=none", "logger=none"]


def test_run_when_its_epochs_are_auto_then_ends_once_validation_is_no_better_and_tests_the_best(composed, tmp_path):
    many_passes = ["data.batch_size=8", "optim.rows.lr=0.1", "optim.dense.lr=0.01"]  # it soon knows its rows by heart
    record = train_here(composed("train", *TINY, *QUIET, *many_passes, "trainer.max_epochs=auto"), tmp_path / "run")
    steps = 1000 / 8  # of an epoch: two of them are more than 200
    assert record.details["epochs"] == record.details["best_epoch"] + 2
    assert record.details["steps"] == steps * record.details["epochs"]
    assert record.metrics["val/ne"] == record.details["best_score"]
    assert record.metrics["test/ne"] == pytest.approx(record.metrics["val/ne"], rel=0.2)
    assert record.metrics["train/ne"] < record.metrics["val/ne"]


def test_run_when_an_epoch_has_few_steps_then_waits_for_two_hundred(composed, tmp_path):
    none_is_better = ["optim.rows.lr=1e-9", "optim.dense.lr=1e-9", "data.batch_size=50"]  # 20 steps an epoch
    record = train_here(composed("train", *TINY, *QUIET, *none_is_better, "trainer.max_epochs=auto"), tmp_path / "run")
    assert (record.details["epochs"], record.details["steps"]) == (1 + 10, 220)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "shadowsync", "async_ps"])
def test_two_workers_when_their_epochs_are_auto_then_both_end_after_the_same_one(run_forked, tmp_path, strategy):
    small = [*TINY_DATA[:3], *QUIET, "data.batch_size=5", "model=lr", "hydra.run.dir=out"]
    two = ["strategy.num_trainers=2"] if strategy == "shadowsync" else ["trainer.devices=2"]
    done = run_forked("train.py", f"strategy={strategy}", *two, *small, "trainer.max_epochs=auto", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    assert 2 < record["epochs"] < 100
    assert record["best_epoch"] <= record["epochs"]
    examples = 1000 * record["epochs"]
    assert record["metrics"]["examples"] == examples > 5 * record["steps"]  # of both, and those of the first alone


def test_epochs_when_auto_then_a_run_s_own_early_stopping_stays_and_a_schedule_over_the_run_is_refused(composed):
    own = plain(composed("train", "trainer.max_epochs=auto", "callbacks=[default,early_stopping]"))
    before = dict(own["callbacks"])
    take_auto_epochs(own)
    assert (own["callbacks"], own["trainer"]["max_epochs"]) == (before, 100)
    plateau = plain(composed("train", "trainer.max_epochs=auto", "optim/scheduler=plateau", "callbacks=none"))
    take_auto_epochs(plateau)
    assert list(plateau["callbacks"]) == ["early_stopping"]
    cosine = plain(composed("train", "trainer.max_epochs=auto", "optim/scheduler=cosine"))
    with pytest.raises(ValueError, match=r"auto ends a run .*cosine.* has to know its length"):
        take_auto_epochs(cosine)


def test_epochs_when_auto_and_an_engine_starts_the_workers_then_they_get_a_number(composed, monkeypatch):
    pytest.importorskip("ray")
    record = SimpleNamespace(config=plain(composed("train", "launcher=ray", "trainer.max_epochs=auto")))
    started = []
    monkeypatch.setattr(
        training, "build", lambda node: lambda function, record: started.append(record.config["trainer"])
    )
    training.launch(record)
    assert [trainer["max_epochs"] for trainer in started] == [100]


@pytest.mark.slow
def test_quick_comparison_then_four_models_stand_in_one_table(run_forked, tmp_path):
    small = [*TINY_DATA, *QUIET, "trainer.limit_train_batches=2", "hydra.sweep.dir=out"]
    done = run_forked("train.py", "experiment=quick", *small, "callbacks=[default,early_stopping]", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    table = done.stdout[done.stdout.rindex("4 jobs") :]
    assert all(f" {word} " in table for word in ("lr", "deepfm", "dcn_v2", "dlrm", "AUC", "seconds"))
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("out/*/metrics.json"))]
    assert len(records) == 4
    assert all(record["epochs"] in (100, record["best_epoch"] + 1) for record in records)  # by its own patience
