"""One table: every strategy, and what it promises. A new strategy is a new row, never a special case in a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from scenarios import SCENARIOS, Stage

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
# Several workers are as good as one with all their batches, and everything that Lightning does with one works.
SYNCHRONOUS = BASE | {"exact", "accumulate", "evaluate", "fast_dev_run", "resume", "test_best", "fit_again"}


@dataclass(frozen=True)
class Row:
    """A strategy, the number of its workers, and its promises.

    ``elsewhere``: the scenarios that are played in a main process of their own, all at once.
    """

    strategy: str
    devices: int
    promises: frozenset[str]
    elsewhere: tuple[str, ...] = ()


TABLE = (
    Row("auto", 1, SYNCHRONOUS | {"callbacks", "logged_metrics", "all_predictions", "crash"}),
    # Runs the command line again, returns rank 0's predictions only, kills the main process when another rank fails.
    Row("ddp", 2, SYNCHRONOUS | {"callbacks", "logged_metrics"}, elsewhere=tuple(SCENARIOS)),
    # Leaves variables in the environment, starts anew for each request, loses callbacks and logged metrics, fits once.
    Row("ddp_spawn", 2, BASE | {"exact"}, elsewhere=("fit",)),
    Row("ddp_forkserver", 1, SYNCHRONOUS | {"callbacks", "logged_metrics", "all_predictions", "crash"}),
    Row("ddp_forkserver", 2, SYNCHRONOUS | {"callbacks", "logged_metrics", "all_predictions", "crash"}),
)
REFERENCE = TABLE[0]

Observe = Callable[[Row, str], dict[str, Any]]


def promised(promise: str) -> pytest.MarkDecorator:
    """One test per row that makes this promise."""
    rows = [row for row in TABLE if promise in row.promises]
    return pytest.mark.parametrize("row", rows, ids=[f"{row.strategy}-{row.devices}" for row in rows])


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Observe:
    """What a row shows in a scenario; each is played once."""
    seen: dict[tuple[Row, str], dict[str, Any]] = {}

    def play(row: Row, scenario: str) -> dict[str, Any]:
        if (row, scenario) not in seen:
            folder = tmp_path_factory.mktemp(row.strategy)
            if row.elsewhere:
                seen.update({(row, name): value for name, value in play_elsewhere(row, folder).items()})
            else:
                seen[row, scenario] = SCENARIOS[scenario](Stage(row.strategy, row.devices, folder))
        return seen[row, scenario]

    return play


def play_elsewhere(row: Row, folder: Path) -> dict[str, Any]:
    command = [sys.executable, scenarios.__file__, row.strategy, str(row.devices), str(folder), *row.elsewhere]
    subprocess.run(command, check=True, timeout=150)
    return torch.load(folder / "observed.pt", weights_only=False)


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
    assert torch.equal(seen["weight"], seen["saved"])


@promised("metrics")
def test_metrics_when_fitted_then_come_back(observe, row):
    seen, reference = observe(row, "fit"), observe(REFERENCE, "fit")
    assert Path(seen["best_path"]).name == Path(reference["best_path"]).name
    for name in ("train/loss", "val/loss"):
        assert seen["callback_metrics"][name] == pytest.approx(reference["callback_metrics"][name], rel=1e-5)


@promised("logged_metrics")
def test_logged_metrics_when_fitted_then_come_back(observe, row):
    seen, reference = observe(row, "fit"), observe(REFERENCE, "fit")
    assert seen["progress"] == reference["progress"] == (2, 16)
    assert seen["logged_metrics"].keys() == reference["logged_metrics"].keys()
    assert seen["logged_metrics"]["val/loss"] == pytest.approx(reference["logged_metrics"]["val/loss"], rel=1e-5)


@promised("callbacks")
def test_callbacks_when_fitted_then_know_the_best_score(observe, row):
    seen = observe(row, "fit")
    assert seen["best_score"].item() == pytest.approx(seen["callback_metrics"]["val/loss"])
    assert seen["early_stopping"].item() == pytest.approx(seen["callback_metrics"]["val/loss"])


@promised("exact")
def test_workers_when_sixteen_updates_are_done_then_equal_one_with_all_their_batches(observe, row):
    assert_same(observe(row, "fit")["parameters"], observe(REFERENCE, "fit")["parameters"])


@promised("accumulate")
def test_half_batches_when_accumulated_then_equal_whole_ones(observe, row):
    seen = observe(row, "accumulate")
    assert seen["global_step"] == 16
    assert_same(seen["parameters"], observe(REFERENCE, "fit")["parameters"])


@promised("evaluate")
def test_metrics_when_evaluated_then_equal_those_of_one_worker(observe, row):
    seen, reference = observe(row, "evaluate"), observe(REFERENCE, "evaluate")
    assert seen["unchanged"]
    assert seen["validate"] == [{"val/loss": pytest.approx(reference["validate"][0]["val/loss"], rel=1e-5)}]
    assert seen["test"] == [{"test/loss": pytest.approx(reference["test"][0]["test/loss"], rel=1e-5)}]


@promised("all_predictions")
def test_predictions_when_made_then_all_come_back_in_order(observe, row):
    assert_same(observe(row, "evaluate")["predictions"], observe(REFERENCE, "evaluate")["predictions"])


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


@promised("fit_again")
def test_trainer_when_it_fits_again_then_goes_on(observe, row):
    seen, reference = observe(row, "fit_again"), observe(REFERENCE, "fit_again")
    assert seen["progress"] == reference["progress"] == (2, 16)
    assert_same(seen["parameters"], reference["parameters"])


@promised("crash")
def test_error_when_a_rank_fails_then_it_arrives_and_the_trainer_is_usable(row, tmp_path):
    seen = scenarios.crash(Stage(row.strategy, row.devices, tmp_path))
    with pytest.raises(ZeroDivisionError, match=f"on rank {row.devices - 1}"):
        raise seen["error"]
    assert (seen["status"], seen["trained"]) == ("finished", True)
