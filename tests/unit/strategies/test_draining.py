"""Groups that are drained for maintenance: what the command does, and where a group comes back."""

import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.strategies.hierarchical import cli
from lightning_recsys.strategies.hierarchical import run as net_run
from lightning_recsys.strategies.hierarchical.draining import WANTED, GroupState
from lightning_recsys.strategies.hierarchical.servers.group_parts import SyncOrder
from lightning_recsys.strategies.hierarchical.servers.group_server import GroupRequests
from lightning_recsys.strategies.hierarchical.servers.sync_agent import SyncAgent
from lightning_recsys.strategies.replicas.drivers import ShadowThread
from lightning_recsys.strategies.replicas.rounds import CenterRounds
from lightning_recsys.sync import make_algorithm

RUN = f"lightning_recsys-{os.getpid()}-abc"


@pytest.fixture
def run(tmp_path):
    """Two groups of two servers, one of them drained."""
    folders = {}
    for number in range(4):
        folder = tmp_path / RUN / f"group-{number}"
        folder.mkdir(parents=True)
        GroupState(number // 2, 2, True, drained=number > 1, nets=2, waiting=2 * (number > 1)).write(folder)
        folders[number] = folder
        (tmp_path / RUN / f"group-{number}.socket").touch()
    (tmp_path / RUN / "group-4").mkdir()  # of a server without parts
    return SimpleNamespace(parent=tmp_path, folders=folders)


def ask(run, *arguments):
    return cli.main(["--store-folder", str(run.parent), "--timeout", "0.1", *arguments])


def test_command_when_it_lists_then_each_group_with_its_nets(run, capsys):
    assert ask(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{RUN}  group 0  trains  0 of 2 nets wait",
        f"{RUN}  group 1  drained  2 of 2 nets wait",
    ]


def test_command_when_a_group_has_not_begun_then_waits_until_its_servers_tell_of_it(run, capsys):
    for number in (2, 3):
        (run.folders[number] / "group.json").unlink()
    assert ask(run, "drain", "1") == 1
    assert "group 1 has not begun here within 0 s" in capsys.readouterr().err
    drained = GroupState(1, 2, True, drained=True, nets=1, waiting=1)
    beginning = threading.Timer(0.3, drained.write, [run.folders[2]])
    beginning.start()
    assert ask(run, "drain", "1", "--timeout", "60") == 0
    beginning.join()
    assert (run.folders[2] / WANTED).exists()


def test_command_when_a_run_was_killed_then_only_those_that_live_are_there(run):
    dead = run.parent / f"lightning_recsys-{2**22 + 1}-abc" / "group-0"  # Linux has no process of such a number
    dead.mkdir(parents=True)
    GroupState(0, 2, True, nets=2).write(dead)
    assert cli.find_runs(run.parent).keys() == {RUN}


def test_command_when_another_run_ends_meanwhile_then_goes_on_without_it(run, monkeypatch):
    other, lstat = run.parent / f"lightning_recsys-{os.getpid()}-abb", Path.lstat
    shutil.copytree(run.parent / RUN, other)

    def ending(path):
        if path.parent == other:
            shutil.rmtree(other)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", ending)
    assert cli.find_runs(run.parent).keys() == {RUN}
    assert not other.exists()


def test_command_when_the_first_group_is_drained_then_says_that_nothing_is_published(run, capsys):
    for number, folder in run.folders.items():
        GroupState(number // 2, 2, True, drained=number < 2, nets=2, waiting=2 * (number < 2)).write(folder)
    assert ask(run, "drain", "0") == 0
    assert "no versions come meanwhile" in capsys.readouterr().err
    assert ask(run, "drain", "1") == 1
    assert "no versions" not in capsys.readouterr().err


def test_command_when_a_group_is_drained_then_all_its_servers_are_told_and_it_waits_for_them(run, capsys):
    GroupState(1, 2, True, nets=2).write(run.folders[2])
    GroupState(1, 2, True, nets=2).write(run.folders[3])
    assert ask(run, "drain", "1") == 1
    assert "did not come to rest within 0 s" in capsys.readouterr().err
    assert [(x / WANTED).exists() for x in run.folders.values()] == [False, False, True, True]
    for number in (2, 3):
        GroupState(1, 2, True, drained=True, nets=2, waiting=2).write(run.folders[number])
    assert ask(run, "drain", "1") == 0
    GroupState(1, 2, True, nets=2).write(run.folders[2])
    GroupState(1, 2, True, nets=2).write(run.folders[3])
    assert ask(run, "rejoin", "1") == 0
    assert not any((x / WANTED).exists() for x in run.folders.values())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["drain", "0"], "group 0 is the only one that trains"),
        (["drain", "2"], r"one of the groups \[0, 1\], got 2"),
        (["drain"], "got None"),
        (["rejoin", "1", "--run", "other"], rf"--run: \['{RUN}'\]"),
    ],
    ids=["last", "unknown_group", "no_group", "unknown_run"],
)
def test_command_when_it_cannot_be_meant_then_says_why(run, capsys, arguments, reason):
    assert ask(run, *arguments) == 1
    assert re.search(reason, capsys.readouterr().err)
    assert not any((x / WANTED).exists() for x in run.folders.values())


@pytest.mark.parametrize("arguments", [["drain", "0"], ["rejoin", "0", "--run", "lightning_recsys-1-gone"]])
def test_command_when_no_run_is_there_then_says_so(tmp_path, capsys, arguments):
    assert cli.main(["--store-folder", str(tmp_path), *arguments]) == 1
    assert capsys.readouterr().err == (
        "lightning-recsys groups: no groups of Hierarchical Training run on this machine\n"
    )


def test_command_when_groups_average_among_themselves_then_none_can_be_drained(run, capsys):
    for number, folder in run.folders.items():
        GroupState(number // 2, 2, False, nets=2).write(folder)
    assert ask(run, "drain", "1") == 1
    assert "strategy.algorithm=easgd" in capsys.readouterr().err


def test_group_when_it_comes_back_then_with_the_weights_of_the_centre_and_rounds():
    center, replica, rounds = torch.arange(3.0), torch.full((3,), 9.0), []

    def average(part, *, alpha):
        rounds.append(part.clone())
        return lambda: center.clone()

    piece = SimpleNamespace(size=3, pull=center.clone, begin_elastic_average=average)
    algorithm = make_algorithm("easgd", {})
    agent = SyncAgent(SyncOrder(algorithm, (), None, None, "center-0", 0.0, 1, 2), replica)
    agent._thread = ShadowThread(CenterRounds(algorithm, replica, pieces=[piece]), interval=0.0)
    agent.take_center()
    assert torch.equal(replica, center)
    assert not rounds
    agent.start()
    while not rounds:
        pass
    agent.stop()
    assert torch.equal(rounds[0], center)
    assert torch.equal(replica, center)


class Agent:
    """What keeps a drained server's share, which takes the centre's weights when it is let, and fails at first."""

    rounds, has_center = 0, True

    def __init__(self, failures):
        self.failures, self.may, self.calls = failures, threading.Event(), []

    def take_center(self):
        self.may.wait(20)
        self.calls.append("take")
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no sync server answers")

    def start(self, meeting):
        assert meeting is None
        self.calls.append("start")

    def abandon(self):
        self.calls.append("abandon")


@pytest.fixture
def drained(tmp_path):
    """A server of a drained group, which nobody wants to be drained any more."""
    requests = GroupRequests(tmp_path, Limits(), lambda: None)
    requests._state = GroupState(1, 2, True, drained=True)
    yield requests
    requests.close()


def send(requests, operation, **arguments):
    return requests.operations.reads[operation](Request(operation, 1, bytes(16), 0, "", arguments, []))


def let_it_end(drained, agent):
    """What a look has begun, which waits for this."""
    begun = drained._rejoining
    agent.may.set()
    begun.exception(20)
    agent.may.clear()


def test_group_when_it_cannot_come_back_then_says_so_stays_drained_and_tries_again(drained, caplog):
    agent = drained._agent = Agent(failures=1)
    assert send(drained, "look", waits=True)
    let_it_end(drained, agent)
    assert send(drained, "look", waits=True)
    assert "Group 1 has not come back, and tries again: no sync server answers" in caplog.messages
    assert send(drained, "look", waits=True)
    let_it_end(drained, agent)
    assert not send(drained, "look", waits=True)
    assert agent.calls == ["take", "take", "start"]
    assert not drained._state.drained


def test_group_when_rounds_end_while_it_comes_back_then_that_waits_and_only_a_net_that_waits_brings_it_back(drained):
    agent = drained._agent = Agent(failures=0)
    assert send(drained, "look", waits=False)
    assert drained._rejoining is None
    assert send(drained, "look", waits=True)
    ended = send(drained, "end_sync")
    assert not ended.done()
    agent.may.set()
    assert ended.result(20) is None
    assert agent.calls == ["take"]
    assert send(drained, "look", waits=False)
    assert not send(drained, "look", waits=True)
    assert agent.calls == ["take", "start"]


class Servers:
    """The servers of a group, which have nines in the replica."""

    def __init__(self, task, calls):
        self.task, self.calls = task, calls

    def end_sync(self):
        self.calls.append("end_sync")
        return {}

    def pull_model(self, *, keep):
        self.calls.append("pull_model")
        with torch.no_grad():
            for x in self.task.parameters():
                x.fill_(9.0)


@pytest.fixture
def net(monkeypatch):
    """Makes a net that leads a drained group; with what it does."""

    def make(others):
        def all_reduce(tensor):
            if tensor.dim():
                tensor += torch.tensor(others.pop(0))

        def request(name, arguments):
            calls.append((name, arguments["waits"]))
            return SimpleNamespace(value=True)

        calls, task = [], torch.nn.Linear(1, 1)
        monkeypatch.setattr(net_run.dist, "all_reduce", all_reduce)
        monkeypatch.setattr(net_run, "meet_buffers", lambda task: None)
        monkeypatch.setattr(net_run.NetRun, "_elect", lambda self: None)
        dense = SimpleNamespace(
            strategy=SimpleNamespace(global_rank=0, barrier=lambda name: None),
            has_center=True,
            num_groups=2,
            agreed_stops=0,
            group_connections=lambda: [SimpleNamespace(request=request)],
        )
        made = net_run.NetRun(dense, task, task, torch.optim.SGD(task.parameters(), lr=1.0))
        made._brought = SimpleNamespace(partitioned=SimpleNamespace(parts=[]), servers=Servers(task, calls))
        made.leads = True
        return made, task, calls

    return make


def values_of(task):
    return [x.item() for x in task.parameters()]


def test_weights_when_brought_together_then_it_is_asked_once_whether_the_group_is_drained_before_they_are_taken(net):
    made, task, calls = net([[2.0, 4.0, 2.0]])  # of two groups that train
    made.settle(goes_on=False)
    assert calls == ["end_sync", ("look", False), "pull_model"]
    assert values_of(task) == [1.0, 2.0]
    assert [x.item() for x in made.own_replica.values()] == [1.0, 2.0]


def test_weights_when_the_last_group_that_trains_has_died_then_those_of_drained_groups_and_never_a_division_by_nought(
    net,
):
    made, task, _ = net([[0.0] * 3, [1.0, 1.0, 1.0]])  # and another drained one
    made.settle(goes_on=False)
    assert values_of(task) == [5.0, 5.0]
    made, task, calls = net([[0.0] * 3, [-9.0, -9.0, -1.0], [0.0] * 3, [3.0, 3.0, 1.0]])  # all first ranks have died
    made.settle(goes_on=False)
    assert values_of(task) == [6.0, 6.0]  # the next ones have taken what the servers have
    assert calls.count("pull_model") == 2
