"""A server that is killed loses no acknowledged update and applies none twice."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from server_processes import (
    DIM,
    ROWS,
    TOUCHED,
    Processes,
    processes,
    push_ones,
    run_server,
    run_server_that_dies,
)

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD, RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.stores import DynamicRows, MappedStores
from lightning_recsys.stores.exchange import RowExchange

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

LAYOUT = TableLayout((EmbeddingBagConfig("t", ROWS, DIM, ("x", "y"), init_std=0.0),))
KILLS = 6


def test_updates_when_the_server_is_killed_under_load_then_none_is_lost_and_none_counts_twice(tmp_path):
    table = MappedStores(tmp_path).create_embedding_store("ones", LAYOUT, RowSGD(), seed=0)
    with processes() as pool:
        server, endpoint = pool.serve(tmp_path)
        clients = [pool.start(push_ones, endpoint, seed, seed == 1, Processes) for seed in range(2)]
        for _, orders in clients:
            assert orders.poll(120)
            assert orders.recv() == "started"
        for kill in range(KILLS):
            time.sleep(0.15 + 0.05 * kill)
            before = float(table.rows.sum())
            os.kill(server.pid, signal.SIGKILL)
            server.join()
            server, _ = pool.serve(tmp_path, endpoint)
            deadline = time.monotonic() + 60
            while float(table.rows.sum()) <= before and time.monotonic() < deadline:  # clients have come back
                time.sleep(0.01)
        results = []
        for _, orders in clients:
            orders.send("stop")
        for process, orders in clients:
            assert orders.poll(120)
            results.append(orders.recv())
            process.join()
        status = connect(endpoint, transport="tcp")
        told = status.status()
        status.close()
    assert [process.exitcode for process, _ in clients] == [0, 0]
    assert all(result["reconnects"] >= 1 for result in results)
    assert all(result["rows"] > 0 for result in results)
    total = sum(result["rows"] for result in results) * DIM
    assert table.rows.double().sum().item() == total
    assert table.step == sum(result["pushes"] for result in results)
    assert told["refused"] == 0
    assert (table.rows == table.rows[:, :1]).all()  # whole rows, never a part of one


WHERE = ["before the undo record", "half applied", "before the mark", "after the mark"]


@pytest.mark.parametrize(("where", "dtype"), [*((where, "float32") for where in WHERE), ("half applied", "bfloat16")])
def test_update_when_the_server_is_killed_inside_it_then_counts_once(tmp_path, where, dtype):
    mapped = MappedStores(tmp_path)
    layout = TableLayout((replace(LAYOUT.tables[0], dtype=dtype),))  # bfloat16 has whole numbers to 256, never rounded
    table = mapped.create_embedding_store("ones", layout, RowSGD(), seed=0)
    with processes() as pool:
        server, endpoint = pool.serve(tmp_path, target=run_server_that_dies, more=(where, 4))
        exits = []

        def start_again():
            server.join()
            exits.append(server.exitcode)
            pool.serve(tmp_path, endpoint)

        guard = threading.Thread(target=start_again)
        guard.start()
        stores = connect(endpoint, transport="tcp", timeout=60, window=3)
        store = stores.embedding_store("ones")
        expected = torch.zeros(ROWS)
        for _ in range(10):
            rows = torch.randperm(ROWS)[:TOUCHED]
            expected[rows] += 1
            store.apply_row_gradients(rows, -torch.ones(TOUCHED, DIM), lr=1.0)
        store.flush()
        guard.join()
        status = stores.status()
        stores.close()
    assert exits == [-signal.SIGKILL]
    assert torch.equal(table.rows.float(), expected.unsqueeze(1).expand(-1, DIM))
    assert table.step == 10
    if where == "after the mark":  # applied and never acknowledged, so it came again
        assert status["duplicates"] >= 1


@pytest.mark.parametrize("where", ["half applied", "after the mark"])
def test_exchange_when_the_server_is_killed_inside_it_then_counts_once_and_is_answered(tmp_path, where):
    table = MappedStores(tmp_path).create_embedding_store("ones", LAYOUT, RowWiseAdagrad(), seed=0)
    with processes() as pool:
        server, endpoint = pool.serve(tmp_path, target=run_server_that_dies, more=(where, 4))
        guard = threading.Thread(target=lambda: (server.join(), pool.serve(tmp_path, endpoint)))
        guard.start()
        stores = connect(endpoint, transport="tcp", timeout=60)
        store = stores.embedding_store("ones")
        expected, answers = torch.zeros(ROWS), []
        for _ in range(8):
            rows = torch.randperm(ROWS)[:TOUCHED]
            expected[rows] += 1
            request = RowExchange(
                fetch_rows=rows,
                push_rows=rows,
                push_clocks=torch.ones(TOUCHED, dtype=torch.int32),
                updates={"weight": -torch.ones(TOUCHED, DIM), "sum": torch.ones(TOUCHED)},
                num_steps=1,
                clock="sum",
            )
            answers.append((store.begin_exchange(request), expected[rows]))
            if len(answers) % 3 == 0:
                answers[-1][0]()
        for answer, counts in answers[:3]:  # the third was awaited before the server died
            assert torch.equal(answer().values["sum"], counts)
        last, counts = answers[-1]
        assert torch.equal(last().clocks, counts.int())
        guard.join()
        status = stores.status()
        stores.close()
    assert server.exitcode == -signal.SIGKILL
    assert torch.equal(table.rows, expected.unsqueeze(1).expand(-1, DIM))
    assert torch.equal(table.row_state["sum"], expected)
    assert torch.equal(table.clocks, expected.int())
    assert table.step == 8
    if where == "after the mark":
        assert status["duplicates"] >= 1


@pytest.mark.parametrize("where", ["rows made, and not yet named", "half applied", "after the mark"])
def test_dynamic_rows_when_the_server_is_killed_while_it_makes_them_then_they_are_whole_and_count_once(tmp_path, where):
    layout = TableLayout((EmbeddingBagConfig("t", 2**45, DIM, ("x",), init_std=0.5),))
    keys = torch.arange(ROWS) * 2**36
    with processes() as pool:
        server, endpoint = pool.serve(tmp_path, target=run_server_that_dies, more=(where, 4))
        guard = threading.Thread(target=lambda: (server.join(), pool.serve(tmp_path, endpoint)))
        guard.start()
        stores = connect(endpoint, transport="tcp", timeout=60)
        store = stores.create_embedding_store("ones", layout, RowSGD(), seed=0, dynamic=DynamicRows())
        expected, touched = store.lookup(keys), torch.zeros(ROWS, dtype=torch.bool)
        for _ in range(10):
            rows = torch.randperm(ROWS)[:TOUCHED]
            expected[rows] += 1
            touched[rows] = True
            store.apply_row_gradients(keys[rows], -torch.ones(TOUCHED, DIM), lr=1.0)
        store.flush()
        guard.join()
        assert torch.equal(store.lookup(keys), expected)
        assert torch.equal(store.live_rows(), keys[touched])
        assert store.step == 10
        stores.close()
    assert server.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("where", WHERE)
def test_elastic_average_when_the_server_is_killed_inside_it_then_counts_once(tmp_path, where):
    center = MappedStores(tmp_path).create_dense_store("center", torch.zeros(1000))
    with processes() as pool:
        server, endpoint = pool.serve(tmp_path, target=run_server_that_dies, more=(where, 2))

        def start_again():
            server.join()
            pool.serve(tmp_path, endpoint)

        guard = threading.Thread(target=start_again)
        guard.start()
        stores = connect(endpoint, transport="tcp", timeout=60)
        store = stores.dense_store("center")
        moved = [store.elastic_average(torch.ones(1000), alpha=0.5) for _ in range(3)]
        guard.join()
        stores.close()
    assert server.exitcode == -signal.SIGKILL
    for times, vector in enumerate(moved, start=1):
        assert torch.equal(vector, torch.full((1000,), 1 - 0.5**times))
    assert torch.equal(center.pull(), moved[-1])
    assert center.version == 3


def test_server_when_its_parent_is_killed_then_ends(tmp_path):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(reader)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        server = context.Process(target=run_server, args=(tmp_path, None, theirs))
        server.start()
        assert ours.poll(60)
        os.write(writer, str(server.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(parent, 0)
    with open(reader) as pipe:
        assert int(pipe.read())  # ends when the server has: it holds the other end
