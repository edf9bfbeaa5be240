"""Twelve jobs of one command: nothing is left of them, and each is what it would have been alone."""

from __future__ import annotations

import json

import pytest
from recipe_helpers import TINY_DATA, run_watched

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]

SMALL = (*TINY_DATA, "logger=none", "callbacks/progress_bar=none")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """``-m`` over both strategies, two models and three seeds."""
    folder = tmp_path_factory.mktemp("long_sweep")
    axes = ("strategy=single,ddp", "model=deepfm,lr", "seed=0,1,2")
    done, traces = run_watched("-m", *SMALL, *axes, "hydra.sweep.dir=out", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "out", traces


def metrics_of(folder):
    record = json.loads((folder / "metrics.json").read_text())
    assert record["status"] == "completed"
    return {name: value for name, value in record["metrics"].items() if name not in ("eps", "examples")}


def test_twelve_jobs_leave_no_process_port_file_or_shared_memory(sweep):
    folder, traces = sweep
    assert len(list(folder.glob("*/metrics.json"))) == 12
    assert len(traces.ports_meanwhile) >= 6  # each launch of two workers has a port of its own
    assert traces.left_behind() == {}


@pytest.mark.parametrize(("strategy", "model"), [("single", "lr"), ("ddp", "deepfm")])
def test_last_jobs_equal_the_same_runs_alone(sweep, strategy, model, run_forked, tmp_path):
    """The last seed: up to eleven jobs ran in the process before it."""
    folder, _ = sweep
    (job,) = folder.glob(f"*_{model}-synthetic-{strategy}_seed-2")
    done = run_forked(
        "train.py", *SMALL, f"strategy={strategy}", f"model={model}", "seed=2", "hydra.run.dir=out", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert metrics_of(job) == metrics_of(tmp_path / "out")
