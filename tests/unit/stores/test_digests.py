"""Digests of rows: the same in every store and however rows are cut, another one for whatever changed."""

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.placement import PlacementPlan, TablePart, rows_in_stripe
from lightning_recsys.stores import DynamicRows, StoreBackend
from lightning_recsys.stores.digests import DIGEST, digest_rows

LAYOUT = TableLayout((EmbeddingBagConfig("a", 40, 8, ("x",), init_std=0.5), EmbeddingBagConfig("b", 30, 8, ("z",))))


def cut_plan():
    parts = [TablePart("t", "a", rows_in_stripe(40, i, 2), server=i, stripe=i, num_stripes=2) for i in range(2)]
    return PlacementPlan("size", 2, (*parts, TablePart("t", "b", 30, server=1)))


@pytest.mark.parametrize("dim", [1, 3, 8])
def test_digest_when_one_bit_changes_then_it_is_another(dim):
    rows = torch.randn(100, dim)
    before = digest_rows(rows)
    assert torch.equal(before, digest_rows(rows.clone()))
    assert len(set(before.tolist())) == 100
    rows.view(torch.int32)[7, -1] ^= 1
    assert (digest_rows(rows) != before).nonzero().flatten().tolist() == [7]
    assert digest_rows(rows[:0]).shape == (0,)


def test_digests_when_tables_are_cut_then_they_are_those_of_the_rows(servers):
    backend = StoreBackend.create("t", LAYOUT, RowSGD(0.1), servers=servers[:2], plan=cut_plan())
    for table, rows in (("a", 40), ("b", 30)):
        expected = digest_rows(backend.read_rows(table, "weight", 0, rows))
        assert torch.equal(backend.read_rows(table, DIGEST, 0, rows), expected)
        assert torch.equal(backend.read_rows(table, DIGEST, 5, 13), expected[5:18])
        ids = torch.tensor([3, 29, 0, 8])
        assert torch.equal(digest_rows(backend.stored.read(table, "weight", ids)), expected[ids])
        assert torch.equal(backend.stored.read(table, DIGEST, ids), expected[ids])
    with pytest.raises(ValueError, match="follows from them and cannot be written"):
        backend.write_rows("a", DIGEST, 0, torch.zeros(1, dtype=torch.int64))


def test_dynamic_digests_when_tables_are_cut_then_they_are_those_of_the_rows_and_drawing_is_told(servers):
    backend = StoreBackend.create(
        "t", LAYOUT, RowSGD(0.1), servers=servers[:2], plan=cut_plan(), seed=9, dynamic=DynamicRows()
    )
    tables = backend.dynamic
    tables.write("a", "weight", torch.tensor([4, 5]), torch.ones(2, 8))
    ids = torch.tensor([5, 7, 4])
    assert torch.equal(tables.read("a", DIGEST, ids), digest_rows(tables.read("a", "weight", ids)))
    assert tables.drawing("a") == (9, 0, 1)
    assert tables.drawing("b") == (9, 40, 1)
