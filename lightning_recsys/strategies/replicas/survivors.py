"""Averages over the trainers that live: a group that a death has broken is made anew without the dead."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from lightning_recsys.parameter_server.waiting import turns
from lightning_recsys.strategies.common.workers.meeting import connect_members
from lightning_recsys.strategies.replicas.rounds import MeanRounds
from lightning_recsys.sync import Decision, Report, SyncAlgorithm, decide

GENERATION = "generation"  # the key of the number of the generation that is under way


class Council:
    """Where the first workers of all trainers agree on the next generation of their group.

    Everybody writes its report of a generation into the store. The first of those that are expected, and live, decides
    for all, once all of them have reported or are lost, and the others wait for what it decides.

    Args:
        store: A store that whoever has started the workers keeps. Nothing else in this process may use this
            connection to it.
        rank: Rank of this worker.
        host: Where the others reach each of them; see :func:`~.workers.meeting.connect_members`.
        lost: The ranks that have died, as far as the launcher has noticed.
        timeout: How long to wait for trainers that are behind. Those that die are noticed at once.
        cancelled: Asked while it waits; once ``True`` it waits a few seconds more.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        host: str,
        lost: Callable[[], Collection[int]],
        timeout: timedelta,
        cancelled: Callable[[], bool],
    ) -> None:
        self.rank, self.store, self._host = rank, store, host
        self._lost, self._timeout, self._cancelled = lost, timeout, cancelled
        self.generation: int | None = None  # the one under way; None before this worker was in any

    # What a death between two steps leaves:
    # - before its report is written: who decides waits until the launcher has noticed, and decides without it;
    # - after that: it may be counted among the next members. They cannot connect to it then, or their first round
    #   fails: all of them report once more, and it is lost by then. Its report alone says nothing that the others do
    #   not know: what it had folded in and nobody else had, nobody needs any more;
    # - of who decides: the next one that lives does, once the launcher has noticed, unless the decision is there. It is
    #   written once, by one request, before the number of the generation that it begins.
    # Reports of a generation are there until the next one is decided on: all that live have heard by then.

    def agree(self, *, expected: Collection[int], folded: int | None, has_stopped: bool) -> Decision:
        """Leave the generation under way together with all others; what follows, the same for everybody.

        Args:
            expected: The members of that generation, and those that join; the same on all of them.
            folded: Number of rounds that this worker has folded in; see :class:`~lightning_recsys.sync.Report`.
            has_stopped: Whether its last round was the one in which all wanted to stop; see
                :class:`~lightning_recsys.sync.Report`.

        Raises:
            TimeoutError: the others did not come in time.
        """
        if self.generation is None:
            known = self.store.check([GENERATION])
            self.generation = int(self.store.get(GENERATION)) if known else 0
        report = Report(self.rank, folded=folded, has_stopped=has_stopped)
        self.store.set(self._key(self.rank), json.dumps(asdict(report)))
        decided = f"{self.generation}/decided"
        dead: Collection[int] = ()

        def is_over(looks: bool) -> bool:
            """Whether there is a decision; this worker makes it where it is the first that lives."""
            nonlocal dead
            if self.store.check([decided]):
                return True
            dead = self._lost() if looks else dead
            living = [rank for rank in sorted(expected) if rank not in dead]
            if living[0] != self.rank or not all(self.store.check([self._key(rank)]) for rank in living):
                return False
            reports = [Report(**json.loads(self.store.get(self._key(rank)))) for rank in living]
            self.store.compare_set(decided, "", json.dumps(asdict(decide(reports))))
            return True

        self._wait(is_over)
        plain = json.loads(self.store.get(decided))
        decision = Decision(**plain | {"members": tuple(plain["members"])})
        # Who joins later reads the number, and nobody joins before all others have heard of the decision: any of them
        # writes it, as the one that has decided may have died before it did.
        self.generation += 1
        self.store.set(GENERATION, str(self.generation))
        if decision.members[:1] == (self.rank,):
            self._forget(self.generation - 2, expected)
        return decision

    def connect(self, members: Sequence[int]) -> dist.ProcessGroupGloo:
        """A group of the members of the generation that begins; all of them call this together.

        Raises:
            RuntimeError: one of them did not come, or went again.
        """
        places = PrefixStore(f"{self.generation}/group", self.store)
        return connect_members(places, members.index(self.rank), len(members), host=self._host, patience=self._timeout)

    def _wait(self, is_over: Callable[[bool], bool]) -> None:
        if not any(is_over(looks) for looks in turns(self._timeout.total_seconds(), self._cancelled)):
            raise TimeoutError(f"worker {self.rank} waited for the other trainers, and they did not come.")

    def _forget(self, generation: int, ranks: Collection[int]) -> None:
        for key in (f"{generation}/decided", *(self._key(rank, generation) for rank in ranks)):
            self.store.delete_key(key)

    def _key(self, rank: int, generation: int | None = None) -> str:
        return f"{self.generation if generation is None else generation}/{rank}"


class SurvivorRounds(MeanRounds):
    """Averages over the first workers of all trainers that live.

    Args:
        algorithm: The algorithm, already started; see :class:`~lightning_recsys.sync.ReplicaRounds`.
        replica: The vector that rounds move, while workers may be writing to it.
        council: The council of the first workers of all trainers.
        joins: Whether this worker makes the rounds of a trainer whose first worker has died: the others know what the
            algorithm remembers.
    """

    # The steps of a round, and what a death between two of them leaves to those that live:
    # 1. all of them sum their replicas. Who is not in the sum yet finds that a connection is closed: at once where it
    #    waits for the dead, and where it waits for another member as soon as that one has noticed and closed its own.
    #    There is no limit of time in this, for trainers may be slow. Some may have the sum, and some not.
    # 2. each keeps the mean, 3. folds it in, and counts. Nobody begins the next sum before it has done so: the mean of
    #    the last round that anybody has folded in is kept until all have folded it in.
    # 4. Who found a closed connection gives the group up and reports how many rounds it has folded in. All come here,
    #    for the next round of those that are ahead fails, too. They agree on members (`Council`) and connect.
    # 5. Who lacks the last mean gets it from one who has it, and folds it in; a new member gets what the algorithm
    #    remembers. Where all members are new, as the last that knew it has died, the algorithm begins anew. A death
    #    in 4 or 5 fails the new group, and all report again: who has folded in says so by its count.
    # So a round is folded in by all that live, or by none of them.

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor, *, council: Council, joins: bool = False) -> None:
        super().__init__(algorithm, replica, group=None)
        self._council = council
        self._joins = joins
        self._expected: tuple[int, ...] = ()  # members of this generation, and those that join with the next one
        self._kept = torch.empty_like(replica)  # the mean of the last round that was folded in

    def set_leaders(self, ranks: tuple[int, ...]) -> None:
        """Before rounds begin, or go on after a pause: these workers make them; all of them say the same."""
        if ranks != self._expected:
            self._leave_group()
        self._expected = ranks

    def run(self, *, leaving: bool) -> bool:
        """One round; where a member has died, among those that are left."""
        answer, num_leaving = None, 0
        failure: RuntimeError | None = None
        while answer is None:
            decision = None
            if self._group is None:
                decision = self._agree(has_stopped=False)
                if decision.stops:
                    return True
                if failure is not None and decision.members == self._expected:
                    raise failure  # nobody has died: another group would fail as well
                self._expected = decision.members
            try:
                if decision is not None and self._begin(decision):
                    return False  # it has caught up, and the round that was cut off was this one
                answer, num_leaving = self._exchange(leaving=leaving)
            except RuntimeError as error:  # of the group: a connection is closed, or could not be made
                failure = error
                self._leave_group()
        if num_leaving < self.num_trainers:
            self._kept.copy_(answer)
        if not self.finish(answer, num_leaving=num_leaving):
            return False
        if not self._agree(has_stopped=True).is_whole:
            self._leave_group()
        return True

    def _agree(self, *, has_stopped: bool) -> Decision:
        folded = None if self._joins else self.count
        return self._council.agree(expected=self._expected, folded=folded, has_stopped=has_stopped)

    def _begin(self, decision: Decision) -> bool:
        """Connect to the other members, and bring all to the same round; whether this one was behind."""
        group = self._council.connect(decision.members)
        self.enter(group)
        source, mean = decision.members.index(decision.source), self._message[:-1]
        is_behind = not self._joins and self.count < decision.folded
        if decision.lags:
            group.broadcast(mean.copy_(self._kept), source).wait()  # type: ignore[attr-defined]  # not in torch's stubs
            if is_behind or self._joins:
                self._kept.copy_(mean)
            if is_behind:
                self.finish(mean)
        if decision.begins:
            self.algorithm.start(self.replica)
        if decision.joins:
            remembered = {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}
            for tensor in remembered.values():
                group.broadcast(tensor, source).wait()  # type: ignore[attr-defined]
            if self._joins:
                self.algorithm.load_state_dict(remembered)
                self.count, self._joins = decision.folded, False
        return is_behind

    def _leave_group(self) -> None:
        self._group = None  # the last reference: connections close, by which those learn of it that wait in them

    def close(self) -> None:
        """Leave the group."""
        self._leave_group()
