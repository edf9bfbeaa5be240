"""HET and its baselines from the command line."""

from __future__ import annotations

import csv
import json

import pytest
from recipe_helpers import TINY, TINY_DATA

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

QUIET = ("trainer=cpu", "callbacks/progress_bar=none", "logger=none")


def table(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_sweep_when_over_models_then_all_train_with_cached_rows(run_forked, tmp_path):
    axis = "model=wide_deep,dlrm"
    small = (*TINY_DATA, "model.embedding_dim=4", *QUIET)
    done = run_forked("train.py", "-m", "strategy=het", axis, *small, "hydra.sweep.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in table(tmp_path / "out/comparison.csv")] == ["completed"] * 2
    records = [json.loads(path.read_text()) for path in tmp_path.glob("out/**/metrics.json")]
    assert len(records) == 2
    for record in records:
        assert record["metrics"]["examples"] == 1000
        assert {"test/ne", "cache/hit_rate", "cache/clock_lag/mean", "comm/rows_bytes"} <= record["metrics"].keys()


def test_checkpoint_when_of_each_mode_then_the_others_go_on_from_it(run_forked, tmp_path):
    algorithms = ("het", "hybrid")
    sweep = ("train.py", "-m", "strategy=het", *TINY, *QUIET)
    done = run_forked(*sweep, f"strategy.algorithm={','.join(algorithms)}", "hydra.sweep.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path / "out/comparison.csv")
    assert [(row["strategy.algorithm"], row["status"]) for row in rows] == [
        (algorithm, "completed") for algorithm in algorithms
    ]
    (saved,) = tmp_path.glob("out/1_*/checkpoints/last.ckpt")
    more = (f"ckpt_path='{saved}'", "trainer.max_epochs=2", "strategy=het,async_ps", "hydra.sweep.dir=on")
    done = run_forked("train.py", "-m", *TINY, *QUIET, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in table(tmp_path / "on/comparison.csv")] == ["completed"] * 2
