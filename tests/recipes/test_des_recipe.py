"""DES from the command line."""

from __future__ import annotations

import csv
import json

import pyarrow.parquet as parquet
import pytest
import torch
from recipe_helpers import TINY_DATA
from recipe_tools.build import build_datamodule, build_task, build_trainer

from lightning_recsys.checkpoints import read_checkpoint, read_description

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


def predictions_when_the_model_was_cut_are_those_of_the_whole(path, run_forked, folder) -> None:
    done = run_forked("predict.py", f"checkpoint={path}", "out=predictions.parquet", folder=folder)
    assert done.returncode == 0, done.stderr
    checkpoint = read_description(path)
    config = checkpoint["hyper_parameters"]["config"]
    data = build_datamodule(config, checkpoint=checkpoint)
    trainer = build_trainer(config, strategy="auto", devices=1, logger=False, enable_progress_bar=False)
    task = build_task(config, data)
    task.load_state_dict(read_checkpoint(path)["state_dict"])
    expected = torch.cat(trainer.predict(task, datamodule=data))
    found = torch.tensor(parquet.read_table(folder / "predictions.parquet")["prediction"].to_pylist())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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
    predictions_when_the_model_was_cut_are_those_of_the_whole(trained / "checkpoints/last.ckpt", run_forked, tmp_path)
    more = ("model=deepfm", "trainer.devices=3", "trainer.max_epochs=2", ckpt_path, "hydra.run.dir=more")
    done = run_forked("train.py", *SMALL, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert metrics_in(tmp_path / "more")["examples"] == 1000, "of the second epoch alone"
