"""A collection's rows in stores, with copies of the busy ones in the worker: HET's cache at work."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of the batch, K rows.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.embeddings import SparseFeatures, Ticket
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.accumulating import is_additive
from lightning_recsys.placement import TablePart
from lightning_recsys.row_cache.copies import RowCache
from lightning_recsys.row_cache.held import CachedTicket, HeldRows, RowsByMessage
from lightning_recsys.row_cache.index import BatchPlan, CachePolicy, Integers
from lightning_recsys.row_cache.messages import RowMessages, RowPlaces
from lightning_recsys.row_cache.owners import RowGradients, StepGradients, join_gradients
from lightning_recsys.row_cache.shared_index import SharedIndex
from lightning_recsys.row_cache.transfers import RowsInPlace, mapped_stores
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, EmbeddingStore
from lightning_recsys.sync import ClockName, ClockRule

_FLUSH_BYTES = 16 << 20  # of updates in one message, when all of them go


class CachedBackend(StoreBackend):
    r"""Rows in stores, and a bounded number of them also here, where they are looked up and trained (HET).

    A copy that was fetched at the global clock :math:`c_s` and updated here up to :math:`c_c` is used as long as

    .. math:: c_c \le c_s + s \qquad\text{and}\qquad c_g \le c_c + s

    where only the store knows its clock :math:`c_g`. Otherwise its updates are pushed and the row is fetched again.
    Updates leave with the rows' eviction, with such a refresh, or with :meth:`flush`; each is applied exactly once.

    One message a step and store carries, in this order, the updates that rows left behind, requests for the rows that
    the batch lacks, and the clocks of the copies that it would use. A second one follows only where a copy turns out
    to be too old. Where the next batch is announced (:meth:`prefetch`), its message travels while this one computes;
    a clock check is then older by as much, and the second bound holds as of that moment. Batches further off may be
    announced as well (:meth:`announce`): the rows that they need soonest stay.

    ``cache_rows=0`` is the same without copies: the rows of each batch are fetched, trained, pushed and dropped.

    With ``in_step`` the workers make one update of each row a step, with the sum of their gradients: gradients wait
    (:meth:`take_gradients`) until they were summed at the rows' owners
    (:func:`~lightning_recsys.row_cache.owners.sum_at_owners`), whose copies alone are trained
    (:meth:`finish_step`), stay current, and are pushed with the next :meth:`flush`. Behind that all workers wait for
    each other. Between two steps no copy owes anything.

    Args:
        layout: The collection's tables.
        optimizer: The update rule, one whose state is a sum (RowSGD, RowAdagrad, RowWiseAdagrad), or any with
            ``any_rule``.
        stores: The stores, each with the parts of tables that it holds; see :class:`StoreBackend`.
        cache_rows: Rows that may stay from one step to the next.
        staleness: ``s``, or ``None`` for no bound: then nothing is ever checked or refreshed.
        policy: Which rows go first when there are too many (:class:`CacheIndex`).
        clock: How pushes move the stores' clocks (:class:`ClockRule`).
        device: The device on which the copies live.
        shared: For caches of collections whose batches have the same ids, with this size and policy. Used where rows
            are in this machine's memory.
        in_step: Workers train in step. Rows then come in messages even where they are in this machine's memory.
        any_rule: No row has two workers' updates under way at once, as in step, or where there is one worker and
            nothing stays here: the rule may have any state.

    Raises:
        ValueError: as :class:`StoreBackend`; or ``cache_rows`` or ``staleness`` is negative.
        TypeError: the rule's state is no sum.

    Communication: per step, the distinct rows that were missing or too old, each with state, number and clock; as much
    outwards for each row that leaves with updates; 8 bytes and a bit for each copy that is checked. Where stores forget
    rows, an update travels with the copy that it was made to, and sixteen times in ``expire_after`` batches the clocks
    of all copies go out.
    """

    def __init__(
        self,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        stores: Sequence[tuple[EmbeddingStore, Sequence[TablePart]]],
        cache_rows: int,
        staleness: int | None,
        policy: CachePolicy = "light_lfu",
        clock: ClockName = "max",
        device: torch.device | str | None = None,
        shared: SharedIndex | None = None,
        in_step: bool = False,
        any_rule: bool = False,
    ) -> None:
        super().__init__(layout, optimizer, stores=stores)
        self.cache_rows = cache_rows
        self.policy: CachePolicy = policy
        self._any_rule = any_rule
        self._passing = self._make_copies(0, device)  # rows of evaluation, which go behind each lookup
        places, rule = RowPlaces(layout, [parts for _, parts in stores]), ClockRule(staleness=staleness, clock=clock)
        # Messages are there in any case: they bring rows of evaluation that are to have this worker's own updates.
        self._messages = RowMessages(self.stores, places, rule, self.row_shapes)
        self._gradients = StepGradients() if in_step else None  # of batches that wait for the other workers
        self._updates: int | None = None  # that the tables have seen, where the rule asks; None: to be asked for
        self._held = self._hold(shared)

    def _make_copies(self, limit: int, device: torch.device | str | None, **options: Any) -> RowCache:
        features = [name for table in self.layout.tables for name in table.feature_names]
        dim, any_rule = self.layout.embedding_dim, self._any_rule
        return RowCache(limit, dim, self.optimizer, device=device, any_rule=any_rule, features=features, **options)

    def _hold(self, shared: SharedIndex | None) -> HeldRows:
        dynamic = any(isinstance(store, DynamicEmbeddingStore) for store in self.stores)
        options: dict[str, Any] = {"policy": self.policy, "num_keys": None if dynamic else self.layout.num_rows}
        device, parts = self._passing.rows.device, (self._messages, self._gradients)
        mapped = mapped_stores(self.stores, device)
        if not mapped or self._gradients is not None or not is_additive(self.optimizer):
            self._shared = None
            return RowsByMessage(self._make_copies(self.cache_rows, device, **options), *parts)
        self._shared = shared or SharedIndex(self.cache_rows, **options)
        cache = self._make_copies(self.cache_rows, device, index=self._shared.index, **options)
        return RowsInPlace(cache, *parts, stores=mapped, shared=self._shared)

    @property
    def staleness(self) -> int | None:
        """``s``, or ``None`` for no bound; it can be set between two steps, but not to 0 or from it."""
        return self._messages.rule.staleness

    @staleness.setter
    def staleness(self, staleness: int | None) -> None:
        self._messages.rule = replace(self._messages.rule, staleness=staleness)

    @property
    def shared_index(self) -> SharedIndex | None:
        """The index that further caches may take as ``shared``; ``None`` where rows come in messages."""
        return self._shared

    # --- A step ------------------------------------------------------------------------------------------------------

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, CachedTicket]:  # noqa: D102 - inherited
        if self._gradients:
            raise RuntimeError(
                "gradients of an earlier step still wait for those of the other workers (strategy=het in step: "
                "algorithm=hybrid or staleness=0), which meet when Lightning steps the optimizer. With manual "
                "optimization call self.manual_backward(loss), and step the optimizer that self.optimizers() returns."
            )
        batch = self._held.lookup(sparse)
        return self._held.cache.pool(batch.plan, sparse), batch

    def prefetch(self, sparse: SparseFeatures) -> None:
        """Send the message of the batch that is looked up next, after the present one's lookup.

        Rows that both batches have are trained before their answer is taken; the update is then made to what it brings.
        Where each step of a worker must see the last one of all others (``staleness=0`` with a barrier between steps),
        this would read too early.
        """
        self._held.prefetch(sparse.to("cpu"))

    def announce(self, sparse: SparseFeatures, *, ahead: int) -> None:  # noqa: D102 - inherited
        self._held.announce(sparse.to("cpu"), ahead=ahead)

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:  # noqa: D102
        batches = self._held.redeem(tickets)
        sums = self._sum_by_row(batches, grad_BFD)
        if self._gradients is not None:
            self._gradients.add(sums, lr=lr)
            return
        plan, sums_UD = (
            next(sums) if len(batches) == 1 else join_gradients([(plan, part.clone()) for plan, part in sums])
        )
        self._held.may_owe = True
        self._held.cache.update(plan.slots_U, sums_UD, lr=lr, step=self._count_update())
        self._messages.count_step()
        self._held.evict()
        if not self.cache_rows:  # nothing else is sent before the next lookup, which need not wait behind this
            self._messages.send()

    def take_gradients(self) -> RowGradients | None:
        """In step: this worker's gradients since the last :meth:`finish_step`, which follows; ``None`` without any.

        All workers call this behind the last step's updates, and go on together.
        """
        if not is_additive(self.optimizer) and self._updates is None:
            self._updates = self.step
        return self._gradients.joined() if self._gradients else None

    def finish_step(self, owned: Integers, *, counts: bool) -> None:
        """In step: train the rows that this worker owns; the copies of the others become outdated.

        Args:
            owned: Positions of the former in the keys of :meth:`take_gradients`, whose sums are those of all workers.
            counts: This worker lets the stores count the update, of all that make it.
        """
        step = self._count_update()
        if self._gradients:
            self._held.may_owe = True
            self._gradients.train(self._held.cache, owned, step=step)
        if counts:
            self._messages.count_step()
        self._held.evict()

    def count_gradient_bytes(self, num_bytes: int) -> None:
        """Note what gradients took that went to other workers, and came from them."""
        self._messages.counts["gradients"] += num_bytes

    def _count_update(self) -> int:
        """The number of the update at hand, for a rule that asks for it, else 0."""
        if is_additive(self.optimizer):
            return 0
        self._updates = (self.step if self._updates is None else self._updates) + 1
        return self._updates

    def lookup_frozen(self, sparse: SparseFeatures) -> Tensor:
        """Look up like :meth:`lookup`, in the same copies by the same rule, rows that are not trained by it.

        Rows that are frozen are so cached like any other. Nothing is pushed for it but what the rule asks for.
        """
        if not self.cache_rows:  # nothing stays
            return self.lookup_fresh(sparse)
        with torch.inference_mode(False):  # memory that is made here is written to again, perhaps outside of that mode
            return self._held.cache.pool(self._held.lookup_frozen(sparse).plan, sparse)

    def lookup_fresh(self, sparse: SparseFeatures) -> Tensor:
        """Look up past the cache: rows as the stores have them, and updates that only this worker has.

        Nothing is pushed, and no copy comes or goes.
        """
        if self._shared is not None and not self._held.may_owe:  # rows of training move without messages
            return super().lookup_frozen(sparse)
        with torch.inference_mode(False):
            plan = self._passing.plan(self._messages.places.keys_of(sparse.to("cpu")))
            for answer in self._messages.send(plan.keys_U):
                found = answer.wait()
                self._passing.install(plan.slots_U[answer.fetched], found.values, found.clocks.numpy())
            self._held.cache.subtract_unsent(plan.keys_U, self._passing.rows, plan.slots_U)
            pooled_BFD = self._passing.pool(plan, sparse)
            self._passing.index.evict(spare_from=plan.number + 1)  # it owes nothing
            return pooled_BFD

    def flush(self) -> None:
        """Push every update that is still here, and return when all are in the stores. The copies stay."""
        row_bytes = 4 * sum(torch.Size(shape).numel() for shape in self.row_shapes.values())
        pushed = self._held.flush(block=max(_FLUSH_BYTES // row_bytes, 1))
        if (
            self._gradients is not None and self.dynamic is None
        ):  # nobody else has updates of these, and all of them are admitted
            self._held.cache.keep(pushed)
        super().flush()

    def invalidate(self) -> None:
        """Flush, then drop all copies: the next lookup fetches. After somebody has written to the stores."""
        self.flush()
        self._updates = None  # who writes rows may set the steps as well
        self._held.clear()

    def _sum_by_row(self, batches: Sequence[CachedTicket], grad_BFD: Tensor) -> Iterator[tuple[BatchPlan, Tensor]]:
        """For each batch the gradients of its distinct rows, which are valid until the next ones are taken."""
        cache = self._held.cache
        device = cache.rows.device
        grads = torch.split(grad_BFD.to(device), [batch.sparse.batch_size for batch in batches])
        for batch, grad in zip(batches, grads, strict=True):
            there = batch.sparse.to(device)
            offsets = None if there.is_single_hot else there.bag_offsets()
            yield batch.plan, cache.sum_gradients(batch.plan, offsets, there.weights, grad)

    # --- What others see ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates that the tables have seen, from all workers; what this one has not sent yet included."""
        return self._messages.step

    @step.setter
    def step(self, value: int) -> None:
        self.flush()
        self._updates = None
        for store in self.stores:
            store.step = value

    def read_rows(self, table: str, name: str, first_row: int, num_rows: int) -> Tensor:  # noqa: D102 - inherited
        self.flush()
        return super().read_rows(table, name, first_row, num_rows)

    def write_rows(self, table: str, name: str, first_row: int, values: Tensor) -> None:
        """The reverse of :meth:`read_rows`; drops all copies here. Those of other workers are theirs to drop."""
        self.invalidate()
        super().write_rows(table, name, first_row, values)

    def _save_rows(self, destination: dict[str, Any], prefix: str) -> None:
        self.flush()
        super()._save_rows(destination, prefix)

    def telemetry(self) -> dict[str, Any]:
        """Counts of what the cache has done so far.

        ``cache/reads`` counts the distinct rows of all batches. Shares of them are ``cache/hit_rate``, ``miss_rate``,
        ``stale_rate`` (found too old by a store) and ``refresh_rate`` (too far ahead of what was fetched).
        ``cache/evictions`` and ``comm/messages`` are numbers, ``comm/{rows,clocks,gradients}_bytes`` bytes both ways,
        ``comm/ahead_bytes`` those that were asked for ahead of their lookup and travelled while a batch computed, and
        ``cache/clock_lag`` is ``c_c - c_s`` of each row of the last batch, a float tensor. Where clocks count every
        update, ``cache/missed_updates/max`` is the largest number of others' updates, of those that the stores had when
        clocks were compared, that a copy lacked and was fit for use: exactly in place, at most by message, where it is
        known once the copy is fetched anew.
        """
        counts = self._messages.total()
        reads = max(counts["reads"], 1)
        return {
            "cache/reads": counts["reads"],
            "cache/hit_rate": (counts["reads"] - counts["misses"]) / reads,
            "cache/miss_rate": counts["misses"] / reads,
            "cache/stale_rate": counts["stale"] / reads,
            "cache/refresh_rate": counts["refreshes"] / reads,
            "cache/evictions": counts["evictions"],
            "cache/clock_lag": torch.from_numpy(self._held.lags_U.astype(np.float32)),
            "comm/messages": counts["messages"],
            **{f"comm/{kind}_bytes": counts[kind] for kind in ("rows", "clocks", "gradients", "ahead")},
            **({"cache/missed_updates/max": counts["most_missed"]} if self._messages.rule.by_sum else {}),
        }

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts with an empty cache: the updates that are here must not be pushed twice.
        self.invalidate()
        return super().__getstate__() | {"_held": None, "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._held = self._hold(None)

    def extra_repr(self) -> str:
        """Names the tables, the rule, the stores and the cache."""
        return f"{super().extra_repr()}; cache_rows={self.cache_rows}, staleness={self.staleness}"
