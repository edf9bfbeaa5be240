"""A machine that is gone without a word: neither end of its connections waits for it for ever."""

import os
import signal
import time
from contextlib import ExitStack, closing

import pytest
import torch
from two_hosts import two_hosts

from lightning_recsys.errors import RequestRefusedError
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.parameter_server import connect, journal, serve
from lightning_recsys.parameter_server.access.keys import JobKeys
from lightning_recsys.parameter_server.client import LinkLostError
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.messages import sockets

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

SILENCE = 2.0
PLACES = 7


def enter(host):
    host.enter()
    sockets.SILENCE_SECONDS, sockets.HEARTBEAT_SECONDS = SILENCE, SILENCE / 8


def run_server(host, folder, keys, pipe):
    """Serve; to tell its status takes this server longer than anybody may be silent."""
    enter(host)
    journal.LEASE_SECONDS = 0.1
    status = RequestHandler.status

    def slow_status(handler):
        time.sleep(2 * SILENCE)
        return status(handler)

    RequestHandler.status = slow_status
    serve(folder, bind=f"tcp://{host.address}:0", keys=keys, ready=pipe.send, max_clients=PLACES)


def take_places(host, endpoint, keys, pipe):
    """Connect and push, over and over, then say no more."""
    enter(host)
    kept = [connect(endpoint, keys=keys, transport="tcp", timeout=30) for _ in range(PLACES - 1)]
    for stores in kept:
        stores.create_dense_store("center", torch.zeros(2)).elastic_average(torch.ones(2), alpha=0.5)
    pipe.send(len(kept))
    pipe.recv()


def stay(host, endpoint, keys, pipe):
    """Ask a busy server, then say no more until the other end is gone, and come back."""
    enter(host)
    with closing(connect(endpoint, keys=keys, transport="tcp", timeout=SILENCE / 2, retries=100)) as stores:
        connection = stores.connection
        connection._timeout = 60.0  # the other end may be silent for no shorter than that, were it told so at once
        stores.status()
        pipe.send(connection.traffic.reconnects)
        try:
            connection._link.receive(100.0)
        except LinkLostError as error:
            pipe.send(str(error))
        pipe.recv()
        connection._lost, connection._timeout = True, 1.0
        pipe.send(stores.dense_store("center").pull().tolist())


def test_machine_when_it_is_gone_then_its_places_are_free_and_the_other_end_knows_too(tmp_path):
    keys, context = JobKeys.generate(), fork_server_context()
    with two_hosts() as (here, there), ExitStack() as stack:

        def start(function, *arguments):
            pipe, other = context.Pipe()
            process = context.Process(target=function, args=(*arguments, other), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            return process, pipe

        def hear(pipe):
            assert pipe.poll(60)
            return pipe.recv()

        _, server = start(run_server, here, tmp_path / "stores", keys.server)
        endpoint = hear(server)
        lost, others = start(take_places, there, endpoint, keys.client)
        _, patient = start(stay, there, endpoint, keys.client)
        assert hear(others) == PLACES - 1
        assert hear(patient) == 0, "a server that computes is there all the same"
        _, late = start(come_late, here, endpoint, keys.client)
        assert "all 7 places for clients are taken" in hear(late)
        there.set_link("down")
        os.kill(lost.pid, signal.SIGKILL)
        late.send("again")
        assert hear(late) == "welcome"
        assert hear(patient) == "the connection was lost"
        there.set_link("up")
        patient.send("come back")
        assert hear(patient) == [1 - 0.5**6] * 2


def come_late(host, endpoint, keys, pipe):
    """Ask for a place, once and then until there is one."""
    enter(host)
    try:
        connect(endpoint, keys=keys, transport="tcp", timeout=30).close()
    except RequestRefusedError as error:
        pipe.send(str(error))
    pipe.recv()
    while True:
        try:
            connect(endpoint, keys=keys, transport="tcp", timeout=30).close()
        except RequestRefusedError:
            time.sleep(0.1)
        else:
            break
    pipe.send("welcome")
