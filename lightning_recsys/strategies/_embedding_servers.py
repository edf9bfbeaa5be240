"""Which embedding server holds what."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch
from torch import nn

from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.parameter_server.backend import table_costs
from lightning_recsys.placement import PlacementMethod, PlacementPlan, TableCost, place_tables

PROFILE_BATCH = 1024  # examples
PROFILE_ROUNDS = 5  # the fastest counts
PROFILE_ROWS = 1_000_000  # of a table at most: more would miss the processor's caches no more often


def collections_of(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """The collections in a model, by the names under which stores keep them."""
    return {
        name or "embeddings": module
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
    }


def plan_placement(
    collections: Mapping[str, EmbeddingBagCollection], num_servers: int, *, method: PlacementMethod
) -> PlacementPlan:
    """Spread the tables of all collections over servers; ``profiled`` measures them first."""
    costs: list[TableCost] = []
    for name, collection in collections.items():
        measured = measure_costs(collection) if method == "profiled" else None
        costs += table_costs(name, collection.layout, collection.optimizer, measured)
    return place_tables(costs, num_servers, method=method)


def measure_costs(collection: EmbeddingBagCollection) -> dict[str, float]:
    """What each table costs its server: seconds for lookup and update of a batch, one random id for each feature."""
    return {table.name: _seconds(collection, TableLayout((table,))) for table in collection.tables}


def _seconds(collection: EmbeddingBagCollection, layout: TableLayout) -> float:
    (table,) = layout.tables
    rows = min(table.num_embeddings, PROFILE_ROWS)
    layout = TableLayout((dataclasses.replace(table, num_embeddings=rows),))
    weight = torch.zeros(rows, layout.embedding_dim)
    state = collection.optimizer.initial_state(weight)
    kernel = choose_kernel("auto", layout, collection.optimizer, weight.device)
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    ids = torch.randint(rows, (len(table.feature_names) * PROFILE_BATCH,), generator=generator)
    sparse = SparseFeatures(table.feature_names, ids)
    gradient = torch.ones(PROFILE_BATCH, len(table.feature_names), layout.embedding_dim)
    fastest = float("inf")
    for step in range(1, PROFILE_ROUNDS + 2):  # the first one compiles and touches the memory
        began = time.perf_counter()
        kernel.lookup(weight, sparse)
        kernel.apply_gradients(weight, state, sparse, gradient, learning_rate=0.01, step=step)
        if step > 1:
            fastest = min(fastest, time.perf_counter() - began)
    return fastest
