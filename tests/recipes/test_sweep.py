from __future__ import annotations

import csv
import json
import os
import re
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from recipe_helpers import TINY, run_watched, train_here
from recipe_tools import sweep as sweep_tools
from recipe_tools.record import isolated_job
from recipe_tools.report import METRICS
from recipe_tools.sweep import (
    SweepComparison,
    comparison,
    for_people,
    print_comparison,
    read_records,
    write_csv,
    write_markdown,
)
from rich.console import Console


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Four jobs in one command: workers and no workers, right and wrong."""
    folder = tmp_path_factory.mktemp("sweep")
    done, traces = run_watched(
        "-m",
        *TINY,
        "hydra.sweep.dir=out",
        "strategy=ddp,single",
        "optim.rows.lr=0.02,-1",
        folder=folder,
    )
    return folder / "out", done, traces


@pytest.mark.distributed
def test_sweep_leaves_nothing_behind(sweep):
    _, _, traces = sweep
    assert traces.ports_meanwhile  # so the watching works
    assert traces.left_behind() == {}


@pytest.mark.distributed
def test_sweep_ends_in_one_table_of_all_jobs(sweep):
    folder, done, _ = sweep
    with (folder / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["strategy"], row["optim.rows.lr"]) for row in rows] == [
        ("ddp", "0.02"),
        ("ddp", "-1"),
        ("single", "0.02"),
        ("single", "-1"),
    ]
    assert [row["status"] for row in rows] == ["completed", "failed", "completed", "failed"]
    assert all(float(row["test/ne"]) > 0 and float(row["eps"]) > 0 for row in rows if row["status"] == "completed")
    assert all("lr must be a finite number" in row["error"] for row in rows if row["status"] == "failed")
    assert (folder / "comparison.md").read_text().splitlines()[0].startswith("| job | strategy | optim.rows")
    assert "4 jobs" in done.stdout


@pytest.mark.distributed
def test_sweep_with_failed_jobs_fails_after_the_others(sweep):
    _, done, _ = sweep
    assert done.returncode == 1
    assert done.stderr == "2 of 4 jobs failed; see above, or error in comparison.csv\n"


@pytest.mark.distributed
def test_sweep_folders_name_their_jobs(sweep):
    folder, _, _ = sweep
    assert [path.name for path in sorted(folder.iterdir()) if path.is_dir()] == [
        "0_dlrm-synthetic-ddp_seed-0",
        "1_dlrm-synthetic-ddp_seed-0",
        "2_dlrm-synthetic-single_seed-0",
        "3_dlrm-synthetic-single_seed-0",
    ]


@pytest.mark.distributed
def test_job_of_a_sweep_equals_the_same_run_alone(sweep, tmp_path, composed):
    folder, _, _ = sweep
    record = train_here(composed("train", *TINY, "logger=none", "callbacks/progress_bar=none"), tmp_path)
    job = json.loads((folder / "2_dlrm-synthetic-single_seed-0/metrics.json").read_text())["metrics"]
    assert {name: value for name, value in job.items() if name != "eps"} == {
        name: value for name, value in record.metrics.items() if name != "eps"
    }


@pytest.mark.distributed
def test_ddp_job_trains_on_two_workers(sweep):
    folder, _, _ = sweep
    ddp, single = (
        torch.load(folder / f"{job}_seed-0/checkpoints/last.ckpt", weights_only=True)["global_step"]
        for job in ("0_dlrm-synthetic-ddp", "2_dlrm-synthetic-single")
    )
    assert (ddp, single) == (5, 10)


def test_isolated_job_undoes_what_a_job_changes(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    before = dict(os.environ)
    random_state = torch.get_rng_state()
    with isolated_job():
        pl.seed_everything(3, workers=True, verbose=False)
        torch.use_deterministic_algorithms(True)
        os.environ["KEPT"] = "2"
    assert dict(os.environ) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("sweeper", "status", "value", "expected"),
    [
        ("BasicSweeper", JobStatus.FAILED, ValueError("wrong"), JobStatus.COMPLETED),  # so that the others go on
        ("BasicSweeper", JobStatus.COMPLETED, float("nan"), JobStatus.COMPLETED),
        ("OptunaSearch", JobStatus.FAILED, ValueError("wrong"), JobStatus.FAILED),
        ("OptunaSearch", JobStatus.COMPLETED, float("nan"), JobStatus.FAILED),
        ("OptunaSearch", JobStatus.COMPLETED, None, JobStatus.FAILED),  # a figure of several simulations
        ("OptunaSearch", JobStatus.COMPLETED, 0.8, JobStatus.COMPLETED),
    ],
)
def test_sweepers_get_what_they_can_go_on_with(sweeper, status, value, expected):
    hydra = {"mode": RunMode.MULTIRUN, "sweeper": {"_target_": f"some.{sweeper}"}, "job": {"num": 3}}
    config = OmegaConf.create({"hydra": hydra, "optimized_metric": "val/ne"})
    job_return = JobReturn(status=status, _return_value=value)
    SweepComparison().on_job_end(config, job_return)
    assert job_return.status == expected
    if expected == JobStatus.FAILED and status == JobStatus.COMPLETED:
        with pytest.raises(ValueError, match=f"optimized_metric: val/ne is {value}"):
            _ = job_return.return_value


def test_interrupted_sweep_is_compared_without_the_jobs_of_an_earlier_one(tmp_path):
    for job, age in enumerate((3600, 0, 0)):
        path = tmp_path / "dlrm" / str(job) / "metrics.json"  # hydra.sweep.subdir may name nested folders
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record(job, ["seed=1"], {"val/ne": 0.5})))
        os.utime(path, (time.time() - age,) * 2)
    assert [found["job"] for found in read_records(tmp_path, since=time.time() - 60)] == [1, 2]


def record(job, overrides, metrics, *, error=None):
    status = "failed" if error else "completed"
    return {"job": job, "overrides": overrides, "metrics": metrics, "status": status, "error": error, "wall_time_s": 1}


def test_comparison_shows_the_overrides_that_differ(tmp_path):
    rows = comparison(
        [
            record(0, ["data.train_rows=10", "model=dlrm", "optim.dense.lr=0.0123456789"], {"val/ne": 0.81234}),
            record(1, ["data.train_rows=10", "model=lr"], {}, error="ValueError: a | b\nmore"),
        ]
    )
    write_csv(tmp_path / "table.csv", rows)
    write_markdown(tmp_path / "table.md", for_people(rows, optimized_metric="val/ne"))
    assert Path(tmp_path / "table.csv").read_text().splitlines()[:2] == [
        "job,model,optim.dense.lr,status,val/ne,wall_time_s,error",
        "0,dlrm,0.0123456789,completed,0.81234,1,",
    ]
    assert Path(tmp_path / "table.md").read_text().splitlines() == [
        "| job | model | optim.dense.lr | status | val/ne | seconds | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 0 | dlrm | 0.01235 | completed | 0.8123 | 1.0 |  |",
        "| 1 | lr |  | failed |  | 1.0 | ValueError: a \\| b |",
    ]


def test_comparison_when_it_is_wider_than_the_terminal_then_every_cell_is_whole_in_one_of_its_pieces(
    tmp_path, monkeypatch, capsys
):
    header = [
        "job",
        "model",
        "strategy.lookahead",
        "optim.dense.lr",
        "status",
        *(name.split(" (")[0] for name, _, _ in METRICS[:8]),
    ]
    cells = [header, *([str(job), "deepfm", "16", f"0.00{job}", "completed", *["0.1234"] * 8] for job in range(12))]
    cells[0].append("error")
    for line in cells[1:]:
        line.append("ValueError: " + "a long sentence that no line of this terminal holds " * 3)
    monkeypatch.setattr(sweep_tools, "console", lambda: Console(width=80, force_terminal=False))
    print_comparison(cells, tmp_path, drawn=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    shown = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]
    for place, name in enumerate(header[:-1]):
        (top,) = [number for number, line in enumerate(shown) if name in line and (place or number < 3)]
        column = shown[top].index(name)
        for line, found in zip(cells[1:], shown[top + 2 :], strict=False):
            assert (found[0], found[column]) == (line[0], line[place])
