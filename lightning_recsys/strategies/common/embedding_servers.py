"""Which embedding server holds what, and a model whose rows are there."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.embeddings.substitution import substitute_embeddings
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.placement import PlacementMethod, PlacementPlan, Room, TableCost, place_tables
from lightning_recsys.stores.backend import table_costs
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.sync import StalenessNormalization

PROFILE_BATCH = 1024  # examples, where there are none of the run's own
PROFILE_ROUNDS = 5  # the median counts
PROFILE_ROWS = 1_000_000  # of a table at most: more would miss the processor's caches no more often


_NO_IDS = np.empty(0, dtype=np.int64)


class ServedTables:
    """The tables of a model, while embedding servers hold their rows.

    Args:
        model: Its collections are served, and the plain embedding modules that are chosen.
        optimizer: The update rule of the rows of plain modules.
        min_rows: Plain modules of at least so many rows; by default none for their size.
        names: Plain modules to take whatever their size, by their paths.

    Attributes:
        substitution: The plain embedding modules that were replaced; none where none is chosen.
        collections: All that are served, by the names under which stores keep them.
    """

    def __init__(
        self, model: nn.Module, *, optimizer: RowOptimizer, min_rows: int | None = None, names: Sequence[str] = ()
    ) -> None:
        self.collections = {
            name or "embeddings": module
            for name, module in model.named_modules()
            if isinstance(module, EmbeddingBagCollection)
        }
        self.substitution = substitute_embeddings(model, optimizer=optimizer, min_rows=min_rows, names=names)
        self.collections |= self.substitution.collections

    def clear(self, servers: Sequence[Stores]) -> None:
        """Remove what an earlier run left of these tables, whose room the plan may need."""
        for name in self.collections:
            for server in servers:
                with suppress(KeyError):
                    server.remove(name)

    def ignored_groups(self, optimizers: Sequence[Optimizer]) -> list[str]:
        """What optimizers say of plain modules in parameter groups of their own, and the rows' rule does otherwise.

        A group speaks of the rows where its learning rate or weight decay differs from that of another group.

        Returns:
            A sentence for each such module and number.
        """
        if not self.substitution.placeholders:
            return []
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if group["params"]]
        ignored = []
        for key in ("lr", "weight_decay"):
            # Schedules have noted what they start from; OneCycleLR rises to the rate that it was given.
            notes = (f"max_{key}", f"initial_{key}", key)
            given = [float(next((group[x] for x in notes if x in group), 0.0)) for group in groups]
            for group, value in zip(groups, given, strict=True):
                for path in (self.substitution.placeholders.get(x) for x in group["params"]):
                    if path is None or not self.collections[path].trainable or len(set(given)) == 1:
                        continue
                    rule = self.collections[path].optimizer
                    if value != getattr(rule, key):
                        ignored.append(
                            f"configure_optimizers gives {path} {key}={value:g} in a group of its own, and its rows are"
                            f" on servers, trained by strategy.row_optimizer={type(rule).__name__} with"
                            f" {key}={getattr(rule, key):g}. Set that to what you mean."
                        )
        return ignored

    def flush(self) -> None:
        """Return when every update is on its server."""
        for collection in self.collections.values():
            collection.flush()

    def release(self, *, copy_rows: bool) -> None:
        """Give the model its own rows again, the trained ones if asked for."""
        for collection in self.collections.values():
            collection.unbind(copy_rows=copy_rows)
        self.substitution.restore()


def plan_placement(
    collections: Mapping[str, EmbeddingBagCollection],
    num_servers: int,
    *,
    method: PlacementMethod,
    samples: Callable[[int], Sequence[SparseFeatures]] = lambda _: (),
    rooms: Sequence[Room] | None = None,
    growing: Container[str] = (),
    normalization: StalenessNormalization | None = None,
) -> PlacementPlan:
    """Spread the tables of all collections over servers; ``profiled`` measures them first, if there is a choice.

    Args:
        collections: The collections of the model, by name.
        num_servers: Number of servers.
        method: How to place tables; see :func:`place_tables`.
        samples: Gives the features of so many training batches to measure with, or of none.
        rooms: How much each server has for rows; by default enough.
        growing: Names of the collections whose rows are made as they are trained.
        normalization: How stale gradients count, where rows have versions; else ``None``.

    Raises:
        NoRoomError: the servers have no room for the tables.
    """
    if num_servers == 1:
        method = "size"
    costs: list[TableCost] = []
    batches = samples(PROFILE_ROUNDS + 1) if method == "profiled" else ()
    for name, collection in collections.items():
        measured = measure_costs(collection, batches) if method == "profiled" else None
        costs += table_costs(
            name,
            collection.layout,
            collection.optimizer,
            measured,
            seen=ids_in(collection, batches) if batches else None,
            grows=name in growing,
            normalization=normalization,
        )
    return place_tables(costs, num_servers, method=method, rooms=rooms)


def ids_in(collection: EmbeddingBagCollection, samples: Sequence[SparseFeatures]) -> dict[str, NDArray[np.int64]]:
    """The ids that batches look up in each table, each as often as they do; of the batches with all of its features."""
    batches = _resolved(collection, samples)
    return {
        table.name: np.concatenate([_NO_IDS, *(x.select(table.feature_names).values.numpy() for x in batches)])
        for table in collection.tables
    }


def _resolved(collection: EmbeddingBagCollection, samples: Sequence[SparseFeatures]) -> list[SparseFeatures]:
    """Of the batches those that have all features of a collection, as it looks them up."""
    return [collection.resolve(x) for x in samples if set(collection.feature_names) <= set(x.keys)]


def rooms_of(servers: Sequence[Stores]) -> list[Room] | None:
    """How much room each server has for rows, or ``None`` where one of them does not say.

    Servers of one place share its room, so each lacks what the stores of the others were promised.
    """
    told = [server.status() for server in servers]
    if not all("free_bytes" in status for status in told):
        return None
    free: dict[str, int] = {}  # by place, as if nothing were promised; the last bytes may go between two answers
    promised: dict[str, int] = {}
    for status in told:
        place, own = str(status["place"]), int(status.get("promised_bytes", 0))
        free[place] = min(free.get(place, 2**63), int(status["free_bytes"]) + own)
        promised[place] = promised.get(place, 0) + own
    places = [str(status["place"]) for status in told]
    return [Room(place, max(free[place] - promised[place], 0)) for place in places]


def measure_costs(collection: EmbeddingBagCollection, samples: Sequence[SparseFeatures] = ()) -> dict[str, float]:
    """What each table costs its server: seconds for lookup and update of a batch.

    Args:
        collection: The collection whose tables are measured.
        samples: Features of training batches; where none has the collection's, one random id for each feature is taken.
    """
    resolved = _resolved(collection, samples)
    return {table.name: _seconds(collection, table, resolved or _random_batch(table)) for table in collection.tables}


def _random_batch(table: EmbeddingBagConfig) -> list[SparseFeatures]:
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    shape, num_ids = (len(table.feature_names) * PROFILE_BATCH,), min(table.num_embeddings, 2**63 - 1)
    return [SparseFeatures(table.feature_names, torch.randint(num_ids, shape, generator=generator))]


def _seconds(collection: EmbeddingBagCollection, table: EmbeddingBagConfig, batches: Sequence[SparseFeatures]) -> float:
    rows = min(table.num_embeddings, PROFILE_ROWS)
    layout = TableLayout((dataclasses.replace(table, num_embeddings=rows),))
    weight = torch.zeros(rows, layout.embedding_dim)
    state = collection.optimizer.initial_state(weight)
    kernel = choose_kernel("auto", layout, collection.optimizer, weight.device)
    seconds = []
    for step, batch in zip(range(1, PROFILE_ROUNDS + 2), cycle(batches), strict=False):
        sparse = batch.select(table.feature_names)
        offsets = None if sparse.is_single_hot else sparse.bag_offsets()
        sparse = dataclasses.replace(sparse, values=sparse.values % rows, offsets=offsets)
        gradient = torch.ones(sparse.batch_size, len(table.feature_names), layout.embedding_dim)
        began = time.perf_counter()
        kernel.lookup(weight, sparse)
        kernel.apply_gradients(weight, state, sparse, gradient, lr=0.01, step=step)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one compiles and touches the memory
