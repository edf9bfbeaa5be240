"""What strangers and slow readers may keep of a server: no endless message or answers, and no places for good."""

import socket
import struct
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest
import torch
import zmq
from server_helpers import CLIENT, LAYOUT, OpenServer, raw_dealer, request_frames, running

from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.messages.wire import Limits, decode_reply

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

LIMITS = Limits(message_bytes=1 << 20)
SIZE = 200_000  # floats of a vector: 800 kB, of which two answers are over the limit


class Zmtp:
    """A DEALER without ZeroMQ, which sends what it likes and reads nothing of what it is sent."""

    def __init__(self, endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._socket.settimeout(60)
        self._socket.connect((host, int(port)))
        self._socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self._socket.sendall(bytes([4, len(ready)]) + ready)

    def send(self, data, *, more=False):
        self._socket.sendall(bytes([2 | more]) + struct.pack(">Q", len(data)) + data)

    def is_cut(self):
        """Whether the other end ends the connection soon."""
        with suppress(ConnectionResetError):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and self._socket.recv(1 << 20):
                pass
            return time.monotonic() < deadline
        return True

    def close(self):
        self._socket.close()


def test_peer_when_it_never_ends_a_message_then_is_cut_and_others_go_on(tmp_path):
    with (
        running(tmp_path, kind=OpenServer, limits=LIMITS) as server,
        closing(connect(server.endpoint, transport="tcp", timeout=20)) as stores,
        closing(Zmtp(server.endpoint)) as endless,
        closing(Zmtp(server.endpoint)) as patient,
    ):
        center = stores.create_dense_store("center", torch.ones(SIZE))
        patient.send(b"the beginning of a message", more=True)
        sent = 0
        with suppress(ConnectionError):
            while sent < 100 << 20:  # each frame is within the limit
                endless.send(bytes(1 << 18), more=True)
                sent += 1 << 18
                time.sleep(0.005 if sent < 8 << 20 else 0.2)  # the server looks twice a second, and may be held up
        assert sent < 100 << 20
        for _ in range(20):  # far more than a message may have, in messages that are whole
            center.assign(center.pull())
        patient.send(request_frames("status")[0])
        assert stores.connection.traffic.reconnects == 0
        while server.handler.counts.refused == 0:  # a message whose header is none, and no reason to cut
            time.sleep(0.01)
        assert len(server._connections) == 2


def test_peer_when_it_takes_no_answers_then_is_cut_and_others_go_on(tmp_path):
    with (
        running(tmp_path, kind=OpenServer, limits=LIMITS) as server,
        closing(connect(server.endpoint, transport="tcp", timeout=20)) as stores,
        closing(Zmtp(server.endpoint)) as greedy,
    ):
        center = stores.create_dense_store("center", torch.ones(SIZE))
        with suppress(ConnectionError):  # it may be cut before it has asked for all
            for number in range(1, 101):  # 80 MB
                greedy.send(bytes(request_frames("pull", store="center", request_id=number)[0]))
        pulled = 0
        while len(server._connections) > 1:
            assert center.pull().all()
            pulled += 1
        assert server.handler.counts.requests - pulled < 100
        assert stores.connection.traffic.reconnects == 0
        assert greedy.is_cut()


def test_peer_when_frames_of_answers_that_it_took_are_let_go_late_then_is_not_cut(tmp_path):
    with (
        running(tmp_path, kind=OpenServer, limits=LIMITS) as server,
        closing(connect(server.endpoint, transport="tcp", timeout=20)) as stores,
    ):
        center = stores.create_dense_store("center", torch.ones(SIZE))
        (peer,) = server._connections._by_descriptor.values()
        late = threading.Event()  # as if the thread that takes frames back had no turn
        peer.unsent.append((zmq.MessageTracker(late), 2 << 20))
        for _ in range(20):
            assert center.pull().all()
        assert peer.unsent_bytes() > LIMITS.message_bytes
        assert stores.connection.traffic.reconnects == 0
        assert len(server._connections) == 1


@contextmanager
def slow_way(endpoint):
    """Another endpoint of the same server, over which answers take their time; and what holds them back while clear."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    ends = []

    def forward(source, target, pause, is_open):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                is_open.wait()
                target.sendall(data)
                time.sleep(pause)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                client, server = listening.accept()[0], socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                server.connect((host, int(port)))
                ends.extend((client, server))
                for way in ((client, server, 0, always_open), (server, client, 0.005, open_for_answers)):
                    threads.append(threading.Thread(target=forward, args=way))
                    threads[-1].start()

    listening = socket.create_server(("127.0.0.1", 0))
    open_for_answers, always_open = threading.Event(), threading.Event()
    open_for_answers.set()
    always_open.set()
    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}", open_for_answers
    finally:
        open_for_answers.set()
        for end in (listening, *ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for end in (listening, *ends):
            end.close()


def test_client_when_its_way_is_too_slow_for_all_that_it_asks_then_gets_it_all_and_pushes_count_once(tmp_path):
    with (
        running(tmp_path, kind=OpenServer, limits=LIMITS) as server,
        slow_way(server.endpoint) as (endpoint, open_for_answers),
        closing(connect(endpoint, transport="tcp", timeout=20)) as stores,
    ):
        users = stores.create_embedding_store("users", LAYOUT, RowSGD(lr=1.0), seed=0)
        stores.create_dense_store("center", torch.arange(SIZE, dtype=torch.float32))
        before = users.lookup(torch.tensor([1]))
        asked = []
        open_for_answers.clear()  # however long this thread takes to ask for all
        for _ in range(20):
            asked.append(stores.connection.begin("pull", store="center"))
            users.apply_row_gradients(torch.tensor([1]), -torch.ones(1, 4), lr=1.0)
        open_for_answers.set()
        for pending in asked:
            assert stores.connection.wait(pending).arrays[0][-1] == SIZE - 1
        users.flush()
        assert stores.connection.traffic.reconnects >= 1
        torch.testing.assert_close(users.lookup(torch.tensor([1])), before + 20)
        assert users.step == 20


def said(dealer, operation, **fields):
    dealer.send_multipart(request_frames(operation, **fields))
    assert dealer.poll(60_000)
    return decode_reply(dealer.recv_multipart(), Limits())


def test_client_when_it_says_hello_in_many_names_then_takes_one_place_until_it_goes(tmp_path):
    with running(tmp_path, max_clients=2) as server, zmq.Context() as context:
        with raw_dealer(context, server.endpoint) as first:
            told = [said(first, "hello", client=bytes([number]) * 16) for number in range(1, 10)]
            assert [reply.status for reply in told] == ["ok", *["refused"] * 8]
            assert "a connection is one client's" in told[1].value
            with raw_dealer(context, server.endpoint) as second, raw_dealer(context, server.endpoint) as third:
                assert said(second, "hello", client=b"b" * 16).status == "ok"
                assert "all 2 places" in said(third, "hello", client=b"c" * 16).value
        deadline = time.monotonic() + 60
        while len(server._connections) and time.monotonic() < deadline:
            time.sleep(0.01)
        for client in (CLIENT, b"d" * 16):
            connect(server.endpoint, transport="tcp", timeout=20).close()
            with raw_dealer(context, server.endpoint) as dealer:
                assert said(dealer, "hello", client=client).status == "ok"


def test_client_when_its_place_was_given_away_before_its_first_push_then_gets_another_one(tmp_path):
    with running(tmp_path, max_clients=1) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20)
        stores.connection._link.close()  # as a network would
        stores.connection._lost = True
        while len(server._connections):
            time.sleep(0.01)
        other = connect(server.endpoint, transport="tcp", timeout=20)
        other.close()
        assert stores.create_dense_store("center", torch.ones(3)).pull().tolist() == [1.0] * 3
        assert server.handler.journal.applied(0) == 1
        stores.close()


def test_goodbye_when_the_connection_is_gone_before_it_is_read_then_counts_all_the_same(tmp_path):
    tmp_path.chmod(0o700)
    with OpenServer(tmp_path) as server, zmq.Context() as context:
        dealer = raw_dealer(context, server.endpoint)
        with closing(dealer):
            dealer.send_multipart(request_frames("hello"))
            assert server._router.poll(60_000)
            assert server._serve_one()
            assert server.handler.status()["clients"] == 1
            dealer.send_multipart(request_frames("goodbye", request_id=2))
            dealer.linger = 60_000
        assert server._router.poll(60_000)
        deadline = time.monotonic() + 60
        while len(server._connections) and time.monotonic() < deadline:
            server._connections.look()
            time.sleep(0.01)
        assert len(server._connections) == 0
        assert server._serve_one()
        assert server.handler.status()["clients"] == 0
