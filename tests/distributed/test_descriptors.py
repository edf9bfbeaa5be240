"""Connections share a process's threads and take few file descriptors; where none is left, a sentence says so."""

import gc
import os
import re
import resource
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress

import psutil
import pytest
import torch
from server_helpers import running
from server_processes import processes

from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.messages import sockets
from lightning_recsys.parameter_server.messages.sockets import allow_descriptors

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

CHILD = """
import resource, sys, time
from lightning_recsys.parameter_server import connect

resource.setrlimit(resource.RLIMIT_NOFILE, (96, 4096))
opened = []
try:
    while True:
        opened.append(connect(sys.argv[1], transport="tcp", timeout=20))
except OSError as error:
    print(len(opened), type(error).__name__, error, flush=True)
opened[0].close()
deadline = time.monotonic() + 60
while True:
    try:
        with_room = connect(sys.argv[1], transport="tcp", timeout=20)
        break
    except OSError:  # a thread of ZeroMQ's closes them
        if time.monotonic() > deadline:
            raise
        time.sleep(0.01)
print(sum(stores.status()["stores"] for stores in [*opened[1:], with_room]))
for stores in [*opened[1:], with_room]:
    stores.close()
"""


def test_process_when_it_has_no_descriptors_left_then_a_sentence_says_what_to_do_and_the_rest_goes_on(tmp_path):
    with running(tmp_path) as server:
        command = [sys.executable, "-c", CHILD, server.endpoint]
        child = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr
    first, second = child.stdout.splitlines()
    opened = int(re.match(r"([0-9]+) OSError ", first)[1])
    assert opened >= 10, "nine descriptors each would have been enough for ten with nothing else open"
    assert "no file descriptors are left for a connection to ipc://" in first
    assert "this process may have 96 open" in first
    assert "`ulimit -n 4096`" in first
    assert second == "0", "no store is there, as each of the connections said"


THREADS = """
import os, time, zmq
from lightning_recsys.parameter_server.messages.sockets import shared_context

def count():
    return len(os.listdir("/proc/self/fd"))

context = shared_context()
deadline = time.monotonic() + 60
before = count()
while time.monotonic() < deadline:  # a thread of ZeroMQ's closes the socket that started it
    time.sleep(0.05)
    if (now := count()) == before:
        break
    before = now
socket = context.socket(zmq.DEALER)
print(count() - before)
socket.close(0)
"""


def test_context_when_there_is_one_then_its_threads_have_their_descriptors():
    """ZeroMQ aborts where they are gone when it starts them, and looks for them only then."""
    child = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "1", "a socket has taken its own alone"


def test_connections_then_they_take_four_descriptors_and_no_threads_each_and_a_fork_makes_its_own(tmp_path):
    process = psutil.Process()
    with running(tmp_path) as server, ExitStack() as stack:
        center = stack.enter_context(closing(connect(server.endpoint, transport="tcp", timeout=20)))
        center.create_dense_store("center", torch.ones(2))
        descriptors, threads = process.num_fds(), process.num_threads()
        for _ in range(20):
            stack.enter_context(closing(connect(server.endpoint, transport="tcp", timeout=20)))
        assert process.num_threads() == threads
        assert process.num_fds() == descriptors + 20 * 5, "the server is of this process, and has its end"
        pid = os.fork()
        if not pid:
            with closing(connect(server.endpoint, transport="tcp", timeout=20)) as own:
                os._exit(own.dense_store("center").pull().tolist() != [1.0, 1.0])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    deadline = time.monotonic() + 60
    while process.num_fds() >= descriptors and time.monotonic() < deadline:  # a thread of ZeroMQ's closes them
        time.sleep(0.01)
    assert process.num_fds() < descriptors


CHILD_THAT_RECONNECTS = """
import os, resource, signal, sys
import torch
from lightning_recsys.parameter_server import connect

stores = connect(sys.argv[1], transport="tcp", timeout=0.5, retries=2)
center = stores.create_dense_store("center", torch.ones(2))
connection, held = stores.connection, []
new_link = connection._new_link


def without_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return new_link()


connection._new_link = without_descriptors
os.kill(int(sys.argv[2]), signal.SIGSTOP)  # so that nobody answers, and the link is made anew
calls = [center.pull, center.pull, lambda: center.assign(torch.zeros(2)), connection.flush]
if sys.argv[3] == "goes on":
    calls += [center.pull]
else:
    calls += [stores.close]
for call in calls:
    try:
        call()
        print("it was sent", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
os.kill(int(sys.argv[2]), signal.SIGCONT)
if sys.argv[3] == "goes on":
    while held:
        os.close(held.pop())
    connection._new_link, connection._timeout = new_link, 5
    connection.flush()
    print(center.pull().tolist(), flush=True)
    stores.close()
"""


@pytest.mark.parametrize("then", ["goes on", "closes"])
def test_connection_when_it_is_lost_and_no_descriptor_is_left_then_says_so_each_time_and_loses_nothing(tmp_path, then):
    with processes() as pool:
        process, endpoint = pool.serve(tmp_path / "stores")
        command = [sys.executable, "-c", CHILD_THAT_RECONNECTS, endpoint, str(process.pid), then]
        child = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr
    *calls, last = child.stdout.splitlines()
    if then == "closes":
        assert re.match(
            r"ServerUnreachableError .*no file descriptors are left .*; 1 push was never acknowledged", last
        )
    else:
        assert last == "[0.0, 0.0]"
    assert len(calls) >= 4
    for call in calls:
        assert call.startswith("OSError [Errno 24] no file descriptors are left for a connection to ipc://")


def test_connection_of_a_parent_when_it_is_closed_or_used_in_a_forked_process_then_nothing_hangs_there_or_here(
    tmp_path,
):
    with running(tmp_path) as server, closing(connect(server.endpoint, transport="tcp", timeout=20)) as stores:
        center = stores.create_dense_store("center", torch.ones(2))
        pending = stores.connection.begin("status")
        connection = stores.connection
        uses = [center.pull, connection.flush, lambda: connection.wait(pending), lambda: connection.push("assign")]
        pid = os.fork()
        if not pid:
            told = []
            for use in uses:
                try:
                    use()
                except RuntimeError as error:
                    told.append("does not survive a fork: connect anew" in str(error))
            stores.close()
            stores.close()
            with closing(connect(server.endpoint, transport="tcp", timeout=20)) as own:
                os._exit(told != [True] * 4 or own.dense_store("center").pull().tolist() != [1.0, 1.0])
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        assert ended != (0, 0), "it hangs"
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert connection.wait(pending).value["stores"] == 1
        assert center.pull().tolist() == [1.0, 1.0]


def test_context_when_a_process_is_forked_then_it_has_none_and_its_parent_keeps_its_own():
    """Process ids come again, so a process's id is no name of a context."""
    own = sockets.shared_context()
    pid = os.fork()
    if not pid:
        os._exit(sockets._contexts != [] or sockets._inherited[-1:] != [own] or sockets.shared_context() is own)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sockets.shared_context() is own


def settled_descriptors():
    """How many this process has, once the tests before have let go of theirs, which ZeroMQ's threads close."""
    gc.collect()
    before, deadline = -1, time.monotonic() + 30
    while (now := psutil.Process().num_fds()) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.5)
    return now


def test_server_when_its_clients_take_all_descriptors_then_it_says_so_once_and_may_have_more(tmp_path, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = settled_descriptors() + 200
    with running(tmp_path) as server, ExitStack() as stack:

        def one_more():
            return stack.enter_context(closing(connect(server.endpoint, transport="tcp", timeout=20)))

        one_more()
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        taken = []
        stack.callback(lambda: [os.close(descriptor) for descriptor in taken])

        def take_all_but(left):
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(left):
                os.close(taken.pop())

        take_all_but(56)  # ten connections with both of their ends, and what threads need for a moment meanwhile
        for _ in range(10):
            one_more()
        take_all_but(2)  # which are too few
        with pytest.raises(OSError, match="no file descriptors are left for a connection"):
            one_more()
        told = [record.getMessage() for record in caplog.records if "file descriptor" in record.getMessage()]
        assert len(told) == 1
        assert f"of {limit}: further clients will wait in vain" in told[0]
        allow_descriptors(limit + 50)
        one_more()
        allow_descriptors(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit + 50, hard)
