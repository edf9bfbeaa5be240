"""Caches of a virtual HET cluster against what is known of caches: hit rates and bytes on Zipf traces."""

from functools import partial

import numpy as np
import pytest
import torch

from lightning_recsys.data import Batch, SyntheticDataModule
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import LogisticRegression
from lightning_recsys.optim import RowSGD
from lightning_recsys.simulation import HETCluster
from lightning_recsys.tasks import CTRTask

ROWS, BATCH, STEPS, WARM = 2000, 64, 240, 60


def zipf(exponent):
    weights = np.arange(1, ROWS + 1) ** -exponent
    return weights / weights.sum()


def che(probabilities, cache_rows, *, batch=BATCH):
    """Che's approximation for a cache that keeps the rows of the last batches: distinct reads of a batch, and hits.

    A row is in a batch with probability ``q``. The cache holds the rows of about the last ``T`` batches, where ``T`` is
    such that it is full: sum of ``1 - (1 - q)^T`` = its size. A read hits with probability ``1 - (1 - q)^T``.
    """
    q = 1 - (1 - probabilities) ** batch
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - q) ** middle).sum() < cache_rows else (low, middle)
    return q.sum(), (q * (1 - (1 - q) ** low)).sum()


@pytest.mark.parametrize(("exponent", "fraction"), [(0.8, 0.1), (1.1, 0.3)])
def test_lru_on_a_zipf_trace_then_hits_and_bytes_are_those_of_ches_approximation(exponent, fraction):
    probabilities, dim = zipf(exponent), 32
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.choice(ROWS, size=(STEPS, BATCH), p=probabilities))
    labels = (torch.arange(BATCH) % 2).float()
    batches = [Batch(torch.zeros(BATCH, 0), SparseFeatures(("c0",), row), labels) for row in ids]
    fields = SyntheticDataModule(batch_size=BATCH, train_rows=BATCH, cardinalities=(ROWS,), num_dense=0).fields
    cluster = HETCluster(
        num_workers=1, cache_fraction=fraction, staleness=None, policy="lru", prefetch=False, embedding_dim=dim
    )

    task = CTRTask(
        LogisticRegression(0, fields, row_optimizer=RowSGD(0.01)), optimizer=partial(torch.optim.SGD, lr=0.01)
    )
    moved = []
    found = cluster.train(task, batches, watch=lambda results: moved.append(results.traffic.copy()))
    reads_of = [len(row.unique()) for row in ids]
    assert found.traffic["rows"] == round(found.metrics["cache/miss_rate"] * sum(reads_of)) * (4 + 4 * dim)
    later = STEPS - WARM  # the cache is full
    row_bytes, clock_bytes = ((moved[-1][kind] - moved[WARM - 1][kind]) / later for kind in ("rows", "clocks"))
    reads, misses = sum(reads_of[WARM:]) / later, row_bytes / (4 + 4 * dim)
    reads_expected, hits_expected = che(probabilities, round(fraction * ROWS))
    assert reads == pytest.approx(reads_expected, rel=0.02)
    assert 1 - misses / reads == pytest.approx(hits_expected / reads_expected, abs=0.01)
    assert clock_bytes == pytest.approx(2 * 4 * misses, rel=0.03)  # as many copies leave, with a clock each, as come
