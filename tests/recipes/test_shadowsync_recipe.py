"""ShadowSync from the command line: algorithms in background and foreground, and nothing left behind."""

from __future__ import annotations

import csv
import json

import pytest
from recipe_helpers import TINY

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

QUIET = ("trainer=cpu", "callbacks/progress_bar=none", "logger=none")


def test_run_when_trained_then_reports_metrics_and_how_it_synchronised(run_forked, tmp_path):
    command = ("model=dlrm", "strategy=shadowsync", "strategy.num_trainers=2", "strategy.workers_per_trainer=2")
    done = run_forked("train.py", *command, *TINY, *QUIET, "hydra.run.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    assert record["status"] == "completed"
    assert record["metrics"]["examples"] == 1000
    assert {"test/ne", "sync/divergence", "sync/gap", "staleness/hogwild/mean"} <= record["metrics"].keys()
    command = ("evaluate.py", "ckpt_path=out/checkpoints/best.ckpt", "hydra.run.dir=again")
    done = run_forked(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "again/metrics.json").read_text())
    assert again["metrics"]["test/ne"] == record["metrics"]["test/ne"]
    command = (
        "train.py",
        "ckpt_path=out/checkpoints/last.ckpt",
        "strategy=single",
        "trainer.max_epochs=2",
        *TINY,
        *QUIET,
    )
    done = run_forked(*command, "hydra.run.dir=on", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_sweep_when_over_algorithms_and_modes_then_all_jobs_end_in_one_table(run_forked, tmp_path):
    axes = ("strategy.algorithm=easgd,bmuf", "strategy.rounds=background,foreground")
    done = run_forked(
        "train.py", "-m", "strategy=shadowsync", *axes, *TINY, *QUIET, "hydra.sweep.dir=out", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["completed"] * 4
    assert {(row["strategy.algorithm"], row["strategy.rounds"]) for row in rows} == {
        (algorithm, rounds) for algorithm in ("easgd", "bmuf") for rounds in ("background", "foreground")
    }
