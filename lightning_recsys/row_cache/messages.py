"""What a cache says to the stores of a collection: one message to each that has to hear something."""

# Shape suffixes: K pushed rows, M fetched rows, C checked rows.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import Ticket
from lightning_recsys.row_cache.copies import RowCache, RowUpdates
from lightning_recsys.row_cache.index import BatchPlan
from lightning_recsys.row_cache.places import Integers, RowPlaces
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.exchange import RowExchange, RowValues
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, EmbeddingStore
from lightning_recsys.sync import ClockRule

Clocks = NDArray[np.int32]
NO_KEYS: Integers = np.empty(0, dtype=np.int64)
NO_CLOCKS: Clocks = np.empty(0, dtype=np.int32)

_NAMED_PER_EXPIRY = 16
"""How often a worker names all its copies to a store that forgets rows, while it makes as many batches as the store
counts updates until it forgets. Each worker's batch is an update or two there, so 8 workers fit in."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one store will say.

    Args:
        wait: Returns it, once it is there.
        fetched: Which of the keys to fetch it brings, as an index of them.
        checked: Which of the keys to check it judges, as an index of them.
    """

    wait: Callable[[], RowValues]
    fetched: Integers | slice
    checked: Integers | slice


class RowMessages:
    """Cuts what is to be said by store, and says it in one message each, all of them on their way at once.

    Args:
        stores: The collection's stores.
        places: Which of them has which row.
        rule: What a push tells the stores' clocks, and when a copy is too old.
        row_shapes: Shape of what one row has of ``weight`` and of each state.

    Attributes:
        needs_copies: Whether a store forgets rows: what is owed then comes with copies of the rows.
        shortest_expiry: After how many updates one does, at the earliest; ``None`` where none does.
        counts: ``messages`` sent so far, and bytes both ways for ``rows``, ``clocks`` and ``gradients``.
        unsent_steps: Updates of the whole collection that each store has not heard of.
    """

    def __init__(
        self,
        stores: Sequence[EmbeddingStore],
        places: RowPlaces,
        rule: ClockRule,
        row_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.unsent_steps = [0] * len(stores)
        self._stores, self._places, self._rule, self._row_shapes = stores, places, rule, row_shapes
        dynamic = [x.dynamic if isinstance(x, DynamicEmbeddingStore) else DynamicRows() for x in stores]
        self._counts_updates = [rule.clock == "max" and x.admission > 1 for x in dynamic]  # else the clocks say it
        self._needs_copies = [x.expire_after is not None for x in dynamic]
        self.needs_copies = any(self._needs_copies)
        self.shortest_expiry = min((x.expire_after for x in dynamic if x.expire_after is not None), default=None)
        self._owed: list[RowUpdates] = []

    def count_step(self) -> None:
        """Note an update; the stores hear of it with the next push or flush."""
        self.unsent_steps = [steps + 1 for steps in self.unsent_steps]

    def owe(self, updates: RowUpdates) -> None:
        """Let updates of rows ride on the next message, ahead of its fetches."""
        if len(updates.keys):
            self._owed.append(updates)

    def send(
        self,
        fetch_M: Integers = NO_KEYS,
        check_C: Integers = NO_KEYS,
        clocks_C: Clocks = NO_CLOCKS,
        *,
        with_steps: bool = False,
    ) -> list[Answer]:
        """Send what is owed, ask for rows, have copies checked; nothing to a store that this does not concern.

        Args:
            fetch_M: Keys of rows to get.
            check_C: Keys of copies to check.
            clocks_C: Their clocks.
            with_steps: Let every store know of all steps.
        """
        owed, self._owed = self._owed, []
        keys_K = np.concatenate([x.keys for x in owed] or [NO_KEYS])
        heard_K = np.concatenate([self._rule.sent(x.current, x.unsent) for x in owed] or [NO_CLOCKS])
        updates = {name: _joined([x.values[name] for x in owed]) for name in self._row_shapes if owed}
        unsent_K = np.concatenate([x.unsent for x in owed] or [NO_CLOCKS])
        copies = {}
        if owed and self.needs_copies:
            copies = {name: _joined([x.copies[name] for x in owed]) for name in self._row_shapes}
        answers = []
        splits = [self._places.split(keys) for keys in (keys_K, fetch_M, check_C)]
        for index, (store, *parts) in enumerate(zip(self._stores, *splits, strict=True)):
            (pushed, push_rows), (fetched, fetch_rows), (checked, check_rows) = parts
            steps = self.unsent_steps[index] if with_steps or len(push_rows) else 0
            if not (steps or len(push_rows) or len(fetch_rows) or len(check_rows)):
                continue
            self.unsent_steps[index] -= steps
            request = RowExchange(
                push_rows=torch.from_numpy(push_rows),
                push_clocks=torch.from_numpy(heard_K[pushed]),
                updates=_of_rows(updates, pushed, push_rows),
                push_counts=torch.from_numpy(unsent_K[pushed] if self._counts_updates[index] else NO_CLOCKS),
                copies=_of_rows(copies, pushed, push_rows) if self._needs_copies[index] else {},
                num_steps=steps,
                fetch_rows=torch.from_numpy(fetch_rows),
                check_rows=torch.from_numpy(check_rows),
                check_clocks=torch.from_numpy(clocks_C[checked]),
                staleness=self._rule.staleness,
                clock=self._rule.clock,
            )
            answers.append(Answer(store.begin_exchange(request), fetched, checked))
            sizes = request.bytes_by_kind(store.layout.num_rows, self._row_shapes, weight_bytes=store.weight_bytes)
            self.counts.update(sizes)
            self.counts["messages"] += 1
        return answers


@dataclass(eq=False)
class CachedTicket(Ticket):
    """Names a batch whose rows are in the cache, or on their way to it.

    Args:
        plan: Where the rows are. They stay while the cache waits for the batch's gradients.
        answers: What waits for the stores' answers, with the positions in the plan that each was asked to fetch and to
            check. Empty once they have been taken.
        stale: Positions in the plan of copies that a store found too old.
    """

    plan: BatchPlan = field(kw_only=True)
    answers: list[tuple[Callable[[], RowValues], Integers, Integers]] = field(default_factory=list)
    stale: list[Integers] = field(default_factory=list)


class BatchMessages:
    """Asks the stores for what batches need, and puts the answers into a cache.

    A batch is asked for once (:meth:`begin`); its answers are taken later (:meth:`settle`), so that the message may
    travel while an earlier batch computes. Copies that turned out to be unfit meanwhile are asked for a second time
    (:meth:`refresh`). Between these steps a copy may be trained: what is fetched is put below what the copy owes.

    Args:
        messages: What says it to each store.
        rule: When a copy is too far ahead, or behind.

    Attributes:
        counts: Those of the messages, with ``misses``, ``stale`` and ``refreshes`` in rows.
        lags_U: By how many updates each copy of the last batch was ahead of what was fetched, int32 ``[U]``.
    """

    def __init__(self, messages: RowMessages, rule: ClockRule) -> None:
        self._messages, self._rule = messages, rule
        self.counts = messages.counts
        self.lags_U = NO_CLOCKS
        self._unnamed_batches = 0  # since the stores were told which copies are here, where they have to be

    def begin(self, batch: CachedTicket, cache: RowCache, training: Sequence[Integers], *, validate: bool) -> None:
        """Send a batch's message: fetch what is missing, refresh what is too far ahead, have the rest checked.

        Args:
            batch: It is planned.
            cache: Where its rows are, or are to be.
            training: Slots of batches that are trained before this one reads them.
            validate: ``False`` where rows are only to be trained: the copies that are here will do.
        """
        plan = batch.plan
        if not validate or self._rule.staleness is None:
            fetch, check, refresh = np.flatnonzero(plan.new_U), NO_KEYS, NO_KEYS
        else:
            # Without any slack it is no use to refresh a copy ahead of the update at hand: it is refreshed behind it.
            expected = training if self._rule.staleness else []
            fetch, check, refresh = cache.sort(plan, self._rule.bound, np.concatenate([NO_KEYS, *expected]))
        if validate:
            self.counts["misses"] += len(fetch)
            self.counts["refreshes"] += len(refresh)
        self.ask(batch, cache, fetch=fetch, check=check, refresh=refresh)
        if cache.limit:
            self._name_copies(batch, cache)

    def ask(
        self,
        batch: CachedTicket,
        cache: RowCache,
        *,
        fetch: Integers = NO_KEYS,
        check: Integers = NO_KEYS,
        refresh: Integers = NO_KEYS,
    ) -> None:
        """Fetch, check and refresh rows of a batch, by their positions in its plan; what is owed goes ahead of it.

        To refresh is to push and to fetch, in one message: the store makes the push first.
        """
        plan = batch.plan
        if len(refresh):
            self.owe(cache, plan.slots_U[refresh])
            fetch = np.concatenate([fetch, refresh])
        clocks = cache.current[plan.slots_U[check]] if len(check) else NO_CLOCKS
        for answer in self._messages.send(plan.keys_U[fetch], plan.keys_U[check], clocks):
            batch.answers.append((answer.wait, fetch[answer.fetched], check[answer.checked]))

    def settle(self, batch: CachedTicket, cache: RowCache) -> None:
        """Wait for what was asked for a batch, and put it into the cache."""
        for answer, fetched, checked in batch.answers:
            found = answer()
            if len(fetched):
                cache.install(batch.plan.slots_U[fetched], found.values, found.clocks.numpy())
            if len(checked):
                batch.stale.append(checked[found.stale.numpy()])
        batch.answers.clear()

    def refresh(self, batch: CachedTicket, cache: RowCache) -> None:
        """Second message of a batch whose first was answered: push and fetch what may not be used as it is."""
        self.lags_U, again_U = cache.find_outrun(batch.plan, self._rule.bound)
        if not again_U.any() and not any(map(len, batch.stale)):
            return
        self.counts["refreshes"] += int(again_U.sum())
        for positions in batch.stale:
            self.counts["stale"] += len(positions)
            again_U[positions] = True
        self.ask(batch, cache, refresh=np.flatnonzero(again_U))
        self.settle(batch, cache)

    def owe(self, cache: RowCache, slots: Integers) -> None:
        """Let the updates of copies ride on the next message; they owe nothing afterwards."""
        self._messages.owe(cache.take(slots, with_copies=self._messages.needs_copies))

    def _name_copies(self, batch: CachedTicket, cache: RowCache) -> None:
        """Now and then tell stores that forget rows which ones are here, so that they keep them.

        A copy may be in use for long before its updates, or its next check, name the row. The answers, which say
        nothing that is needed, come with those of the batch.
        """
        expiry = self._messages.shortest_expiry
        if expiry is None:
            return
        self._unnamed_batches += 1
        if self._unnamed_batches * _NAMED_PER_EXPIRY < expiry:
            return
        self._unnamed_batches = 0
        slots = cache.held_slots()
        for answer in self._messages.send(check_C=cache.keys(slots), clocks_C=cache.current[slots]):
            batch.answers.append((answer.wait, NO_KEYS, NO_KEYS))


def _of_rows(arrays: Mapping[str, Tensor], which: Integers | slice, rows: Integers) -> dict[str, Tensor]:
    """Of all pushed rows those of one store; nothing where it has none of them."""
    return {name: values[which] for name, values in arrays.items() if len(rows)}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other, on the CPU."""
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to("cpu")
