"""Connections within the machine: no congestion control that paces."""

import os
import socket

import pytest
import torch
import zmq
from server_helpers import OpenServer, running

from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.messages.sockets import send_unpaced

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="needs Linux")


def control_of(descriptor: int) -> bytes:
    with socket.socket(fileno=os.dup(descriptor)) as own:
        return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_server_and_client_on_loopback_then_no_end_is_paced(tmp_path, monkeypatch):
    told = []

    def spy(descriptor):
        send_unpaced(descriptor)
        told.append(control_of(descriptor))

    for module in ("server", "client"):
        monkeypatch.setattr(f"lightning_recsys.parameter_server.{module}.send_unpaced", spy)
    with running(tmp_path, kind=OpenServer) as server:
        assert told == [b"reno"]  # where ZeroMQ listens
        stores = connect(server.endpoint, transport="tcp")
        center = stores.create_dense_store("center", torch.zeros(3))
        while len(told) < 2:  # a link looks at its socket when it waits
            assert center.pull().tolist() == [0.0] * 3
        stores.close()
    assert set(told) == {b"reno"}


def test_sockets_of_other_kinds_then_nothing_happens(tmp_path):
    first, second = socket.socketpair()
    with first, second, socket.socket() as unbound, (tmp_path / "file").open("wb") as file:
        before = control_of(unbound.fileno())
        for descriptor in (first.fileno(), unbound.fileno(), file.fileno(), 12345):
            send_unpaced(descriptor)
        assert control_of(unbound.fileno()) == before  # bound to no address


def test_version_of_zeromq_then_it_tells_where_it_listens_before_bind_returns():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    monitor = router.get_monitor_socket(int(zmq.EVENT_LISTENING))
    router.bind("tcp://127.0.0.1:0")
    assert monitor.poll(0)
    router.disable_monitor()
    monitor.close(0)
    router.close(0)
    context.term()
