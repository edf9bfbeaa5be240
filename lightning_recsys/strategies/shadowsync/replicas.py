"""ShadowSync's dense part: a replica for each trainer, and rounds that keep replicas together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim import Optimizer

from lightning_recsys.checkpoints import read_own
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.launchers.loopback import LOOPBACK
from lightning_recsys.placement import ClusterLayout
from lightning_recsys.strategies.common.averaged_copies import refuse_averages_in_shared_memory
from lightning_recsys.strategies.common.direct_steps import DirectSteps
from lightning_recsys.strategies.common.schedules import refuse_saving_by_steps
from lightning_recsys.strategies.common.settings import (
    chosen_algorithm,
    refuse_meaningless,
    require_one_of,
    require_whole,
)
from lightning_recsys.strategies.common.workers.living import made_by_the_first
from lightning_recsys.strategies.common.workers.ranks import check_ranks, count_ranks, placed_ranks, take_ranks
from lightning_recsys.strategies.parts import DensePart
from lightning_recsys.strategies.replicas.drivers import Driver, ForegroundHook, ShadowThread
from lightning_recsys.strategies.replicas.rounds import (
    CENTER,
    SYNC,
    CenterRounds,
    MeanRounds,
    Rounds,
    find_center,
    make_center,
)
from lightning_recsys.strategies.replicas.survivors import Council, SurvivorRounds
from lightning_recsys.strategies.shadowsync.run import TrainerRun
from lightning_recsys.strategies.shadowsync.team import Team
from lightning_recsys.sync import RoundSchedule, SyncAlgorithm, Topology

if TYPE_CHECKING:
    from lightning_recsys.parameter_server.meetings import MeetingPlace

RoundsIn = Literal["background", "foreground"]
Final = Literal["trainer0", "average"]

CHECKPOINT_KEY = "shadowsync"


class Replicas(DensePart):
    """Trainers with a replica of the dense part each, which rounds keep together; a trainer's workers share one.

    A *trainer* has ``workers_per_trainer`` processes, Lightning's ranks, which train one replica and one optimizer
    state in shared memory, without a lock (Hogwild).

    Args:
        num_trainers: Replicas, over all nodes. Default: as many as ``Trainer(devices=..., num_nodes=...)`` gives.
        workers_per_trainer: Processes that share a replica; all on one node.
        algorithm: ``easgd``, ``ma``, ``bmuf``, a name registered with
            :func:`~lightning_recsys.sync.register_algorithm`, or an algorithm.
        rounds: ``background`` runs rounds in the shadow thread, ``foreground`` between two steps, while the worker
            waits, and with ``ma`` and ``bmuf`` all workers of its trainer.
        alpha: Elastic parameter, in ``(0, 1]``: how far a round moves a replica; ``None`` is the algorithm's default,
            0.5 for those named above.
        gap: Foreground: steps of a worker from one round to the next.
        interval: Seconds from one round to the next: in the background instead of as often as 1.75 % of a core allows,
            in the foreground instead of ``gap``.
        eta: BMUF's step size; ``None`` is its default, 1.
        block_momentum: BMUF's momentum; ``None`` is its default, 0.
        nesterov: BMUF's look-ahead; ``None`` is its default, off.
        num_sync_servers: Servers for the centre of ``easgd``, each with an equal part of it; 1 where there is none.
        final: What the trained model is: ``trainer0``'s replica, or the ``average`` of all.

    Raises:
        ValueError: an argument is out of range, or does not go with another.
        TypeError: an argument is of another type.

    Communication: in the background, per round and trainer, the replica to the sync servers and the centre back, or one
    all-reduce among the trainers.
    Reference: Zheng et al. 2020, "ShadowSync: performing synchronization in the background for highly scalable
    distributed training".
    """

    asynchronous = True
    wraps_model = False

    def __init__(
        self,
        *,
        num_trainers: int | None = None,
        workers_per_trainer: int = 1,
        algorithm: str | SyncAlgorithm = "easgd",
        rounds: RoundsIn = "background",
        alpha: float | None = None,
        gap: int = 5,
        interval: float | None = None,
        eta: float | None = None,
        block_momentum: float | None = None,
        nesterov: bool | None = None,
        num_sync_servers: int = 1,
        final: Final = "trainer0",
    ) -> None:
        require_one_of("rounds", rounds, get_args(RoundsIn))
        require_one_of("final", final, get_args(Final))
        require_whole("num_trainers", num_trainers, optional=True)
        require_whole("workers_per_trainer", workers_per_trainer)
        require_whole("gap", gap)
        require_whole("num_sync_servers", num_sync_servers)
        options = {"alpha": alpha, "eta": eta, "block_momentum": block_momentum, "nesterov": nesterov}
        self.algorithm = chosen_algorithm(Replicas, algorithm, options, interval=interval)
        if rounds == "background":
            why = "with strategy.rounds=background, whose rounds go by time (strategy.interval) and not by steps"
            refuse_meaningless(Replicas, {"gap": gap}, why)
        elif interval is not None:
            refuse_meaningless(Replicas, {"gap": gap}, f"beside strategy.interval={interval}, its replacement")
        if self.algorithm.topology is not Topology.CENTRAL:
            name = algorithm if isinstance(algorithm, str) else type(algorithm).__name__
            why = (
                f"to strategy.algorithm={name}, whose trainers average among themselves: only an algorithm with a"
                " centre, such as easgd, has sync servers"
            )
            refuse_meaningless(Replicas, {"num_sync_servers": num_sync_servers}, why)
        self.num_trainers = num_trainers
        self.workers_per_trainer = workers_per_trainer
        self.rounds: RoundsIn = rounds
        self.gap = gap
        self.interval = interval
        self.num_sync_servers = num_sync_servers
        self.final: Final = final
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self._run: TrainerRun | None = None  # from the model's setup to the teardown of a fit
        self._direct_steps: DirectSteps | None = None  # while it trains with rounds in the foreground
        self._goes_on = False  # whether the last settling has interrupted training
        # Of the checkpoint that was read last, for the start of training: the algorithm's memory, with its name and the
        # centre, for all; and what this trainer has of its own.
        self._restored: Mapping[str, Any] = {}
        self._restored_trainer: Mapping[str, Any] | None = None
        # The same for the checkpoint that is being written, from the model's state to the end of it.
        self._saved: Mapping[str, Any] | None = None
        self._saved_trainer: dict[str, Any] | None = None

    # --- Who is who --------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Number of copies of the dense part that are trained; rank 0 trains the first one."""
        return self.layout.num_trainers

    @property
    def layout(self) -> ClusterLayout:
        """Which rank works for which trainer; known once a ``Trainer`` has the strategy.

        Raises:
            ValueError: the ranks do not make up whole trainers.
        """
        num_trainers = self.num_trainers
        if num_trainers is None:
            ranks = count_ranks(self.strategy)
            num_trainers, rest = divmod(ranks, self.workers_per_trainer)
            if rest or not num_trainers:
                raise ValueError(
                    f"{ranks} ranks are no whole number of trainers with strategy.workers_per_trainer="
                    f"{self.workers_per_trainer}. Set strategy.num_trainers, and leave trainer.devices out."
                )
        return ClusterLayout(
            num_trainers, self.workers_per_trainer, self.strategy.num_nodes, placed_ranks(self.strategy)
        )

    @property
    def takes_replacements(self) -> bool:  # type: ignore[override]  # which depends on the settings
        """Whether trainers have one worker each: the memory that several share is gone with those that made it."""
        return self.workers_per_trainer == 1

    def take_ranks(self) -> None:
        """Take as many processes as the trainers need.

        Raises:
            ValueError: ``trainer.devices`` or ``torchrun`` says otherwise, or the accelerator is no CPU.
        """
        strategy = self.strategy
        take_ranks(strategy, self.workers_per_trainer if self.num_trainers is None else self.layout.ranks_per_node)
        layout = self.layout
        settings = (
            f"strategy.num_trainers={layout.num_trainers} with strategy.workers_per_trainer={self.workers_per_trainer}"
        )
        needed = layout.ranks_per_node if layout.nodes is None else layout.world_size
        check_ranks(strategy, needed, settings=settings, what="trainers")

    def servers(self) -> list[ServerSpec]:
        """Sync servers, where the algorithm has a centre."""
        if self.algorithm.topology is Topology.CENTRAL and self.layout.num_trainers > 1:
            return [ServerSpec(SYNC, index) for index in range(self.num_sync_servers)]
        return []

    # --- The replica -------------------------------------------------------------------------------------------------

    def refuse(self, trainer: pl.Trainer) -> None:
        """Refuse callbacks that would swap weights in shared memory, or wait within an epoch.

        Raises:
            ValueError: a setting of the trainer, or a callback, does not go with workers that run free.
        """
        if self.workers_per_trainer > 1:
            refuse_averages_in_shared_memory(
                trainer, setting=f"strategy.workers_per_trainer={self.workers_per_trainer}"
            )
        waits = (
            self.rounds == "foreground"
            and self.algorithm.topology is Topology.ALL_REDUCE
            and self.layout.num_trainers > 1
        )
        if waits and self.interval is not None:
            refuse_saving_by_steps(trainer, setting=f"strategy.interval={self.interval}")

    def start(self) -> None:
        """Start all replicas alike, each in its trainer's memory."""
        strategy = self.strategy
        team, layout = Team(strategy.task, layout=self.layout, rank=strategy.global_rank), self.layout
        # A single trainer has nobody to be synchronised with.
        num_trainers = layout.num_trainers if team.replica.size else 1
        self._run = TrainerRun(team, strategy.task, num_trainers=num_trainers, barrier=strategy.barrier)

    def begin(self) -> None:
        """Share the optimizer state and begin to synchronise."""
        strategy, run = self.strategy, self._run
        assert strategy.changes is not None
        assert run is not None
        run.team.share_optimizers(strategy.optimizers)
        strategy.changes.before_train_epoch_end(run.bring_back)
        strategy.changes.before_validation_data(run.bring_back)
        rounds = None
        if run.num_trainers > 1:
            # The algorithm, and the centre, start at the average, which is what a checkpoint has as the model's
            # weights. Only then is the average replaced by each trainer's own replica.
            rounds = self._make_rounds(run.team)
            run.team.restore(self._restored_trainer)
        if self.rounds == "foreground" and run.num_trainers > 1:
            what = "under strategy=shadowsync makes no round with rounds=foreground: nobody counts it"
            self._direct_steps = DirectSteps(strategy.optimizers, consequence=what)
            strategy.changes.before_train_epoch_end(run.stop_before_others)
            strategy.changes.before_validation_data(run.stop_before_others)
            if self.algorithm.topology is Topology.ALL_REDUCE:
                self._meet_at_equal_steps(run)
        run.start(None if rounds is None else self._driver(rounds, run.team), successor=self._succeed)
        if self.strategy.joining is not None and rounds is None:
            run.team.leads = False  # until the next meeting, from which on the other trainers count on this one

    def _meet_at_equal_steps(self, run: TrainerRun) -> None:
        """Let every trainer go on from rank 0's step, and make others' rounds while it waits for work.

        A trainer that a resumed run had not would come to its rounds at other steps than those that wait for it.
        """
        steps = torch.from_numpy(run.team.own_since_round.copy())
        dist.broadcast(steps, src=0)
        if run.team.leads:
            run.team.own_since_round[:] = steps.numpy()
        if self.strategy.dealer is not None:
            self.strategy.dealer.while_waiting = run.standing_in

    def _driver(self, rounds: Rounds, team: Team) -> Driver:
        if self.rounds == "background":
            return ShadowThread(rounds, interval=self.interval)
        schedule = RoundSchedule(gap=self.gap, interval=self.interval, steps=team.own_since_round)
        return ForegroundHook(rounds, schedule=schedule, alone=team.alone)

    def _make_rounds(self, team: Team) -> Rounds | None:
        """The algorithm's, started; ``None`` where the trainer's first worker makes them for all."""
        replica, restored = team.replica.flat, self._restored
        self.algorithm.start(replica)
        if restored.get("algorithm") == type(self.algorithm).__name__:
            self.algorithm.load_state_dict(restored["state"])
        if self.algorithm.topology is Topology.CENTRAL:
            initial = restored.get(CENTER, replica)
            servers = self.strategy.stores(SYNC)
            made_by_the_first(self.strategy, partial(make_center, servers, initial))
            pieces = find_center(servers, replica.numel())
            every_worker = self.rounds == "foreground"
            rounds = CenterRounds(self.algorithm, replica, pieces=pieces)
            if self.strategy.joining is not None:
                replica.copy_(rounds.pull_center())
            return rounds if team.leads or every_worker else None
        if self.rounds == "foreground":
            team.stand_still_for_rounds()
        if self.strategy.joining is not None:
            return None
        if (place := self.strategy.run_servers.meeting_place()) is not None:
            return self._survivor_rounds(team, place) if team.leads else None
        group = dist.new_group(list(self.layout.leaders), timeout=self.strategy.patience, backend="gloo")
        return MeanRounds(self.algorithm, replica, group=group) if team.leads else None

    def _survivor_rounds(self, team: Team, place: MeetingPlace, *, joins: bool = False) -> SurvivorRounds:
        """Rounds that go on without trainers that die: the group is made in the first of them."""
        own: Any = _get_default_store()  # torch's stubs lack what copies a connection
        store = PrefixStore("shadowsync", own.clone())
        timeout, cancelled = self.strategy.patience, self.strategy.run_servers.is_asked_to_end
        council = Council(
            store,
            rank=self.strategy.global_rank,
            host=LOOPBACK if self.strategy.launches else "",
            lost=place.lost,
            timeout=timeout,
            cancelled=cancelled,
        )
        return SurvivorRounds(self.algorithm, team.replica.flat, council=council, joins=joins)

    def _succeed(self) -> Driver | None:
        """The driver of a worker whose trainer's first one has died."""
        if self._run is None or self._run.num_trainers == 1:
            return None
        team = self._run.team
        if self.algorithm.topology is Topology.CENTRAL:
            pieces = find_center(self.strategy.stores(SYNC), team.replica.size)
            return self._driver(CenterRounds(self.algorithm, team.replica.flat, pieces=pieces), team)
        place = self.strategy.run_servers.meeting_place()
        assert place is not None  # nobody else survives a worker
        return self._driver(self._survivor_rounds(team, place, joins=True), team)

    # --- Training ----------------------------------------------------------------------------------------------------

    def begin_batch(self, batch_idx: int) -> None:
        """Hear of errors beside training; go on after an epoch's end."""
        assert self._run is not None
        self._run.begin_batch()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], make: Callable[..., Any]) -> Any:
        """Step, count, and run the foreground's round where one is due."""
        assert self._run is not None
        ours = nullcontext() if self._direct_steps is None else self._direct_steps.ours()
        with ours, self._run.team.update(closure) as compute:
            output = make(optimizer, compute)
        self._run.count_step()
        return output

    # --- One set of weights ------------------------------------------------------------------------------------------

    def settle(self, flush_rows: Callable[[], None], *, goes_on: bool) -> None:
        """Swap the average of the replicas in, and rank 0's buffers; nothing is synchronised meanwhile."""
        assert self._run is not None
        self._goes_on = goes_on and self._run.is_training and not self._run.is_averaged
        averages = self.strategy.averages
        self._run.show_average(flush=flush_rows, meet=None if averages is None else averages.meet)

    def resume(self) -> None:
        """Go on, unless the epoch is over: what its end saves is then what was validated."""
        if self._run is None or not self._run.is_averaged:
            return
        is_over = self.strategy.task.trainer.fit_loop.epoch_loop._is_training_done
        if not self.strategy.reduce_boolean_decision(is_over):  # for every rank: some may have a batch left
            self._run.resume()

    def finish(self) -> None:
        """Let callbacks find what validation sees, each rank in memory of its own."""
        if self._run is not None:
            self._run.detach()

    def end(self) -> None:
        """Make all replicas the final model, but for parameters that a callback has changed: those are rank 0's."""
        if self._run is not None and self._run.is_training:
            self._run.end(average=self.final == "average")

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    @property
    def is_spread(self) -> bool:  # noqa: D102 - inherited
        return self._run is not None and self._run.is_training and self._run.num_trainers > 1

    def keep(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The average of the replicas, in memory of its own; keep what goes beside it, and train on."""
        run = self._run
        if run is None:
            return tensors
        if run.is_training:
            saves = self.strategy.is_global_zero or self.strategy.run_servers.first_may_die
            self._saved = run.sync_state() if saves else None
            self._saved_trainer = run.trainer_state(self.strategy.optimizers)
        tensors = {
            name: value.clone() if isinstance(value, Tensor) and run.team.replica.holds(value) else value
            for name, value in tensors.items()
        }
        if self._goes_on:
            self._goes_on = False
            run.resume()
        return tensors

    def state(self) -> dict[str, Any]:
        """The algorithm's memory, with its name, and with the centre."""
        return {CHECKPOINT_KEY: self._saved} if self._saved else {}

    def own_state(self) -> dict[str, Any]:
        """The state of this rank's trainer that is its own, where it is the trainer's first."""
        if self._saved_trainer is None:
            return {}
        index = self.layout.trainer_of(self.strategy.global_rank)
        return {CHECKPOINT_KEY: {"trainer": index, **self._saved_trainer}}

    def load_own(self, path: Any, loaded: dict[str, Any], *, weights_only: bool) -> None:
        """Take what this trainer had; a trainer that the saved run had not starts from the average."""
        wanted = self.layout.trainer_of(self.strategy.global_rank)
        self._restored, self._restored_trainer = loaded.get(CHECKPOINT_KEY, {}), None
        kept = read_own(path, CHECKPOINT_KEY, {"trainer": wanted}, expected=wanted, weights_only=weights_only)
        if kept is not None:
            loaded["optimizer_states"] = kept["optimizer_states"]  # instead of the first trainer's
            self._restored_trainer = kept

    # --- Telemetry and the end ---------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Synchronisation and staleness of this process so far; see ``docs/settings/shadowsync.md`` for each name."""
        return {} if self._run is None else self._run.telemetry()

    @property
    def exchanged_bytes(self) -> int:  # noqa: D102 - inherited
        return 0 if self._run is None else self._run.exchanged_bytes

    def stop(self) -> None:
        """Stop the shadow thread and leave the shared memory."""
        if self._run is not None:
            self._run.close(succeeded=self.strategy.succeeded)
        if self._direct_steps is not None:
            self._direct_steps.remove()
        super().stop()
