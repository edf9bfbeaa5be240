"""Runs of Ray Train on one node, in a cluster of the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="the extra lightning-recsys[ray] is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("ray_script.py")
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def folder():
    """A folder with a short name, as paths of Ray's sockets below it may have 107 bytes, of which it takes 61."""
    with tempfile.TemporaryDirectory(prefix="r") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def runs(folder):
    """What the runs have said: results by run, and the lines of each rank by run."""
    before = set(SHARED_MEMORY.iterdir())
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    results = json.loads((folder / "results.json").read_text())
    results["recipe"] = json.loads((folder / "output" / "metrics.json").read_text())
    for name, result in results.items():
        lines = [(folder / name / f"rank-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
        result["ranks"] = [[json.loads(line) for line in rank] for rank in lines]
    results["output"] = (folder / "recipe.log").read_text()
    results["folder"], results["new"] = folder, set(SHARED_MEMORY.iterdir()) - before
    return results


@pytest.mark.parametrize(("name", "starts"), [("het", 1), ("recipe", 2)])
def test_workers_when_a_trainer_has_no_devices_then_two_train_together(runs, name, starts):
    for rank in runs[name]["ranks"]:
        began = [line for line in rank if "pid" in line]
        assert len(began) == starts
        assert all(line["world_size"] == 2 and line["trainer"] == [2, 1, 2] for line in began)
        assert all(line["environment"] for line in began)
        assert all(line["interface"] in psutil.net_if_addrs() for line in began)
    first, second = (next(line for line in rank if "end" in line) for rank in runs[name]["ranks"])
    assert first == second  # epochs, steps and the sum of all parameters
    assert first["total"] != 0


def test_recipe_when_rank_0_is_killed_then_it_goes_on_at_the_same_server_and_ends_with_every_step_and_one_table(runs):
    record, output = runs["recipe"], runs["output"]
    for rank in record["ranks"]:
        assert [line["epoch"] for line in rank[:-1]] == [0, 1]
        assert [line["step"] for line in rank[:-1]] == [0, 8]
        assert (rank[-1]["end"], rank[-1]["step"]) == (3, 24)
        first, second = rank[:-1]
        assert len(first["servers"]) == 1
        assert first["servers"] == second["servers"]  # the server has outlived the workers
        assert first["pid"] != second["pid"]
        assert first["port"] != second["port"]
        assert first["job"] == second["job"]
    assert (record["status"], record["epochs"], record["steps"]) == ("completed", 3, 24)
    assert Path(record["checkpoint"]).is_relative_to(runs["folder"] / "output" / "checkpoints")
    assert 0 < record["metrics"]["test/logloss"] < 5
    assert output.count("Eval NE") == 1
    assert "RayTrainWorker" not in output.partition("Eval NE")[2]  # the table is the driver's


def test_servers_when_an_actor_is_killed_then_each_push_has_counted_once(runs):
    for rank in runs["het"]["ranks"]:
        (last,) = (line for line in rank if "counted" in line)
        assert last["counted"] == 32  # sixteen steps of two workers
        assert last["endpoints"] == runs["het"]["endpoints"]
        assert last["server_pid"] != runs["het"]["server_pid"]


def test_checkpoints_then_each_epoch_has_reported_one_and_the_last_one_loads(runs):
    from lightning_recsys.checkpoints import has_checkpoint, read_checkpoint

    het = runs["het"]
    assert len(het["checkpoints"]) == 2
    assert (het["metrics"]["epoch"], het["metrics"]["step"]) == (1, 16)
    assert 0 < het["metrics"]["val/logloss"] < 5
    last = Path(het["last"], "checkpoint.ckpt")
    assert last.is_relative_to(runs["folder"] / "storage" / "het")
    assert has_checkpoint(last)
    total = sum(x.double().sum().item() for x in read_checkpoint(last, weights_only=False)["state_dict"].values())
    (trained,) = (line["total"] for line in het["ranks"][0] if "total" in line)
    assert total == pytest.approx(trained, rel=1e-9)


def test_cluster_when_it_has_ended_then_nothing_is_left(runs):
    ours = str(runs["folder"])
    left = [x.pid for x in psutil.process_iter(["cmdline"]) if any(ours in part for part in x.info["cmdline"] or ())]
    assert left == []
    ranks = [rank for name in ("het", "recipe") for rank in runs[name]["ranks"]]
    pids = {line[key] for rank in ranks for line in rank for key in ("pid", "server_pid") if key in line}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not [path for path in runs["new"] if any(str(pid) in path.name for pid in pids)]
