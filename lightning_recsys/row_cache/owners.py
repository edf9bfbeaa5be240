"""Gradients of workers in step: each row's are summed at one of the workers that have some, which alone trains it.

A rule such as Adagrad is not linear in its gradient: the steps that workers make with their own gradients do not add up
to the step with the mean. So the gradients have to meet before the rule. They could meet in the store, which would keep
what has come until the last worker's is there; or at a worker. They meet at a worker:

* **Bytes.** Of the workers that have gradients of a row, one is its owner for the step; the others send theirs to it,
  and it sends the update to the store. So a worker sends each gradient once, to the store or to another worker: as many
  rows as without owners. On top come the numbers of the rows, 4 bytes each to each other worker, and workers receive
  what stores would have. A store gets each row once a step and not once from each worker: where many workers share a
  store's link this is less than stores that sum would get, and where stores stand beside the workers it is more
  (15 % for two hosts, D = 8 and half of the rows in common:
  :func:`~lightning_recsys.placement.communication.row_exchange`).
* **Crashes.** A store that waits for several workers' gradients has a half of a step that must outlive ``kill -9``,
  and must be forgotten when a worker dies. Here nothing has changed before the owners' pushes, each of which counts
  once as any other. A worker that dies before them leaves the rows of the step before; one that dies among them leaves
  rows of which some have taken the step, as without owners; in both cases the others' collectives raise, and the run
  ends.

Any worker that has gradients of a row also has the row, with its state, from its lookup: the owner need not fetch it.
Who it is follows from the row's key, so that each owns about as many rows as the others.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: W workers, P parts (collections), U a worker's distinct rows, T those of all workers, D embedding dim.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.hash_table import EMPTY, find, make_table, put, value_at
from lightning_recsys.compiled.hashing import mix
from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.row_cache.copies import RowCache
from lightning_recsys.row_cache.index import BatchPlan, Integers


@dataclass(frozen=True)
class RowGradients:
    """A worker's gradients of the distinct rows of a collection.

    Args:
        keys: int64 ``[U]``, no duplicates.
        sums: float32 ``[U, D]``.
    """

    keys: Integers
    sums: Tensor


@dataclass(frozen=True)
class Owned:
    """The rows that a worker is to train.

    Attributes:
        rows: For each part the positions in its keys of the rows that are this worker's, int64; ``None`` where no
            worker had any gradients.
        num_bytes: What this worker has sent to others and received from them.
    """

    rows: list[Integers | None]
    num_bytes: int


def sum_at_owners(parts: Sequence[RowGradients | None], group: dist.ProcessGroup, device: torch.device) -> Owned:
    """Sum each row's gradients at its owner, in place; what others own keeps this worker's share.

    Args:
        parts: One for each collection, the same ones on all workers; ``None`` where this worker has no gradients, as
            of a lookup that it did not make. Workers may differ in that.
        group: The workers; all of them call this.
        device: Where the group's collectives take their tensors.

    Communication: all-gathers of ``P + 1`` numbers and of the keys, padded to the worker with most, of 4 bytes where
    all are below 2^31; then each row's gradient from the workers that do not own it to the one that does.
    """
    rank, world_size = group.rank(), group.size()
    # 1. All tell how many rows they have of each part, so that all take the same way from here on: a part that nobody
    #    looked up is left out, and where no worker has a row all of them are done.
    has_large_keys = any(part is not None and not _fits_int32(part.keys) for part in parts)
    sizes = torch.tensor([*(-1 if part is None else part.keys.size for part in parts), int(has_large_keys)])
    sizes_WP = _all_gather(sizes.to(device), group).numpy()
    none_P = np.all(sizes_WP[:, :-1] < 0, axis=0)
    rows: list[Integers | None] = [None if none else np.empty(0, dtype=np.int64) for none in none_P]
    counts_WP = np.maximum(sizes_WP[:, :-1], 0)
    if not counts_WP.any():
        return Owned(rows, num_bytes=0)
    # 2. All get the keys of all, from which each finds by itself, as the others do, who owns which row.
    key_type = torch.int64 if sizes_WP[:, -1].any() else torch.int32
    keys_W, key_bytes = _gather_keys(parts, counts_WP, key_type, group, device)
    sends: list[list[tuple[int, Integers]]] = [[] for _ in range(world_size)]
    receives: list[list[tuple[int, Integers]]] = [[] for _ in range(world_size)]
    for index, part in enumerate(parts):
        if part is None or not part.keys.size:
            continue
        own_U, elsewhere = divide(index, keys_W, counts_WP, rank)
        rows[index] = np.flatnonzero(own_U == rank)
        for other in range(world_size):
            if other != rank:
                sends[other].append((index, np.flatnonzero(own_U == other)))
                receives[other].append((index, elsewhere[other]))
    # 3. Gradients go to their owners, in the order of the keys of step 2: no number of a row travels with them.
    gradient_bytes = _exchange(parts, sends, receives, group, device)
    return Owned(rows, num_bytes=key_bytes + gradient_bytes)


class StepGradients:
    """The gradients of batches that wait for those of the other workers, until all train in step."""

    def __init__(self) -> None:
        self._waiting: list[tuple[BatchPlan, Tensor]] = []
        self._lr = 0.0  # of the update with them

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    @property
    def plans(self) -> list[int]:
        """Numbers of their plans, whose rows must stay."""
        return [plan.number for plan, _ in self._waiting]

    def add(self, gradients: Iterable[tuple[BatchPlan, Tensor]], *, lr: float) -> None:
        """Keep copies of the gradients of further batches' rows."""
        self._waiting += [(plan, sums_UD.clone()) for plan, sums_UD in gradients]
        self._lr = lr

    def joined(self) -> RowGradients | None:
        """All of them as those of one batch, which are summed at their owners in place; ``None`` without any."""
        if not self._waiting:
            return None
        if len(self._waiting) > 1:
            self._waiting = [join_gradients(self._waiting)]
        ((plan, sums_UD),) = self._waiting
        return RowGradients(plan.keys_U, sums_UD)

    def train(self, cache: RowCache, owned: Integers, *, step: int) -> None:
        """Train the copies of the rows that this worker owns, and have the others count as outdated."""
        ((plan, sums_UD),) = self._waiting
        self._waiting = []
        cache.update(plan.slots_U[owned], sums_UD.index_select(0, _on(sums_UD, owned)), lr=self._lr, step=step)
        cache.outdate(np.delete(plan.slots_U, owned))

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()


def join_gradients(gradients: Sequence[tuple[BatchPlan, Tensor]]) -> tuple[BatchPlan, Tensor]:
    """One plan of several, of which some have rows in common, and the sums of their rows' gradients."""
    plans = [plan for plan, _ in gradients]
    keys_U, first, places = np.unique(
        np.concatenate([plan.keys_U for plan in plans]), return_index=True, return_inverse=True
    )
    slots_U = np.concatenate([plan.slots_U for plan in plans])[first]
    sums = torch.cat([sums_UD for _, sums_UD in gradients])
    joined_UD = sums.new_zeros(len(keys_U), sums.shape[1])
    joined_UD.index_add_(0, _on(sums, places), sums)
    plan = min(plans, key=lambda plan: plan.number)
    return replace(plan, keys_U=keys_U, slots_U=slots_U), joined_UD


def _gather_keys(
    parts: Sequence[RowGradients | None],
    counts_WP: Integers,
    key_type: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[list[Integers], int]:
    """Each worker's keys, the parts behind each other; and the bytes that this took."""
    totals_W = counts_WP.sum(axis=1)
    padded = torch.zeros(int(totals_W.max()), dtype=key_type)
    first = 0
    for part in parts:
        if part is not None:
            padded[first : first + part.keys.size] = torch.from_numpy(part.keys)
            first += part.keys.size
    gathered = _all_gather(padded.to(device), group).to(torch.int64).numpy()
    num_bytes = 2 * (len(totals_W) - 1) * padded.numel() * key_type.itemsize
    return [keys[:total] for keys, total in zip(gathered, totals_W, strict=True)], num_bytes


def divide(
    index: int, keys_W: Sequence[Integers], counts_WP: Integers, rank: int
) -> tuple[NDArray[np.int32], list[Integers]]:
    """Owners of this worker's rows of a part; for each worker where the rows that it sends here belong among them.

    Args:
        index: Number of the part.
        keys_W: Each worker's keys, the parts behind each other.
        counts_WP: How many keys each part has, int64 ``[W, P]``.
        rank: Rank of this worker.
    """
    starts_W = counts_WP[:, :index].sum(axis=1)
    counts_W = counts_WP[:, index]
    keys_T = np.concatenate([x[first : first + n] for x, first, n in zip(keys_W, starts_W, counts_W, strict=True)])
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts_W)])
    owners_T, places_T = np.empty(keys_T.size, dtype=np.int32), np.empty(keys_T.size, dtype=np.int64)
    _choose_owners(keys_T, bounds, rank, make_table(keys_T.size), owners_T, places_T)
    elsewhere = [places_T[first:end][owners_T[first:end] == rank] for first, end in pairwise(bounds)]
    return owners_T[bounds[rank] : bounds[rank + 1]], elsewhere


@compile_loop
def _choose_owners(keys, bounds, rank, table, owners, places):  # noqa: ANN001, ANN202
    """Fill for each key of each worker its row's owner, and where the row is among the keys of ``rank`` (or -1)."""
    # Number the distinct keys, and count the workers that have each of them.
    distinct, of = 0, np.empty(keys.shape[0], dtype=np.int64)
    left, owner, place = np.zeros_like(of), np.full_like(of, -1), np.full_like(of, -1)
    for i in range(keys.shape[0]):
        cell = find(table, keys[i])
        at = value_at(table, cell)
        if at == EMPTY:
            at = distinct
            put(table, cell, keys[i], at)
            distinct += 1
        of[i] = at
        left[at] += 1  # workers that have gradients of it
    # Draw the owner among these workers by a hash of the key, so that it is the same on all and rows spread evenly.
    for i in range(keys.shape[0]):
        at = of[i]
        if place[at] == -1:
            place[at] = -2  # drawn
            left[at] = mix(np.uint64(keys[i])) % np.uint64(left[at])  # the owner is the one after so many
    # Count down by worker: whoever finds 0 owns the row.
    for worker in range(bounds.shape[0] - 1):
        for i in range(bounds[worker], bounds[worker + 1]):
            at = of[i]
            if left[at] == 0:
                owner[at] = worker
            left[at] -= 1
            if worker == rank:
                place[at] = i - bounds[worker]
    for i in range(keys.shape[0]):
        owners[i], places[i] = owner[of[i]], place[of[i]]


def _exchange(
    parts: Sequence[RowGradients | None],
    sends: Sequence[Sequence[tuple[int, Integers]]],
    receives: Sequence[Sequence[tuple[int, Integers]]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """Send gradients to their owners and add those that come; returns the bytes both ways."""

    def sums_of(index: int) -> Tensor:
        part = parts[index]
        assert part is not None
        return part.sums

    blocks = [[sums_of(i).index_select(0, _on(sums_of(i), at)).flatten() for i, at in to] for to in sends]
    out_sizes = [sum(block.numel() for block in to) for to in blocks]
    in_sizes = [sum(at.size * sums_of(i).shape[1] for i, at in source) for source in receives]
    sent = torch.cat([torch.empty(0, device=device), *(block.to(device) for to in blocks for block in to)])
    received = torch.empty(sum(in_sizes), device=device)
    group.alltoall_base(received, sent, in_sizes, out_sizes).wait()
    first = 0
    for source in receives:  # in the order of the ranks, so that two runs give the same bits
        for index, at in source:
            sums = sums_of(index)
            size = at.size * sums.shape[1]
            there = received[first : first + size].view(at.size, sums.shape[1]).to(sums.device)
            sums.index_add_(0, _on(sums, at), there)
            first += size
    return 4 * (sent.numel() + received.numel())


def _fits_int32(keys: Integers) -> bool:
    return not keys.size or bool((keys.astype(np.int32) == keys).all())


def _on(tensor: Tensor, positions: Integers) -> Tensor:
    return torch.from_numpy(positions).to(tensor.device)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The workers' tensors of one shape, on the CPU: ``[W, *shape]``."""
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([gathered], [tensor]).wait()
    return torch.stack(gathered).cpu()
