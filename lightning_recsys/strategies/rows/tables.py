"""Which embedding server holds what, and a model whose rows are there."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.embeddings.substitution import substitute_embeddings
from lightning_recsys.optim import RowAdagrad, RowOptimizer, RowSGD
from lightning_recsys.optim.torch_rules import (
    UNKNOWN_SETTINGS,
    base_lr,
    nearest_rule,
    row_rule_of,
    unknown_settings,
    written,
)
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
        min_rows: Plain modules of at least so many rows; by default none for their size.
        names: Plain modules to take whatever their size, by their paths.

    Attributes:
        substitution: The plain embedding modules that were replaced; none where none is chosen.
        collections: All that are served, by the names under which stores keep them. Those of plain modules are among
            them once :meth:`choose_rules` has said by which rule each is trained.
    """

    def __init__(self, model: nn.Module, *, min_rows: int | None = None, names: Sequence[str] = ()) -> None:
        self.collections = {
            name or "embeddings": module
            for name, module in model.named_modules()
            if isinstance(module, EmbeddingBagCollection)
        }
        self.substitution = substitute_embeddings(model, min_rows=min_rows, names=names)
        self._mapped: set[str] = set()  # paths of plain modules whose rule is that of their optimizer
        self._watched: list[Any] = []  # hooks of the optimizers that these are in

    def choose_rules(
        self,
        optimizers: Sequence[Optimizer],
        *,
        given: RowOptimizer | None,
        check: Callable[[RowOptimizer], None],
    ) -> None:
        """Say by which rule each plain module is trained: the given one, or that of the optimizer that has it.

        Args:
            optimizers: What ``configure_optimizers`` gave, with the placeholders where the weights would be.
            given: ``strategy.row_optimizer``.
            check: Raises ``TypeError`` for a rule by which the strategy's rows cannot be trained.

        Raises:
            TypeError: rows have no rule that does what a module's optimizer does.
            ValueError: a module is in no optimizer, or in several, or in one that was made before this run.
        """
        self.substitution.empty_state(optimizers)
        kept = self.substitution.kept_weights(optimizers)
        for path, owners in self.substitution.owners(optimizers).items():
            collection = self.substitution.collections[path]
            if given is not None:
                self.substitution.train_by(path, given)
                continue
            try:
                rule = _rule_of(path, owners, check, kept.get(path))
            except (TypeError, ValueError) as error:
                if collection.trainable:
                    raise
                self.substitution.train_by(path, RowSGD(), frozen_for=str(error))
                continue
            self.substitution.train_by(path, rule)
            self._mapped.add(path)
            self._watched.append(_watch(path, *owners[0], rule))
        self.collections |= self.substitution.collections

    def attach_to(self, optimizers: Sequence[Optimizer]) -> None:
        """Update the rows of plain modules at the steps of their optimizers, at the rates of these or in proportion."""
        self.substitution.attach_to(optimizers, takes_rate_of_owner=self._mapped)

    def clear(self, servers: Sequence[Stores], names: Iterable[str]) -> None:
        """Remove what an earlier run left of some of these tables, whose room the plan may need."""
        for name in names:
            for server in servers:
                with suppress(KeyError):
                    server.remove(name)

    def ignored_groups(self, optimizers: Sequence[Optimizer]) -> list[str]:
        """The settings of plain modules in optimizers' parameter groups that a given rule does otherwise.

        A group speaks of the rows where its learning rate or weight decay differs from that of another group.

        Returns:
            A sentence for each such module and number.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if group["params"]]
        ignored = []
        for key, value_of in (("lr", base_lr), ("weight_decay", _weight_decay)):
            given = [value_of(group) for group in groups]
            for group, value in zip(groups, given, strict=True):
                for path in (self.substitution.placeholders.get(x) for x in group["params"]):
                    if path is None or path in self._mapped or len(set(given)) == 1:
                        continue
                    rule = self.collections[path].optimizer
                    if self.collections[path].trainable and value != getattr(rule, key):
                        ignored.append(
                            f"configure_optimizers gives {path} {key}={value:g} in a group of its own, and its rows are"
                            f" on servers, trained by strategy.row_optimizer={type(rule).__name__} with"
                            f" {key}={getattr(rule, key):g}. Set that to what you mean, or leave it out: rows are then"
                            " trained as configure_optimizers says."
                        )
        return ignored

    def rules(self) -> str:
        """By which rule each plain module is trained, in one line."""
        by_rule: dict[str, list[str]] = {}
        for path, collection in self.substitution.collections.items():
            rule = written(collection.optimizer) if collection.trainable else "frozen"
            by_rule.setdefault(rule, []).append(path)
        return "; ".join(f"{', '.join(paths)}: {rule}" for rule, paths in by_rule.items())

    def flush(self) -> None:
        """Return when every update is on its server."""
        for collection in self.collections.values():
            collection.flush()

    def release(self, *, copy_rows: bool) -> None:
        """Give the model its own rows again, the trained ones if asked for."""
        for collection in self.collections.values():
            collection.unbind(copy_rows=copy_rows)
        for hook in self._watched:
            hook.remove()
        self.substitution.restore()


def _weight_decay(group: Mapping[str, Any]) -> float:
    return float(group.get("weight_decay", 0.0))


def _rule_of(
    path: str,
    owners: Sequence[tuple[Optimizer, int]],
    check: Callable[[RowOptimizer], None],
    earlier: Optimizer | None,
) -> RowOptimizer:
    """The rule of the optimizer that has a module, by which the strategy's rows can be trained.

    Raises:
        TypeError: rows have no such rule.
        ValueError: there is not one optimizer, or it was made before the run.
    """
    if earlier is not None:
        raise ValueError(
            f"{path} is on servers during this run, and {type(earlier).__name__}, which configure_optimizers returns,"
            " was made of its weight before the run began, in __init__, say: it would train what no batch reads."
            " Make the optimizer in configure_optimizers, of self.parameters()."
        )
    if len(owners) != 1:
        raise ValueError(
            f"{path} is on servers during this run, and configure_optimizers has it in {len(owners)} parameter groups:"
            " its rows are trained by the rule of one. Give it to one optimizer, freeze it (requires_grad_(False)), or"
            " say by what it is trained with strategy.row_optimizer=RowAdagrad(lr=0.01), say."
        )
    ((optimizer, index),) = owners
    group = optimizer.param_groups[index]
    rule = row_rule_of(optimizer, group, lr=base_lr(group) or 1.0)
    why = "no rule of rows is such"
    if rule is not None:
        try:
            check(rule)
        except TypeError as error:
            why = str(error)
        else:
            return rule
    instead = nearest_rule(optimizer, group)
    try:
        check(instead)
    except TypeError:
        instead = RowAdagrad(instead.lr)
    settings = "".join(f", {name}={value}" for name, value in unknown_settings(group).items())
    raise TypeError(
        f"{path} is on servers during this run, and configure_optimizers trains it by"
        f" {type(optimizer).__name__}(lr={base_lr(group):g}{settings}): {why}. Rows are trained as by SGD, Adagrad and"
        f" Adam of torch without {', '.join(UNKNOWN_SETTINGS)}. Give {path} to such an optimizer, or write by what its"
        f" rows are to be trained, whatever optimizer has it: strategy.row_optimizer={written(instead)}."
    )


def _watch(path: str, optimizer: Optimizer, index: int, rule: RowOptimizer) -> Any:
    """Refuse to go on once a parameter group's rule is no more that of the rows, but for its learning rate."""

    def compare(*_: Any) -> None:
        now = row_rule_of(optimizer, optimizer.param_groups[index], lr=rule.lr)
        if now != rule:
            raise ValueError(
                f"{path} is on servers, and its rows are trained by the rule that {type(optimizer).__name__} had when"
                f" training started, of which only the learning rate may change: {written(rule)}, and now"
                f" {'none that rows have' if now is None else written(now)}. Schedulers that move betas or momentum"
                " (OneCycleLR, CyclicLR) take cycle_momentum=False, which leaves them alone; a checkpoint brings the"
                " settings of the optimizer that it has."
            )

    return optimizer.register_step_post_hook(compare)


def plan_placement(
    collections: Mapping[str, EmbeddingBagCollection],
    num_servers: int,
    *,
    beside: PlacementPlan | None = None,
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
        beside: Where other tables of the model are already; the plan has these as well.
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
    return place_tables(costs, num_servers, method=method, rooms=rooms, beside=beside)


def ids_in(collection: EmbeddingBagCollection, samples: Sequence[SparseFeatures]) -> dict[str, NDArray[np.int64]]:
    """The ids that batches look up in each table, each as often as they do; of the batches with all of its features."""
    batches = _resolved(collection, samples)
    return {
        table.name: np.concatenate([_NO_IDS, *(x.select(table.feature_names).values.numpy() for x in batches)])
        for table in collection.tables
    }


def _resolved(collection: EmbeddingBagCollection, samples: Sequence[SparseFeatures]) -> list[SparseFeatures]:
    """The batches that have all features of a collection, as it looks them up."""
    return [collection.resolve(x) for x in samples if set(collection.feature_names) <= set(x.keys)]


def rooms_of(servers: Sequence[Stores]) -> list[Room] | None:
    """How much room each server has for rows, or ``None`` where one of them does not say.

    Servers of one place share its room; the last bytes may go between two answers.
    """
    told = [server.status() for server in servers]
    if not all("free_bytes" in status for status in told):
        return None
    free: dict[str, int] = {}
    for status in told:
        place = str(status["place"])
        free[place] = min(free.get(place, 2**63), int(status["free_bytes"]))
    return [Room(str(status["place"]), free[str(status["place"])]) for status in told]


def measure_costs(collection: EmbeddingBagCollection, samples: Sequence[SparseFeatures] = ()) -> dict[str, float]:
    """The cost of each table to its server: seconds for lookup and update of a batch.

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
