"""One table: every strategy, and what it promises. A new strategy is a new row, never a special case in a test."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import scenarios
import torch
from ports import free_port, let_go
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.tuner import Tuner
from scenarios import SCENARIOS, TASKS, Stage
from torch.multiprocessing.spawn import ProcessExitedException

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    # a run that goes on elsewhere, on purpose
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

# What any strategy owes: the run takes place on as many workers as asked for, and the main process gets the result.
BASE = frozenset({"fit", "weights", "metrics"})
# Everything that Lightning does with one worker works with several.
COMPLETE = BASE | {"evaluate", "fast_dev_run", "test_best", "limits", "early_stopping", "loggers", "weights_only"}
# Several workers are as good as one with all their batches.
SYNCHRONOUS = COMPLETE | {"exact", "accumulate", "clipping", "schedules", "resume", "fit_again"}
# What our launcher gives, whatever the strategy: all results are back, and the trainer is of use again.
HOME = frozenset({"callbacks", "logged_metrics", "all_predictions", "uneven_evaluation", "crash"})


@dataclass(frozen=True)
class Row:
    """A strategy, the number of its workers, and its promises.

    ``strategy``: a registered name, or ``module:function`` for what the function returns.
    ``task``: what it trains, ``regression`` (dense layers), ``recommendation`` (with embedding tables; ``plain`` and
    ``bfloat16`` without momentum), or ``fields``
    (with tables and a layer that can be cut by fields).
    ``elsewhere``: the scenarios that are played in a main process of their own, all at once.
    ``torchrun``: whether torchrun starts the workers there.
    """

    strategy: str
    devices: int
    promises: frozenset[str]
    task: str = "regression"
    elsewhere: tuple[str, ...] = ()
    torchrun: bool = False

    def stage(self, folder: Path) -> Stage:
        return Stage(self.strategy, self.devices, folder, self.task)

    def __str__(self) -> str:
        return f"{self.strategy.rpartition(':')[2]}-{self.devices}-{self.task}" + "-torchrun" * self.torchrun


AVERAGES = frozenset({"averages"})  # Callbacks that average weights work.
LOADERS = frozenset({"loader_workers"})  # Ranks may fork DataLoader processes.

# Rows in bfloat16 are rounded to one of two neighbours: several workers are as good as one, and not equal to it.
ROUNDED = BASE | {"resume"}
REFERENCES = {task: Row("auto", 1, ROUNDED if task == "bfloat16" else SYNCHRONOUS | HOME, task=task) for task in TASKS}
OURS = SYNCHRONOUS | HOME | {"kill"}
UNDER_TORCHRUN = {"task": "recommendation", "elsewhere": ("load_by_workers",), "torchrun": True}
TABLE = (
    *REFERENCES.values(),
    Row("ddp_forkserver", 1, BASE | {"exact", "resume", "fit_again", "crash", "kill"}),
    Row("factories:ddp_by_yaml", 2, OURS | AVERAGES | {"refuses_uneven"}, task="recommendation"),
    Row("des", 1, BASE | {"exact", "resume"}, task="fields"),
    Row(
        "factories:des_by_yaml", 2, OURS | LOADERS | {"refuses_averages", "rows_alone", "refuses_tuner"}, task="fields"
    ),
    # Each worker goes its own way and is evaluated with its own weights.
    Row("factories:free_workers", 2, (COMPLETE | HOME | {"kill", "free"}) - {"test_best", "weights_only"}),
    Row(
        "factories:shadowsync_trainers",
        1,
        BASE | {"exact", "accumulate", "clipping", "schedules", "resume", "fit_again", "crash", "kill"},
        task="recommendation",
    ),
    Row("factories:shadowsync_trainers", 2, BASE | {"free"}),
    Row(
        "factories:shadowsync_trainers",
        2,
        COMPLETE | HOME | AVERAGES | LOADERS | {"outlives", "free"},
        task="recommendation",
    ),
    Row("factories:shadowsync_workers", 4, BASE | {"test_best"}, task="recommendation"),
    Row("factories:shadowsync_foreground", 2, BASE, task="recommendation"),
    Row("factories:shadowsync_ma", 2, BASE | {"test_best", "free"}, task="recommendation"),
    Row("factories:shadowsync_bmuf", 2, BASE | {"test_best"}, task="recommendation"),
    Row(
        "factories:het_without_staleness",
        2,
        OURS | AVERAGES | {"refuses_uneven", "rows_alone", "refuses_tuner"},
        task="recommendation",
    ),
    Row("het", 1, BASE | {"exact", "resume", "accumulate", "limits"}, task="recommendation"),
    Row("factories:het_by_messages", 2, BASE | LOADERS | {"exact"}, task="recommendation"),
    Row("het", 2, BASE | {"test_best", "weights_only"}, task="recommendation"),
    Row("het_hybrid", 2, BASE | {"exact"}, task="recommendation"),
    Row("async_ps", 1, BASE | {"exact", "resume", "accumulate", "clipping", "schedules", "fit_again"}, task="plain"),
    Row("factories:async_ps_by_yaml", 2, BASE | AVERAGES | {"test_best", "crash", "free"}, task="plain"),
    Row("hierarchical", 1, COMPLETE | {"exact", "resume", "schedules", "fit_again", "crash"}),
    Row("factories:hierarchical_nets", 2, BASE | {"test_best", "free"}),
    Row("factories:hierarchical_groups", 2, BASE | {"test_best"}),
    Row("factories:ddp_by_yaml", 2, ROUNDED, task="bfloat16"),
    Row("factories:shadowsync_trainers", 2, BASE, task="bfloat16"),
    Row("factories:het_by_messages", 2, BASE, task="bfloat16"),
    Row("factories:async_ps_by_yaml", 2, BASE, task="bfloat16"),
    # Combinations of parts that no paper has.
    Row("factories:shadowsync_cached", 1, BASE | {"exact", "resume"}, task="recommendation"),
    Row("factories:shadowsync_cached", 2, BASE | {"test_best", "free"}, task="recommendation"),
    Row("factories:async_ps_cached", 1, BASE | {"exact"}, task="plain"),
    Row("factories:async_ps_cached", 2, BASE | {"free"}, task="plain"),
    Row("factories:hierarchical_cached", 2, BASE | {"free"}),
    Row("factories:ddp_free", 1, BASE | {"exact"}, task="recommendation"),
    Row("factories:ddp_free", 2, BASE | {"refuses_uneven"}, task="recommendation"),
    Row("factories:shadowsync_workers", 2, LOADERS, **UNDER_TORCHRUN),  # two workers of one trainer
    Row("factories:shadowsync_ma", 2, LOADERS, **UNDER_TORCHRUN),
    Row("factories:shadowsync_bmuf", 2, LOADERS, **UNDER_TORCHRUN),
    Row("factories:het_by_messages", 2, LOADERS, **UNDER_TORCHRUN),
)

Observe = Callable[[Row, str], dict[str, Any]]


def promised(promise: str) -> pytest.MarkDecorator:
    """One test per row that makes this promise."""
    rows = [row for row in TABLE if promise in row.promises]
    return pytest.mark.parametrize("row", rows, ids=str)


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Observe:
    """What a row shows in a scenario; each is played once."""
    seen: dict[tuple[Row, str], dict[str, Any]] = {}

    def play(row: Row, scenario: str) -> dict[str, Any]:
        if (row, scenario) not in seen:
            folder = tmp_path_factory.mktemp(str(row))
            if row.elsewhere:
                together = [x for x in TABLE if x.torchrun] if row.torchrun else [row]  # torchrun takes long to start
                for other, observed in play_elsewhere(together, folder).items():
                    seen.update({(other, name): value for name, value in observed.items()})
            else:
                with patch.dict(os.environ):  # Lightning's own strategies leave variables behind
                    seen[row, scenario] = SCENARIOS[scenario](row.stage(folder))
        return seen[row, scenario]

    return play


def play_elsewhere(rows: Sequence[Row], folder: Path) -> dict[Row, dict[str, dict[str, Any]]]:
    arguments: list[str] = []
    for i, row in enumerate(rows):
        (folder / str(i)).mkdir()
        arguments += ["/", row.strategy, str(row.devices), row.task, str(folder / str(i)), *row.elsewhere]
    launcher: tuple[str, ...] = ()
    if rows[0].torchrun:
        launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={rows[0].devices}")
        launcher += (f"--master-port={free_port()}",)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, scenarios.__file__, *arguments]
    try:
        subprocess.run(command, check=True, timeout=190, env=environment)
    finally:
        let_go()
    return {row: torch.load(folder / str(i) / "observed.pt", weights_only=False) for i, row in enumerate(rows)}


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of float32 sums: a mean of halves against a mean of all, over 16 updates."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@promised("fit")
def test_run_when_fitted_then_took_place_on_all_workers(observe, row):
    seen = observe(row, "fit")
    assert seen["callback_metrics"]["world_size"] == row.devices
    assert seen["state"] == ("finished", "fit")


@promised("weights")
def test_weights_when_fitted_then_come_back(observe, row):
    seen = observe(row, "fit")
    assert seen["state_dict"].keys() == seen["saved"].keys() == observe(REFERENCES[row.task], "fit")["saved"].keys()
    assert seen["trained"]
    reference = observe(REFERENCES[row.task], "fit")["saved"]
    assert all(value.dtype == reference[name].dtype for name, value in seen["state_dict"].items())
    if "exact" in row.promises:  # others may save an average, and give back one replica
        for name, trained in seen["state_dict"].items():
            assert torch.equal(trained, seen["saved"][name]), name


@promised("metrics")
def test_metrics_when_fitted_then_come_back(observe, row):
    seen, reference = observe(row, "fit"), observe(REFERENCES[row.task], "fit")
    assert Path(seen["best_path"]).name in {"epoch=0.ckpt", "epoch=1.ckpt"}
    assert seen["callback_metrics"].keys() == reference["callback_metrics"].keys()
    if "exact" in row.promises:
        for name in ("train/loss", "val/loss"):
            assert seen["callback_metrics"][name] == pytest.approx(reference["callback_metrics"][name], rel=1e-5)


@promised("logged_metrics")
def test_logged_metrics_when_fitted_then_come_back(observe, row):
    seen, reference = observe(row, "fit"), observe(REFERENCES[row.task], "fit")
    assert seen["progress"] == reference["progress"] == (2, 16)
    assert seen["logged_metrics"].keys() == reference["logged_metrics"].keys()
    assert seen["logged_metrics"]["val/loss"] == pytest.approx(seen["callback_metrics"]["val/loss"])


@promised("callbacks")
def test_callbacks_when_fitted_then_know_the_best_score(observe, row):
    seen = observe(row, "fit")
    assert seen["best_score"].item() == pytest.approx(seen["callback_metrics"]["val/loss"])
    assert seen["early_stopping"].item() == pytest.approx(seen["callback_metrics"]["val/loss"])


@promised("exact")
def test_workers_when_sixteen_updates_are_done_then_equal_one_with_all_their_batches(observe, row):
    assert_same(observe(row, "fit")["parameters"], observe(REFERENCES[row.task], "fit")["parameters"])


@promised("accumulate")
def test_half_batches_when_accumulated_then_equal_whole_ones(observe, row):
    seen = observe(row, "accumulate")
    assert seen["global_step"] == 16
    assert_same(seen["parameters"], observe(REFERENCES[row.task], "fit")["parameters"])


@promised("evaluate")
def test_metrics_when_evaluated_then_equal_those_of_one_worker(observe, row):
    seen, reference = observe(row, "evaluate"), observe(REFERENCES[row.task], "evaluate")
    assert seen["unchanged"]
    assert seen["validate"] == [{"val/loss": pytest.approx(reference["validate"][0]["val/loss"], rel=1e-5)}]
    assert seen["test"] == [{"test/loss": pytest.approx(reference["test"][0]["test/loss"], rel=1e-5)}]


@promised("all_predictions")
def test_predictions_when_made_then_all_come_back_in_order(observe, row):
    assert_same(observe(row, "evaluate")["predictions"], observe(REFERENCES[row.task], "evaluate")["predictions"])


@promised("test_best")
def test_best_checkpoint_when_asked_for_by_name_then_is_tested(observe, row):
    seen = observe(row, "test_the_best")
    assert seen["test"] == pytest.approx(seen["best_score"], rel=1e-5)


@promised("fast_dev_run")
def test_fast_dev_run_when_asked_for_then_takes_one_step(observe, row):
    assert observe(row, "fast_dev_run") == {"global_step": 1, "trained": True}


@promised("resume")
@pytest.mark.parametrize("step", [5, 8])
def test_run_when_resumed_then_ends_where_an_uninterrupted_one_does(observe, row, step):
    seen = observe(row, "resume")[step]
    assert seen["progress"] == (2, 16)
    assert_same(seen["parameters"], observe(row, "fit")["parameters"])


@promised("rows_alone")
def test_model_when_it_has_no_optimizer_then_its_rows_are_trained_saved_and_loaded(observe, row):
    seen, reference = (observe(x, "resume_without_optimizer") for x in (row, REFERENCES[row.task]))
    assert seen["epochs"] == 2
    assert_same(seen["parameters"], reference["parameters"])


@promised("fit_again")
def test_trainer_when_it_fits_again_then_goes_on(observe, row):
    seen, reference = observe(row, "fit_again"), observe(REFERENCES[row.task], "fit_again")
    assert seen["progress"] == reference["progress"] == (2, 16)
    assert_same(seen["parameters"], reference["parameters"])


@promised("refuses_tuner")
def test_tuner_when_workers_would_keep_what_it_finds_then_refused_by_name_and_the_trainer_is_usable(row, tmp_path):
    stage = row.stage(tmp_path)
    task, trainer = stage.make_task(), stage.trainer(max_epochs=1)
    with pytest.raises(TypeError, match=r"Tuner\.lr_find .* Find the learning rate on one device"):
        Tuner(trainer).lr_find(task, datamodule=stage.rows(), update_attr=False)
    assert not trainer.callbacks
    trainer.callbacks.append(LearningRateFinder(update_attr=False))
    with pytest.raises(TypeError, match=r"callback LearningRateFinder .* (DES|HET)Strategy cannot\. Find the value"):
        trainer.fit(task, datamodule=stage.rows())


@promised("crash")
def test_error_when_a_rank_fails_then_it_arrives_and_the_trainer_is_usable(row, tmp_path):
    seen = scenarios.crash(row.stage(tmp_path))
    with pytest.raises(ZeroDivisionError, match=f"on rank {row.devices - 1}"):
        raise seen["error"]
    assert (seen["status"], seen["trained"]) == ("finished", True)


@promised("kill")
def test_worker_when_killed_then_the_error_names_it_and_the_trainer_is_usable(row, tmp_path):
    seen = scenarios.kill(row.stage(tmp_path))
    with pytest.raises(ProcessExitedException, match=rf"Worker {row.devices - 1} was ended by SIGKILL"):
        raise seen["error"]
    assert seen["status"] == "finished"


@promised("outlives")
def test_worker_when_killed_then_the_others_train_on(row, tmp_path):
    assert scenarios.kill(row.stage(tmp_path)) == {"error": None, "status": "finished"}


@promised("free")
def test_worker_when_another_one_is_held_then_runs_ahead(row, tmp_path):
    assert scenarios.straggle(row.stage(tmp_path)) == {"overtaken": True, "status": "finished"}


@promised("refuses_uneven")
def test_training_data_when_uneven_then_refused(row, tmp_path):
    seen = scenarios.uneven_fit(row.stage(tmp_path))
    with pytest.raises(ValueError, match=r"same number of training batches.* got \[4, 3\]"):
        raise seen["error"]


@promised("free")
def test_training_data_when_uneven_then_all_of_it_is_trained_on(row, tmp_path):
    assert scenarios.uneven_fit(row.stage(tmp_path)) == {"error": None, "status": "finished"}


@promised("uneven_evaluation")
def test_metric_when_ranks_have_different_numbers_of_examples_then_is_weighted_by_them(observe, row):
    seen, reference = (observe(x, "uneven_evaluation") for x in (row, REFERENCES[row.task]))
    assert seen["val/loss"] == pytest.approx(reference["val/loss"], rel=1e-5)


@promised("loader_workers")
def test_batches_when_processes_of_each_rank_load_them_then_the_run_trains_on_them_and_ends(observe, row):
    seen = observe(row, "load_by_workers")
    assert (seen["world_size"], seen["trained"]) == (row.devices, True)
    assert seen["progress"] == (2, 16)


@promised("limits")
def test_limits_when_set_then_hold(observe, row):
    """Epochs, steps, and batches of validation in the last epoch."""
    assert observe(row, "limits") == {
        "limit_batches": (2, 6, 2),
        "overfit_batches": (2, 4, 2),
        "max_steps": (1, 5, 2 * 8),
    }


@promised("clipping")
def test_gradients_when_clipped_then_train_as_in_one_worker(observe, row):
    assert_same(observe(row, "clip")["parameters"], observe(REFERENCES[row.task], "clip")["parameters"])


@promised("clipping")
def test_gradients_when_clipped_then_train_otherwise_than_unclipped(observe, row):
    seen, unclipped = (observe(row, x)["parameters"] for x in ("clip", "save_weights_only"))
    assert not torch.allclose(seen, unclipped, rtol=1e-3)


@promised("schedules")
def test_learning_rate_when_it_changes_by_steps_then_does_so_as_in_one_worker(observe, row):
    seen, reference = (observe(x, "schedule") for x in (row, REFERENCES[row.task]))
    assert seen["lr"] == pytest.approx(reference["lr"]) == pytest.approx(0.02 / 2**2)
    assert_same(seen["parameters"], reference["parameters"])


@promised("loggers")
def test_logger_when_given_then_writes_each_step_once(observe, row):
    seen, reference = (observe(x, "log_to_files") for x in (row, REFERENCES[row.task]))
    assert seen["steps"] == reference["steps"] == list(range(8))
    assert (seen["folders"], seen["hyperparameters"]) == (["version_0"], True)
    if "exact" in row.promises:
        assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-5)


@promised("early_stopping")
def test_run_when_nothing_gets_better_then_stops_early(observe, row):
    assert observe(row, "stop_early") == {"progress": (3, 24)}


@promised("weights_only")
def test_checkpoint_when_of_weights_only_then_is_read_with_and_without_a_trainer(observe, row):
    seen = observe(row, "save_weights_only")
    assert "state_dict" in seen["keys"]
    assert not seen["keys"] & {"optimizer_states", "lr_schedulers"}
    assert seen["restored"] or "exact" not in row.promises
    again, at_once = seen["val/loss"]
    assert again == pytest.approx(at_once, rel=1e-5)


@promised("averages")
def test_average_when_validated_and_saved_then_comes_back(observe, row):
    seen, reference = (observe(x, "average_weights") for x in (row, REFERENCES[row.task]))
    assert seen["world_size"] == row.devices
    assert seen["state_dict"].keys() == seen["saved"].keys() == reference["state_dict"].keys()
    for name, average in seen["state_dict"].items():
        assert torch.equal(average, seen["saved"][name]) or name.endswith(".step"), name  # a copy's are not averaged
    validated, at_the_end = seen["val/loss"]
    assert validated == pytest.approx(at_the_end, rel=1e-5)
    if "exact" in row.promises:
        for name, average in dense_part(seen["state_dict"]).items():
            assert_same(average, reference["state_dict"][name])
        for name, tensor in seen["resumed"].items():
            assert_same(tensor, seen["state_dict"][name])


@promised("averages")
def test_weights_when_averaged_stochastically_then_come_back(observe, row):
    seen, reference = (observe(x, "average_stochastically") for x in (row, REFERENCES[row.task]))
    assert seen["world_size"] == row.devices
    assert seen["state_dict"].keys() == reference["state_dict"].keys()
    for name, average in dense_part(seen["state_dict"]).items():
        assert average.isfinite().all(), name
        if "exact" in row.promises:
            assert_same(average, reference["state_dict"][name])


def dense_part(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What every strategy averages; rows are as trained where they are in stores."""
    return {name: tensor for name, tensor in state.items() if "embedding_bags" not in name}


@promised("refuses_averages")
@pytest.mark.parametrize("scenario", ["average_weights", "average_stochastically"])
def test_callback_when_it_averages_a_model_that_is_cut_then_refused_by_name(row, scenario, tmp_path):
    with pytest.raises(TypeError, match=r"callback \w*WeightAveraging averages .* strategy=\w+ cuts the model"):
        SCENARIOS[scenario](row.stage(tmp_path))


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_strategy_when_it_has_not_run_then_can_be_pickled_and_torn_down_repeatedly(row, tmp_path):
    stage = row.stage(tmp_path)
    strategy = stage.make_strategy()
    assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)
    trainer = stage.trainer()
    for _ in range(2):
        trainer.strategy.teardown()
