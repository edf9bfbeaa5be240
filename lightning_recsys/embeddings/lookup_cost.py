"""What each table of a collection costs to look up, measured: placement over servers balances it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from lightning_recsys.embeddings.backend import LocalBackend
from lightning_recsys.embeddings.collection import EmbeddingBagCollection
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.embeddings.sparse_features import SparseFeatures

_STAND_IN_ROWS = 1 << 20


def measure_lookup_cost(
    collection: EmbeddingBagCollection, batches: Sequence[SparseFeatures], *, repeats: int = 3
) -> dict[str, float]:
    """Time pooled lookups on the CPU, table by table, on real batches: their bag lengths and their ids decide.

    Tables without rows here are timed on a stand-in of at most a million rows.

    Args:
        collection: Whose tables to time; not changed.
        batches: A few batches as training sees them.
        repeats: Rounds over all batches, after one that is not counted.

    Returns:
        Table name -> seconds per batch, the median.

    Raises:
        ValueError: no batch, or no round.
    """
    if not batches or repeats < 1:
        raise ValueError(f"at least one batch and one round are needed, got {len(batches)} and {repeats}.")
    resolved = [collection.resolve(batch).to("cpu") for batch in batches]
    return {
        table.name: _time_table(collection, TableLayout((table,)), resolved, repeats) for table in collection.tables
    }


def _time_table(
    collection: EmbeddingBagCollection, layout: TableLayout, batches: Sequence[SparseFeatures], repeats: int
) -> float:
    (table,) = layout.tables
    own, own_batches = collection.embedding_bags, [batch.select(table.feature_names) for batch in batches]
    if isinstance(own, LocalBackend) and not own.is_meta:
        rows = own.read(table.name, "weight").cpu()
    else:
        rows = torch.zeros(min(table.num_embeddings, _STAND_IN_ROWS), layout.embedding_dim)
        own_batches = [dataclasses.replace(batch, values=batch.values % rows.shape[0]) for batch in own_batches]
    kernel = choose_kernel("auto", layout, collection.optimizer, rows.device)
    seconds = []
    for _ in range(repeats + 1):
        for batch in own_batches:
            start = perf_counter()
            kernel.lookup(rows, batch)
            seconds.append(perf_counter() - start)
    return median(seconds[len(own_batches) :])
