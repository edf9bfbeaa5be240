"""Searches: trials that fail, stop and go on, and what their ranges are."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time

import optuna
import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from recipe_helpers import RECIPES, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUIET = ("logger=none", "callbacks/progress_bar=none")


def test_search_goes_on_after_a_trial_that_diverged_and_after_its_end(run_forked, tmp_path):
    """One trial of a grid of two diverges; later, two more are asked for in the same folder."""
    space = "hydra.sweeper.params={optim.dense.lr: 'choice(1e38,0.001)'}"
    for num_trials in (2, 4):
        search = ("hparams_search=optuna", f"hydra.sweeper.n_trials={num_trials}", "hydra.sweep.dir=out")
        done = run_forked("train.py", *search, space, *TINY, *QUIET, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        rows = compared(tmp_path / "out")
        assert [row["job"] for row in rows] == [str(job) for job in range(num_trials)]
        assert {row["val/ne"] for row in rows if row["optim.dense.lr"] == "1e+38"} == {""}
        best = yaml.safe_load((tmp_path / "out/optimization_results.yaml").read_text())
        assert best["best_value"] == min(float(row["val/ne"]) for row in rows if row["val/ne"])
        assert best["best_params"]["optim.dense.lr"] == 0.001


def test_search_when_it_is_killed_in_a_trial_then_the_next_command_does_the_others(run_forked, tmp_path):
    out = tmp_path / "out"
    search = ("hparams_search=optuna", "model=lr", *QUIET, "hydra.sweep.dir=out", "hydra.sweeper.n_trials=3")
    search += ("data.val_rows=1000", "data.test_rows=1000")
    killed = subprocess.Popen(
        [sys.executable, RECIPES / "train.py", *search, "data.train_rows=100_000_000"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(lambda: list(out.glob("0/metrics.json")), seconds=120)
        second = run_forked("train.py", *search, "data.train_rows=1000", folder=tmp_path)
        assert second.returncode == 1
        assert f"another process searches in {out.name}: wait until it has ended" in second.stderr
    finally:
        killed.kill()
        killed.wait()
    done = run_forked("train.py", *search, "data.train_rows=1000", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on after 1 trials" in done.stdout + done.stderr
    states = {row["job"]: row["status"] for row in compared(out)}
    assert states == {"0": "running", "1": "completed", "2": "completed"}
    lrs = [row["optim.rows.lr"] for row in compared(out)]
    assert len(set(lrs)) == 3  # the sampler does not begin again with its first proposal


def test_search_when_killed_while_its_first_trial_was_proposed_then_goes_on(run_forked, tmp_path):
    """The journal has a trial then, and not all of its settings, or none."""
    (tmp_path / "out").mkdir()
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "out/search.journal")))
    optuna.create_study(storage=storage, study_name="search").ask()
    search = ("hparams_search=optuna", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=out")
    done = run_forked("train.py", *search, *TINY, *QUIET, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["job"] for row in compared(tmp_path / "out")] == ["1"]


def test_search_when_all_trials_fail_or_it_makes_no_sense_then_says_so(run_forked, tmp_path):
    search = ("hparams_search=optuna", *TINY, *QUIET, "hydra.sweep.dir=out", "hydra.sweeper.n_trials=2")
    failing = "hydra.sweeper.params={optim.dense.lr: 'choice(1e38,2e38)'}"
    done = run_forked("train.py", *search, failing, folder=tmp_path)
    assert done.returncode == 1
    assert "none of 2 trials succeeded" in done.stdout + done.stderr
    assert len(compared(tmp_path / "out")) == 2
    for wrong, message in {
        "optim.rows.lr=choice(0.1,0.2)": "has a search over optim.dense.lr in Cat",
        "hydra.sweeper.sampler=Guesser": "optuna.samplers has no class 'Guesser'",
        "hydra.sweeper.direction=maximize": "has a search that is to minimize",
    }.items():
        done = run_forked("train.py", *search, failing, wrong, folder=tmp_path)
        assert done.returncode == 1
        assert message in done.stderr
    nothing = ("-m", "hydra/sweeper=optuna", "seed=1", *TINY, *QUIET)
    done = run_forked("train.py", *nothing, folder=tmp_path)
    assert "nothing is searched: give a key several values" in done.stderr


def test_ranges_of_a_search_then_are_those_that_the_command_line_names(run_forked, tmp_path):
    """Each kind of range, by what the journal says of it; a single value takes a key out of the search."""
    ranges = {
        "optim.rows.lr": "tag(log,interval(0.01,0.1))",
        "model.embedding_dim": "int(interval(2,4))",
        "data.batch_size": "range(16,65,16)",
        "seed": "1,2",
        "optim.dense.lr": "0.002",
    }
    search = ("hparams_search=optuna", *TINY, *QUIET, "hydra.sweep.dir=out", "hydra.sweeper.n_trials=1")
    done = run_forked("train.py", *search, *(f"{key}={value}" for key, value in ranges.items()), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "out/search.journal")))
    (trial,) = optuna.load_study(study_name=None, storage=storage).trials
    assert trial.distributions == {
        "optim.rows.lr": FloatDistribution(0.01, 0.1, log=True),
        "model.embedding_dim": IntDistribution(2, 4),
        "data.batch_size": IntDistribution(16, 64, step=16),
        "seed": CategoricalDistribution((1, 2)),
    }
    config = json.loads((tmp_path / "out/0/metrics.json").read_text())["config"]
    assert config["optim"]["dense"]["lr"] == 0.002
    assert config["optim"]["rows"]["lr"] == trial.params["optim.rows.lr"]
    assert (config["data"]["batch_size"], config["seed"]) == (trial.params["data.batch_size"], trial.params["seed"])


def compared(folder):
    with (folder / "comparison.csv").open() as file:
        return list(csv.DictReader(file))


def _wait_for(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
