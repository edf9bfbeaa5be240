"""Hydra's plugins for parallel jobs, where ``lightning-recsys[sweeps]`` is installed."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from recipe_helpers import MARK, RECIPES, TINY, TINY_DATA, _marked, run_recipe, run_watched

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]
QUIET = ("logger=none", "callbacks/progress_bar=none")


def needs(plugin: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(plugin) is None
    return pytest.mark.skipif(missing, reason=f"{plugin} is not installed: pip install lightning-recsys[sweeps]")


def metrics_below(folder):
    """Job -> metrics, without what depends on the clock."""
    records = [json.loads(path.read_text()) for path in folder.glob("*/metrics.json")]
    assert {record["status"] for record in records} == {"completed"}
    return {
        record["job"]: {name: value for name, value in record["metrics"].items() if not name.startswith("eps")}
        for record in records
    }


@needs("hydra_plugins.hydra_joblib_launcher")
def test_parallel_jobs_equal_consecutive_ones_and_leave_nothing(tmp_path):
    jobs = ("-m", *TINY_DATA, *QUIET, "model=lr", "strategy=single,ddp", "seed=0,1", "hydra.sweep.dir=out")
    for name, launcher in (("joblib", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")), ("basic", ())):
        (tmp_path / name).mkdir()
        done, traces = run_watched(*jobs, *launcher, folder=tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "4 jobs" in done.stdout
        assert traces.left_behind() == {}
    parallel, consecutive = (metrics_below(tmp_path / name / "out") for name in ("joblib", "basic"))
    assert parallel.keys() == {0, 1, 2, 3}
    assert parallel == consecutive


@needs("hydra_plugins.hydra_submitit_launcher")
def test_jobs_of_submitit_then_train_in_processes_that_know_nothing_of_the_recipes_folder(tmp_path):
    jobs = ("-m", *TINY_DATA, *QUIET, "model=lr", "strategy=ddp", "hydra.sweep.dir=out")
    done = run_recipe("train.py", *jobs, "hydra/launcher=submitit_local", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 job" in done.stdout
    assert metrics_below(tmp_path / "out").keys() == {0}


@needs("hydra_plugins.hydra_joblib_launcher")
@pytest.mark.parametrize(("number", "strategy"), [(signal.SIGINT, "single"), (signal.SIGKILL, "ddp")])
def test_parallel_jobs_when_interrupted_or_killed_then_no_process_is_left(tmp_path, number, strategy):
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    overrides = ("model=lr", f"strategy={strategy}", "data.train_rows=1000000", "seed=0,1,2", "hydra.sweep.dir=out")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    sweep = subprocess.Popen(
        [sys.executable, RECIPES / "train.py", "-m", *overrides, *QUIET, *launcher],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, as a terminal gives it
    )
    try:
        _wait_for(lambda: len(list(out.glob("*/metrics.json"))) == 2, seconds=60)
        assert len(_marked(mark)) > 2
        (os.killpg if number == signal.SIGINT else os.kill)(sweep.pid, number)
        assert sweep.wait(20) == -number
        _wait_for(lambda: not _marked(mark), seconds=20)
    finally:
        for process in _marked(mark):
            process.kill()
        sweep.wait()


def _wait_for(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@needs("hydra_plugins.hydra_joblib_launcher")
def test_parallel_jobs_refuse_a_strategy_that_runs_the_command_line_again(tmp_path):
    overrides = ("trainer=cpu", "trainer.strategy=ddp", "trainer.devices=2", "hydra.sweep.dir=out")
    done = run_recipe("train.py", "-m", *TINY, *QUIET, *overrides, "hydra/launcher=joblib", folder=tmp_path)
    assert done.returncode == 1
    with (tmp_path / "out/comparison.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["error"].startswith("ValueError: trainer.strategy: DDPStrategy starts its workers by running")
