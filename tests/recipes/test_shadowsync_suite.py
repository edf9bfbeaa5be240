"""The ShadowSync suite: jobs in turns, a link between two hosts, what is kept of interrupted runs, the command line."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from benchmarks.harness import processes
from benchmarks.harness.bars import Bars
from benchmarks.harness.jobs import hosts
from benchmarks.harness.jobs import job as jobs
from benchmarks.harness.jobs.hosts import Host, NoLinkError, linked_hosts
from benchmarks.harness.jobs.job import Job, steps_per_second
from benchmarks.suites.shadowsync import quality as shadowsync_quality
from benchmarks.suites.shadowsync import suite as shadowsync
from benchmarks.suites.shadowsync import training as shadowsync_training
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from recipe_helpers import CONF, TINY
from recipe_tools.quiet import be_quiet

from lightning_recsys.monitoring.processes import descendants
from lightning_recsys.strategies import ShadowSyncStrategy

CHAIN = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def test_steps_per_second_when_steps_span_pauses_then_only_running_time_counts():
    # A step takes 0.4 s of running time; the job runs 1 s of every 10.
    runs = [(10.0 * i, 10.0 * i + 1.0) for i in range(6)]
    steps = np.array([10.0 * int(0.4 * k) + (0.4 * k) % 1 for k in range(1, 16)])
    assert steps_per_second([steps, steps], runs) == pytest.approx([5.0] * 4)


def test_steps_per_second_when_one_turn_was_slower_then_it_shows_in_that_turn_only():
    runs = [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0), (6.0, 8.0)]
    steps = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0])
    assert steps_per_second([steps], runs) == pytest.approx([1.0, 2.0])


def test_descendants_then_those_of_children_are_found_as_well():
    with subprocess.Popen([sys.executable, "-c", CHAIN]) as process:
        try:
            deadline = time.monotonic() + 20
            while len(descendants(process.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            root, *others = descendants(process.pid)
            assert root == process.pid
            assert others == [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        finally:
            for pid in descendants(process.pid):
                os.kill(pid, signal.SIGKILL)


def test_job_when_it_fails_then_its_output_is_told_and_nothing_is_left(tmp_path):
    settings = {"batch_size": 4, "strategy": {"num_trainers": 0}}
    job = Job(
        "broken",
        [[sys.executable]],
        training="benchmarks.suites.shadowsync.training",
        settings=[settings],
        folder=tmp_path,
        workers=2,
    )
    with pytest.raises(RuntimeError, match=r"job 'broken' failed:(.|\n)*strategy.num_trainers must be at least 1"), job:
        pass
    assert [process.poll() is not None for process in job._main] == [True]


# --- The link --------------------------------------------------------------------------------------------------------


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_linked_hosts_when_there_is_no_root_then_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(NoLinkError, match="need root and iproute2"), linked_hosts():
        pass


def test_linked_hosts_then_they_reach_each_other_at_the_rate_and_are_gone_afterwards():
    try:
        with linked_hosts("80mbit") as (a, b):
            assert a.namespace in namespaces()
            for host in (a, b):
                show = ["ip", "-n", host.namespace, "-brief", "link", "show", "dev", host.interface]
                assert subprocess.run(show, capture_output=True, text=True).stdout.split()[1] == "UP"
            server = subprocess.Popen(
                b.command(sys.executable, "-c", RECEIVE, b.address), stdout=subprocess.PIPE, text=True
            )
            with server:
                assert server.stdout.readline() == "ready\n"
                subprocess.run(a.command(sys.executable, "-c", SEND, b.address), check=True, timeout=60)
                seconds = float(server.stdout.readline())
    except NoLinkError as error:
        pytest.skip(str(error))
    assert seconds > 0.3  # 4 MB at 10 MB/s take 0.4 s; memory to memory it would be a hundredth of that
    assert a.namespace not in namespaces()
    assert b.namespace not in namespaces()


RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as door:
    print("ready", flush=True)
    peer, _ = door.accept()
    began, got = time.monotonic(), 0
    while chunk := peer.recv(1 << 16):
        got += len(chunk)
    assert got == 4_000_000
    print(time.monotonic() - began)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(4_000_000))"


def test_linked_hosts_when_work_fails_inside_then_they_are_gone():
    try:
        with pytest.raises(ZeroDivisionError), linked_hosts() as (a, _):
            raise ZeroDivisionError
    except NoLinkError as error:
        pytest.skip(str(error))
    assert a.namespace not in namespaces()


def test_counted_by_then_it_is_what_the_system_says_of_an_interface():
    sent, sent_packets, received, received_packets = hosts.counted_by("lo")
    assert sent >= sent_packets >= 0
    assert received >= received_packets >= 0
    with pytest.raises(ValueError, match="no network interface 'none'"):
        hosts.counted_by("none")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_linked_hosts_when_a_signal_ends_the_program_then_they_are_gone(number):
    env = processes.environment()
    with subprocess.Popen(
        [sys.executable, "-c", WAIT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            if not (namespace := process.stdout.readline().strip()):
                said = process.stderr.read()
                assert "NoLinkError" in said
                pytest.skip(said.splitlines()[-1])
            assert namespace in namespaces()
            process.send_signal(number)
            assert process.wait(30) != 0
        finally:
            process.kill()
    assert namespace not in namespaces()


WAIT = """
import time
from benchmarks.harness.jobs.hosts import linked_hosts
from benchmarks.harness.jobs.job import sigterm_exits
with sigterm_exits(), linked_hosts() as (host, _):
    print(host.namespace, flush=True)
    time.sleep(60)
"""


def test_linked_hosts_when_somebody_was_killed_then_what_was_left_goes_and_what_is_used_stays():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with subprocess.Popen([sys.executable, "-c", ""]) as killed:
        pass
    left, used = f"lrb{killed.pid}-0a", f"lrb{os.getppid()}-99999b"
    try:
        for name in (left, used):
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("there can be no network namespaces here")
        with linked_hosts():
            assert left not in namespaces()
            assert used in namespaces()
    except NoLinkError as error:
        pytest.skip(str(error))
    finally:
        for name in (left, used):
            if name in namespaces():
                subprocess.run(["ip", "netns", "del", name], check=True)


# --- Quality ---------------------------------------------------------------------------------------------------------


def test_quality_then_means_gaps_and_the_bar_are_those_of_the_seeds():
    def runs(*values: float, gap: float) -> list[dict[str, float]]:
        return [{"test/ne": value, "sync/gap": gap} for value in values]

    methods = {"S-EASGD": runs(0.79, 0.81, gap=6.0), "a": runs(0.79, 0.83, gap=5.0), "b": runs(0.79, 0.80, gap=30.0)}
    bar = shadowsync_quality.bar_of("rows", methods)
    assert bar.value == pytest.approx(100 * (0.80 / 0.795 - 1))
    assert bar.verdict == "FAIL"
    lines = shadowsync_quality.compared("rows", methods).rows
    assert lines[0] == ["S-EASGD", "6.0", "0.80000 ± 0.01414", "0.79000 to 0.81000", "+0.000%"]
    assert lines[2][-1] == "-0.625%"


@pytest.mark.distributed
def test_quality_when_run_again_then_only_what_was_not_finished_is_trained(tmp_path):
    common = ["name=shadowsync", "model=dlrm", *TINY, "strategy=shadowsync", "~callbacks.model_checkpoint"]
    common += ["+trainer.enable_checkpointing=false", "trainer.limit_val_batches=0"]
    methods = {"S-EASGD": [], "FR-EASGD-2": ["strategy.rounds=foreground", "strategy.gap=2"]}

    def measure() -> dict[str, list[dict[str, float]]]:
        (table,), _ = shadowsync_quality.measure(
            data={"synthetic": ["data=synthetic"]},
            methods=methods,
            common=common,
            seeds=[0],
            cache=tmp_path,
            root=str(tmp_path),
        )
        return table.details["runs"]

    def written() -> dict[str, int]:
        return {path.parent.name[:16]: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.json")}

    be_quiet()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        first, before = measure(), written()
        (path,) = tmp_path.glob("synthetic-FR-*/metrics.json")
        path.write_text(path.read_text().replace('"status": "completed"', '"status": "running"'))
        second, after = measure(), written()
    assert len(before) == 2
    assert after["synthetic-S-EASG"] == before["synthetic-S-EASG"]
    assert after["synthetic-FR-EAS"] > before["synthetic-FR-EAS"]
    assert second["S-EASGD"] == first["S-EASGD"]
    assert second["FR-EASGD-2"][0]["sync/gap"] == pytest.approx(2, abs=0.6)
    assert 0 < second["FR-EASGD-2"][0]["test/ne"] < 2


# --- Parts whose jobs only pretend to train --------------------------------------------------------------------------


class Pretended:
    """A job of which nothing is started; what it is asked to do is checked."""

    def __init__(self, name, launchers, *, training, settings, folder, workers, environment=({},)) -> None:
        assert len(launchers) == len(settings)
        for own in settings:
            assert own.keys() <= signature(shadowsync_training.train).parameters.keys()
            if own["strategy"] is not None:
                ShadowSyncStrategy(**own["strategy"])
        self.slowed = settings[0].get("slowed")
        self.telemetry = {rank: {"sync/gap": 5.0 + rank, "sync/rounds": 2.0} for rank in range(workers)}

    def rates(self, batch_size, *, rank=None):
        slow = self.slowed is not None and rank == self.slowed[0]
        return [batch_size * (0.2 if slow else 0.95 if self.slowed else 1.0)]


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.setattr(jobs, "Job", Pretended)
    monkeypatch.setattr(jobs, "run_in_turns", lambda given, *, rounds, seconds: None)
    return shadowsync.Suite(batch_size=100, rounds=1, seconds=0.0)


def verdicts(bars):
    return {bar.name: (bar.value, bar.verdict) for bar in bars}


def test_scale_then_two_trainers_stand_beside_two_processes(suite):
    (row,), bars = suite.scale()
    assert row.to_dict()["ratio_to_base"] == {"two processes": 1.0, "two trainers": 1.0}
    assert verdicts(bars) == {"two trainers / two processes": (1.0, "pass")}


def test_straggler_then_the_bars_are_about_the_other_trainer(suite):
    (first, slowed), bars = suite.straggler()
    variants = ("S-EASGD", "S-MA", "FR-MA-5")
    assert first.to_dict()["ratio_to_base"] == {"no straggler": 1.0, **dict.fromkeys(variants, 0.95)}
    assert slowed.to_dict()["ratio_to_base"] == {"no straggler": 1.0, **dict.fromkeys(variants, 0.2)}
    beside = "trainer 0 beside a straggler / without one"
    assert verdicts(bars) == {f"{beside}, {name}": (0.95, "pass") for name in ("S-EASGD", "S-MA")}


def test_link_then_the_gap_is_that_of_the_trainer_that_waits_longest(suite, monkeypatch):
    both = tuple(Host(name, f"10.0.0.{i}", f"link-{name}") for i, name in enumerate("ab"))
    monkeypatch.setattr(shadowsync, "linked_hosts", lambda rate: nullcontext(both))
    (row, gaps), bars = suite.link("1gbit")
    assert set(row.to_dict()["examples_per_second"]) == {"not synchronised", "FR-EASGD-5", "FR-EASGD-30", "S-EASGD"}
    assert gaps.rows[-1][:2] == ["S-EASGD", "5.0, 6.0"]
    assert verdicts(bars)["sync gap of S-EASGD, 1gbit link"] == (6.0, "pass")


def test_link_when_a_trainer_made_no_round_then_its_gap_is_infinite(suite, monkeypatch):
    both = tuple(Host(name, f"10.0.0.{i}", f"link-{name}") for i, name in enumerate("ab"))
    monkeypatch.setattr(shadowsync, "linked_hosts", lambda rate: nullcontext(both))

    class Late(Pretended):
        def __init__(self, name, *given, **settings) -> None:
            super().__init__(name, *given, **settings)
            self.telemetry[1] = {}

    monkeypatch.setattr(jobs, "Job", Late)
    (_, gaps), bars = suite.link("1gbit")
    assert gaps.rows[-1] == ["S-EASGD", "5.0, no round", "2.0, 0.0"]
    assert verdicts(bars)["sync gap of S-EASGD, 1gbit link"] == (math.inf, "FAIL")
    assert Bars(tuple(bars)).to_dict()["bars"][-1]["value"] is None


def test_link_when_there_can_be_none_then_its_bars_say_not_measured(suite, monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    results, bars = suite.link("1gbit")
    assert results == []
    assert {bar.verdict for bar in bars} == {"not measured"}


def test_slowed_then_only_its_rank_computes_so_many_times_as_long(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(shadowsync_training.time, "thread_time", lambda: next(clock))
    for rank, expected in ((1, 3), (0, 0)):
        computed = []
        module = SimpleNamespace(training_step=lambda batch, i, computed=computed: computed.append(batch))
        callback = shadowsync_training.Slowed(1, 5.0)
        callback.on_train_batch_start()
        callback.on_train_batch_end(SimpleNamespace(global_rank=rank), module, None, "batch", 0)
        # A tick for each look at the clock: begun, done, and one before each computation.
        assert computed == ["batch"] * expected


def test_suite_when_a_part_is_unknown_then_the_parts_are_named(tmp_path):
    settings = OmegaConf.to_container(OmegaConf.load(CONF / "suite" / "shadowsync.yaml"), resolve=False)
    settings |= {"parts": ["overheads"], "cache": str(tmp_path), "data": str(tmp_path)}
    del settings["_target_"]
    parts = "link, overhead, scale, straggler, store, requests, quality"
    with pytest.raises(ValueError, match=f"suite.parts must be some of {parts}, got 'overheads'"):
        shadowsync.run(**settings)
