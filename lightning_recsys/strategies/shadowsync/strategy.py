"""ShadowSync: replicas that train on their own and are kept together in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim import Optimizer

from lightning_recsys.checkpoints import read_extras
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.placement import ClusterLayout
from lightning_recsys.renamed import renamed_arguments
from lightning_recsys.strategies.common.averaged_copies import refuse_averages_in_shared_memory
from lightning_recsys.strategies.common.direct_steps import DirectSteps
from lightning_recsys.strategies.common.schedules import refuse_saving_by_steps
from lightning_recsys.strategies.common.served import ServedStrategy
from lightning_recsys.strategies.common.settings import (
    chosen_algorithm,
    refuse_meaningless,
    require_one_of,
    require_whole,
)
from lightning_recsys.strategies.common.workers.ranks import check_ranks, take_ranks
from lightning_recsys.strategies.shadowsync.drivers import Driver, ForegroundHook, ShadowThread
from lightning_recsys.strategies.shadowsync.rounds import (
    CENTER,
    SYNC,
    CenterRounds,
    MeanRounds,
    Rounds,
    find_center,
    open_center,
)
from lightning_recsys.strategies.shadowsync.run import TrainerRun
from lightning_recsys.strategies.shadowsync.survivors import Council, SurvivorRounds
from lightning_recsys.strategies.shadowsync.team import Team
from lightning_recsys.sync import RoundSchedule, SyncAlgorithm, Topology

if TYPE_CHECKING:
    from lightning_recsys.parameter_server.meetings import MeetingPlace

RoundsIn = Literal["background", "foreground"]
Final = Literal["trainer0", "average"]

CHECKPOINT_KEY = "shadowsync"


@dataclass
class _Kept:
    """What a checkpoint has besides Lightning's own.

    Args:
        sync: The algorithm's memory, with its name, and with the centre; in rank 0's part, for all.
        trainer: What the trainer has of its own.
    """

    sync: Mapping[str, Any] | None = None
    trainer: dict[str, Any] | None = None


class ShadowSyncStrategy(ServedStrategy):
    r"""Trainers with a dense replica each, kept together beside training; embedding rows in stores, once for all.

    A *trainer* has ``workers_per_trainer`` processes, Lightning's ranks, which train one replica of the dense part and
    one optimizer state in shared memory, without a lock (Hogwild). Rows lie in stores on the embedding servers, where
    all workers read and write them without a lock. A shadow thread in each trainer's first worker runs round after
    round of a :class:`~lightning_recsys.sync.SyncAlgorithm` and knows nothing of training.

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
        min_workers: Workers other than the first may die as long as so many are left.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.common.served.ServedStrategy`, such as
            ``table_placement``.

    Raises:
        ValueError: an argument is out of range, or does not go with another.
        TypeError: an argument is of another type.

    Communication: in the background, per round and trainer, the replica to the sync servers and the centre back, or one
    all-reduce among the trainers. Training itself communicates with the embedding servers only.
    Reference: Zheng et al. 2020, "ShadowSync: performing synchronization in the background for highly scalable
    distributed training".
    Differs from the paper: workers are processes, not threads; a trainer that finishes early goes on with its rounds
    until all have finished; a single trainer does not synchronise.

    >>> from pytorch_lightning import Trainer
    >>> strategy = ShadowSyncStrategy(num_trainers=2, workers_per_trainer=2)
    >>> Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False).world_size
    4
    """

    strategy_name = "shadowsync"
    asynchronous = True
    wraps_model = False

    @renamed_arguments(mode="rounds")
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
        min_workers: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_one_of("rounds", rounds, get_args(RoundsIn))
        require_one_of("final", final, get_args(Final))
        require_whole("num_trainers", num_trainers, optional=True)
        require_whole("workers_per_trainer", workers_per_trainer)
        require_whole("gap", gap)
        require_whole("min_workers", min_workers)
        require_whole("num_sync_servers", num_sync_servers)
        options = {"alpha": alpha, "eta": eta, "block_momentum": block_momentum, "nesterov": nesterov}
        self.algorithm = chosen_algorithm(ShadowSyncStrategy, algorithm, options, interval=interval)
        if rounds == "background":
            why = "with strategy.rounds=background, whose rounds go by time (strategy.interval) and not by steps"
            refuse_meaningless(ShadowSyncStrategy, {"gap": gap}, why)
        elif interval is not None:
            refuse_meaningless(
                ShadowSyncStrategy, {"gap": gap}, f"beside strategy.interval={interval}, its replacement"
            )
        if self.algorithm.topology is not Topology.CENTRAL:
            name = algorithm if isinstance(algorithm, str) else type(algorithm).__name__
            why = (
                f"to strategy.algorithm={name}, whose trainers average among themselves: only an algorithm with a"
                " centre, such as easgd, has sync servers"
            )
            refuse_meaningless(ShadowSyncStrategy, {"num_sync_servers": num_sync_servers}, why)
        self.num_trainers = num_trainers
        self.workers_per_trainer = workers_per_trainer
        self.rounds: RoundsIn = rounds
        self.gap = gap
        self.interval = interval
        self.num_sync_servers = num_sync_servers
        self.final: Final = final
        self.min_workers = min_workers

    def _reset(self) -> None:
        super()._reset()
        self._run: TrainerRun | None = None  # from the model's setup to the teardown of a fit
        self._direct_steps: DirectSteps | None = None  # while it trains with rounds in the foreground
        self._restored = _Kept()  # of the checkpoint that was read last, for the start of training
        self._saved = _Kept()  # for the checkpoint that is being written, from the model's state to the end of it

    # --- Who is who --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> ClusterLayout:
        """Which rank works for which trainer; known once a ``Trainer`` has the strategy.

        Raises:
            ValueError: the ranks do not make up whole trainers.
        """
        num_trainers = self.num_trainers
        if num_trainers is None:
            ranks = self.num_nodes * self.num_processes
            num_trainers, rest = divmod(ranks, self.workers_per_trainer)
            if rest or not num_trainers:
                raise ValueError(
                    f"{ranks} ranks are no whole number of trainers with strategy.workers_per_trainer="
                    f"{self.workers_per_trainer}. Set strategy.num_trainers, and leave trainer.devices out."
                )
        return ClusterLayout(num_trainers, self.workers_per_trainer, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Take as many processes as the trainers need.

        Raises:
            ValueError: ``trainer.devices`` or ``torchrun`` says otherwise, or the accelerator is no CPU.
        """
        take_ranks(self, self.workers_per_trainer if self.num_trainers is None else self.layout.ranks_per_node)
        layout = self.layout
        settings = (
            f"strategy.num_trainers={layout.num_trainers} with strategy.workers_per_trainer={self.workers_per_trainer}"
        )
        check_ranks(self, layout.ranks_per_node, settings=settings, what="trainers")
        super().set_world_ranks()

    def server_specs(self) -> list[ServerSpec]:
        """Embedding servers, and sync servers where the algorithm has a centre."""
        specs = super().server_specs()
        if self.algorithm.topology is Topology.CENTRAL and self.layout.num_trainers > 1:
            specs += [ServerSpec(SYNC, index) for index in range(self.num_sync_servers)]
        return specs

    # --- The replica -------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """As the base class, and refuse callbacks that would swap weights in shared memory, or wait within an epoch.

        Raises:
            ValueError: a setting of the trainer, or a callback, does not go with workers that run free.
        """
        if trainer.state.fn == TrainerFn.FITTING and self.workers_per_trainer > 1:
            refuse_averages_in_shared_memory(
                trainer, setting=f"strategy.workers_per_trainer={self.workers_per_trainer}"
            )
        waits = (
            self.rounds == "foreground"
            and self.algorithm.topology is Topology.ALL_REDUCE
            and self.layout.num_trainers > 1
        )
        if trainer.state.fn == TrainerFn.FITTING and waits and self.interval is not None:
            refuse_saving_by_steps(trainer, setting=f"strategy.interval={self.interval}")
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Start all replicas alike, each in its trainer's memory."""
        super().configure_ddp()
        team, layout = Team(self.task, layout=self.layout, rank=self.global_rank), self.layout
        # A single trainer has nobody to be synchronised with.
        num_trainers = layout.num_trainers if team.replica.size else 1
        self._run = TrainerRun(team, self.task, num_trainers=num_trainers, barrier=self.barrier)

    def on_train_start(self) -> None:
        """Share the optimizer state and begin to synchronise."""
        super().on_train_start()
        assert self.changes is not None
        run = self._run
        assert run is not None
        run.team.share_optimizers(self.optimizers)
        self.changes.before_train_epoch_end(run.bring_back)
        self.changes.before_validation_data(run.bring_back)
        rounds = None
        if run.num_trainers > 1:
            # The algorithm, and the centre, start at the average, which is what a checkpoint has as the model's
            # weights. Only then is the average replaced by each trainer's own replica.
            rounds = self._make_rounds(run.team)
            run.team.restore(self._restored.trainer)
        if self.rounds == "foreground" and run.num_trainers > 1:
            what = "under strategy=shadowsync makes no round with rounds=foreground: nobody counts it"
            self._direct_steps = DirectSteps(self.optimizers, consequence=what)
            self.changes.before_train_epoch_end(run.stop_before_others)
            self.changes.before_validation_data(run.stop_before_others)
            if self.algorithm.topology is Topology.ALL_REDUCE:
                self._meet_at_equal_steps(run)
        run.start(None if rounds is None else self._driver(rounds, run.team), successor=self._succeed)

    def _meet_at_equal_steps(self, run: TrainerRun) -> None:
        """Let every trainer go on from rank 0's step, and make others' rounds while it waits for work.

        A trainer that a resumed run had not would come to its rounds at other steps than those that wait for it.
        """
        steps = torch.from_numpy(run.team.own_since_round.copy())
        dist.broadcast(steps, src=0)
        if run.team.leads:
            run.team.own_since_round[:] = steps.numpy()
        if self._dealer is not None:
            self._dealer.while_waiting = run.standing_in

    def _driver(self, rounds: Rounds, team: Team) -> Driver:
        if self.rounds == "background":
            return ShadowThread(rounds, interval=self.interval)
        schedule = RoundSchedule(gap=self.gap, interval=self.interval, steps=team.own_since_round)
        return ForegroundHook(rounds, schedule=schedule, alone=team.alone)

    def _make_rounds(self, team: Team) -> Rounds | None:
        """The algorithm's, started; ``None`` where the trainer's first worker makes them for all."""
        replica, restored = team.replica.flat, self._restored.sync or {}
        self.algorithm.start(replica)
        if restored.get("algorithm") == type(self.algorithm).__name__:
            self.algorithm.load_state_dict(restored["state"])
        if self.algorithm.topology is Topology.CENTRAL:
            initial = restored.get(CENTER, replica)
            pieces = open_center(self.stores(SYNC), initial, is_first=self.is_global_zero, barrier=self.barrier)
            every_worker = self.rounds == "foreground"
            return CenterRounds(self.algorithm, replica, pieces=pieces) if team.leads or every_worker else None
        if self.rounds == "foreground":
            team.stand_still_for_rounds()
        if (place := self.run_servers.meeting_place()) is not None:
            return self._survivor_rounds(team, place) if team.leads else None
        group = dist.new_group(list(self.layout.leaders), timeout=self._timeout, backend="gloo")
        return MeanRounds(self.algorithm, replica, group=group) if team.leads else None

    def _survivor_rounds(self, team: Team, place: MeetingPlace, *, joins: bool = False) -> SurvivorRounds:
        """Rounds that go on without trainers that die: the group is made in the first of them."""
        own: Any = _get_default_store()  # torch's stubs lack what copies a connection
        store = PrefixStore("shadowsync", own.clone())
        timeout, cancelled = self._timeout or default_pg_timeout, self.run_servers.is_asked_to_end
        council = Council(store, rank=self.global_rank, lost=place.lost, timeout=timeout, cancelled=cancelled)
        return SurvivorRounds(self.algorithm, team.replica.flat, council=council, joins=joins)

    def _succeed(self) -> Driver | None:
        """The driver of a worker whose trainer's first one has died."""
        if self._run is None or self._run.num_trainers == 1:
            return None
        team = self._run.team
        if self.algorithm.topology is Topology.CENTRAL:
            pieces = find_center(self.stores(SYNC), team.replica.size)
            return self._driver(CenterRounds(self.algorithm, team.replica.flat, pieces=pieces), team)
        place = self.run_servers.meeting_place()
        assert place is not None  # nobody else survives a worker
        return self._driver(self._survivor_rounds(team, place, joins=True), team)

    # --- Training ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Hear of errors beside training; go on after an epoch's end."""
        super().on_train_batch_start(batch, batch_idx)
        assert self._run is not None
        self._run.begin_batch()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step, count, and run the foreground's round where one is due."""
        assert self._run is not None
        ours = nullcontext() if self._direct_steps is None else self._direct_steps.ours()
        with ours, self._run.team.update(closure) as compute:
            output = super().optimizer_step(optimizer, compute, *args, **kwargs)
        self._run.count_step()
        return output

    # --- One set of weights ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Swap the average of the replicas in, and rank 0's buffers; nothing is synchronised meanwhile."""
        if self._run is not None:
            flush = None if self.tables is None else self.tables.flush
            self._run.show_average(flush=flush, meet=None if self.averages is None else self.averages.meet)

    def on_validation_end(self) -> None:
        """Go on, unless the epoch is over: what its end saves is then what was validated."""
        if self._run is None or not self._run.is_averaged:
            return
        is_over = self.task.trainer.fit_loop.epoch_loop._is_training_done
        if not self.reduce_boolean_decision(is_over):  # for every rank: some may have a batch left
            self._run.resume()

    def finish_training(self) -> None:
        """Let callbacks find what validation sees, each rank in memory of its own."""
        super().finish_training()
        if self._run is not None:
            self._run.detach()

    def on_train_end(self) -> None:
        """Make all replicas the final model, but for parameters that a callback has changed: those are rank 0's."""
        if self._run is not None and self._run.is_training:
            self.finish_training()
            self._run.end(average=self.final == "average")

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """While training, the average of the replicas, which is what validation sees; all ranks call this."""
        run = self._run
        if run is None or not self.succeeded:  # a rank that has failed cannot wait for the others' replicas
            return super().lightning_module_state_dict()
        goes_on = run.is_training and not run.is_averaged
        self.settle()
        if run.is_training:
            sync = run.sync_state() if self.is_global_zero else None
            self._saved = _Kept(sync, run.trainer_state(self.optimizers))
        state = {
            name: value.clone() if isinstance(value, Tensor) and run.team.replica.holds(value) else value
            for name, value in super().lightning_module_state_dict().items()
        }
        if goes_on:
            run.resume()
        return state

    @property
    def saves_folders(self) -> bool:  # noqa: D102 - inherited
        run = self._run
        return super().saves_folders or (run is not None and run.is_training and run.num_trainers > 1)

    def checkpoint_extras(self) -> dict[str, Any] | None:  # noqa: D102 - inherited
        return self._saved.trainer

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, with the algorithm's memory and every trainer's replica and optimizers."""
        if self._saved.sync and "optimizer_states" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = self._saved.sync
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, with what this trainer had; a trainer that the saved run had not starts from the average."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        index = self.layout.trainer_of(self.global_rank)
        trainer = read_extras(checkpoint_path, index, weights_only=weights_only is not False)
        if trainer is not None and "since_round" not in trainer:  # of another strategy, which may have replicas, too
            trainer = None
        if trainer is not None:
            loaded["optimizer_states"] = trainer["optimizer_states"]  # instead of the first trainer's
        self._restored = _Kept(loaded.get(CHECKPOINT_KEY), trainer)
        return loaded

    # --- Telemetry and the end ---------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Synchronisation, staleness and traffic of this process so far; see ``docs/shadowsync.md`` for each name."""
        served = super().telemetry()
        if self._run is None:
            return served
        for name in ("comm/sent_bytes", "comm/received_bytes"):
            served[name] += self._run.exchanged_bytes
        return self._run.telemetry() | served

    def teardown(self) -> None:
        """Stop the shadow thread and leave the shared memory; then all that the base class does."""
        if self._run is not None:
            self._run.close(succeeded=self.succeeded)
            self._run = None
        if self._direct_steps is not None:
            self._direct_steps.remove()
        super().teardown()
