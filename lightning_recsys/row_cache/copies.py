"""A worker's copies of rows: trained in place, with what they have not sent yet."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: B batch, F features, N ids, U distinct rows, M rows fetched, P rows with updates, C slots, D dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch_row
from lightning_recsys.compiled.vectors import add_floats, vector_width
from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import Kernel, TableLayout, choose_kernel
from lightning_recsys.optim import RowOptimizer, RowSGD
from lightning_recsys.optim.accumulating import (
    CLOCK_COLUMNS,
    CURRENT,
    HELD,
    START,
    UNSENT,
    apply_and_accumulate,
    apply_and_owe,
    check_additive,
    is_additive,
)
from lightning_recsys.row_cache.index import BatchPlan, CacheIndex, CachePolicy, Integers
from lightning_recsys.sync.clocks import ClockRule, advance, is_too_far

Clocks = NDArray[np.int32]

_NO_WEIGHTS = np.empty(0, dtype=np.float32)
_NO_OFFSETS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class RowUpdates:
    """The updates that rows owe their server; every row owes something.

    Attributes:
        keys: int64 ``[P]``.
        current: The rows' own clocks ``c_c``, int32 ``[P]``.
        unsent: Updates that each row has accumulated here, int32 ``[P]``, at least 1.
        values: By name, float32 ``[P, ...]`` on the cache's device: ``weight`` is to be subtracted from the server's
            rows, every state to be added to the server's.
        copies: The rows themselves and their state, with these updates made, as ``values`` in shape; for a server that
            may have forgotten them. Empty unless asked for.
    """

    keys: Integers
    current: Clocks
    unsent: Clocks
    values: dict[str, Tensor]
    copies: dict[str, Tensor] = field(default_factory=dict)


class RowCache:
    """A bounded set of rows with optimizer state and clocks, trained here and sent later.

    The slots may exceed ``limit`` for the rows of the batch at hand and of a batch planned ahead; the index brings them
    back to it after the update (:meth:`CacheIndex.evict`), and what dropped rows owe is here until the next plan, to be
    taken. All steps of a batch work on arrays; nothing is done key by key in Python.

    Args:
        limit: Rows that outlast a step; 0 keeps none.
        embedding_dim: Width ``D`` of a row.
        optimizer: The update rule: one whose state is a sum (RowSGD, RowAdagrad, RowWiseAdagrad), or any with
            ``any_rule``.
        policy: Which rows go first when there are too many; see :class:`CacheIndex`.
        device: Where rows, state and updates are; index and clocks are on the CPU.
        num_keys: A number above all keys; see :class:`CacheIndex`.
        index: One that other caches use as well, instead of an own one of this limit and policy. It is for its owner
            to plan and to evict then, and for who uses the cache to keep the column ``HELD`` of its clocks.
        any_rule: Nobody else updates a row between its fetch and the push of what was made of it, so any rule will do.
        features: Names of the features that are pooled from the slots.

    Attributes:
        limit: Rows that outlast a step.
        index: Which rows are in which slots, and which go first.
        rows: float32 ``[C, D]``, contiguous; a new tensor whenever the slots grow, so read it after :meth:`plan`.
        row_state: The rule's state by name, ``[C]`` or ``[C, D]``.
        owed: What each slot has not sent yet: ``weight`` and every state, ``[C, D]`` or ``[C]``.
        clocks: Each slot's, int32 ``[C, 4]``, with the columns of :mod:`lightning_recsys.optim.accumulating`.

    Raises:
        ValueError: ``limit`` is negative, or the policy is unknown.
        TypeError: a rule whose updates of several workers cannot be added.

    >>> from lightning_recsys.optim import RowSGD
    >>> cache = RowCache(1, 2, RowSGD())
    >>> plan = cache.plan(np.array([9, 5, 9]))
    >>> cache.install(plan.slots_U, {"weight": torch.zeros(2, 2)}, np.array([3, 0], dtype=np.int32))
    >>> cache.update(plan.slots_U, torch.ones(2, 2), lr=0.5)
    >>> cache.rows[plan.slots_N].tolist()
    [[-0.5, -0.5], [-0.5, -0.5], [-0.5, -0.5]]
    >>> updates = cache.take(cache.index.evict(spare_from=plan.number + 1))
    >>> updates.keys.tolist(), updates.current.tolist(), updates.values["weight"].tolist()
    ([9], [4], [[0.5, 0.5]])
    """

    def __init__(
        self,
        limit: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        *,
        policy: CachePolicy = "light_lfu",
        device: torch.device | str | None = None,
        num_keys: int | None = None,
        index: CacheIndex | None = None,
        any_rule: bool = False,
        features: Sequence[str] = (),
    ) -> None:
        if not any_rule:
            check_additive(optimizer)
        self.limit, self.optimizer = limit, optimizer
        self.index = CacheIndex(limit, policy=policy, num_keys=num_keys) if index is None else index
        self._owns_index = index is None
        self.rows = torch.empty(0, embedding_dim, device=device)
        self.row_state = optimizer.initial_state(self.rows)
        self.owed = {name: torch.empty_like(x) for name, x in {"weight": self.rows, **self.row_state}.items()}
        self.clocks: Clocks = np.zeros((0, CLOCK_COLUMNS), dtype=np.int32)
        self._sums = self.rows  # room for the gradients of a batch's rows, kept from batch to batch
        self._features = tuple(features)
        self._kernel: tuple[int, Kernel] | None = None  # for so many slots; made when a batch is first pooled from them
        self._marks = np.zeros(0, dtype=np.bool_)  # of slots, all False: one so large takes too long to make each step

    @property
    def start(self) -> Clocks:
        """``c_s`` of each slot, int32 ``[C]``."""
        return self.clocks[:, START]

    @property
    def current(self) -> Clocks:
        """``c_c`` of each slot, int32 ``[C]``."""
        return self.clocks[:, CURRENT]

    @property
    def unsent(self) -> Clocks:
        """Updates of each slot that its server does not have yet, int32 ``[C]``."""
        return self.clocks[:, UNSENT]

    def plan(self, keys_N: Integers) -> BatchPlan:
        """Find a batch's rows; new ones get slots whose content :meth:`install` has to bring before any lookup.

        Args:
            keys_N: int64 ``[N]``, any numbers, repeated as the batch repeats them.
        """
        return self._with_room(self.index.plan(keys_N))

    def plan_announced(self, number: int) -> BatchPlan:
        """Plan like :meth:`plan` for the batch of that announcement; it and those before it are used up."""
        return self._with_room(self.index.plan_announced(number))

    def _with_room(self, plan: BatchPlan) -> BatchPlan:
        self.make_room(self.index.num_slots)
        return plan

    def make_room(self, num_slots: int) -> None:
        """Have so many slots, or more."""
        if num_slots > len(self.clocks):
            self._grow(max(num_slots * 5 // 4, self.limit))

    def _grow(self, num_slots: int) -> None:
        def grown(tensor: Tensor) -> Tensor:
            larger = tensor.new_empty(num_slots, *tensor.shape[1:])
            larger[: tensor.shape[0]] = tensor
            return larger

        self.rows = grown(self.rows)
        self.row_state = {name: grown(tensor) for name, tensor in self.row_state.items()}
        self.owed = {name: grown(tensor) for name, tensor in self.owed.items()}
        self.clocks = np.pad(self.clocks, ((0, num_slots - len(self.clocks)), (0, 0)))

    def install(self, slots_M: Integers, values: dict[str, Tensor], clocks_M: Clocks) -> None:
        """Fetch: put rows as a server sent them into their slots; ``c_s`` becomes the server's clock.

        Updates made here since the fetch was asked for are made again to what it brought, and count in ``c_c``. Those
        from before it must have been taken, and sent ahead of it.

        Args:
            slots_M: Distinct slots, int64 ``[M]``.
            values: ``weight`` and every state, float32 ``[M, ...]``, on any device.
            clocks_M: The server's clocks, int32 ``[M]``.
        """
        where = self._indices(slots_M)
        for name, tensor in {"weight": self.rows, **self.row_state}.items():
            tensor.index_copy_(0, where, values[name].to(tensor.device))
        if set_clocks(slots_M, clocks_M, self.clocks):
            again = self._indices(slots_M[self.unsent[slots_M] > 0])
            for name, tensor in {"weight": self.rows, **self.row_state}.items():
                tensor.index_add_(0, again, self.owed[name].index_select(0, again), alpha=-1 if name == "weight" else 1)

    def sort(self, plan: BatchPlan, staleness: int, training: Integers) -> tuple[Integers, Integers, Integers]:
        """Positions in a plan of the rows to fetch, of the copies to check, and of those to push and fetch again.

        Args:
            plan: The plan of the batch.
            staleness: How far a copy may be ahead of what was fetched, or ``NO_BOUND``.
            training: Slots of copies that get another update before the batch reads them. One that this update takes
                too far is refreshed ahead of it.
        """
        if len(self._marks) < len(self.clocks):
            self._marks = np.zeros(len(self.clocks), dtype=np.bool_)
        positions = np.empty((3, len(plan.slots_U)), dtype=np.int64)
        there = self.clocks, self._marks, staleness
        sizes = sort_copies(plan.slots_U, plan.new_U, training, *there, positions)
        fetch, check, refresh = (row[:size] for row, size in zip(positions, sizes, strict=True))
        return fetch, check, refresh

    def find_outrun(self, plan: BatchPlan, staleness: int) -> tuple[Clocks, NDArray[np.bool_]]:
        """By how much each copy of a batch is ahead of what was fetched, and which of them went too far since then."""
        lags_U, is_outrun_U = np.empty(len(plan.slots_U), dtype=np.int32), np.empty(len(plan.slots_U), dtype=np.bool_)
        find_outrun(plan.slots_U, self.clocks, staleness, lags_U, is_outrun_U)
        return lags_U, is_outrun_U

    def keep(self, slots: Integers) -> None:
        """In place of :meth:`install`: nobody else has changed the rows, so they are what a fetch would bring.

        Updates made here since they were taken still count in ``c_c`` only.
        """
        self.start[slots] = self.current[slots] - self.unsent[slots]

    def sum_gradients(
        self, plan: BatchPlan, offsets: Tensor | None, weights: Tensor | None, grad_BFD: Tensor
    ) -> Tensor:
        """The gradient of each distinct row of a batch, float32 ``[U, D]``; valid until the next call.

        Args:
            plan: The plan of the batch.
            offsets: Where each of the batch's bags begins and the last one ends, int64 ``[F * B + 1]``; ``None`` where
                each holds one id.
            weights: Weight of each id, float32 ``[N]``; ``None`` where all are 1.
            grad_BFD: The gradient of the pooled lookup, ``[B, F, D]``.
        """
        num_rows, dim = plan.slots_U.size, self.rows.shape[1]
        if self._sums.shape[0] < num_rows:
            self._sums = self.rows.new_empty(num_rows * 5 // 4, dim)  # kept: fresh pages would cost more than the sums
        sums_UD = self._sums[:num_rows]
        if self.rows.device.type == "cpu":
            sum_by_position_for(dim)(
                plan.distinct_N,
                _NO_OFFSETS if offsets is None else offsets.numpy(),
                _NO_WEIGHTS if weights is None else weights.numpy(),
                grad_BFD.contiguous().numpy(),
                sums_UD.numpy(),
            )
            return sums_UD
        per_id = grad_BFD.transpose(0, 1).reshape(-1, dim)
        if offsets is not None:
            per_id = per_id.repeat_interleave(offsets.diff(), dim=0)
        if weights is not None:
            per_id = per_id * weights.unsqueeze(1)
        return sums_UD.zero_().index_add_(0, self._indices(plan.distinct_N), per_id)

    def pool(self, plan: BatchPlan, sparse: SparseFeatures) -> Tensor:
        """Sum each bag's rows, which are in the slots of the plan: float32 ``[B, F, D]``, where the batch is."""
        if self._kernel is None or self._kernel[0] != len(self.rows):
            # All slots are one table, which every feature shares. The kernel only looks up: on a GPU that of a rule
            # with state would have room for a state of its own.
            slots = EmbeddingBagConfig("slots", max(len(self.rows), 1), self.rows.shape[1], self._features)
            self._kernel = len(self.rows), choose_kernel("auto", TableLayout((slots,)), RowSGD(), self.rows.device)
        in_slots = sparse.with_values(torch.from_numpy(plan.slots_N))
        return self._kernel[1].lookup(self.rows, in_slots.to(self.rows.device)).to(sparse.device)

    def update(self, slots_U: Integers, grads_UD: Tensor, *, lr: float, step: int = 0) -> None:
        """Train rows in place, accumulate the same update for the server, and tick their clocks once.

        Args:
            slots_U: Distinct slots, int64 ``[U]``.
            grads_UD: Summed gradients of the rows in these slots, float32 ``[U, D]``.
            lr: Step size of this update.
            step: Updates that the table has seen, this one included, for a rule whose state is no sum.
        """
        there = (self.optimizer, slots_U, grads_UD, self.rows, self.row_state, self.owed, self.clocks)
        if is_additive(self.optimizer):
            apply_and_accumulate(*there, lr=lr)
        else:
            apply_and_owe(*there, lr=lr, step=step)

    def outdate(self, slots: Integers) -> None:
        """Somebody else has made an update that these copies lack: their clocks count it, and so are ahead."""
        self.clocks[slots, CURRENT] = ClockRule.after_update(self.clocks[slots, CURRENT])

    def take(self, slots: Integers, *, with_copies: bool = False) -> RowUpdates:
        """Take the updates of those of the given slots that have some; the rows stay, and owe nothing afterwards.

        ``c_s`` stays as well: a row that was updated since it was fetched lacks what others sent meanwhile, so it still
        counts as ahead of where it started.
        """
        slots_P, (current_P, unsent_P) = np.empty_like(slots), np.empty((2, slots.size), dtype=np.int32)
        count = take_unsent(slots, self.clocks, slots_P, current_P, unsent_P)
        slots_P, current_P, unsent_P = slots_P[:count], current_P[:count], unsent_P[:count]
        where = self._indices(slots_P)
        values = {name: tensor.index_select(0, where) for name, tensor in self.owed.items()}
        copies = {}
        if with_copies:
            rows = {"weight": self.rows, **self.row_state}
            copies = {name: tensor.index_select(0, where) for name, tensor in rows.items()}
        return RowUpdates(self.index.keys(slots_P), current_P, unsent_P, values, copies)

    def subtract_unsent(self, keys_K: Integers, rows: Tensor, places_K: Integers) -> None:
        """Let rows as a server has them have the updates of their copies here that it has not; not a use of any.

        Args:
            keys_K: Distinct keys, int64 ``[K]``.
            rows: Rows of this width on the cache's device, changed in place.
            places_K: Which of them have these keys, int64 ``[K]``.
        """
        slots_K = self.index.find(keys_K)
        held = np.flatnonzero(slots_K >= 0)
        owing = held[self.unsent[slots_K[held]] > 0]
        if owing.size:
            updates = self.owed["weight"].index_select(0, self._indices(slots_K[owing]))
            rows.index_add_(0, self._indices(places_K[owing]), updates, alpha=-1)

    def dirty_slots(self) -> Integers:
        """Slots of all rows with unsent updates, in ascending order."""
        return np.flatnonzero(self.unsent[: self.index.num_slots])

    def clear(self) -> None:
        """Drop all rows, unsent updates included; in a shared index only those that are here."""
        if self._owns_index:
            self.index.clear()
        self.clocks[:, UNSENT] = self.clocks[:, HELD] = 0

    def _indices(self, numbers: Integers | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(numbers).to(self.rows.device)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kernel": None}


@cache
def sum_by_position_for(dim: int) -> Callable[..., None]:
    """A loop that sums gradients of width ``dim`` by the position of their rows."""
    width = vector_width(dim)

    @compile_loop
    def sum_by_position(distinct_N, offsets, weights, grad_BFD, sums_UD):  # noqa: ANN001, ANN202
        batch_size, num_features = grad_BFD.shape[0], grad_BFD.shape[1]
        last_id = distinct_N.shape[0] - 1
        sums_UD[:] = np.float32(0)
        for f in range(num_features):
            for b in range(batch_size):
                bag, source = f * batch_size + b, (b * num_features + f) * dim
                first, end = bag, bag + 1
                if offsets.shape[0]:
                    first, end = offsets[bag], offsets[bag + 1]
                for position in range(first, end):
                    prefetch_row(sums_UD, distinct_N[min(position + AHEAD, last_id)])
                    target = distinct_N[position] * dim
                    weight = weights[position] if weights.shape[0] else np.float32(1)
                    for d in range(0, dim, width):
                        add_floats(sums_UD, target + d, grad_BFD, source + d, weight, width)

    return cast(Callable[..., None], sum_by_position)


@compile_loop
def set_clocks(slots, fetched, clocks):  # noqa: ANN001, ANN201
    """Rows were fetched at these clocks; returns whether updates have been made here meanwhile."""
    has_updates = False
    for i in range(slots.shape[0]):
        slot, unsent = slots[i], clocks[slots[i], UNSENT]
        clocks[slot, START], clocks[slot, CURRENT] = fetched[i], advance(fetched[i], unsent)
        has_updates |= unsent > 0
    return has_updates


@compile_loop
def take_unsent(slots, clocks, taken, current, unsent):  # noqa: ANN001, ANN201
    """Let slots owe nothing; fills those that did, and their clocks, and returns how many."""
    count, last = 0, slots.shape[0] - 1
    for i in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(i + AHEAD, last)])
        slot = slots[i]
        if clocks[slot, UNSENT] > 0:
            taken[count], current[count], unsent[count] = slot, clocks[slot, CURRENT], clocks[slot, UNSENT]
            clocks[slot, UNSENT] = 0
            count += 1
    return count


@compile_loop
def sort_copies(slots, is_new, in_training, clocks, marks, staleness, positions):  # noqa: ANN001, ANN201
    """Sort a batch's rows by what has to be asked for them; returns how many are to be fetched, checked, refreshed.

    Args:
        slots: Slots of the batch's rows, int64 ``[U]``.
        is_new: Which of the slots hold nothing yet, bool ``[U]``.
        in_training: Slots of copies that get another update before this batch reads them, int64 ``[W]``.
        clocks: Clocks of all copies, int32 ``[C, 4]``.
        marks: For each slot a place to write to, bool ``[C]``; all ``False``, before and afterwards.
        staleness: How far a copy may be ahead of what was fetched, or ``NO_BOUND``.
        positions: Result, int64 ``[3, U]``: positions of those to fetch, to check and to refresh.
    """
    for slot in in_training:
        marks[slot] = True
    fetched, checked, refreshed, last = 0, 0, 0, slots.shape[0] - 1
    for u in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(u + AHEAD, last)])
        slot = slots[u]
        if is_new[u]:
            positions[0, fetched] = u
            fetched += 1
        elif is_too_far(advance(clocks[slot, CURRENT], marks[slot]), clocks[slot, START], staleness):
            positions[2, refreshed] = u
            refreshed += 1
        else:
            positions[1, checked] = u
            checked += 1
    for slot in in_training:
        marks[slot] = False
    return fetched, checked, refreshed


@compile_loop
def find_outrun(slots, clocks, staleness, lags, is_outrun):  # noqa: ANN001, ANN201
    """Find copies that went too far ahead after they had been asked for.

    A row that is as it was fetched is fit for use, even where its clock has come to its end.

    Args:
        slots: Slots of the batch's rows, int64 ``[U]``.
        clocks: Clocks of all copies, int32 ``[C, 4]``.
        staleness: How far a copy may be ahead of what was fetched, or ``NO_BOUND``.
        lags: Result, int32 ``[U]``: by how much each copy is ahead of what was fetched.
        is_outrun: Result, bool ``[U]``: whether each copy went too far ahead.
    """
    last = slots.shape[0] - 1
    for u in range(slots.shape[0]):
        prefetch_row(clocks, slots[min(u + AHEAD, last)])
        start, current = clocks[slots[u], START], clocks[slots[u], CURRENT]
        lags[u] = current - start
        is_as_fetched = current == start and clocks[slots[u], UNSENT] == 0
        is_outrun[u] = not is_as_fetched and is_too_far(current, start, staleness)
