"""The suite of virtual clusters: beside real ones, whose metrics are made up; and their speed, in small."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from inspect import signature

import pytest
from benchmarks.harness import processes
from benchmarks.harness.processes import Run, python, watched
from benchmarks.suites.simulation import speed, suite, twins
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from recipe_helpers import CONF, TINY
from recipe_tools.record import isolated_job

OPTIONS = ["name=simulation", "model=dlrm", *TINY, "trainer.limit_val_batches=0"]


def test_suite_when_real_runs_are_given_then_virtual_ones_are_as_fast_as_the_one_and_judged(
    composed, tmp_path, monkeypatch
):
    composed("benchmark")
    made = []

    def trained(name, overrides, *, cache, root):
        made.append(name)
        trainers = 2 if "strategy.num_trainers=2" in overrides else 1
        return {"eps": 1000.0 * trainers, "test/ne": 1.0, "sync/gap": 5.0}

    monkeypatch.setattr(twins, "trained", trained)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        (found,), bars = twins.measure(common=OPTIONS, interval=0.5, seeds=[0], cache=tmp_path, root=str(tmp_path))
    assert made == ["trainers1-seed0", "trainers2-seed0"]
    rows = twins.rows_of(found.details)
    speed_up = rows["speed-up by the second trainer"]
    assert speed_up[0] == 2.0
    assert speed_up[1] == pytest.approx(2.0, rel=0.25)  # ten batches: a worker's late start counts
    # A batch takes 0.1 s, and half a second passes between two rounds.
    assert rows["sync gap"][1] == pytest.approx(5.0, rel=0.5)
    assert [bar.limit for bar in bars] == [0.3, 20.0, 20.0]
    assert 0.3 < rows["test NE"][1] < 3


def test_speed_when_measured_in_small_then_both_are_in_every_round_and_judged(tmp_path, monkeypatch):
    processes = []

    def pretended(name, command):
        processes.append(name)
        if "simulate.py" in name:
            return "", Run(name, seconds=300.0, gib=9.0)
        with redirect_stdout(io.StringIO()) as printed, isolated_job():
            speed.main(command[-1])
        return printed.getvalue(), Run(name, seconds=60.0, gib=0.5)

    monkeypatch.setattr(speed, "watched", pretended)
    small = ["cluster=asgd_3k", "cluster.workers_per_replica=3", "data=synthetic", "data.batch_size=16"]
    (small_row, row, runs), bars = speed.measure(
        common=small,
        models=[speed.SMALL, speed.DEFAULT],
        command=["cluster=asgd_3k"],
        rounds=2,
        seconds=0.01,
        root=str(tmp_path),
    )
    assert processes == ["deepfm_small, both in turns", "deepfm, both in turns", "simulate.py cluster=asgd_3k"]
    assert small_row.workload == "deepfm_small, 3 workers, B=16"
    for one in (small_row, row):
        assert [len(one.measured.rates[name]) for name in (speed.PLAIN, speed.SIMULATED)] == [2, 2]
        assert min(rate for rates in one.measured.rates.values() for rate in rates) > 0
    values = {bar.name: (bar.value, bar.side, bar.limit) for bar in bars}
    assert values == {
        "deepfm_small, pushes per second": (small_row.measured.median(speed.SIMULATED) / 16, "at least", 200.0),
        "deepfm_small, memory": (0.5, "at most", 8.0),
        "deepfm, pushes per step of plain training": (
            row.measured.ratio(speed.SIMULATED, speed.PLAIN),
            "at least",
            0.8,
        ),
        "deepfm, memory": (0.5, "at most", 8.0),
        "simulate.py cluster=asgd_3k": (5.0, "at most", 10.0),
        "simulate.py cluster=asgd_3k, memory": (9.0, "at most", 8.0),
    }
    assert bars[-1].verdict == "FAIL"
    assert [run["name"] for run in runs.details["runs"]] == [row[0] for row in runs.rows] == processes


def test_process_when_watched_then_its_peak_is_told_or_what_it_said_of_its_failure(tmp_path, monkeypatch):
    peak_of, seen = processes._peak_gib, tmp_path / "seen"

    def look(pid):
        if (gib := peak_of(pid)) and gib > 60 / 1024:
            seen.touch()
        return gib

    monkeypatch.setattr(processes, "_peak_gib", look)
    begins = "import os, sys, time; x = bytearray(60 << 20); del x; time.sleep(0.5)"
    ends = "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('done')"
    printed, run = watched("large", python("-c", f"{begins}\n{ends}", str(seen)))
    assert (printed, run.name) == ("done\n", "large")
    assert 60 / 1024 < run.gib < 1
    assert run.seconds >= 0.5
    with pytest.raises(RuntimeError, match=r"large failed:\nwrong"):
        watched("large", python("-c", "import sys; sys.exit('wrong')"))


def test_suite_then_takes_what_its_configuration_has():
    config = OmegaConf.to_container(OmegaConf.load(CONF / "suite/simulation.yaml"))
    del config["_target_"]
    signature(suite.run).bind(**config)
    signature(twins.measure).bind(**config["twins"], cache=None, root="")
    signature(speed.measure).bind(**config["speed"], root="")
    assert config["speed"]["models"] == [speed.SMALL, speed.DEFAULT]
