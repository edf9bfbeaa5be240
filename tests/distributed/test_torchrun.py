"""Servers of jobs whose processes torchrun starts: on one node, on two, and when something goes wrong."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from ports import free_port
from served_strategy import Ratings
from two_hosts import two_hosts

from lightning_recsys.launchers.sidecars import SHARED_MEMORY

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).with_name("torchrun_script.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@contextmanager
def job(*command, **variables):
    """A torchrun of its own process group, of which nothing is left afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([str(x) for x in command], env=environment, start_new_session=True, **pipes) as process:
        ranks = []
        try:
            yield process
        finally:
            with ExitStack() as stack:
                stack.callback(process.kill)
                ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for rank in ranks:
                if rank.is_running():
                    rank.kill()


def one_node(action):
    return (*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", SCRIPT, action, 1)


def lines(output, word):
    """What followed the word in the lines that began with it, without repetitions."""
    return list(dict.fromkeys(re.findall(rf"^{word} (.+)$", output, flags=re.MULTILINE)))


def listens(endpoint):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix("ipc://")) == 0


def soon(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def folders(pids):
    return [x for pid in pids for x in SHARED_MEMORY.glob(f"lightning_recsys-{pid}-*")]


def test_job_when_it_runs_twice_on_one_node_then_each_run_has_servers_of_its_own():
    with job(*one_node("train")) as process:
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    over_the_wire, mapped = lines(output, "endpoints")
    endpoints = [*over_the_wire.split(), *mapped.split()]
    assert len(set(endpoints)) == 6
    assert all(x.startswith(f"ipc://{SHARED_MEMORY}/lightning_recsys-") for x in endpoints)
    assert lines(output, "types") == [" ".join(["RemoteStores"] * 3), " ".join(["MappedStores"] * 3)]
    assert lines(output, "counted")[0] == "8 8 8"  # two ranks, four steps
    for endpoint in endpoints:  # once, by one of the two ranks
        way = "messages (as was asked for)" if endpoint in over_the_wire.split() else "the files of /dev/shm/"
        assert output.count(f"at {endpoint}: by {way}") == 1
    assert not any(listens(x) for x in endpoints)
    assert folders(lines(output, "pid")) == []


def test_job_when_a_rank_raises_then_its_error_is_seen_nothing_is_saved_and_no_server_is_left():
    with job(*one_node("crash")) as process:
        output, _ = process.communicate(timeout=150)  # a checkpoint is made by all ranks, and the others train
    assert process.returncode == 1
    assert "ZeroDivisionError: in step 3" in output
    assert "on_exception.ckpt was not written" in output
    assert lines(output, "saved") == ["[]"]  # of both ranks
    endpoints = " ".join(lines(output, "endpoints")).split()
    assert len(endpoints) >= 2
    assert soon(lambda: not any(map(listens, endpoints)))
    assert soon(lambda: folders(lines(output, "pid")) == [])


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGTERM, os.killpg), (signal.SIGINT, os.kill), (signal.SIGKILL, os.kill)],
)
def test_job_when_it_is_ended_from_outside_then_no_server_is_left(number, send):
    """The signal goes to torchrun, SIGTERM to its whole process group; SIGKILL to rank 0, which started the servers."""
    with job(*one_node("go_on")) as process:
        output = ""
        while len(lines(output, "in")) < 2:
            output += process.stdout.readline()
        endpoints = " ".join(lines(output, "endpoints")).split()
        pids = lines(output, "pid")
        assert len(endpoints) == 3
        assert all(map(listens, endpoints))
        assert len(folders(pids)) == 1
        victim = int(lines(output, "rank-0-is")[0]) if number == signal.SIGKILL else process.pid
        send(victim, number)
        rest, _ = process.communicate(timeout=100)
        assert process.returncode != 0
        if number == signal.SIGTERM:
            assert not re.search(r"^\[rank\d\]: ", rest, flags=re.MULTILINE)  # as torch begins the lines of tracebacks
        assert "another server serves" not in rest  # those that a signal to the whole group cut off were left alone
        assert soon(lambda: not any(map(listens, endpoints)))
        assert soon(lambda: folders(pids) == [])


def run_on(hosts, action, **variables):
    """Status and output of the processes of one job, a rank on each host; ``variables`` of a host, from its link."""
    port = free_port()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                job(
                    *host.command(*TORCHRUN, "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"),
                    f"--master-addr={hosts[0].address}",
                    f"--master-port={port}",
                    SCRIPT,
                    action,
                    2,
                    **{name: value(host) for name, value in variables.items()},
                )
            )
            for rank, host in enumerate(hosts)
        ]
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    return [process.returncode for process in processes], outputs


def test_job_when_its_nodes_cannot_connect_then_each_says_what_to_look_at():
    with two_hosts() as hosts:
        codes, outputs = run_on(hosts, "meet", GLOO_SOCKET_IFNAME=lambda _: "lo")
    assert 0 not in codes
    for rank, output in enumerate(outputs):
        assert re.search(rf"RuntimeError: rank {rank} of 2 could not connect to the others \(main node 10\.", output)
        assert "GLOO_SOCKET_IFNAME=eth0; it is lo" in output


@pytest.fixture(scope="module")
def two_nodes():
    """What the processes of a job said on each of two nodes, and the nodes' addresses; one job for the tests below."""
    with two_hosts() as hosts:
        codes, outputs = run_on(hosts, "train_over_the_wire", GLOO_SOCKET_IFNAME=lambda host: host.link)
        assert codes == [0, 0], outputs
        yield outputs, [host.address for host in hosts]


def test_job_when_it_spans_two_nodes_then_servers_listen_where_others_reach_them(two_nodes):
    outputs, nodes = two_nodes
    for output in outputs:
        (endpoints,) = lines(output, "endpoints")
        addresses = [x.removeprefix("tcp://").partition(":")[0] for x in endpoints.split()]
        assert addresses == [nodes[0], nodes[1], nodes[0]]
        assert lines(output, "types") == [" ".join(["RemoteStores"] * 3)]
        assert lines(output, "counted") == ["8 8 8"]
        assert folders(lines(output, "pid")) == []


def test_shadowsync_when_its_trainers_are_on_two_nodes_then_both_end_with_one_model(two_nodes):
    outputs, _ = two_nodes
    for output in outputs:
        assert lines(output, "shadowsync-types") == [" ".join(["RemoteStores"] * 4)]
        assert lines(output, "shadowsync-keys") == ["True"]
        assert lines(output, "shadowsync-told") == ["True True True"]
    first, second = (lines(output, "shadowsync-final") for output in outputs)
    assert first == second
    (untrained,) = {" ".join(f"{x.double().sum().item():.12f}" for x in Ratings().state_dict().values())}
    assert not set(first[0].split()) & set(untrained.split())  # every tensor was trained


def test_hierarchical_when_its_groups_are_on_two_nodes_then_both_train_and_end_with_one_model(two_nodes):
    outputs, _ = two_nodes
    assert [lines(output, "groups-world") for output in outputs] == [["2 2"], ["2 2"]]
    endpoints, final, untrained = (
        [lines(x, f"groups-{word}") for x in outputs] for word in ("endpoints", "final", "untrained")
    )
    assert endpoints[0] == endpoints[1]
    assert len(set(endpoints[0][0].split())) == 2
    assert all(x.startswith("tcp://") for x in endpoints[0][0].split())
    assert final[0] == final[1]
    assert not set(final[0][0].split()) & set(untrained[0][0].split())  # every tensor was trained
