"""Versions of rows travel from one run's stores to another's, whatever number of servers and workers either has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.placement import PlacementPlan, TablePart
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.strategies.rows.row_tags import read_share, write_shares
from lightning_recsys.sync import StalenessNormalization

BY_CHANGE = StalenessNormalization("linear", sensitivity=1.0)
LAYOUT = TableLayout((EmbeddingBagConfig("a", 7, 4, ("x",), init_std=0.0),))


@pytest.fixture
def opened():
    found = []
    yield found
    for stores in found:
        stores.close()


def make_backend(folder, opened, *, num_stripes, dynamic):
    for index in range(num_stripes):
        (folder / str(index)).mkdir(parents=True)
        opened.append(MappedStores(folder / str(index)))
    servers = opened[-num_stripes:]
    sizes = [len(range(stripe, 7, num_stripes)) for stripe in range(num_stripes)]
    parts = [TablePart("t", "a", size, stripe=i, num_stripes=num_stripes, server=i) for i, size in enumerate(sizes)]
    plan = PlacementPlan("size", num_stripes, tuple(parts))
    options = {"servers": servers, "plan": plan, "seed": 0, "dynamic": dynamic, "normalization": BY_CHANGE}
    backend = StoreBackend.create("t", LAYOUT, RowSGD(1.0), **options)
    return backend, {"t": SimpleNamespace(embedding_bags=backend)}


def tags_of(backend):
    ids = torch.arange(7)
    read = backend.dynamic.read if backend.dynamic else lambda table, name, _: backend.read_rows(table, name, 0, 7)
    return [read("a", name, ids) for name in ("version", "change")]


@pytest.mark.parametrize("dynamic", [None, DynamicRows()], ids=["all rows", "dynamic"])
def test_tags_when_two_workers_save_and_three_load_on_fewer_servers_then_are_the_same(tmp_path, opened, dynamic):
    backend, collections = make_backend(tmp_path / "first", opened, num_stripes=2, dynamic=dynamic)
    for ids in ([0, 3, 5], [3, 6], [3]):
        _, ticket = backend.lookup(SparseFeatures(("x",), torch.tensor(ids)))
        backend.apply_gradients([ticket], torch.full((len(ids), 1, 4), float(len(ids))), lr=1.0)
    expected = tags_of(backend)
    assert expected[0].tolist() == [1, 0, 0, 3, 0, 1, 1]
    assert expected[1].tolist() == [3.0, 0.0, 0.0, 1.0, 0.0, 3.0, 2.0]
    shares = [read_share(collections, BY_CHANGE, rank=rank, num_ranks=2) for rank in range(2)]
    again, others = make_backend(tmp_path / "again", opened, num_stripes=1, dynamic=dynamic)
    for rank in range(3):
        write_shares(others, BY_CHANGE, shares[rank::3])
    for found, kept in zip(tags_of(again), expected, strict=True):
        assert torch.equal(found, kept)
        assert found.dtype == kept.dtype


def test_tags_when_the_model_has_no_such_table_or_no_changes_then_the_others_are_loaded(tmp_path, opened):
    backend, collections = make_backend(tmp_path, opened, num_stripes=1, dynamic=None)
    share = {"t": {"a": {"first": 5, "version": torch.tensor([4, 2])}}, "gone": {"a": {"first": 0}}}
    write_shares(collections, BY_CHANGE, [share])
    assert tags_of(backend)[0].tolist() == [0, 0, 0, 0, 0, 4, 2]
