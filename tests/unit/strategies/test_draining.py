"""Groups that are drained for maintenance: what the command does, and where a group comes back."""

import re
from types import SimpleNamespace

import pytest
import torch

from lightning_recsys.strategies.hierarchical import cli
from lightning_recsys.strategies.hierarchical.draining import WANTED, GroupState
from lightning_recsys.strategies.hierarchical.servers.group_parts import SyncOrder
from lightning_recsys.strategies.hierarchical.servers.sync_agent import SyncAgent
from lightning_recsys.strategies.shadowsync.drivers import ShadowThread
from lightning_recsys.strategies.shadowsync.rounds import CenterRounds
from lightning_recsys.sync import make_algorithm


@pytest.fixture
def run(tmp_path):
    """Two groups of two servers, one of them drained."""
    folders = {}
    for number in range(4):
        folder = tmp_path / "lightning_recsys-7-abc" / f"group-{number}"
        folder.mkdir(parents=True)
        GroupState(number // 2, 2, True, drained=number > 1, nets=2, waiting=2 * (number > 1)).write(folder)
        folders[number] = folder
    (tmp_path / "lightning_recsys-7-abc" / "group-4").mkdir()  # without parts yet
    return SimpleNamespace(parent=tmp_path, folders=folders)


def ask(run, *arguments):
    return cli.main([*arguments, "--store-folder", str(run.parent), "--timeout", "0.1"])


def test_command_when_it_lists_then_each_group_with_its_nets(run, capsys):
    assert ask(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "lightning_recsys-7-abc  group 0  trains  0 of 2 nets wait",
        "lightning_recsys-7-abc  group 1  drained  2 of 2 nets wait",
    ]


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
        (["rejoin", "1", "--run", "other"], r"--run: \['lightning_recsys-7-abc'\]"),
    ],
    ids=["last", "unknown_group", "no_group", "unknown_run"],
)
def test_command_when_it_cannot_be_meant_then_says_why(run, capsys, arguments, reason):
    assert ask(run, *arguments) == 1
    assert re.search(reason, capsys.readouterr().err)
    assert not any((x / WANTED).exists() for x in run.folders.values())


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

    piece = SimpleNamespace(size=3, pull=center.clone, begin_elastic_average=average, moving_seconds=0.0)
    algorithm = make_algorithm("easgd", {})
    agent = SyncAgent(SyncOrder(algorithm, (), None, None, "center-0", 0.0, 1, 2), replica)
    agent._thread = ShadowThread(CenterRounds(algorithm, replica, pieces=[piece]), interval=0.0)
    agent.rejoin()
    while not rounds:
        pass
    agent.stop()
    assert torch.equal(rounds[0], center)
    assert torch.equal(replica, center)
