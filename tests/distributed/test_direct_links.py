"""Clients on the server's machine leave ZeroMQ for a direct link, and come back to it when that is lost."""

import socket
import threading
from contextlib import closing

import pytest
import torch
from server_helpers import LAYOUT, ask, running, stop_collector

from lightning_recsys.optim import SGD
from lightning_recsys.parameter_server import JobKeys, connect
from lightning_recsys.parameter_server.direct import DirectSocket
from lightning_recsys.parameter_server.links import DirectLink, ZeroMQLink

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

ROW = torch.tensor([4])


@pytest.fixture(autouse=True)
def _collector_stops():
    yield
    stop_collector()


def link_of(stores):
    return stores.connection._link


def make_users(stores):
    return stores.create_embedding_store("users", LAYOUT, SGD(learning_rate=0.5), seed=3)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0"])
def test_client_of_this_machine_then_goes_direct(tmp_path, bind):
    with running(tmp_path, bind=bind) as server, closing(connect(server.endpoint, shared_memory="never")) as stores:
        users = make_users(stores)
        assert isinstance(link_of(stores), DirectLink)
        torch.testing.assert_close(users.lookup(ROW), users.read("weight", 4, 1))


def test_client_with_keys_then_stays_with_zeromq_which_encrypts(tmp_path):
    keys = JobKeys.generate()
    with (
        running(tmp_path, keys=keys.server) as server,
        closing(connect(server.endpoint, keys=keys, shared_memory="never", timeout=20)) as stores,
    ):
        make_users(stores)
        assert isinstance(link_of(stores), ZeroMQLink)
        assert ask(server.handler, "hello").value["direct"] is None


def test_client_when_the_port_is_another_program_s_then_tells_it_nothing_and_stays_with_zeromq(tmp_path):
    heard = []

    def stranger():
        with listening.accept()[0] as connected:
            connected.sendall(b"220 mail.example")  # 16 bytes as well
            heard.append(connected.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listening, running(tmp_path) as server:
        thread = threading.Thread(target=stranger)
        thread.start()
        server.handler.direct_port = listening.getsockname()[1]
        with closing(connect(server.endpoint, shared_memory="never")) as stores:
            make_users(stores)
            assert isinstance(link_of(stores), ZeroMQLink)
        thread.join()
    assert heard == [b""]


def test_client_when_nobody_listens_there_then_stays_with_zeromq(tmp_path):
    with running(tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        server.handler.direct_port = closed.getsockname()[1]
        closed.close()
        with closing(connect(server.endpoint, shared_memory="never")) as stores:
            make_users(stores)
            assert isinstance(link_of(stores), ZeroMQLink)


def test_link_when_lost_then_the_client_goes_on_over_zeromq_and_direct_again(tmp_path):
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never", timeout=20)) as stores:
        users = make_users(stores)
        before = users.lookup(ROW)
        for times in range(1, 6):
            assert isinstance(link_of(stores), DirectLink)
            link_of(stores)._socket._socket.shutdown(socket.SHUT_RDWR)
            users.apply_row_gradients(ROW, torch.full((1, 4), -2.0), learning_rate=0.5)
            users.flush()
            assert isinstance(link_of(stores), ZeroMQLink)
            torch.testing.assert_close(users.lookup(ROW), before + times)
            users.lookup(ROW)  # the second that finds nothing on its way
        assert users.step == 5
        assert stores.connection.traffic.reconnects == 5


def test_client_when_its_push_and_the_answers_before_it_fill_the_sockets_then_both_get_through(tmp_path):
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never", timeout=20)) as stores:
        size = 4 << 20  # 16 MiB: more than the system keeps for both ends
        center = stores.create_dense_store("center", torch.zeros(size))
        connection = stores.connection
        asked = [connection.begin("pull", store="center") for _ in range(4)]
        connection.push("assign", store="center", arrays=[torch.ones(size)])
        for pending in asked:
            assert not connection.wait(pending).arrays[0].any()
        assert center.pull().all()


def test_client_when_it_takes_no_answers_or_sends_half_a_request_then_others_are_served(tmp_path):
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never", timeout=20)) as stores:
        users = make_users(stores)
        center = stores.create_dense_store("center", torch.zeros(4 << 20))
        with closing(connect(server.endpoint, shared_memory="never")) as greedy:
            greedy.dense_store("center")
            for _ in range(8):
                greedy.connection.begin("pull", store="center")
            with socket.create_connection(("127.0.0.1", server.handler.direct_port)) as slow:
                slow.sendall((1).to_bytes(8, "little"))
                for _ in range(20):
                    users.apply_row_gradients(ROW, torch.ones(1, 4), learning_rate=1.0)
                assert users.step == 20
                assert not center.pull().any()


def test_server_when_told_to_stop_then_requests_that_have_arrived_directly_are_answered(tmp_path):
    with running(tmp_path) as server:
        stores = connect(server.endpoint, shared_memory="never", timeout=20)
        center = stores.create_dense_store("center", torch.zeros(1 << 20))
        assert center.pull().numel() == 1 << 20
        asked = [stores.connection.begin("pull", store="center") for _ in range(3)]
        server.stop()
        answers = [stores.connection.wait(pending).arrays[0] for pending in asked]
        assert [answer.numel() for answer in answers] == [1 << 20] * 3
        stores.close()


def test_server_when_it_can_have_no_more_sockets_then_says_so_and_serves_on(tmp_path, monkeypatch, caplog):
    def full(door):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("lightning_recsys.parameter_server.direct.DirectDoor.let_in", full)
    monkeypatch.setattr("lightning_recsys.parameter_server.links._GREETING_SECONDS", 0.1)
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never")) as stores:
        make_users(stores)
        assert isinstance(link_of(stores), ZeroMQLink)
    assert "go on over ZeroMQ, a little slower: [Errno 24] Too many open files" in caplog.text


def test_direct_socket_when_a_server_ends_then_nothing_of_it_is_left(tmp_path):
    with running(tmp_path) as server:
        port = server.handler.direct_port
        plain = socket.create_connection(("127.0.0.1", port), timeout=5)
        direct = DirectSocket(plain, max_bytes=100)
        assert plain.fileno() == direct.fileno()
    direct.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
