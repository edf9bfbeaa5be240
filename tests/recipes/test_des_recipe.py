"""DES from the command line."""

from __future__ import annotations

import csv
import json

import pytest
from recipe_helpers import TINY_DATA

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = (
    "strategy=des",
    *TINY_DATA,
    "model.embedding_dim=4",
    "trainer=cpu",
    "callbacks/progress_bar=none",
    "logger=none",
)


def metrics_in(folder) -> dict[str, float]:
    record = json.loads((folder / "metrics.json").read_text())
    assert record["status"] == "completed"
    return record["metrics"]


def test_sweep_when_over_models_then_all_count_each_example_once_and_more_processes_go_on(run_forked, tmp_path):
    axes = ("model=deepfm,dlrm", "strategy.field_placement=balanced")
    done = run_forked("train.py", "-m", *SMALL, *axes, "hydra.sweep.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out/comparison.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["completed"] * 2
    for path in tmp_path.glob("out/**/metrics.json"):
        assert metrics_in(path.parent)["examples"] == 1000
    trained = next(path.parents[1] for path in tmp_path.glob("out/**/last.ckpt") if "deepfm" in str(path))
    ckpt_path = f"ckpt_path={trained}/checkpoints/last.ckpt"
    done = run_forked("evaluate.py", ckpt_path, "hydra.run.dir=again", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert metrics_in(tmp_path / "again")["test/ne"] == pytest.approx(metrics_in(trained)["test/ne"], rel=1e-6)
    more = ("model=deepfm", "trainer.devices=3", "trainer.max_epochs=2", ckpt_path, "hydra.run.dir=more")
    done = run_forked("train.py", *SMALL, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert metrics_in(tmp_path / "more")["examples"] == 1000, "of the second epoch alone"
