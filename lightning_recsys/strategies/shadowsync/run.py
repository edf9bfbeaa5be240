"""One worker's part in a run: it trains with its team, and stops whenever one set of weights is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.strategies.common.means import meet_buffers, take_mean
from lightning_recsys.strategies.common.workers.living import living_ranks
from lightning_recsys.strategies.replicas.drivers import Driver, ForegroundHook
from lightning_recsys.strategies.replicas.rounds import CENTER, CenterRounds
from lightning_recsys.strategies.shadowsync.team import Team


class TrainerRun:
    """Replicas that train, and their average in the place of each while training is interrupted.

    Every method but :meth:`begin_batch`, :meth:`count_step`, :meth:`stop_before_others` and :meth:`telemetry` is called
    by all ranks together.

    Args:
        team: This worker among those of its trainer.
        module: The model that is trained.
        num_trainers: Trainers with replicas to average; 1 where nothing is synchronised.
        barrier: Returns when all ranks have called it; takes a name for the reason.

    Attributes:
        team: This worker among those of its trainer.
        num_trainers: Trainers with replicas to average.
        driver: Runs the rounds that this worker makes; ``None`` where it makes none.
        is_training: Whether training is under way, from :meth:`start` to :meth:`end`.
        is_averaged: Whether the average of the replicas stands in their place.
    """

    def __init__(self, team: Team, module: nn.Module, *, num_trainers: int, barrier: Callable[[str], None]) -> None:
        self.team = team
        self.driver: Driver | None = None
        self.is_training = self.is_averaged = False
        self._module = module
        self.num_trainers = num_trainers
        self._barrier = barrier
        self._own_weights: Tensor | None = None  # a leader's replica, while it is training and the average is in place
        self._is_finished = False  # parameters are in memory of their own, where callbacks may change them

    def start(self, driver: Driver | None, *, successor: Callable[[], Driver | None] = lambda: None) -> None:
        """Begin to train.

        Args:
            driver: Runs the rounds that this worker makes; ``None`` where it makes none.
            successor: Makes the driver of this worker where those before it in its trainer have died.
        """
        self.driver = driver
        self._successor = successor  # of this worker, where its trainer's first one dies
        self.is_training = True
        self._barrier("all replicas are there")
        self._elect()
        self._start_driver()

    def _start_driver(self) -> None:
        if self.driver is not None:
            self.driver.start()

    def _elect(self) -> None:
        """Behind a meeting: take over from this trainer's first worker where that has died."""
        living = living_ranks()
        if self.team.elect(living) and self.driver is None:
            self.driver = self._successor()
        if self.driver is not None:
            self.driver.rounds.set_leaders(self.team.leaders_among(living))

    # --- Training ----------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Raise what happened beside training; go on where an epoch's end, or a validation, had stopped it."""
        self.resume()
        if self.driver is not None:
            self.driver.check()
            if not self.driver.is_active:  # since the last epoch's end
                self.driver.start()
        self.bring_back()
        self.team.begin_batch()

    def count_step(self) -> None:
        """This worker has made an update; where a round in the foreground is due it is made now."""
        if self.is_training:
            self.bring_back()  # before a round
            self.team.count_step()
            if self.driver is not None:
                self.driver.after_step()

    def bring_back(self) -> None:
        """Let parameters whose ``data`` was replaced be those of the replica again, unless the average is in place.

        It is for steps and what comes before a validation: a callback that swaps weights for the validation itself has
        them in its own memory until it swaps back.
        """
        if self.is_training and not self.is_averaged:
            self.team.bring_back()

    def stop_before_others(self) -> None:
        """Before this rank waits for others: in the foreground, take part in the rounds of those who still train."""
        if self.driver is not None:
            self.driver.stop_before_others()

    def standing_in(self) -> AbstractContextManager[Callable[[], None]]:
        """Around a wait of this worker for something to train, as :meth:`Driver.standing_in`.

        While the average is in place nobody makes rounds: all come back from it together.
        """
        if self.driver is None or self.is_averaged:
            return nullcontext(lambda: None)
        return self.driver.standing_in()

    # --- One set of weights ------------------------------------------------------------------------------------------

    def show_average(self, *, flush: Callable[[], None], meet: Callable[[], None] | None) -> None:
        """Swap the average of the replicas in, and rank 0's buffers; nothing is synchronised meanwhile.

        The order is what makes the average one of whole replicas. A worker in the foreground leaves its rounds before
        it waits, for those who still train wait for it in theirs; a shadow thread goes on while its worker waits, and
        stops when nobody updates a replica any more. Only then is no round under way anywhere.

        Args:
            flush: Brings this worker's updates of rows to their stores; called first.
            meet: Averages what callbacks keep; called while the average is in place.
        """
        if not self.is_training or self.is_averaged:
            return
        flush()
        self.stop_before_others()
        self._barrier("everybody has stopped training")
        if self.driver is not None:
            self.driver.stop()
        self._barrier("no round is under way")
        self._elect()
        if self.num_trainers > 1:
            # Each trainer's first worker brings its replica; a trainer whose workers have all died brings none.
            flat = self.team.replica.flat
            mean = flat.clone()
            take_mean([mean], counts=self.team.leads)
            if self.team.leads:
                self._own_weights = flat.clone()
                flat.copy_(mean)
        if meet is not None:
            meet()
        meet_buffers(self._module)
        self.is_averaged = True
        # Workers other than the first read the average from the memory that their trainer's first one writes to.
        self._barrier("the average is in place")

    def resume(self) -> None:
        """Swap the replicas back in and go on, where the average is in their place."""
        if not self.is_averaged:
            return
        self._barrier("nobody needs the average any more")
        self._elect()
        if self._own_weights is not None:  # a leader's
            self.team.replica.flat.copy_(self._own_weights)
        self.is_averaged, self._own_weights = False, None
        self._barrier("all replicas are back")
        self._start_driver()

    def detach(self) -> None:
        """Let callbacks find the average, which is in place, in memory of this rank's own."""
        if self.is_training and not self._is_finished:
            self.team.replica.detach()
            self._is_finished = True

    def end(self, *, average: bool) -> None:
        """Make all replicas the final model, but for parameters that a callback has changed: those are rank 0's.

        Args:
            average: It is the average of the replicas, instead of the first trainer's.
        """
        replica = self.team.replica
        seen = replica.flat
        final = (seen if average or self._own_weights is None else self._own_weights).clone()
        replica.merge_changes(final)
        dist.broadcast(final, src=0)
        replica.assign(final)
        replica.attach(seen)
        self.is_training = self._is_finished = self.is_averaged = False
        self._own_weights = None
        meet_buffers(self._module)
        self._barrier("all replicas are the final model")

    # --- What checkpoints keep, and telemetry ------------------------------------------------------------------------

    def sync_state(self) -> dict[str, Any]:
        """The algorithm's memory, with the centre where there is one; empty where this worker makes no rounds."""
        if self.driver is None:
            return {}
        rounds = self.driver.rounds
        state = {name: tensor.clone() for name, tensor in rounds.algorithm.state_dict().items()}
        center = {CENTER: rounds.pull_center()} if isinstance(rounds, CenterRounds) else {}
        return {"algorithm": type(rounds.algorithm).__name__, "state": state, **center}

    def trainer_state(self, optimizers: Sequence[Optimizer]) -> dict[str, Any] | None:
        """The state that is each trainer's own, and that its first worker adds to a checkpoint."""
        if self.num_trainers == 1 or not self.team.leads:
            return None
        replica = self.team.replica.flat if self._own_weights is None else self._own_weights
        return {
            "replica": replica.clone(),
            "optimizer_states": [x.state_dict() for x in optimizers],
            "since_round": torch.from_numpy(self.team.since_round).clone(),
        }

    def telemetry(self) -> dict[str, Any]:
        """Synchronisation and staleness of this worker so far."""
        values: dict[str, Any] = {}
        if self.driver is not None and self.driver.rounds.count:
            rounds = self.driver.rounds
            is_own = isinstance(self.driver, ForegroundHook) and isinstance(rounds, CenterRounds)  # not its trainer's
            steps = self.team.own_steps if is_own else self.team.steps.sum()
            values["sync/gap"] = float(steps / rounds.count)
            values["sync/rounds"] = rounds.count / max(self.driver.active_seconds, 1e-9)
            if rounds.divergence is not None:
                values["sync/divergence"] = rounds.divergence
        staleness = self.team.staleness
        return values if staleness is None else values | {"staleness/hogwild": staleness}

    @property
    def exchanged_bytes(self) -> int:
        """The bytes that this process sent to other trainers, and received as well."""
        return 0 if self.driver is None else self.driver.rounds.exchanged_bytes

    def close(self, *, succeeded: bool) -> None:
        """Stop the shadow thread and leave the shared memory, however the run went.

        Args:
            succeeded: The others are there as well, so groups of processes can be taken apart.
        """
        if self.driver is not None:
            self.driver.abandon()
            if succeeded:
                self.driver.rounds.close()
        self.team.close()
