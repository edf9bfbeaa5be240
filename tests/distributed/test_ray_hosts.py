"""Runs of Ray Train on two hosts, which are network namespaces with a node of Ray each: by hand.

``LIGHTNING_RECSYS_RAY_HOSTS=all pytest -s tests/distributed/test_ray_hosts.py`` as root; in the place of ``all``
stand names of runs.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from two_hosts import two_hosts

from lightning_recsys.checkpoints import read_checkpoint

pytest.importorskip("ray", reason="the extra lightning-recsys[ray] is not installed")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif("LIGHTNING_RECSYS_RAY_HOSTS" not in os.environ, reason="LIGHTNING_RECSYS_RAY_HOSTS is not set"),
]

SCRIPT = Path(__file__).with_name("ray_hosts_script.py")
ROWS, RATES = 360, 1 + 1 / 2 + 1 / 4  # of the model that counts, whose steps halve with each of three epochs
# What a host has for itself: its memory of /dev/shm, and a disk.
PRIVATE = "mount --make-rprivate / && mount -t tmpfs -o size=3g tmpfs /dev/shm && mount -t tmpfs tmpfs /mnt && exec $@"


NAMES = [
    *("ddp", "het", "des", "shadowsync", "async_ps", "hierarchical"),
    *("easgd-replaced", "bmuf-replaced", "async_ps-replaced", "all-died"),
    *("host-lost", "host-lost-smaller", "host-lost-replaced"),  # each in a cluster that has one host afterwards
]


@contextmanager
def node(folder, hosts, host, env):
    """A node of Ray, until it is left; the first host's is the head. Each has a memory and a disk of its own."""
    first = hosts[0]
    place = ["--head", "--port=6379", f"--temp-dir={folder / 'ray'}", "--include-dashboard=false"]
    if host is not first:
        place = [f"--address={first.address}:6379"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *place]
    options = [f"--node-ip-address={host.address}", "--num-cpus=4", "--object-store-memory=104857600"]
    log = folder / f"node-{host.namespace}.log"
    with log.open("w") as file:
        process = subprocess.Popen(on(host, [*command, *options]), env=env, stdout=file, stderr=file)
    try:
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def on(host, command):
    return host.command("sh", "-c", PRIVATE, "sh", *command)


@pytest.fixture(scope="module")
def runs():
    """What came of each run, and what its workers told, by rank; the hosts' addresses. The cluster has ended."""
    chosen = os.environ["LIGHTNING_RECSYS_RAY_HOSTS"]
    names = NAMES if chosen == "all" else chosen.split(",")
    with tempfile.TemporaryDirectory(prefix="r") as name, two_hosts() as hosts:
        folder = Path(name)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SCRIPT.parent),
            "RAY_ADDRESS": f"{hosts[0].address}:6379",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            "RAY_TRAIN_METRICS_ENABLED": "0",
        }
        lasting = [name for name in names if not name.startswith("host-lost")]
        for several in filter(None, (lasting, *([name] for name in names if name not in lasting))):
            with ExitStack() as nodes:
                for host in hosts:
                    nodes.enter_context(node(folder, hosts, host, env))
                script = [sys.executable, str(SCRIPT), str(folder), ",".join(several), hosts[1].namespace]
                subprocess.run(on(hosts[0], script), env=env, check=True)
        left = [subprocess.run(["ip", "netns", "pids", x.namespace], capture_output=True, text=True) for x in hosts]
        assert [x.stdout for x in left] == ["", ""]
        yield {name: read(folder / name) for name in names} | {"hosts": [host.address for host in hosts]}


def read(folder):
    result = json.loads((folder / "result.json").read_text())
    told = {int(x.stem.removeprefix("rank-")): x.read_text().splitlines() for x in folder.glob("rank-*.jsonl")}
    result["ranks"] = [[json.loads(line) for line in told[rank]] for rank in sorted(told)]
    print(f"{folder.name}: {result.get('seconds')} s, {result.get('error')}")
    for rank, lines in enumerate(result["ranks"]):
        print(rank, *lines, sep="\n  ")
    return result


@pytest.fixture
def result_of(runs):
    def look(name):
        if name not in runs:
            pytest.skip("LIGHTNING_RECSYS_RAY_HOSTS names other runs")
        assert "error" not in runs[name], runs[name]["error"]
        return runs[name]

    return look


@pytest.mark.parametrize("name", ["ddp", "het", "des", "shadowsync", "async_ps", "hierarchical"])
def test_strategy_when_a_worker_of_another_host_is_killed_then_all_go_on_from_the_last_checkpoint(
    runs, result_of, name
):
    result, hosts = result_of(name), set(runs["hosts"])
    for rank in result["ranks"]:
        first, second, last = rank
        assert (first["epoch"], second["epoch"], last["end"]) == (0, 1, 3)
        assert first["world"] == second["world"] == last["members"] == 2
        assert first["pid"] != second["pid"]
    assert {rank[0]["host"] for rank in result["ranks"]} == {rank[1]["host"] for rank in result["ranks"]} == hosts
    if name != "des":  # of which each rank has a part
        assert len({rank[-1]["total"] for rank in result["ranks"]}) == 1
    assert result["epoch"] == 2
    assert len(result["checkpoints"]) == 3
    read = torch.load if Path(result["last"]).is_file() else read_checkpoint
    assert read(result["last"], weights_only=False)["epoch"] == 2


@pytest.mark.parametrize(("name", "dead"), [("easgd-replaced", 0), ("bmuf-replaced", 1), ("async_ps-replaced", 0)])
def test_worker_when_it_dies_with_a_server_then_another_takes_its_place_and_every_row_is_trained(result_of, name, dead):
    result = result_of(name)
    for rank, told in enumerate(result["ranks"]):
        assert [line["replaces"] for line in told[:-1]] == ([False, True] if rank == dead else [False])
        assert (told[-1]["end"], told[-1]["members"]) == (3, 3)
    assert [told[-1]["first"] for told in result["ranks"]].index(True) == (1 if dead == 0 else 0)
    assert len({told[-1]["total"] for told in result["ranks"]}) == 1
    assert result["validated"] == [ROWS] * 3  # behind the fit, from the last checkpoint, with the new one
    counted = counts_of(result)
    assert counted.min() == RATES
    assert counted.sum() <= RATES * ROWS + 8 * 2 / 2  # of one lease at most, in the second epoch, twice


def test_workers_when_all_of_them_die_then_they_start_again_from_the_last_checkpoint(result_of):
    result = result_of("all-died")
    for first, second, last in result["ranks"]:
        assert (first["epoch"], second["epoch"], last["end"]) == (0, 1, 3)
        assert (first["replaces"], second["replaces"], last["members"]) == (False, False, 3)
    counted = counts_of(result)
    assert counted.min() == counted.max() == RATES


def test_host_when_it_is_lost_then_all_workers_go_on_at_the_other_one(runs, result_of):
    result = result_of("host-lost")
    for rank in result["ranks"]:
        first, *_, again, last = rank
        assert (first["epoch"], again["epoch"], last["end"]) == (0, 1, 3)
        assert again["host"] == runs["hosts"][0]
    assert len({rank[-1]["total"] for rank in result["ranks"]}) == 1


def test_host_when_it_is_lost_and_the_other_has_less_room_then_fewer_workers_go_on(runs, result_of):
    (first, again, last), before = result_of("host-lost-smaller")["ranks"]
    assert (first["epoch"], again["epoch"], last["end"]) == (0, 1, 3)
    assert (first["world"], again["world"]) == (2, 1)
    assert again["host"] == runs["hosts"][0]
    assert [line["epoch"] for line in before] == [0]


def test_host_when_it_is_lost_then_its_workers_are_replaced_on_the_other_one(runs, result_of):
    result = result_of("host-lost-replaced")
    here, lost = runs["hosts"]
    dead = [told for told in result["ranks"] if told[0]["host"] == lost]
    others = [told for told in result["ranks"] if told[0]["host"] == here]
    assert len(dead) >= 1
    assert len(others) >= 1
    for first, again, last in dead:
        assert (first["replaces"], again["replaces"], again["host"]) == (False, True, here)
        assert (last["end"], last["members"]) == (3, 3)
    for first, last in others:
        assert (first["replaces"], last["end"], last["members"]) == (False, 3, 3)
    counted = counts_of(result)
    assert counted.min() == RATES
    assert counted.sum() <= RATES * ROWS + len(dead) * 8 * 2 / 2


def counts_of(result):
    """How often each row was trained, by the rates of the epochs, as the last checkpoint has it."""
    return read_checkpoint(result["last"], weights_only=False)["state_dict"]["rows.embedding_bags.t.weight"].flatten()
