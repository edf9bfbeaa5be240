"""Group servers that average among themselves: one that dies is missed from the next meeting on, or back at it."""

import socket
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.strategies.common.workers import meeting as workers_meeting
from lightning_recsys.strategies.hierarchical.servers.group_parts import SyncOrder
from lightning_recsys.strategies.hierarchical.servers.sync_agent import Meeting, SyncAgent
from lightning_recsys.sync import make_algorithm

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def serve(group, pipe):
    """Do with an agent what is asked for, until nobody asks any more."""
    replica = torch.full((4,), float(group))
    agent = SyncAgent(
        SyncOrder(make_algorithm("ma", {"alpha": 1.0}), (), None, None, "center-0", 0.0, group, 3), replica
    )
    asked = {
        "start": lambda meeting: agent.start(meeting),
        "rounds": lambda: agent.rounds,
        "stop": lambda: agent.stop(),
    }
    asked["connect within"] = lambda limit: setattr(workers_meeting, "MEETING_TIME", limit)
    asked |= {"fill": lambda value: replica.fill_(value).tolist(), "replica": replica.tolist}
    try:
        while True:
            what, *arguments = pipe.recv()
            pipe.send(asked[what](*arguments))
    except EOFError:
        agent.abandon()


class Server:
    """A process with an agent."""

    def __init__(self, group):
        context = fork_server_context()
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(group, other))
        self.process.start()
        other.close()

    def begin(self, *asked):
        self.pipe.send(asked)

    def result(self):
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def ask(self, *asked):
        self.begin(*asked)
        return self.result()

    def end(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def servers():
    made = []
    try:
        yield lambda group: made.append(Server(group)) or made[-1]
    finally:
        for server in made:
            server.end()


def stop(*those):
    for server in those:
        server.begin("stop")
    return [server.result()["rounds"] for server in those]


def test_servers_when_one_is_killed_then_the_others_stop_and_meet_without_it_and_again_with_its_successor():
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())

    def meet(number, *those, groups):
        for server, value in zip(those, (1.0, 3.0, 8.0), strict=False):
            server.ask("fill", value)
        before = [server.ask("rounds") for server in those]
        for server in those:
            server.ask("start", Meeting("127.0.0.1", port, number, groups))
        while any(server.ask("rounds") < 3 + x for server, x in zip(those, before, strict=True)):
            pass

    with servers() as start:
        first, doomed, last = (start(group) for group in range(3))
        meet(0, first, doomed, last, groups=[0, 1, 2])
        doomed.end()
        made = stop(first, last)
        assert min(made) >= 3
        meet(1, first, last, groups=[0, 2])
        assert min(stop(first, last)) >= min(made) + 3
        assert first.ask("replica") == last.ask("replica") == [2.0] * 4
        again = start(1)
        meet(2, first, again, last, groups=[0, 1, 2])
        made = stop(first, again, last)
        assert [x.ask("replica") for x in (first, again, last)] == [[4.0] * 4] * 3
        for server in (first, last):  # the third is lost before it comes
            server.ask("start", Meeting("127.0.0.1", port, 3, [0, 1, 2]))
        assert stop(first, last) == [made[0], made[2]]
        meet(4, first, last, groups=[0, 2])
        made = stop(first, last)
        assert min(made) >= 3
        store.set("center-0/5/here-1", "")  # the third comes, and is lost while they connect
        for server in (first, last):
            server.ask("connect within", timedelta(seconds=1))
            server.ask("start", Meeting("127.0.0.1", port, 5, [0, 1, 2]))
        assert store.get("center-0/5/fate") == b"on"
        assert stop(first, last) == made
        for server in (first, last):
            server.ask("connect within", timedelta(seconds=60))
        meet(6, first, again, last, groups=[0, 1, 2])
        stop(first, again, last)
        assert [x.ask("replica") for x in (first, again, last)] == [[4.0] * 4] * 3
    del store
