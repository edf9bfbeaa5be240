"""Clients on the server's machine leave ZeroMQ for a direct link, and come back to it when that is lost."""

import socket
import threading
import time
from contextlib import closing, suppress

import pytest
import torch
from server_helpers import LAYOUT, ask, running, stop_collector

from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.optim import SGD
from lightning_recsys.parameter_server import JobKeys, connect, direct
from lightning_recsys.parameter_server.direct import DirectDoor
from lightning_recsys.parameter_server.links import DirectLink, ZeroMQLink
from lightning_recsys.parameter_server.server import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

ROW = torch.tensor([4])


@pytest.fixture(autouse=True)
def _collector_stops():
    yield
    stop_collector()


def link_of(stores):
    return stores.connection._link


def go_direct(stores):
    """Ask until the connection has left ZeroMQ."""
    deadline = time.monotonic() + 10
    while not isinstance(link_of(stores), DirectLink):
        assert time.monotonic() < deadline
        stores.status()


def make_users(stores):
    return stores.create_embedding_store("users", LAYOUT, SGD(learning_rate=0.5), seed=3)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0"])
def test_client_of_this_machine_then_goes_direct(tmp_path, bind):
    with running(tmp_path, bind=bind) as server, closing(connect(server.endpoint, shared_memory="never")) as stores:
        users = make_users(stores)
        go_direct(stores)
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
            with suppress(ConnectionResetError):  # it was left with words unread
                heard.append(connected.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listening, running(tmp_path) as server:
        thread = threading.Thread(target=stranger)
        thread.start()
        server.handler.direct_port = listening.getsockname()[1]
        with closing(connect(server.endpoint, shared_memory="never")) as stores:
            make_users(stores)
            deadline = time.monotonic() + 10
            while stores.connection._direct is not None and time.monotonic() < deadline:
                stores.status()
            assert isinstance(link_of(stores), ZeroMQLink)
        thread.join()
    assert not any(heard)


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
            go_direct(stores)
            link_of(stores)._socket._socket.shutdown(socket.SHUT_RDWR)
            users.apply_row_gradients(ROW, torch.full((1, 4), -2.0), learning_rate=0.5)
            users.flush()
            assert isinstance(link_of(stores), ZeroMQLink)
            torch.testing.assert_close(users.lookup(ROW), before + times)
        assert users.step == 5
        assert stores.connection.traffic.reconnects == 5


def test_client_when_its_push_and_the_answers_before_it_fill_the_sockets_then_both_get_through(tmp_path):
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never", timeout=20)) as stores:
        size = 4 << 20  # 16 MiB: more than the system keeps for both ends
        center = stores.create_dense_store("center", torch.zeros(size))
        connection = stores.connection
        go_direct(stores)
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
            go_direct(greedy)
            for _ in range(8):
                greedy.connection.begin("pull", store="center")
            with socket.create_connection(("127.0.0.1", server.handler.direct_port)) as slow:
                slow.sendall((1).to_bytes(8, "little"))
                for _ in range(20):
                    users.apply_row_gradients(ROW, torch.ones(1, 4), learning_rate=1.0)
                assert users.step == 20
                assert not center.pull().any()


def test_server_when_busy_then_nobody_waits_for_its_greeting_and_goes_direct_later(tmp_path, monkeypatch):
    busy = threading.Event()
    let_in = DirectDoor.let_in

    def late(door):
        return let_in(door) if busy.is_set() else None

    monkeypatch.setattr(DirectDoor, "let_in", late)
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never")) as stores:
        for _ in range(5):
            stores.status()
        assert isinstance(link_of(stores), ZeroMQLink)
        busy.set()
        go_direct(stores)


@pytest.mark.parametrize("num_floats", [1 << 20, 4 << 20])
def test_server_when_told_to_stop_then_what_has_arrived_behind_large_answers_is_answered(tmp_path, num_floats):
    with running(tmp_path) as server:
        stores = connect(server.endpoint, shared_memory="never", timeout=20)
        center = stores.create_dense_store("center", torch.zeros(num_floats))
        go_direct(stores)
        asked = [stores.connection.begin("pull", store="center") for _ in range(3)]
        pushed = stores.connection.push("assign", store="center", arrays=[torch.ones(2)[:1].expand(1).clone()])
        server.stop()
        answers = [stores.connection.wait(pending).arrays[0] for pending in asked]
        assert [answer.numel() for answer in answers] == [num_floats] * 3
        with pytest.raises(RequestRefusedError, match="center"):
            stores.connection.wait(pushed)  # of a wrong size, and told so
        assert stores.connection.traffic.reconnects == 0
        stores.close()
        assert center.size == num_floats


def test_server_when_told_to_stop_and_some_take_no_answers_then_ends_for_all_of_them_together(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_recsys.parameter_server.server.LINGER_SECONDS", 20.0)  # five times: over the limit
    monkeypatch.setattr("lightning_recsys.parameter_server.server.DRAIN_SECONDS", 0.5)
    with running(tmp_path) as server:
        with closing(connect(server.endpoint, shared_memory="never", timeout=20)) as stores:
            stores.create_dense_store("center", torch.zeros(16 << 20))
        clients = [connect(server.endpoint, shared_memory="never", timeout=0.5, retries=0) for _ in range(5)]
        for client in clients:
            go_direct(client)
            client.connection.begin("pull", store="center")
        server.stop()
    for client in clients:
        client.close()


def test_push_when_cancelled_while_the_server_stands_still_then_ends_soon(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_recsys.parameter_server.links.LAST_SECONDS", 0.1)
    cancelled, go_on = threading.Event(), threading.Event()
    with running(tmp_path) as server:
        stores = connect(server.endpoint, shared_memory="never", timeout=600, cancelled=cancelled.is_set)
        stores.create_dense_store("center", torch.zeros(16 << 20))
        go_direct(stores)
        monkeypatch.setattr(Server, "_serve_direct", lambda self, descriptor: go_on.wait())
        threading.Timer(0.3, cancelled.set).start()
        stores.connection.push("assign", store="center", arrays=[torch.ones(16 << 20)])
        with pytest.raises(ServerUnreachableError, match="did not answer 'assign' in 1 attempts"):
            stores.connection.flush()
        monkeypatch.undo()
        go_on.set()
        stores.close()


def test_push_when_interrupted_on_its_way_then_arrives_once_and_whole(tmp_path, monkeypatch):
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never", timeout=20)) as stores:
        size = 4 << 20
        center = stores.create_dense_store("center", torch.zeros(size))
        go_direct(stores)
        values = torch.arange(size, dtype=torch.float32)
        without = direct._without
        interruptions = iter([True])

        def interrupted(buffers, num_bytes):
            if threading.current_thread() is threading.main_thread() and next(interruptions, False):
                raise KeyboardInterrupt
            return without(buffers, num_bytes)

        monkeypatch.setattr(direct, "_without", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stores.connection.push("assign", store="center", arrays=[values])
        stores.connection.flush()
        assert torch.equal(center.pull(), values)
        assert server.handler.pushes == 2  # the other made the store


def test_server_when_it_can_have_no_more_sockets_then_says_so_and_tells_nobody_of_direct_ones(
    tmp_path, monkeypatch, caplog
):
    def full(door):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(DirectDoor, "let_in", full)
    with running(tmp_path) as server, closing(connect(server.endpoint, shared_memory="never")) as stores:
        for _ in range(20):
            stores.status()
        assert isinstance(link_of(stores), ZeroMQLink)
        assert stores.connection.request("hello").value["direct"] is None
    assert "go on over ZeroMQ, a little slower: [Errno 24] Too many open files" in caplog.text


def test_server_when_strangers_take_all_direct_places_then_others_stay_with_zeromq_until_one_leaves(tmp_path):
    with running(tmp_path, max_clients=2) as server:
        strangers = [socket.create_connection(("127.0.0.1", server.handler.direct_port), timeout=5) for _ in range(2)]
        for stranger in strangers:
            assert len(stranger.recv(16)) == 16
        with closing(connect(server.endpoint, shared_memory="never")) as stores:
            assert stores.connection.request("hello").value["direct"] is None
            strangers.pop().close()
            while stores.connection.request("hello").value["direct"] is None:
                pass
            go_direct(stores)
        strangers.pop().close()


def test_goodbye_when_the_server_has_restarted_meanwhile_then_reaches_it(tmp_path):
    with running(tmp_path) as server:
        endpoint = server.endpoint
        stores = connect(endpoint, shared_memory="never", timeout=20)
        go_direct(stores)
    with running(tmp_path, bind=endpoint) as server:
        assert server.handler.status()["clients"] == 1
        stores.close()
        deadline = time.monotonic() + 10
        while server.handler.status()["clients"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.handler.status()["clients"] == 0


def test_server_when_it_ends_then_its_direct_port_is_closed(tmp_path):
    with running(tmp_path) as server:
        port = server.handler.direct_port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
