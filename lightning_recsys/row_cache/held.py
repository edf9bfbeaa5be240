"""The rows of a collection that are here: which batches wait for them, how they come, and when they leave."""

# Shape suffixes: U distinct rows of a batch.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np

from lightning_recsys.embeddings import SparseFeatures, Ticket
from lightning_recsys.embeddings.sparse_features import same_ids
from lightning_recsys.row_cache.copies import RowCache
from lightning_recsys.row_cache.index import BatchPlan, Integers
from lightning_recsys.row_cache.messages import NO_CLOCKS, NO_KEYS, RowMessages
from lightning_recsys.row_cache.owners import StepGradients
from lightning_recsys.row_cache.window import AnnouncedFeatures
from lightning_recsys.stores.exchange import RowValues
from lightning_recsys.sync import ClockRule

_NAMED_PER_EXPIRY = 16
"""How often a worker names all its copies to a store that forgets rows, while it makes as many batches as the store
counts updates until it forgets. Each worker's batch is an update or two there, so 8 workers fit in."""


@dataclass(eq=False)
class CachedTicket(Ticket):
    """Names a batch whose rows are in the cache, or on their way to it.

    Args:
        plan: Where the rows are. They stay while the cache waits for the batch's gradients.
        answers: What waits for the stores' answers, with the positions in the plan that each was asked to fetch and to
            check. Empty once they have been taken.
        replaced: For each row of the plan that is fetched because its copy is unfit, the copy's clock without what
            others did, and the most that the copy can have lacked when it was fit, int64 ``[2, U]``. Zeros elsewhere.
        stale: Positions in the plan of copies that a store found too old.
    """

    plan: BatchPlan = field(kw_only=True)
    answers: list[tuple[Callable[[], RowValues], Integers, Integers]] = field(default_factory=list)
    replaced: Integers | None = None
    stale: list[Integers] = field(default_factory=list)


class HeldRows(ABC):
    """Has the rows of batches here, and brings what the copies owe to the stores.

    The rows of a batch that was looked up stay until its gradients are here, or until nobody has its ticket any more.

    Args:
        cache: The cache of copies, which is empty at first.
        messages: Tells the stores of updates and steps, and asks them for rows; knows the rows' places and the rule of
            their clocks.
        gradients: Where workers train in step, the gradients of batches that wait for those of other workers, whose
            rows stay as well; else ``None``.

    Attributes:
        cache: The cache of copies.
        counts: Those of the messages, with ``reads``, ``evictions``, ``misses``, ``stale`` and ``refreshes`` in rows,
            and ``most_missed`` in updates (:meth:`CachedBackend.telemetry`).
        lags_U: By how many updates each copy of the last batch was ahead of what was fetched, int32 ``[U]``.
        may_owe: Whether a copy may have updates that the stores lack.
    """

    def __init__(self, cache: RowCache, messages: RowMessages, gradients: StepGradients | None) -> None:
        self.cache, self.counts, self.lags_U, self.may_owe = cache, messages.counts, NO_CLOCKS, False
        self._messages, self._gradients = messages, gradients
        self._waiting: WeakSet[CachedTicket] = WeakSet()  # looked up, and may still get gradients

    @property
    def _rule(self) -> ClockRule:
        return self._messages.rule

    @property
    def needs_from(self) -> int:
        """Number of the first plan whose rows must stay: those of batches that are still to be trained."""
        later = [] if self._gradients is None else self._gradients.plans
        return min([*later, *(x.plan.number for x in self._waiting)], default=np.iinfo(np.int64).max)

    def lookup(self, sparse: SparseFeatures) -> CachedTicket:
        """Have a batch's rows here, fit for use, until they are trained."""
        batch = self._begin(sparse.to("cpu"))
        batch.sparse = sparse
        self._await(batch)
        self._waiting.add(batch)
        return batch

    def lookup_frozen(self, sparse: SparseFeatures) -> CachedTicket:
        """Look up as :meth:`lookup` does, where no gradient will follow."""
        batch = self._begin(sparse.to("cpu"), trained=False)
        self._await(batch)
        return batch

    def redeem(self, tickets: Sequence[Ticket]) -> list[CachedTicket]:
        """The batches that tickets name, with their rows here until the next plan; nothing waits for them any more."""
        batches: list[CachedTicket] = []
        for ticket in tickets:
            if isinstance(ticket, CachedTicket) and ticket in self._waiting:
                batches.append(ticket)
                continue
            # Its rows may be gone: it was redeemed before (a second backward pass through one graph), all copies were
            # dropped in between, or another backend gave it out.
            batches.append(batch := self._begin(ticket.sparse.to("cpu"), trained=False, validate=False))
            self._await(batch, validate=False)
            batch.sparse = ticket.sparse
            self._waiting.add(batch)  # so that the next one does not evict its rows
        for batch in batches:
            self._waiting.discard(batch)
        return batches

    def flush(self, *, block: int) -> Integers:
        """Push every update that is still here, of so many copies at a time; returns the slots of these.

        The copies stay.
        """
        dirty = self.cache.dirty_slots()
        for first in range(0, len(dirty), block):
            self._push(dirty[first : first + block])
        self._messages.send(with_steps=True)
        self.may_owe = False
        return dirty

    def clear(self) -> None:
        """Drop all copies, and wait for no gradients."""
        self._waiting.clear()
        if self._gradients is not None:
            self._gradients.clear()
        self.cache.clear()

    def prefetch(self, features: SparseFeatures) -> None:  # noqa: B027 - nothing travels ahead, unless by message
        """Ask for the rows of the batch that is looked up next."""

    def announce(self, features: SparseFeatures, *, ahead: int) -> None:  # noqa: B027 - as above
        """Know of a batch that is looked up after ``ahead`` other announced ones."""

    @abstractmethod
    def _begin(self, features: SparseFeatures, *, trained: bool = True, validate: bool = True) -> CachedTicket:
        """Plan a batch, and see that its rows come.

        Args:
            features: The features of the batch, on the CPU.
            trained: Whether it is one of those that may have been announced, which are to be trained.
            validate: ``False`` where rows are only to be trained: the copies that are here will do.
        """

    @abstractmethod
    def _await(self, batch: CachedTicket, *, validate: bool = True) -> None:
        """Have all rows of a batch here, fit for use; not for more than training without ``validate``."""

    @abstractmethod
    def evict(self) -> None:
        """Bring the copies back to their number."""

    @abstractmethod
    def leave(self, slots: Integers) -> None:
        """Let rows go from slots, which the next plan may give to others: their updates go to the stores."""

    @abstractmethod
    def _push(self, slots: Integers) -> None:
        """Bring what copies owe to the stores."""


class RowsByMessage(HeldRows):
    """Asks the stores for what batches need, and puts the answers into the cache.

    A batch is asked for once, when it begins; its answers are taken later, so that the message may travel while an
    earlier batch computes (:meth:`prefetch`). Copies that turned out to be unfit meanwhile are asked for a second time.
    Between these steps a copy may be trained: what is fetched is put below what the copy owes.

    Args:
        cache: The cache of copies, which is empty at first.
        messages: Asks the stores for rows, and tells them of updates.
        gradients: Gradients of batches that wait for those of other workers; see :class:`HeldRows`.
    """

    def __init__(self, cache: RowCache, messages: RowMessages, gradients: StepGradients | None) -> None:
        super().__init__(cache, messages, gradients)
        self._coming = AnnouncedFeatures()  # batches that were announced and have not been planned
        self._planned: CachedTicket | None = None  # the batch whose message was sent ahead of its lookup
        self._unnamed_batches = 0  # since the stores were told which copies are here, where they have to be

    @property
    def needs_from(self) -> int:  # noqa: D102 - inherited
        needed = super().needs_from
        return needed if self._planned is None else min(needed, self._planned.plan.number)

    def prefetch(self, features: SparseFeatures) -> None:  # noqa: D102 - inherited
        if not self.cache.limit:  # nothing stays
            return
        if self._planned is not None:
            if same_ids(self._planned.sparse, features):
                return
            self._settle_planned()
        before = self._messages.num_bytes
        self._planned = self._ask_for(features)
        self.counts["ahead"] += self._messages.num_bytes - before

    def announce(self, features: SparseFeatures, *, ahead: int) -> None:  # noqa: D102 - inherited
        if not self.cache.limit:
            return
        for number in self._coming.drop_beyond(ahead):
            self.cache.index.forget(number)
        self._coming.add(features, self.cache.index.announce(self._messages.places.keys_of(features)))

    def flush(self, *, block: int) -> Integers:  # noqa: D102 - inherited
        self._settle_planned()  # what it asked for must not lack what is pushed now
        return super().flush(block=block)

    def clear(self) -> None:  # noqa: D102 - inherited
        self._planned = None
        super().clear()

    def evict(self) -> None:  # noqa: D102 - inherited
        if len(self.cache.index) > self.cache.limit:
            self.leave(self.cache.index.evict(spare_from=self.needs_from))

    def leave(self, slots: Integers) -> None:  # noqa: D102 - inherited
        self.counts["evictions"] += len(slots)
        self._owe(slots)

    def _push(self, slots: Integers) -> None:
        self._owe(slots)
        self._messages.send()

    def _owe(self, slots: Integers) -> None:
        """Let the updates of copies ride on the next message; they owe nothing afterwards."""
        self._messages.owe(self.cache.take(slots, with_copies=self._messages.needs_copies))

    def _begin(self, features: SparseFeatures, *, trained: bool = True, validate: bool = True) -> CachedTicket:
        if trained:
            planned, self._planned = self._planned, None
            if planned is not None and same_ids(planned.sparse, features):
                return planned
            if planned is not None:  # it does not come: its rows come into the cache as they would have
                self._settle(planned)
            return self._ask_for(features)
        self._settle_planned()  # they may share rows
        return self._ask_for(features, trained=False, validate=validate)

    def _ask_for(self, features: SparseFeatures, *, trained: bool = True, validate: bool = True) -> CachedTicket:
        """Plan a batch and send its message: fetch what is missing, refresh what is too far ahead, check the rest."""
        self.evict()
        cache, number = self.cache, self._coming.take(features) if trained else None
        plan = cache.plan(self._messages.places.keys_of(features)) if number is None else cache.plan_announced(number)
        batch = CachedTicket(features, plan=plan)
        if not validate or self._rule.staleness is None:
            fetch, check, refresh = np.flatnonzero(plan.new_U), NO_KEYS, NO_KEYS
        else:
            # Slots of batches that are trained before this one reads them. Without any slack it is no use to refresh a
            # copy ahead of the update at hand: it is refreshed behind it.
            training = [waiting.plan.slots_U for waiting in self._waiting] if self._rule.staleness else []
            fetch, check, refresh = cache.sort(plan, self._rule.bound, np.concatenate([NO_KEYS, *training]))
        if validate:
            self.counts.update(reads=len(plan.keys_U), misses=len(fetch), refreshes=len(refresh))
        self._ask(batch, fetch=fetch, check=check, refresh=refresh)
        if cache.limit:
            self._name_copies(batch)
        return batch

    def _ask(
        self,
        batch: CachedTicket,
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
            if self._rule.by_sum:
                self._note_replaced(batch, refresh)
            self._owe(plan.slots_U[refresh])
            fetch = np.concatenate([fetch, refresh])
        clocks = self.cache.current[plan.slots_U[check]] if len(check) else NO_CLOCKS
        for answer in self._messages.send(plan.keys_U[fetch], plan.keys_U[check], clocks):
            batch.answers.append((answer.wait, fetch[answer.fetched], check[answer.checked]))

    def _note_replaced(self, batch: CachedTicket, refresh: Integers) -> None:
        """Keep what tells, once a row is here again, how many updates of others its copy lacked when it was fit.

        The store's clock then counts what the copy's does, and the others' updates since the copy was fetched: it
        lacked these at most. When it was last fit, the store was at most the staleness ahead of the copy, whose clock
        counts own updates, too, at most as many as the staleness, of which the store may have had none.
        """
        slots, bound = batch.plan.slots_U[refresh], self._rule.bound
        current, start = (x[slots].astype(np.int64) for x in (self.cache.current, self.cache.start))
        batch.replaced = np.zeros((2, len(batch.plan.slots_U)), dtype=np.int64)
        batch.replaced[:, refresh] = current, bound + np.minimum(current - start, bound)

    def _settle_planned(self) -> None:
        """Take the answers of the batch that was asked for ahead of its lookup, if there is one."""
        if self._planned is not None:
            self._settle(self._planned)

    def _settle(self, batch: CachedTicket) -> None:
        """Wait for what was asked for a batch, and put it into the cache."""
        for answer, fetched, checked in batch.answers:
            found = answer()
            if len(fetched):
                self.cache.install(batch.plan.slots_U[fetched], found.values, found.clocks.numpy())
                if batch.replaced is not None:
                    current_M, most_M = batch.replaced[:, fetched]
                    missed_M = np.minimum(found.clocks.numpy() - current_M, most_M)
                    self.counts["most_missed"] = max(self.counts["most_missed"], int(missed_M.max()))
            if len(checked):
                batch.stale.append(checked[found.stale.numpy()])
        batch.answers.clear()

    def _await(self, batch: CachedTicket, *, validate: bool = True) -> None:
        self._settle(batch)
        if not validate:
            return
        # Push and fetch what may not be used as it is, in a second message.
        self.lags_U, again_U = self.cache.find_outrun(batch.plan, self._rule.bound)
        if not again_U.any() and not any(map(len, batch.stale)):
            return
        self.counts["refreshes"] += int(again_U.sum())
        for positions in batch.stale:
            self.counts["stale"] += len(positions)
            again_U[positions] = True
        self._ask(batch, refresh=np.flatnonzero(again_U))
        self._settle(batch)

    def _name_copies(self, batch: CachedTicket) -> None:
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
        slots = self.cache.index.slots()
        for answer in self._messages.send(check_C=self.cache.index.keys(slots), clocks_C=self.cache.current[slots]):
            batch.answers.append((answer.wait, NO_KEYS, NO_KEYS))
