"""Rows on servers, copies of the busy ones in every worker's cache, with bounded staleness per row (HET)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.accumulating import check_additive
from lightning_recsys.placement import PlacementPlan
from lightning_recsys.row_cache.backend import CachedBackend
from lightning_recsys.row_cache.index import CachePolicy
from lightning_recsys.row_cache.owners import sum_at_owners
from lightning_recsys.row_cache.shared_index import SharedIndex
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies.common.look_ahead import LookAhead
from lightning_recsys.strategies.common.settings import (
    refuse_meaningless,
    require_number,
    require_one_of,
    require_whole,
)
from lightning_recsys.strategies.rows.served import ServedRows
from lightning_recsys.sync import ClockName, ClockRule, StalenessRule
from lightning_recsys.sync.clocks import staleness_for

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy

CachedAlgorithm = Literal["het", "hybrid"]

DEFAULT_FRACTION = 0.1
# With 10 % of the rows in the cache (Zipf 1.1, s = 100) so many points of the bytes are saved less than by Belady's
# choice among all batches: 3.4 at B = 128 and 6.2 at B = 2048 where no batch is looked at, 1.7 and 1.8 with these (400
# batches in 80 MiB, 41 in 128), 1.1 with the 600 batches of 128 that 128 MiB would hold.
DEFAULT_LOOKAHEAD_BATCHES = 400
DEFAULT_LOOKAHEAD_BYTES = 128 << 20

AUTO = "auto"
LONG_RUN_STALENESS = 100  # the paper's
# Steps a worker, for each worker, in which copies of a row are to meet once. What each of them has learned by itself
# adds up there: the more workers, the more often.
STEPS_BETWEEN_MEETINGS = 5

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

_LAGS = ("0", "1_to_9", "10_to_99", "from_100")


class CachedRows(ServedRows):
    r"""Rows on servers, and in each worker a cache of those that it needs most.

    A worker reads and trains its copy of a row without asking anybody, as long as the copy is at most ``staleness``
    updates ahead of what was fetched and at most as many behind the server; then its updates go to the server and the
    row is fetched again. Popular rows, which make up most of the traffic, so travel once in many steps.

    Workers that go in step by batches, as under DDP, look at the batches to come. Workers that run free do not: they
    lease their batches as they go.

    Args:
        algorithm: ``het`` is the above. ``hybrid``, which it is compared with, has no cache: every row is fetched and
            pushed at every step.
        cache_rows: Rows that a worker keeps of each collection.
        cache_fraction: The same as a share of the collection's rows, in ``(0, 1]``; 0.1 where neither is given.
        staleness: :math:`s`, in updates of a row; 0 gives the result of no cache, ``None`` or ``"inf"`` no bound.
            ``"auto"`` is a worker's steps by five times the number of workers, at least 1 and at most 100: the copies
            of a row then meet five times for each worker, or more. The steps are those of the whole run, also where it
            is resumed.
        max_missed_updates: How many updates of a row, of all other workers together, a read may lack; instead of
            ``staleness`` and ``clock``, which follow from it and the number of workers (``sum``, and the largest
            staleness that keeps it). Where one is lost, updates that died with it are missed by nobody.
        policy: Which rows leave a full cache, of those that no known batch needs: ``lru``, ``lfu`` or ``light_lfu``.
        clock: What a push makes of a row's clock on its server: ``max``, as in the paper, or ``sum``.
        prefetch: Look at the next batch one step early, and let its rows travel while the present one computes. Rows
            in shared memory do not travel.
        lookahead_batches: Look at up to so many batches ahead, and keep the rows that they need soonest; 0 leaves all
            to the policy. Not done for rows in shared memory, of which a missing one costs next to nothing.
        lookahead_bytes: But at no more than the next one once those that wait take so much memory, with some 50 bytes
            for each of their ids.
        normalization: What stale updates of rows count: ``identity``, in full. Rows that are pushed as gradients
            (:class:`~lightning_recsys.strategies.VersionedRows`) have others.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.rows.served.ServedRows`.

    Raises:
        ValueError: an argument is out of range, both cache sizes are given, ``dynamic_rows`` without ``cache_rows``, or
            settings of a cache with ``hybrid``.
        TypeError: an argument is of another type.

    Communication: per step, one message to each server with what the batch lacks, the clocks of what it has, and the
    updates of rows that left the cache; a second message for rows that are too stale. Workers that go in step without
    staleness, or with ``hybrid``, send gradients of rows that several of them have to one of these, which makes the
    row's update, and meet when all updates have arrived.
    Reference: Miao et al. 2022, "HET: scaling out huge embedding model training via cache-enabled distributed
    framework".
    Differs from the paper: updates that are left in a cache at the end are pushed, not dropped; rows train by Adagrad
    and rowwise Adagrad as well, with ``hybrid`` by any rule; with ``prefetch`` clocks are compared one step early; in
    step, gradients of a row meet at a worker and not at the server.
    """

    def __init__(
        self,
        *,
        algorithm: CachedAlgorithm = "het",
        cache_rows: int | None = None,
        cache_fraction: float | None = None,
        staleness: int | float | str | None = AUTO,
        max_missed_updates: int | None = None,
        policy: CachePolicy = "light_lfu",
        clock: ClockName = "max",
        prefetch: bool = True,
        lookahead_batches: int = DEFAULT_LOOKAHEAD_BATCHES,
        lookahead_bytes: int = DEFAULT_LOOKAHEAD_BYTES,
        normalization: StalenessRule = "identity",
        **kwargs: Any,
    ) -> None:
        if normalization != "identity":
            raise ValueError(
                "strategy.rows.normalization: CachedRows push finished changes, which no server can let count for less;"
                f" only identity goes with them, got {normalization}. Choose rows=plain."
            )
        require_one_of("algorithm", algorithm, get_args(CachedAlgorithm))
        super().__init__(prefetch=prefetch, **kwargs)
        require_one_of("policy", policy, get_args(CachePolicy))
        require_whole("cache_rows", cache_rows, optional=True)
        require_number("cache_fraction", cache_fraction, optional=True)
        if cache_rows is not None and cache_fraction is not None:
            raise ValueError(
                f"give strategy.cache_rows or strategy.cache_fraction, not both; got {cache_rows} and {cache_fraction}."
            )
        if cache_fraction is not None and not 0 < cache_fraction <= 1:
            raise ValueError(
                f"strategy.cache_fraction must be in (0, 1], got {cache_fraction}. strategy.algorithm=hybrid has no"
                " cache."
            )
        if algorithm == "het" and self.dynamic_rows is not None and cache_rows is None:
            raise ValueError(
                "strategy.dynamic_rows needs strategy.cache_rows, the rows that a worker keeps of each collection: a"
                f" share of tables that may have any number of ids is no size; got cache_fraction={cache_fraction}."
            )
        self.algorithm: CachedAlgorithm = algorithm
        self.cache_rows = cache_rows
        self.cache_fraction = (cache_fraction or DEFAULT_FRACTION) if cache_rows is None else None
        require_whole("max_missed_updates", max_missed_updates, optional=True)
        if max_missed_updates is not None and (staleness != AUTO or clock == "sum"):
            raise ValueError(
                "give strategy.max_missed_updates, or strategy.staleness and strategy.clock, which follow from it; got"
                f" {max_missed_updates}, {staleness} and {clock}."
            )
        self.max_missed_updates = max_missed_updates
        self._follows_length = staleness == AUTO and max_missed_updates is None
        self._staleness = LONG_RUN_STALENESS if staleness == AUTO else _number(staleness)
        ClockRule(staleness=self._staleness, clock=clock)  # which refuses what it cannot be
        self.policy: CachePolicy = policy
        self.clock: ClockName = clock if max_missed_updates is None else "sum"
        require_whole("lookahead_batches", lookahead_batches, at_least=0, hint="0 looks at none.")
        require_whole("lookahead_bytes", lookahead_bytes)
        if algorithm == "hybrid":
            of_the_cache = {
                "cache_rows": cache_rows,
                "cache_fraction": cache_fraction,
                "staleness": staleness,
                "max_missed_updates": max_missed_updates,
                "policy": policy,
                "clock": clock,
                "lookahead_batches": lookahead_batches,
                "lookahead_bytes": lookahead_bytes,
            }
            refuse_meaningless(CachedRows, of_the_cache, "with strategy.algorithm=hybrid, which has no cache")
        self.lookahead_batches = lookahead_batches
        self.lookahead_bytes = lookahead_bytes

    def _reset(self) -> None:
        super()._reset()
        self._indexes: dict[object, SharedIndex] = {}  # of caches of the same ids, by what says that they are
        self._num_steps = 0.0  # of a worker in the whole run, as it begins; infinity or less than 1: nobody knows

    def attach(self, strategy: RecsysStrategy) -> None:
        """Belong to a strategy.

        Raises:
            ValueError: ``hybrid`` with workers that run free, which could have plain rows for less.
        """
        if self.algorithm == "hybrid" and strategy.asynchronous:
            raise ValueError(
                "strategy.algorithm=hybrid has no cache, and its workers meet at each step; those of"
                f" {type(strategy).__name__} run free. Use rows=plain, which are read and pushed at each step as well."
            )
        super().attach(strategy)

    @property
    def staleness(self) -> int | None:
        """By how many updates a copy may be ahead or behind; ``None`` without bound.

        Raises:
            ValueError: ``max_missed_updates`` is too small for so many workers.
        """
        if self.max_missed_updates is None:
            return self._staleness
        workers = self.strategy.world_size
        return staleness_for(self.max_missed_updates, num_workers=workers, prefetch=self._looks_ahead and self.prefetch)

    @property
    def _looks_ahead(self) -> bool:
        """Whether a worker knows its batches before they come."""
        return not self.strategy.asynchronous

    @property
    def in_step(self) -> bool:
        """Whether workers meet at the end of each step, so that all see every update of it in the next."""
        exact = self.algorithm == "hybrid" or (self.algorithm == "het" and self.staleness == 0)
        return exact and self.strategy.world_size > 1 and not self.strategy.asynchronous

    @property
    def maps_stores(self) -> bool:
        """Not where workers go in step: their rows and updates travel in messages, for which the servers are there."""
        return not self.in_step

    # --- Rows --------------------------------------------------------------------------------------------------------

    def make_backend(
        self,
        name: str,
        collection: EmbeddingBagCollection,
        *,
        servers: Sequence[Stores],
        plan: PlacementPlan,
        seed: int,
    ) -> CachedBackend:
        """A cache in front of the stores, empty but for the batch at hand where the algorithm has none."""
        caches = self.algorithm == "het"
        num_rows = collection.layout.num_rows
        cache_rows = self._rows_kept(num_rows) if caches else 0
        # Collections of the same features and tables, but for their width, have the same ids in each batch.
        ids = tuple((table.feature_names, table.num_embeddings) for table in collection.layout.tables)
        backend = CachedBackend.create(
            name,
            collection.layout,
            collection.optimizer,
            servers=servers,
            plan=plan,
            seed=seed,
            dynamic=self.dynamic_rows_of(collection),
            cache_rows=cache_rows,
            staleness=self.staleness if caches else 0,
            policy=self.policy,
            clock=self.clock,
            device=self.strategy.root_device,
            shared=self._indexes.get(ids),
            in_step=self.in_step,
            any_rule=self.algorithm == "hybrid",
        )
        if backend.shared_index is not None:
            self._indexes[ids] = backend.shared_index
        return backend

    def check_rule(self, rule: RowOptimizer) -> None:
        """Refuse what the base class refuses, and rules whose state is no sum.

        Raises:
            TypeError: names the rule, and those that can be used.
        """
        super().check_rule(rule)
        if self.algorithm != "hybrid":
            check_additive(rule)

    def _rows_kept(self, num_rows: int) -> int:
        if self.cache_rows is not None:
            return min(self.cache_rows, num_rows)
        assert self.cache_fraction is not None
        return math.ceil(self.cache_fraction * num_rows)

    @property
    def _prefetches(self) -> bool:
        return self.prefetch and self.algorithm == "het" and self._looks_ahead and not self.in_step

    @property
    def peeks(self) -> bool:  # noqa: D102 - inherited
        return self._prefetches or (self.lookahead_batches > 0 and self.algorithm == "het" and self._looks_ahead)

    # --- Training ----------------------------------------------------------------------------------------------------

    def foresee(self) -> None:
        """Learn how many steps a worker makes, which nobody knows any more once workers lease their batches."""
        if self.algorithm == "het" and self.strategy.world_size > 1:
            self._num_steps = self.strategy.task.trainer.estimated_stepping_batches

    def begin(self) -> None:
        """Begin to look ahead, and bound the copies by what is good in a run of so many steps."""
        super().begin()
        trainer = self.strategy.task.trainer
        if self.algorithm == "het" and self.strategy.world_size > 1:
            steps = self._num_steps
            if self._follows_length:
                self._follow_length(steps)
            elif self.max_missed_updates is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
                self._warn_of_short_run(steps - trainer.global_step)

    def look_ahead(self, trainer: pl.Trainer, collections: Sequence[EmbeddingBagCollection]) -> LookAhead:
        """The object that tells collections of their coming batches, and of those behind the next."""
        window = {"num_batches": self.lookahead_batches, "num_bytes": self.lookahead_bytes}
        return LookAhead(trainer, collections, prefetch=self._prefetches, **window)

    def _follow_length(self, steps: float) -> None:
        """Bound the copies by what is good in a run of so many steps a worker; no batch has been looked up yet."""
        self._staleness = _staleness_in(steps, num_workers=self.strategy.world_size)
        for collection in self.collections.values():
            if isinstance(backend := collection.embedding_bags, CachedBackend):
                backend.staleness = self.staleness
        if self.strategy.is_global_zero and self.staleness != LONG_RUN_STALENESS:
            log.info(
                "strategy.staleness=auto is %d: each of %d workers has %d steps in this run. With a smaller value"
                " the copies of a row meet more often, and a short run needs that. From %d steps on it is %d.",
                self.staleness,
                self.strategy.world_size,
                steps,
                LONG_RUN_STALENESS * STEPS_BETWEEN_MEETINGS * self.strategy.world_size,
                LONG_RUN_STALENESS,
            )

    def _warn_of_short_run(self, steps: float) -> None:
        if self.strategy.is_global_zero and self.staleness and 0 < steps <= self.staleness:
            log.warning(
                "strategy.staleness=%d, and this run has %d steps: no copy of a row gets so many updates, and copies in"
                " the workers' caches do not meet before validation or the end, where the sum of what they have learned"
                " may overshoot. Choose strategy.staleness well below the number of steps, or auto; 0 is exact.",
                self.staleness,
                steps,
            )

    def step(self, *, waited: bool) -> None:
        """Make one update of each row with all workers' gradients, where workers go in step.

        When it returns, all updates of all workers are in the stores. A worker that ends in the midst of it leaves rows
        some of which have taken the step; the others find that it is gone.

        Communication: that of :func:`sum_at_owners`, a push to each server, and a barrier; where nobody has gradients,
        a few numbers.
        """
        if self.tables is None or not self.in_step:
            return
        collections = [x for x in self.tables.collections.values() if (x.attached_to is not None) == waited]
        backends = [cast(CachedBackend, x.embedding_bags) for x in collections]
        if not backends:
            return
        parts = [backend.take_gradients() for backend in backends]
        group = dist.group.WORLD
        assert group is not None
        owned = sum_at_owners(parts, group, self.strategy.root_device)
        backends[0].count_gradient_bytes(owned.num_bytes)
        trained = [(x, rows) for x, rows in zip(backends, owned.rows, strict=True) if rows is not None]
        for backend, rows in trained:
            backend.finish_step(rows, counts=self.strategy.is_global_zero)
        for backend, _ in trained:
            backend.flush()
        if trained:
            self.strategy.barrier("every update of this step is in the stores")

    def telemetry(self) -> dict[str, Any]:
        """Cache and clocks of this process so far; see ``docs/settings/het.md`` for each name."""
        backends = [x.embedding_bags for x in self.collections.values()]
        cache = _merged([x.telemetry() for x in backends if isinstance(x, CachedBackend)])
        if not cache:
            return {}
        cache["cache/eviction_rate"] = cache["cache/evictions"] / max(cache["cache/reads"], 1)
        return _lag_shares(cache.pop("cache/clock_lag")) | cache


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of all collections: shares averaged by what they are shares of, others added up, or the largest."""
    reads = sum(part["cache/reads"] for part in parts)
    merged: dict[str, Any] = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        if isinstance(values[0], Tensor):
            merged[name] = torch.cat(values)
        elif name.endswith("_rate"):
            merged[name] = sum(part[name] * part["cache/reads"] for part in parts) / max(reads, 1)
        else:
            merged[name] = max(values) if name.endswith("/max") else sum(values)
    return merged


def _lag_shares(lags: Tensor) -> dict[str, Any]:
    """Clock lags, if there are any, and their histogram.

    >>> shares = _lag_shares(torch.tensor([0.0, 1.0, 12.0, 9.0]))
    >>> shares["cache/clock_lag/share_0"], shares["cache/clock_lag/share_1_to_9"]
    (0.25, 0.5)
    """
    if not lags.numel():
        return {}
    bins = torch.bucketize(lags, torch.tensor([0.0, 9.0, 99.0])).bincount(minlength=len(_LAGS)) / lags.numel()
    return {"cache/clock_lag": lags} | {
        f"cache/clock_lag/share_{name}": share for name, share in zip(_LAGS, bins.tolist(), strict=True)
    }


def _staleness_in(steps: float, *, num_workers: int) -> int:
    """The value of ``staleness="auto"`` in a run of so many steps a worker; 0, less or infinity where nobody knows.

    >>> [_staleness_in(steps, num_workers=2) for steps in (40, 5, 640, 1000, 10**6, -1, float("inf"))]
    [4, 1, 64, 100, 100, 100, 100]
    >>> [_staleness_in(steps, num_workers=8) for steps in (40, 160, 3999, 4000)]
    [1, 4, 99, 100]
    """
    if not 0 < steps < math.inf:
        return LONG_RUN_STALENESS
    return min(max(1, int(steps) // (STEPS_BETWEEN_MEETINGS * num_workers)), LONG_RUN_STALENESS)


def _number(staleness: int | float | str | None) -> int | None:
    if staleness is None or staleness in (math.inf, "inf"):
        return None
    if not isinstance(staleness, int) or isinstance(staleness, bool):
        raise ValueError(
            "strategy.staleness must be auto, a whole number of updates, or null or inf for no bound, got"
            f" {staleness!r}."
        )
    return staleness
