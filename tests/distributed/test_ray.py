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
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}  # of the workers, too
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    results = json.loads((folder / "results.json").read_text())
    from_data, swept = results.pop("data"), results.pop("sweep")
    results["recipe"] = json.loads((folder / "output" / "metrics.json").read_text())
    for name, result in results.items():
        lines = [(folder / name / f"rank-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
        result["ranks"] = [[json.loads(line) for line in rank] for rank in lines]
    results["output"] = (folder / "recipe.log").read_text()
    from_data["seen"] = {path.stem: _seen(path) for path in (folder / "data").glob("*.jsonl")}
    results |= {"data": from_data, "sweep": swept}
    results["folder"], results["new"] = folder, set(SHARED_MEMORY.iterdir()) - before
    return results


def _seen(path):
    """The rows of each batch that a rank has seen, by epoch."""
    epochs = {}
    for line in map(json.loads, path.read_text().splitlines()):
        epochs.setdefault(line["epoch"], []).append(line["rows"])
    return epochs


@pytest.mark.parametrize(("name", "starts", "trainer"), [("het", [2, 2], [2, 1, 2]), ("recipe", [2, 1], [2, 2, 1])])
def test_workers_when_a_trainer_has_no_devices_then_two_train_together(runs, name, starts, trainer):
    for rank, number in zip(runs[name]["ranks"], starts, strict=True):
        began = [line for line in rank if "pid" in line]
        assert len(began) == number
        assert all(line["world_size"] == 2 - line["replaces"] and line["trainer"] == trainer for line in began)
        assert all(line["environment"] for line in began)
        assert all(line["interface"] in psutil.net_if_addrs() for line in began)
    first, second = (next(line for line in rank if "end" in line) for rank in runs[name]["ranks"])
    assert (first["end"], first["total"]) == (second["end"], second["total"])
    assert first["total"] != 0


def test_recipe_when_rank_0_is_killed_then_the_other_goes_on_another_takes_its_place_and_one_table_comes(runs):
    record, output = runs["recipe"], runs["output"]
    (first, new, last), (other, other_last) = record["ranks"]
    assert [line["replaces"] for line in (first, new, other)] == [False, True, False]
    assert len(first["servers"]) == 1
    assert first["servers"] == new["servers"] == other["servers"]
    assert first["job"] == new["job"]
    assert first["port"] == new["port"]  # the store by which they meet is nobody's of theirs
    assert first["pid"] != new["pid"]
    assert (last["first"], other_last["first"]) == (False, True)
    assert last["trained"] > 4
    assert 3 * 16 <= 8 + last["trained"] + other_last["trained"] <= 3 * 16 + 8  # a lease may be trained twice
    assert (record["status"], record["epochs"], record["steps"]) == ("completed", 3, other_last["step"])
    assert Path(record["checkpoint"]).is_relative_to(runs["folder"] / "output" / "checkpoints")
    assert 0 < record["metrics"]["test/logloss"] < 5
    assert output.count("Eval NE") == 1
    assert "RayTrainWorker" not in output.partition("Eval NE")[2]  # the table is the driver's
    assert list((runs["folder"] / "output" / "ray").glob("*/state-of-the-run.pt")) == []


def test_workers_when_one_is_killed_under_het_then_all_start_again_from_the_last_checkpoint_at_the_same_servers(runs):
    for rank in runs["het"]["ranks"]:
        first, second = (line for line in rank if "pid" in line)
        assert [(line["epoch"], line["step"]) for line in (first, second)] == [(0, 0), (1, 8)]
        assert first["servers"] == second["servers"]  # the servers have outlived the workers
        assert first["pid"] != second["pid"]
        assert first["port"] != second["port"]
        assert first["job"] == second["job"]


def test_servers_when_an_actor_is_killed_then_each_push_has_counted_once(runs):
    for rank in runs["het"]["ranks"]:
        (last,) = (line for line in rank if "counted" in line)
        assert last["counted"] == 16  # the eight steps of two workers since they have started again
        assert last["endpoints"] == runs["het"]["endpoints"]
        assert last["server_pid"] != runs["het"]["server_pid"]


def test_servers_when_those_of_another_run_have_the_folder_then_refused_and_these_go_on(runs):
    folder = runs["folder"] / "stores" / "server-0"
    assert runs["het"]["refused"].startswith(f"another server serves {folder}; two would count the same pushes.")
    assert "another store_folder (launcher.store_folder)" in runs["het"]["refused"]


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


def test_ray_data_when_each_worker_has_a_shard_then_each_row_comes_to_one_of_them_in_another_order_each_epoch(runs):
    seen = runs["data"]["seen"]
    ranks = [seen["whole-0"], seen["whole-1"]]
    orders = []
    for epoch in (0, 1):
        own = [[row for batch in rank[epoch] for row in batch] for rank in ranks]
        assert [len(rows) for rows in own] == [501, 501]  # of 1003
        assert len({*own[0], *own[1]}) == 1002
        assert [[len(batch) for batch in rank[epoch]] for rank in ranks] == [[64] * 7 + [53]] * 2
        orders.append(own)
    assert [sorted(rows) for rows in orders[0]] == [sorted(rows) for rows in orders[1]]
    assert orders[0] != orders[1]


def test_ray_data_when_resumed_inside_an_epoch_then_the_very_next_batch_comes(runs):
    seen = runs["data"]["seen"]
    for rank in (0, 1):
        assert seen[f"resumed-{rank}"] == {0: seen[f"whole-{rank}"][0][3:]}


def test_ray_data_then_vocabularies_and_rows_are_those_of_a_file_with_these_rows(runs):
    data = runs["data"]
    assert data["same_encoding"]
    assert data["rows_read"]["train"] == {"rows": 1003, "used": 1003, "skipped": 0, "comments": 0}
    assert data["rows_read"]["validation"]["used"] == 100
    block, ids = data["block"], data["ids"]
    assert [list(row) for row in zip(block["row"], block["price"], strict=True)] == data["dense"]
    size = len(data["dense"])
    assert size > 100
    assert block["shop"] == ids["shop"][:size]
    assert block["user"] == ids["user"][:size]
    tags = [tag for bag in block["tags"] for tag in bag]
    assert tags == ids["tags"][: len(tags)]


def test_ray_data_when_rows_cannot_be_encoded_then_errors_say_why_or_bad_rows_are_counted(runs):
    said = runs["data"]["errors"]
    assert said["bad row"].startswith("train, row 3, column 'clicked': the label must be 0 or 1")
    assert "schema.categorical names column 'shop', which is not in train." in said["no column"]
    assert "first line" not in said["no column"]
    assert "all 1003 training rows have the label 1 in column 'clicked'" in said["one label"]
    assert "datasets needs train" in said["names"]
    assert "schema.split" in said["split"]
    assert said["skipped"]["train"] == {"rows": 1003, "used": 1002, "skipped": 1, "comments": 0}
    assert {"shop", "tags"} <= set(said["guessed"])


def test_sweep_when_its_jobs_are_tasks_then_one_whose_process_died_equals_its_twin_and_one_that_fails_is_told(runs):
    assert runs["sweep"]["died"]
    assert runs["sweep"]["status"] == 1
    assert "1 of 3 jobs failed" in runs["sweep"]["output"]
    records = [json.loads(path.read_text()) for path in (runs["folder"] / "sweep").glob("*/metrics.json")]
    undisturbed, died, wrong = sorted(records, key=lambda record: record["job"])
    assert wrong["error"] == "ValueError: data.batch_size must be at least 1, got 0."
    for record in (undisturbed, died):
        assert (record["status"], record["steps"]) == ("completed", 16)
        for name in [name for name in record["metrics"] if name.startswith("eps")]:
            del record["metrics"][name]
    assert 0 < undisturbed["metrics"]["test/logloss"] < 5
    assert undisturbed["metrics"] == died["metrics"]


def test_cluster_when_it_has_ended_then_nothing_is_left(runs):
    ours = str(runs["folder"])
    left = [x.pid for x in psutil.process_iter(["cmdline"]) if any(ours in part for part in x.info["cmdline"] or ())]
    assert left == []
    ranks = [rank for name in ("het", "recipe") for rank in runs[name]["ranks"]]
    pids = {line[key] for rank in ranks for line in rank for key in ("pid", "server_pid") if key in line}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not [path for path in runs["new"] if any(str(pid) in path.name for pid in pids)]
