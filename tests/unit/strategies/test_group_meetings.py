"""Meetings of group servers that average among themselves: what fails, who comes too late, and who tells them."""

import socket
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.strategies.hierarchical import run as net_run
from lightning_recsys.strategies.hierarchical.servers.group_parts import SyncOrder
from lightning_recsys.strategies.hierarchical.servers.group_server import GroupRequests
from lightning_recsys.strategies.hierarchical.servers.sync_agent import Meeting, SyncAgent
from lightning_recsys.sync import make_algorithm


def make_agent():
    order = SyncOrder(make_algorithm("ma", {"alpha": 1.0}), (), None, None, "center-0", 0.0, 0, 2)
    return SyncAgent(order, torch.zeros(4))


class BreakingGroup:
    """A group of two servers, one of which is lost after some rounds."""

    def __init__(self, num_rounds):
        self.num_rounds = num_rounds

    def size(self):
        return 2

    def allreduce(self, tensors):
        if not self.num_rounds:
            raise RuntimeError("connection closed by peer")
        self.num_rounds -= 1
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def take_part(monkeypatch):
    """Goes through one meeting after the other, and returns what an agent tells at their ends."""
    agent = make_agent()

    def go(*rounds):
        told = []
        for number, num_rounds in enumerate(rounds):
            group = None if num_rounds is None else BreakingGroup(num_rounds)
            monkeypatch.setattr(agent, "_gather", lambda meeting, group=group: group)
            agent.start(Meeting("", 0, number, [0, 1]))
            agent._starting.join()
            told.append(agent.stop())
        return told

    return go


def test_meetings_when_each_loses_a_server_after_rounds_then_all_of_them_count_and_none_is_an_error(take_part):
    told = take_part(3, 2, 4)
    assert [x["rounds"] for x in told] == [3.0, 5.0, 9.0]
    assert 0 < told[0]["seconds"] < told[1]["seconds"] < told[2]["seconds"]


def test_meetings_when_two_in_a_row_have_made_no_round_then_that_is_an_error(take_part):
    assert [x["rounds"] for x in take_part(0, 1, 0)] == [0.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        take_part(0)


def make_place():
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def test_meeting_when_it_ends_before_all_have_come_then_a_warning_says_who_was_missing(caplog):
    place = make_place()
    agent = make_agent()
    agent.start(Meeting("127.0.0.1", place.port, 7, [0, 1]))
    assert agent.stop()["rounds"] == 0
    assert "Groups [0, 1] make no rounds until they meet again: meeting 7 was without groups [1]" in caplog.text


def test_meeting_when_a_server_before_this_one_has_died_in_it_then_its_successor_stays_away(caplog):
    place = make_place()
    for key in ("here-0", "here-1", "fate"):
        place.set(f"center-0/3/{key}", "on" if key == "fate" else "")
    agent = make_agent()
    agent.start(Meeting("127.0.0.1", place.port, 3, [0, 1]))
    agent._starting.join()
    assert agent.stop()["rounds"] == 0
    assert "meeting 3 was without groups [0]" in caplog.text


def test_server_when_each_net_of_its_group_has_it_begin_then_it_begins_once_in_each_interval(tmp_path):
    begun = []
    server = GroupRequests(tmp_path, Limits(), lambda: None)
    server._agent = SimpleNamespace(
        has_center=False, start=begun.append, stop=lambda: {"rounds": 1.0}, rounds=0, abandon=lambda: None
    )

    def ask(operation, **arguments):
        return server.operations.reads[operation](Request(operation, 1, bytes(16), 0, "", arguments, []))

    for number in range(2):
        for _ in range(3):
            ask("begin_sync", host="127.0.0.1", port=1, number=number, groups=[0, 1])
        assert ask("end_sync").result(20) == ask("end_sync").result(20) == {"rounds": 1.0}
    server.close()
    assert begun == [Meeting("127.0.0.1", 1, number, [0, 1]) for number in range(2)]


def test_net_when_it_does_not_lead_its_group_then_it_has_the_servers_begin_and_end_all_the_same(monkeypatch):
    calls = []
    servers = SimpleNamespace(
        begin_sync=lambda number, groups: calls.append(("begin", number, groups)),
        end_sync=lambda: calls.append(("end",)),
    )
    monkeypatch.setattr(net_run.dist, "all_reduce", lambda tensor: tensor.add_(1))  # of the group's first
    monkeypatch.setattr(net_run, "meet_buffers", lambda task: None)
    monkeypatch.setattr(net_run.NetRun, "_elect", lambda self: None)
    strategy = SimpleNamespace(global_rank=1, barrier=lambda name: None)
    dense = SimpleNamespace(strategy=strategy, has_center=False, num_groups=2, agreed_stops=0)
    task = torch.nn.Linear(1, 1)
    net = net_run.NetRun(dense, task, task, torch.optim.SGD(task.parameters(), lr=1.0))
    net._brought = SimpleNamespace(partitioned=SimpleNamespace(parts=[]), servers=servers)
    net.settle(goes_on=True)
    assert calls == [("end",), ("begin", 1, [0, 1])]
