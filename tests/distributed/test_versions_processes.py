"""Versions where several processes push: over the wire as through shared memory, and over what goes wrong."""

from pathlib import Path

import pytest
import torch
from forked import run_processes
from server_helpers import LAYOUT, ask, running

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.stores import DynamicRows, MappedStores, row_files
from lightning_recsys.stores.versions import VERSION
from lightning_recsys.sync import StalenessNormalization

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

WORLD, STEPS = 2, 1000
KEYS = ("x", "y", "z")
BATCH = SparseFeatures(KEYS, torch.tensor([0, 5, 1, 4, 2, 0]))  # rows 0, 5, 1 and 4 of a, 2 and 0 of b
ROWS = [0, 1, 4, 5, 6, 8]
GRADIENT = torch.full((2, 3, 4), -1.0)
IDENTITY, LINEAR = StalenessNormalization("identity"), StalenessNormalization("linear")
DENSE = {"optimizer": RowSGD(1.0), "normalization": IDENTITY, "parts": (100, 28)}


def push_to_shared_rows(rank: int, endpoint: str, folder: str) -> None:
    """Pull and push, as often as the other process."""
    torch.set_num_threads(1)
    stores = connect(endpoint, transport="auto" if endpoint.startswith("shm") else "tcp")
    rows = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, normalization=IDENTITY)
    dense = stores.create_dense_store("v", torch.zeros(128), **DENSE)
    steps = STEPS if endpoint.startswith("shm") else STEPS // 10
    for _ in range(steps):
        _, seen = rows.begin_versioned_lookup(BATCH)()
        _, dense_seen = dense.begin_versioned_pull()()
        rows.apply_gradients(BATCH, GRADIENT, lr=1.0, versions=seen)
        dense.push_gradient(-torch.ones(128), lr=1.0, versions=dense_seen)
    for store in (rows, dense):
        store.flush()
    counts = rows.observed.counts, dense.observed.counts
    torch.save((type(rows).__name__, steps, *counts), Path(folder) / f"{rank}.pt")
    stores.close()


@pytest.mark.parametrize("route", ["tcp", "shm"])
def test_two_workers_when_they_push_to_the_same_rows_then_every_update_is_counted(tmp_path, route):
    (tmp_path / "stores").mkdir()
    mapped = MappedStores(tmp_path / "stores")
    rows = mapped.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, normalization=IDENTITY)
    rows.write("weight", 0, torch.zeros(9, 4))
    dense = mapped.create_dense_store("v", torch.zeros(128), **DENSE)
    if route == "shm":
        run_processes(push_to_shared_rows, f"shm://{tmp_path / 'stores'}", str(tmp_path), nprocs=WORLD)
    else:
        with running(tmp_path / "stores") as server:
            run_processes(push_to_shared_rows, server.endpoint, str(tmp_path), nprocs=WORLD)
    told = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    assert len(told) == WORLD
    assert {name for name, *_ in told} == {"MappedEmbeddingStore" if route == "shm" else "RemoteEmbeddingStore"}
    pushes = sum(steps for _, steps, *_ in told)
    # Versions lose nothing on either way, and the two processes' reports together have every push of every row.
    assert rows.read(VERSION, 0, 9)[ROWS].tolist() == [pushes] * 6
    assert dense.read(VERSION).tolist() == [pushes] * 2
    assert sum(sum(counts.values()) for _, _, counts, _ in told) == 6 * pushes
    assert sum(sum(counts.values()) for *_, counts in told) == 2 * pushes
    sums = torch.cat([rows.read("weight", 0, 9)[ROWS].flatten(), dense.pull()])
    if route == "tcp":
        assert sums.eq(pushes).all(), "a server applies one after the other"
    else:  # two processes may write the same element at the same instant
        lost = 1 - sums.mean().item() / pushes
        print(f"additions lost on shared elements: {lost:.5%}")
        assert 0 <= lost < 0.001


def make_store(stores, *, dynamic=None):
    return stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, dynamic=dynamic, normalization=LINEAR)


@pytest.mark.parametrize("dynamic", [None, DynamicRows()], ids=["all rows", "dynamic"])
def test_store_when_behind_a_server_then_counts_as_a_mapped_one_does(tmp_path, dynamic):
    for name in ("served", "mapped"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "served") as server:
        remote = connect(server.endpoint, transport="tcp")
        stores = [remote, MappedStores(tmp_path / "mapped")]
        pairs = [make_store(x, dynamic=dynamic) for x in stores]
        dense = [x.create_dense_store("v", torch.zeros(128), **DENSE | {"normalization": LINEAR}) for x in stores]
        bags = SparseFeatures(KEYS, torch.tensor([0, 5, 1, 4, 2, 0]), lengths=torch.tensor([2, 0, 1, 1, 0, 2]))
        for store, vector in zip(pairs, dense, strict=True):
            seen = [store.begin_versioned_lookup(x)()[1] for x in (BATCH, bags)]
            _, pulled = vector.begin_versioned_pull()()
            for _ in range(2):
                for sparse, stale in zip((BATCH, bags), seen, strict=True):
                    store.apply_gradients(sparse, GRADIENT, lr=0.5, versions=stale)
                vector.push_gradient(torch.ones(128), lr=1.0, versions=pulled)
            vector.push_gradient(torch.ones(128), lr=1.0, trained=torch.tensor([False, True]))
            store.apply_row_gradients(torch.tensor([1]), torch.ones(1, 4), lr=1.0, versions=torch.tensor([0]))
            store.flush()
        (served, mapped), (served_dense, mapped_dense) = pairs, dense
        assert served.observed.counts == mapped.observed.counts == {1: 6, 2: 6, 3: 6, 4: 6, 5: 1}
        assert served_dense.observed.counts == mapped_dense.observed.counts == {1: 3, 2: 2}
        for name in ("weight", VERSION):
            assert torch.equal(served.read(name, 0, 9), mapped.read(name, 0, 9)), name
        assert torch.equal(served_dense.pull(), mapped_dense.pull())
        assert served_dense.read(VERSION).tolist() == [2, 3]
        served_dense.write(VERSION, torch.tensor([5, 6]))
        assert served_dense.begin_versioned_pull()()[1].tolist() == [5, 6]
        for vector in dense:  # a push is counted where it arrives, unless its number is told
            untrained = torch.tensor([False, False])
            assert vector.push_gradient(torch.ones(128), lr=1.0, trained=untrained)() == 4
            assert vector.push_gradient(torch.ones(128), lr=1.0, step=9)() == 9
            assert vector.read("step").item() == 4
        for opened in stores:
            opened.close()


def test_push_when_it_is_cut_short_then_the_versions_are_taken_back_with_the_rows(tmp_path, monkeypatch):
    handler = RequestHandler(tmp_path)
    store = make_store(handler.stores.mapped)
    store.apply_row_gradients(torch.tensor([2]), torch.ones(1, 4), lr=1.0)
    before = store.read("weight", 0, 9)
    assert ask(handler, "hello").status == "ok"
    arrays = torch.tensor([2, 3]), torch.tensor([0, 0]), torch.ones(2, 4)
    fields = {"store": "t", "lr": 1.0, "versioned": True}

    def fail(*_, **__):
        raise OSError("in the midst of it")

    with monkeypatch.context() as broken:
        broken.setattr(row_files, "apply_update", fail)
        assert ask(handler, "apply_row_gradients", *arrays, sequence=1, **fields).status == "failed"
    assert store.read(VERSION, 0, 9).tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert torch.equal(store.read("weight", 0, 9), before)
    reply = ask(handler, "apply_row_gradients", *arrays, sequence=2, **fields)
    assert [x.tolist() for x in reply.arrays] == [[[1, 1], [2, 1]]]
    assert store.read(VERSION, 0, 9).tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 0]
    handler.close()
    again = RequestHandler(tmp_path)
    assert again.stores.mapped.embedding_store("t").read(VERSION, 2, 2).tolist() == [2, 1], "they outlive the server"
    again.close()
