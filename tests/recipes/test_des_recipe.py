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


def test_sweep_when_over_models_then_all_count_each_example_once(run_forked, tmp_path):
    axes = ("model=wide_deep,deepfm,dcn,dlrm", "strategy.placement=balanced")
    done = run_forked("train.py", "-m", *SMALL, *axes, "hydra.sweep.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out/comparison.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["completed"] * 4
    for path in tmp_path.glob("out/**/metrics.json"):
        assert metrics_in(path.parent)["examples"] == 1000
