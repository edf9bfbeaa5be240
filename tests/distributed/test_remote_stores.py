"""Stores behind a server: the same answers as mapped ones, in order, over what goes wrong on the way."""

import os
import pickle
import re
import socket as plain_socket
import stat
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
import zmq
from forked import run_processes
from ports import free_port
from server_helpers import LAYOUT, ForgetfulServer, request_frames, running

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.optim import RowAdagrad, RowSGD
from lightning_recsys.parameter_server import JobKeys, connect, serve
from lightning_recsys.parameter_server import remote as remote_module
from lightning_recsys.parameter_server.access.keys import KeyFile, Token, add_client, remove_client
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.messages.wire import VERSION, Limits
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.parameter_server.server import Server, check_bind
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.digests import DIGEST, digest_rows

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

LOOPBACK = "tcp://127.0.0.1:0"
KEYS = ("x", "y", "z")
SINGLE = SparseFeatures(KEYS, torch.tensor([0, 5, 1, 4, 2, 0]))
BAGS = SparseFeatures(KEYS, SINGLE.values, lengths=torch.tensor([2, 0, 1, 1, 0, 2]))
WEIGHTED = SparseFeatures(KEYS, SINGLE.values, weights=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))


@pytest.fixture
def server(tmp_path):
    with running(tmp_path) as server:
        yield server


@pytest.fixture
def stores(server):
    stores = connect(server.endpoint, transport="tcp", timeout=20)
    assert isinstance(stores, RemoteStores)
    yield stores
    stores.close()


def make_users(stores, optimizer=None):
    return stores.create_embedding_store("users", LAYOUT, optimizer or RowSGD(lr=0.5), seed=3)


@pytest.mark.parametrize("sparse", [SINGLE, BAGS, WEIGHTED], ids=["single", "bags", "weighted"])
def test_remote_store_when_trained_then_equals_a_mapped_one(stores, tmp_path, sparse):
    (tmp_path / "own").mkdir()
    mapped = make_users(MappedStores(tmp_path / "own"), RowAdagrad(lr=0.5))
    remote = make_users(stores, RowAdagrad(lr=0.5))
    for step in range(3):
        assert torch.equal(remote.pooled_lookup(sparse), mapped.pooled_lookup(sparse))
        gradient = torch.randn(2, 3, 4)
        rows, row_gradients = torch.tensor([8, 0]), torch.randn(2, 4)
        for store in (remote, mapped):
            store.apply_gradients(sparse, gradient, lr=0.1 * step)
            store.apply_row_gradients(rows, row_gradients, lr=0.1)
        gradient.fill_(float("nan"))  # the caller's own again, flushed or not
        row_gradients.fill_(float("nan"))
    remote.flush()
    for name in ("weight", "sum"):
        assert torch.equal(remote.read(name, 0, 9), mapped.read(name, 0, 9))
    assert torch.equal(remote.lookup(torch.tensor([3, 3, 8])), mapped.lookup(torch.tensor([3, 3, 8])))
    assert remote.step == mapped.step == 6
    assert (remote.layout, remote.optimizer) == (mapped.layout, mapped.optimizer)


@pytest.mark.parametrize("sparse", [SINGLE, WEIGHTED], ids=["single", "weighted"])
def test_compressed_store_when_trained_then_equals_a_mapped_one_that_gets_rounded_gradients(server, tmp_path, sparse):
    (tmp_path / "own").mkdir()
    stores = connect(server.endpoint, transport="tcp", timeout=20, compression="bf16")
    mapped = make_users(MappedStores(tmp_path / "own"), RowAdagrad(lr=0.5))
    remote = make_users(stores, RowAdagrad(lr=0.5))
    assert stores.route.endswith("rows in bf16")
    traffic = stores.connection.traffic
    for _ in range(3):
        received, expected = traffic.received_bytes, mapped.pooled_lookup(sparse)
        assert torch.equal(remote.pooled_lookup(sparse), expected.bfloat16().float())
        assert traffic.received_bytes - received == 2 * expected.numel()
        gradient, rows, row_gradients = torch.randn(2, 3, 4), torch.tensor([8, 0]), torch.randn(2, 4)
        mapped.apply_gradients(sparse, gradient.bfloat16().float(), lr=0.1)
        mapped.apply_row_gradients(rows, row_gradients.bfloat16().float(), lr=0.1)
        sent = traffic.sent_bytes
        remote.apply_gradients(sparse, gradient, lr=0.1)
        remote.apply_row_gradients(rows, row_gradients, lr=0.1)
        ids = sparse.values.nbytes + (sparse.weights.nbytes if sparse.weights is not None else 0)
        assert traffic.sent_bytes - sent == ids + 2 * gradient.numel() + rows.nbytes + 2 * row_gradients.numel()
        row_gradients.fill_(float("nan"))
        gradient.fill_(float("nan"))
    remote.flush()
    for name in ("weight", "sum"):
        assert torch.equal(remote.read(name, 0, 9), mapped.read(name, 0, 9))  # whole stretches are never rounded
    assert torch.equal(remote.lookup(torch.tensor([3, 8])), mapped.lookup(torch.tensor([3, 8])).bfloat16().float())
    again = stores.embedding_store("users")
    assert torch.equal(again.lookup(torch.tensor([8])), remote.lookup(torch.tensor([8])))
    stores.close()


@pytest.mark.parametrize("sparse", [SINGLE, BAGS], ids=["single", "bags"])
def test_store_when_its_rows_are_bfloat16_then_they_travel_in_half_the_bytes_and_gradients_do_not(
    server, tmp_path, sparse
):
    (tmp_path / "own").mkdir()
    layout = TableLayout(tuple(replace(table, dtype="bfloat16") for table in LAYOUT.tables))
    stores = connect(server.endpoint, transport="tcp", timeout=20)
    mapped, remote = (
        each.create_embedding_store("users", layout, RowAdagrad(lr=0.5), seed=3)
        for each in (MappedStores(tmp_path / "own"), stores)
    )
    traffic = stores.connection.traffic
    for _ in range(3):
        received, expected = traffic.received_bytes, mapped.pooled_lookup(sparse)
        found = remote.pooled_lookup(sparse)
        assert traffic.received_bytes - received == 2 * expected.numel()
        assert torch.equal(found, expected.bfloat16().float())
        if sparse is SINGLE:
            assert torch.equal(found, expected)  # rows as they are
        gradient, sent = torch.randn(2, 3, 4), traffic.sent_bytes
        for store in (mapped, remote):
            store.apply_gradients(sparse, gradient, lr=0.1)
        assert traffic.sent_bytes - sent >= 4 * gradient.numel()
    remote.flush()
    received, rows = traffic.received_bytes, remote.read("weight", 0, 9)
    assert traffic.received_bytes - received == 2 * rows.numel()
    assert torch.equal(rows, mapped.read("weight", 0, 9))
    assert torch.equal(remote.read(DIGEST, 0, 9), digest_rows(rows.float()))
    remote.write("weight", 2, torch.ones(3, 4, dtype=torch.bfloat16))
    assert torch.equal(remote.lookup(torch.tensor([2, 4])), torch.ones(2, 4))
    with pytest.raises(RequestRefusedError, match="bfloat16"):
        remote.write("weight", 2, torch.ones(3, 4))
    stores.close()


def test_compression_when_it_is_not_for_rows_then_nothing_is_connected(server):
    for name in ("int8", "topk", "zip"):
        with pytest.raises(ValueError, match="rows"):
            connect(server.endpoint, compression=name)


def test_rows_when_read_and_written_in_chunks_then_come_back(stores, monkeypatch):
    monkeypatch.setattr(remote_module, "CHUNK_BYTES", 32)  # two rows
    users, values = make_users(stores), torch.randn(7, 4)
    before = users.read("weight", 0, 9)
    users.write("weight", 1, values)
    after = users.read("weight", 0, 9)
    assert torch.equal(after[1:8], values)
    assert torch.equal(after[[0, 8]], before[[0, 8]])
    assert users.read("weight", 4, 0).shape == (0, 4)
    assert torch.equal(users.read(DIGEST, 2, 7), digest_rows(after[2:9]))
    some = torch.tensor([8, 1, 3, 0, 7])
    users.write_rows("weight", some, torch.ones(5, 4))
    assert torch.equal(users.read_rows("weight", some), torch.ones(5, 4))
    assert users.read("weight", 0, 9).eq(1).all(1).nonzero().flatten().tolist() == [0, 1, 3, 7, 8]
    users.step = 41
    assert users.step == 41


def test_lookups_when_begun_on_several_servers_then_are_answered_in_any_order(stores, tmp_path):
    users = make_users(stores)
    expected = users.pooled_lookup(SINGLE)
    (tmp_path / "second").mkdir()
    with running(tmp_path / "second") as other:
        others = connect(other.endpoint, transport="tcp")
        more = make_users(others)
        waiting = [store.begin_pooled_lookup(SINGLE) for store in (users, more, users, more)]
        for wait in reversed(waiting):
            assert torch.equal(wait(), expected)
        others.close()


def test_dense_store_when_averaged_then_follows_the_algorithm(stores):
    center = stores.create_dense_store("center", torch.zeros(3), optimizer=RowSGD(lr=1.0))
    assert center.elastic_average(torch.ones(3), alpha=0.25).tolist() == [0.25] * 3
    begun = center.begin_elastic_average(torch.ones(3), alpha=0.5)
    assert begun().tolist() == [0.625] * 3
    center.push_gradient(torch.ones(3), lr=0.125)
    assert stores.dense_store("center").pull().tolist() == [0.5] * 3
    center.assign(torch.arange(3.0))
    assert (center.pull().tolist(), center.version, center.size) == ([0.0, 1.0, 2.0], 3, 3)


def test_store_when_missing_or_other_then_says_what_is_there(stores):
    make_users(stores)
    with pytest.raises(KeyError, match=r"no store 'movies'; there are \['users'\]"):
        stores.embedding_store("movies")
    with pytest.raises(KeyError, match="'users' is a store of the kind embedding, not dense"):
        stores.dense_store("users")
    with pytest.raises(RequestRefusedError, match="refused 'create_embedding_store': a store 'users' is in"):
        make_users(stores, RowAdagrad(lr=0.5))
    stores.remove("users")
    with pytest.raises(KeyError, match=r"there are \[\]"):
        stores.embedding_store("users")


def test_push_when_refused_then_raises_at_the_next_call_and_later_ones_count(stores, server):
    users = make_users(stores)
    wrong, right = torch.tensor([9]), torch.tensor([1])
    before = users.lookup(right)
    users.apply_row_gradients(wrong, torch.ones(1, 4), lr=1.0)
    sent = []

    def go_on():
        users.apply_row_gradients(right, torch.ones(1, 4), lr=1.0)
        sent.append(right)  # while word of the refusal was on its way
        users.flush()

    with pytest.raises(RequestRefusedError, match=r"refused 'apply_row_gradients': rows must be in \[0, 9\), got 9"):
        go_on()
    go_on()
    expected = before - 1 if len(sent) == 1 else before - 1 - 1
    assert torch.equal(users.lookup(right), expected)
    assert stores.status()["refused"] == 1


def test_pushes_when_the_window_is_small_then_wait_and_all_arrive(server):
    stores = connect(server.endpoint, transport="tcp", window=2)
    users = make_users(stores)
    before = users.read("weight", 0, 9)
    for _ in range(50):
        users.apply_row_gradients(torch.tensor([4]), -torch.ones(1, 4), lr=1.0)
        assert stores.connection._window.pushes <= 2
    users.flush()
    assert torch.allclose(users.read("weight", 4, 1), before[4] + 50)
    stores.close()


def test_request_when_larger_than_the_server_allows_then_says_so_and_the_next_counts(tmp_path):
    with running(tmp_path, limits=Limits(message_bytes=4096)) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20)
        for _ in range(2):
            with pytest.raises(RequestRefusedError, match="at most 4096 bytes, got 6000: cut it"):
                stores.create_dense_store("center", torch.zeros(1500))
        assert stores.create_dense_store("center", torch.zeros(150)).version == 0
        assert stores.connection.traffic.reconnects == 0
        stores.close()


@pytest.mark.parametrize(
    ("store", "arguments", "size", "error"),
    [
        ("center", {"optimizer": None}, 1500, "at most 4096 bytes, got 6000: cut it"),
        ("center", {"optimizer": "x" * (1 << 20)}, 1, "a header has at most 1048576 bytes"),
        ("center", {"optimizer": object()}, 1, "can not serialize 'object' object"),
        ("center", {"optimizer": 2**65}, 1, "Integer value out of range"),
    ],
)
def test_push_when_the_client_cannot_send_it_then_says_so_and_the_next_counts(server, store, arguments, size, error):
    connection = Connection(server.endpoint, timeout=20, limits=Limits(message_bytes=4096))
    connection.request("hello")
    for _ in range(2):
        with pytest.raises((RequestRefusedError, TypeError, OverflowError), match=error):
            connection.push("create_dense_store", store=store, arguments=arguments, arrays=[torch.zeros(size)])
    connection.wait(
        connection.push("create_dense_store", store=store, arguments={"optimizer": None}, arrays=[torch.zeros(3)])
    )
    assert connection.traffic.reconnects == 0
    connection.close()


def test_pushes_when_the_server_cannot_read_them_then_all_are_told_of_and_the_next_counts(stores, server, monkeypatch):
    users = make_users(stores)
    before = users.lookup(torch.tensor([1]))
    all_are_sent, handle = threading.Event(), server.handler.handle
    monkeypatch.setattr(server.handler, "handle", lambda *request: all_are_sent.wait() and handle(*request))
    try:
        for name in (".x", "-y", "nobody"):
            stores.connection.push("remove", store=name)
    finally:
        all_are_sent.set()  # a push says at once that an earlier one was refused, and is not sent
    with pytest.raises(
        RequestRefusedError, match=r"name must be .*'\.x'.; and 'remove': .*'-y'.; and 'remove': .*nobody"
    ):
        stores.connection.flush()
    users.apply_row_gradients(torch.tensor([1]), torch.ones(1, 4), lr=1.0)
    users.flush()
    assert torch.equal(users.lookup(torch.tensor([1])), before - 1)
    stores.connection.push("remove", store=".x")
    with pytest.raises(RequestRefusedError, match="a store's name must be"):
        stores.close()
    stores.close()


def test_reply_when_lost_then_the_push_is_sent_again_and_applied_once(tmp_path):
    with running(tmp_path, kind=ForgetfulServer) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=0.2, retries=100)
        users = make_users(stores)
        row = torch.tensor([4])
        before = users.lookup(row)
        for count in range(1, 41):
            users.apply_row_gradients(row, torch.full((1, 4), -1.0), lr=1.0)
            if count % 4 == 0:
                users.flush()
                assert torch.allclose(users.lookup(row), before + count)
        assert users.step == 40
        assert server.lost > 10
        assert server.handler.counts.duplicates > 0
        stores.close()


def test_server_when_it_starts_again_then_its_clients_go_on(tmp_path):
    with running(tmp_path) as first:
        endpoint = first.endpoint
        stores = connect(endpoint, transport="tcp", timeout=20)
        users = make_users(stores)
        before = users.read("weight", 0, 9)
        users.apply_row_gradients(torch.tensor([4]), -torch.ones(1, 4), lr=1.0)
        users.flush()
    users.apply_row_gradients(torch.tensor([4]), -torch.ones(1, 4), lr=1.0)  # while there is none
    with running(tmp_path, bind=endpoint):
        users.apply_row_gradients(torch.tensor([4]), -torch.ones(1, 4), lr=1.0)
        users.flush()
        assert torch.allclose(users.read("weight", 4, 1), before[4] + 3)
        assert users.step == 3
        stores.close()


def test_server_when_it_starts_again_without_its_folder_then_the_client_is_told(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with running(tmp_path / "one") as first:
        endpoint = first.endpoint
        stores = connect(endpoint, transport="tcp", timeout=20)
        users = make_users(stores)
    with running(tmp_path / "two", bind=endpoint):
        users.apply_row_gradients(torch.tensor([4]), torch.ones(1, 4), lr=1.0)
        with pytest.raises(RequestRefusedError, match="has not said hello here"):
            users.flush()
        stores.close()


def test_server_when_there_is_none_then_the_error_says_where_what_and_how_long():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(
        ServerUnreachableError, match=rf"{endpoint} did not answer 'hello' in 3 attempts over"
    ) as caught:
        connect(endpoint, timeout=0.1, retries=2)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.endpoint, error.operation, error.attempts) == (endpoint, "hello", 3)
    assert error.seconds > 0.3
    assert str(error) == str(caught.value)


@pytest.mark.parametrize("is_there", [False, True])
def test_wait_when_cancelled_then_ends_before_its_time_and_attempts_are_over(monkeypatch, is_there):
    monkeypatch.setattr("lightning_recsys.parameter_server.client.LAST_SECONDS", 0.1)
    cancelled = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:  # which never answers
        port = server.bind_to_random_port("tcp://127.0.0.1") if is_there else free_port()
        threading.Timer(0.2, cancelled.set).start()
        with pytest.raises(ServerUnreachableError, match="did not answer 'hello'") as caught:
            connect(f"tcp://127.0.0.1:{port}", timeout=600, retries=1000, cancelled=cancelled.is_set)
    assert caught.value.attempts < 20
    assert caught.value.seconds < 60


def test_push_when_cancelled_while_the_server_stands_still_then_ends_soon(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_recsys.parameter_server.client.LAST_SECONDS", 0.1)
    cancelled, go_on = threading.Event(), threading.Event()
    with running(tmp_path) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=600, cancelled=cancelled.is_set)
        stores.create_dense_store("center", torch.zeros(16 << 20))
        monkeypatch.setattr(Server, "_serve_one", lambda self: go_on.wait())
        threading.Timer(0.3, cancelled.set).start()
        stores.connection.push(
            "write_dense", store="center", arguments={"array": "values"}, arrays=[torch.ones(16 << 20)]
        )
        with pytest.raises(ServerUnreachableError, match="did not answer 'write_dense' in 1 attempts"):
            stores.connection.flush()
        with pytest.raises(ServerUnreachableError, match="1 push was never acknowledged"):
            stores.close()
        monkeypatch.undo()
        go_on.set()


@pytest.mark.parametrize("num_floats", [1 << 20, 4 << 20])
def test_server_when_told_to_stop_then_what_has_arrived_behind_large_answers_is_answered(tmp_path, num_floats):
    with running(tmp_path) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20)
        stores.create_dense_store("center", torch.zeros(num_floats))
        asked = [stores.connection.begin("pull", store="center") for _ in range(3)]
        while server.handler.counts.requests < 6:  # hello, the store and its description before
            time.sleep(0.01)
        server.stop()
        answers = [stores.connection.wait(pending).arrays[0] for pending in asked]
        assert [answer.numel() for answer in answers] == [num_floats] * 3
        assert stores.connection.traffic.reconnects == 0
        stores.close()


def test_server_when_of_another_version_then_the_client_is_told_which_two_do_not_fit():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        endpoint = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"

        def answer():
            sender, header = server.recv_multipart()
            server.send_multipart([sender, msgpack.packb([VERSION + 1, msgpack.unpackb(header)[2], "ok", {}, []])])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            ValueError, match=rf"{endpoint}: .* {VERSION}, and the server's start with \[{VERSION + 1}\]"
        ):
            connect(endpoint)
        thread.join()


def test_server_when_it_goes_for_good_then_pushes_and_flushes_raise_and_close_says_what_is_lost(tmp_path):
    with running(tmp_path) as server:
        stores = connect(server.endpoint, transport="tcp", timeout=20, window=2)
        users = make_users(stores)
    stores.connection._timeout, stores.connection._retries = 0.1, 1  # from here on nobody answers
    rows, gradients = torch.tensor([4]), torch.ones(1, 4)
    users.apply_row_gradients(rows, gradients, lr=1.0)
    users.apply_row_gradients(rows, gradients, lr=1.0)
    with pytest.raises(ServerUnreachableError, match="did not answer 'apply_row_gradients' in 2 attempts"):
        users.apply_row_gradients(rows, gradients, lr=1.0)
    with pytest.raises(ServerUnreachableError, match="did not answer 'lookup'"):
        users.lookup(rows)
    with pytest.raises(
        ServerUnreachableError, match=r"did not answer 'apply_row_gradients' in 2 .*; 2 pushes were never"
    ):
        stores.close()
    stores.close()
    with pytest.raises(RuntimeError, match="is closed"):
        users.lookup(rows)


def test_connection_when_two_threads_use_it_then_each_gets_its_own_answers(stores):
    users, wrong = make_users(stores), []

    def read(row):
        expected = users.lookup(torch.tensor([row]))
        wrong.extend(1 for _ in range(50) if not torch.equal(users.lookup(torch.tensor([row])), expected))

    threads = [threading.Thread(target=read, args=(row,)) for row in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- Who is let in -------------------------------------------------------------------------------------------------


def test_client_when_it_has_the_job_s_keys_then_is_served(tmp_path):
    keys, path = JobKeys.generate(), tmp_path / "job.keys"
    keys.save(path)
    with running(tmp_path, bind=LOOPBACK, keys=keys.server) as server:
        for given in (keys, keys.client, path, str(path)):
            stores = connect(server.endpoint, keys=given, transport="tcp", timeout=20)
            assert stores.status()["refused"] == 0
            stores.close()


@pytest.mark.parametrize("which", ["none", "other job", "other client", "other server"])
def test_client_when_it_has_no_or_other_keys_then_gets_nothing(tmp_path, which):
    keys, other = JobKeys.generate(), JobKeys.generate()
    given = {
        "none": None,
        "other job": other.client,
        "other client": type(keys.client)(keys.server.public, other.client.public, other.client.secret),
        "other server": type(keys.client)(other.server.public, keys.client.public, keys.client.secret),
    }[which]
    with running(tmp_path, bind=LOOPBACK, keys=keys.server) as server:
        friend = connect(server.endpoint, keys=keys, transport="tcp", timeout=20)
        before = friend.status()
        with pytest.raises(ServerUnreachableError, match="did not answer 'hello' in 2 attempts"):
            connect(server.endpoint, keys=given, timeout=0.3, retries=1)
        after = friend.status()
        counted = ("requests", "refused", "pushes", "clients", "stores")
        assert [after[name] - before[name] for name in counted] == [1, 0, 0, 0, 0]  # the friend's own question
        friend.close()


def pull_for_a_minute(store):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        store.pull()
        time.sleep(0.05)


def test_clients_with_keys_of_their_own_when_one_is_removed_then_it_is_cut_and_the_others_push_on(tmp_path):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    alice = add_client(path, "alice")
    (tmp_path / "stores").mkdir(mode=0o700)
    with running(tmp_path / "stores", bind=LOOPBACK, keys=KeyFile(path)) as server:
        bob = add_client(path, "bob")  # while it runs
        options = {"transport": "tcp", "timeout": 3, "retries": 1}
        theirs = {name: connect(server.endpoint, keys=own, **options) for name, own in [("a", alice), ("b", bob)]}
        center = theirs["a"].create_dense_store("center", torch.zeros(3), optimizer=RowSGD())
        counters = {name: stores.dense_store("center") for name, stores in theirs.items()}
        for counter in counters.values():
            counter.push_gradient(-torch.ones(3), lr=1.0)
            counter.flush()
        assert center.pull().tolist() == [2.0] * 3
        remove_client(path, "alice")
        with pytest.raises(
            ServerUnreachableError, match=r"does not accept these keys|connection was lost|nothing can be sent"
        ):
            pull_for_a_minute(center)
        counted = counters["b"].pull().tolist()
        with suppress(ServerUnreachableError):
            counters["a"].push_gradient(-torch.ones(3), lr=1.0)
            counters["a"].flush()
        assert counters["b"].pull().tolist() == counted == [2.0] * 3  # nothing of what she sends counts
        counters["b"].push_gradient(-torch.ones(3), lr=1.0)
        counters["b"].flush()
        assert counters["b"].pull().tolist() == [3.0] * 3
        with pytest.raises(ServerUnreachableError):
            connect(server.endpoint, keys=alice, transport="tcp", timeout=0.3, retries=1)
        alice.unlink()
        again = connect(server.endpoint, keys=add_client(path, "alice"), **options)
        assert again.dense_store("center").pull().tolist() == [3.0] * 3
        again.close()
        theirs["b"].close()
        with suppress(ServerUnreachableError):
            theirs["a"].close()


def test_server_when_its_key_file_is_damaged_or_gone_then_the_clients_stay_those_that_it_had(tmp_path, caplog):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    own = add_client(path, "own")
    (tmp_path / "stores").mkdir(mode=0o700)
    with running(tmp_path / "stores", bind=LOOPBACK, keys=KeyFile(path)) as server:
        whole = path.read_bytes()
        for content in (whole[:40], b"{}", JobKeys.generate().to_bytes(), None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
                path.chmod(0o600)
            connect(server.endpoint, keys=own, transport="tcp", timeout=20).close()
            path.write_bytes(whole)
            path.chmod(0o600)
    assert "cannot be read, so the clients stay" in caplog.text
    assert "other keys of the server now" in caplog.text


def test_server_on_loopback_when_a_client_has_its_token_then_is_served_also_by_the_next_server(tmp_path):
    token = tmp_path / ".token"
    for _ in range(2):
        with running(tmp_path, bind=LOOPBACK) as server:
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            for given in (token, str(token), Token.load(token)):
                stores = connect(server.endpoint, keys=given, transport="tcp", timeout=20)
                assert stores.status()["refused"] == 0
                stores.close()


@pytest.mark.parametrize("which", ["none", "another's", "a job's"])
def test_server_on_loopback_when_a_client_lacks_its_token_then_gives_it_nothing(tmp_path, which):
    given = {"none": None, "another's": Token("0" * 64), "a job's": JobKeys.generate()}[which]
    with running(tmp_path, bind=LOOPBACK) as server:
        make_users(server.handler.stores.mapped)
        with pytest.raises(ServerUnreachableError, match="did not answer 'hello'"):
            connect(server.endpoint, keys=given, timeout=0.3, retries=1)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(server.endpoint)
            stranger.send_multipart(request_frames("hello"))
            assert not stranger.poll(300)
        assert server.handler.counts.requests == 0


def connect_as_nobody(_, path):
    os.setuid(65534)
    with plain_socket.socket(plain_socket.AF_UNIX) as stranger, pytest.raises(PermissionError):
        stranger.connect(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_socket_when_another_user_connects_then_is_refused_even_where_the_folder_lets_everybody_in():
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"stores-{os.getpid()}-") as folder,
        running(Path(folder)) as server,
    ):
        os.chmod(folder, 0o755)
        path = server.endpoint.removeprefix("ipc://")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        run_processes(connect_as_nobody, path, nprocs=1)
        connect(server.endpoint, timeout=20).close()


def test_socket_when_its_server_was_killed_then_the_next_one_listens_there(tmp_path):
    with plain_socket.socket(plain_socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / ".socket"))
    with running(tmp_path) as server:
        assert server.endpoint == f"ipc://{tmp_path}/.socket"
        with closing(connect(server.endpoint, transport="tcp", timeout=20)) as stores:
            assert stores.status()["clients"] == 1


def test_socket_when_somebody_listens_there_or_it_is_another_file_then_is_refused(tmp_path):
    (tmp_path / "second").mkdir(0o700)
    with running(tmp_path) as server, pytest.raises(OSError, match=r"cannot listen on ipc:.*Address already in use"):
        Server(tmp_path / "second", bind=server.endpoint)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot listen on ipc:.*there is a file of that name"):
        Server(tmp_path / "second", bind=f"ipc://{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


def test_socket_when_its_path_is_too_long_then_is_refused_with_what_to_do():
    with pytest.raises(
        ValueError, match=r"takes at most 107 bytes for the path of a socket.* or bind tcp://127.0.0.1:0"
    ):
        check_bind(f"ipc:///{'a' * 107}", None)


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.0.0.1:5000", "tcp://[::]:0", "tcp://node-3:0"]
)
def test_bind_when_others_can_reach_it_then_needs_keys(tmp_path, bind):
    with pytest.raises(ValueError, match=r"can be reached from other machines, so it needs keys: .*--make-keys FILE"):
        serve(tmp_path, bind=bind)
    check_bind(bind, JobKeys.generate().server)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bind", ["127.0.0.1:0", "tcp://127.0.0.1", "ipc://relative", "tcp://127.0.0.1:66000", "tcp://:0", ""]
)
def test_bind_when_it_is_no_address_then_is_refused(bind):
    with pytest.raises(ValueError, match=r"bind must be tcp://host:port, .* or ipc:///path/of/a/socket"):
        check_bind(bind, None)


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:0", "tcp://127.0.5.1:9", "tcp://localhost:0", "tcp://[::1]:0", "ipc:///a/socket"]
)
def test_bind_when_of_this_machine_then_needs_no_keys(bind):
    check_bind(bind, None)


# --- Endpoints ----------------------------------------------------------------------------------------------------


def test_connect_when_the_server_s_folder_is_here_then_maps_it(server, tmp_path):
    stores = connect(server.endpoint)
    assert isinstance(stores, MappedStores)
    assert stores.endpoint == f"shm://{tmp_path}"
    users = make_users(stores)
    remote = connect(server.endpoint, transport="tcp")
    before = users.lookup(torch.tensor([1]))
    remote.embedding_store("users").write("weight", 1, torch.full((1, 4), 7.0))
    assert not torch.equal(users.lookup(torch.tensor([1])), before)
    remote.close()
    stores.close()  # which had the server make the store
    deadline = time.monotonic() + 50
    while server.handler.status()["clients"] and time.monotonic() < deadline:  # a goodbye is not waited for
        time.sleep(0.01)
    assert server.handler.status()["clients"] == 0


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"nonce": bytes(16)}, "may not read and write"),
        ({"place": {"boot": "of another machine", "device": 1, "inode": 2}}, "the server runs on another machine"),
    ],
)
def test_connect_when_the_folder_is_not_this_machines_own_then_asks_the_server(server, monkeypatch, told, reason):
    hello = server.handler._operations.reads["hello"]
    monkeypatch.setitem(server.handler._operations.reads, "hello", lambda request: hello(request) | told)
    stores = connect(server.endpoint)
    assert isinstance(stores, RemoteStores)
    assert reason in stores.route
    stores.close()


@pytest.mark.parametrize(
    "endpoint", ["", "users", "shm://relative", "tcp://host", "tcp://host:0", "http://host:1", "tcp://:1"]
)
def test_connect_when_given_no_endpoint_then_says_what_one_is(endpoint):
    with pytest.raises(ValueError, match=re.escape("an endpoint is shm:///folder, ipc:///socket or tcp://host:port")):
        connect(endpoint)


def test_connect_when_an_option_is_wrong_then_says_which(server):
    with pytest.raises(ValueError, match=r"transport must be one of \['auto', 'tcp'\], got 'no'"):
        connect(server.endpoint, transport="no")
    with pytest.raises(ValueError, match="timeout must be above 0, window from 1 to 64"):
        Connection(server.endpoint, timeout=0)


def test_server_when_another_serves_the_folder_then_is_refused(server, tmp_path):
    with pytest.raises(RuntimeError, match="another server serves"):
        Server(tmp_path)


def test_server_when_its_port_is_taken_then_says_so(server, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_recsys.parameter_server.server.BIND_SECONDS", 0.1)
    (tmp_path / "second").mkdir(mode=0o700)
    with pytest.raises(OSError, match=f"cannot listen on {server.endpoint}: Address already in use"):
        Server(tmp_path / "second", bind=server.endpoint)
    Server(tmp_path / "second").close()  # nothing was kept
