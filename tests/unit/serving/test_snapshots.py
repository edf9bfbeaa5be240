"""Reading rows for publication: what must not happen to them, and with which bits they come."""

from threading import Thread

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.server import Server
from lightning_recsys.row_cache.backend import CachedBackend
from lightning_recsys.serving.publishing.snapshots import WholeTable
from lightning_recsys.stores import MappedStores, StoreBackend

TABLE = EmbeddingBagConfig("a", 40, 8, ("x",), init_std=0.5)
LAYOUT = TableLayout((TABLE,))


def train(backend, ids):
    sparse = SparseFeatures(("x",), torch.tensor(ids))
    backend.apply_gradients([backend.lookup(sparse)[1]], torch.randn(len(ids), 1, 8), lr=0.1)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "stores").mkdir(mode=0o700)
    with Server(tmp_path / "stores") as server:
        thread = Thread(target=server.run)
        thread.start()
        yield server
        server.stop()
        thread.join()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_rows_behind_a_cache_when_read_then_nothing_is_taken_from_the_thread_that_trains(server, transport):
    stores = connect(server.endpoint, transport=transport)
    options = {"servers": [stores], "cache_rows": 10, "staleness": 100}
    backend = CachedBackend.create("t", LAYOUT, RowSGD(), **options)
    ((_, before),) = WholeTable(TABLE).all_rows(backend)
    train(backend, [3, 5])
    ((_, rows),) = WholeTable(TABLE).all_rows(backend)
    assert torch.equal(rows, before), "the cache's updates are its own thread's to send"
    backend.flush()
    ((_, rows),) = WholeTable(TABLE).all_rows(backend)
    assert (rows != before).any(1).nonzero().flatten().tolist() == [3, 5]
    assert torch.equal(rows, backend.read("a", "weight"))
    stores.close()


def test_rows_when_they_travel_rounded_then_are_published_with_all_bits_and_once(server):
    stores = connect(server.endpoint, transport="tcp", compression="bf16")
    backend, snapshot = StoreBackend.create("t", LAYOUT, RowSGD(), servers=[stores]), WholeTable(TABLE)
    list(snapshot.all_rows(backend))
    train(backend, [3, 5])
    backend.flush()
    ((ids, rows),) = snapshot.changed_rows(backend)
    assert ids.tolist() == [3, 5]
    assert torch.equal(rows, MappedStores(server.handler.stores.folder).embedding_store("t").lookup(ids))
    assert list(snapshot.changed_rows(backend)) == []
    stores.close()
