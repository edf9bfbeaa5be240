"""ShadowSync: replicas that train on their own and are kept together in the background."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, get_args

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.checkpoints import is_folder, read_extras
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.placement import ClusterLayout, chunk_evenly
from lightning_recsys.renamed import renamed_arguments
from lightning_recsys.stores.interfaces import DenseStore
from lightning_recsys.strategies.common.averaged_copies import refuse_averages_in_shared_memory
from lightning_recsys.strategies.common.schedules import (
    refuse_clocks,
    refuse_different_schedules,
    refuse_saving_by_steps,
)
from lightning_recsys.strategies.common.served import EMBEDDING, ServedStrategy, require_one_of, require_positive
from lightning_recsys.strategies.shadowsync.drivers import Driver, ForegroundHook, ShadowThread
from lightning_recsys.strategies.shadowsync.replica import Replica, share, share_optimizer_state
from lightning_recsys.strategies.shadowsync.rounds import CenterRounds, MeanRounds, Rounds
from lightning_recsys.strategies.shadowsync.standstill import Standstill
from lightning_recsys.sync import RoundSchedule, SyncAlgorithm, Topology, make_algorithm

RoundsIn = Literal["background", "foreground"]
Final = Literal["trainer0", "average"]

CHECKPOINT_KEY = "shadowsync"
CENTER = "center"  # in checkpoints,
CENTER_STORE = "sync-center"  # and on sync servers, where no path of a module can be the same
STALENESS_WINDOW = 1000  # updates whose staleness is kept

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


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
        interval: Seconds from one round to the next: in the background instead of as often as 0.35 % of a core allows,
            in the foreground instead of ``gap``.
        eta: BMUF's step size; ``None`` is its default, 1.
        block_momentum: BMUF's momentum; ``None`` is its default, 0.
        nesterov: BMUF's look-ahead; ``None`` is its default, off.
        num_embedding_servers: Servers for rows.
        num_sync_servers: Servers for the centre of ``easgd``, each with an equal part of it; 1 where there is none.
        final: What the trained model is: ``trainer0``'s replica, or the ``average`` of all.
        **kwargs: As for :class:`~lightning_recsys.strategies.common.served.ServedStrategy`, such as
            ``table_placement``.

    Raises:
        ValueError: an argument is out of range, or does not go with another.

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
        num_embedding_servers: int = 1,
        num_sync_servers: int = 1,
        final: Final = "trainer0",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_one_of("rounds", rounds, get_args(RoundsIn))
        require_one_of("final", final, get_args(Final))
        require_positive("num_trainers", num_trainers)
        require_positive("workers_per_trainer", workers_per_trainer)
        require_positive("gap", gap)
        require_positive("num_embedding_servers", num_embedding_servers)
        require_positive("num_sync_servers", num_sync_servers)
        if interval is not None and not 0 <= interval < float("inf"):
            raise ValueError(f"strategy.interval must be a finite number of seconds, at least 0, got {interval}.")
        options = {"alpha": alpha, "eta": eta, "block_momentum": block_momentum, "nesterov": nesterov}
        self.algorithm = make_algorithm(algorithm, options) if isinstance(algorithm, str) else algorithm
        if num_sync_servers > 1 and self.algorithm.topology is not Topology.CENTRAL:
            raise ValueError(
                f"strategy.num_sync_servers={num_sync_servers} means nothing to strategy.algorithm="
                f"{algorithm if isinstance(algorithm, str) else type(algorithm).__name__}, whose trainers average among"
                " themselves: only an algorithm with a centre, such as easgd, has sync servers. Leave"
                " strategy.num_sync_servers out."
            )
        self.num_trainers = num_trainers
        self.workers_per_trainer = workers_per_trainer
        self.rounds: RoundsIn = rounds
        self.gap = gap
        self.interval = interval
        self.num_embedding_servers = num_embedding_servers
        self.num_sync_servers = num_sync_servers
        self.final: Final = final
        self._reset()

    def _reset(self) -> None:
        self._replica: Replica | None = None
        self._leaders: Any = None  # process group of the trainers' first workers, for rounds that are all-reduces
        self._driver: Driver | None = None
        self._training = False
        self._averaged = False  # the average of the replicas stands in their place,
        self._own_weights: Tensor | None = None  # and a leader keeps its replica here
        self._finished = False  # training is; callbacks may change what they find in the model
        self._restored: dict[str, Any] | None = None
        self._restored_trainer: dict[str, Any] | None = None
        self._saved: dict[str, Any] = {}
        self._saved_trainer: dict[str, Any] | None = None
        self._iterations: Any = None  # of each worker of this trainer; a NumPy view of what they share
        self._since_round: Any = None  # of each worker, its steps since its last round in the foreground; shared, too
        self._standstill: Standstill | None = None  # where a round needs all workers of a trainer to hold still
        self._others_before: int | None = None
        self._staleness: deque[int] = deque(maxlen=STALENESS_WINDOW)

    def __getstate__(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        fresh._reset()
        return super().__getstate__() | fresh.__dict__

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
        devices = self.parallel_devices or []
        if any(device.type != "cpu" for device in devices):
            raise ValueError("ShadowSyncStrategy trains in shared memory, on CPUs: set trainer.accelerator=cpu.")
        started = self._started_by_torchrun()
        if len(devices) == 1:  # also what Lightning makes of devices="auto" on a CPU
            wanted = self.workers_per_trainer if self.num_trainers is None else self.layout.ranks_per_node
            self.parallel_devices = [torch.device("cpu")] * (started or wanted)
        layout = self.layout
        have = started or self.num_processes
        if have != layout.ranks_per_node:
            what = f"torchrun --nproc-per-node={have}" if started else f"trainer.devices={have}"
            raise ValueError(
                f"strategy.num_trainers={layout.num_trainers} with strategy.workers_per_trainer="
                f"{self.workers_per_trainer} needs {layout.ranks_per_node} processes on each of {self.num_nodes} nodes,"
                f" but there is {what}. Set it to {layout.ranks_per_node}, or change the number of trainers or of nodes"
                " (trainer.num_nodes)."
            )
        super().set_world_ranks()

    def _started_by_torchrun(self) -> int | None:
        """Processes of this node, where ``torchrun`` has started them."""
        environment = self.cluster_environment
        return int(os.environ["LOCAL_WORLD_SIZE"]) if isinstance(environment, TorchElasticEnvironment) else None

    @property
    def trainer_index(self) -> int:
        """The trainer that this process works for."""
        return self.layout.trainer_of(self.global_rank)

    @property
    def _leads(self) -> bool:
        return self.layout.worker_of(self.global_rank) == 0

    @property
    def _synchronises(self) -> bool:
        """A single trainer has nobody to be synchronised with."""
        return self.layout.num_trainers > 1 and self._replica is not None and self._replica.size > 0

    def server_specs(self) -> list[ServerSpec]:
        """Embedding servers, and sync servers where the algorithm has a centre."""
        specs = [ServerSpec(EMBEDDING, index) for index in range(self.num_embedding_servers)]
        if self.algorithm.topology is Topology.CENTRAL and self.layout.num_trainers > 1:
            specs += [ServerSpec("sync", index) for index in range(self.num_sync_servers)]
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
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        replica = Replica((name, parameter) for name, parameter in named if parameter.requires_grad)
        initial = {
            "replica": torch.zeros(replica.size),
            "iterations": torch.zeros(self.workers_per_trainer, dtype=torch.int64),
            "since_round": torch.zeros(self.workers_per_trainer, dtype=torch.int64),
        }
        shared = share(initial, team_size=self.workers_per_trainer)
        replica.attach(shared["replica"])
        self._replica, self._iterations = replica, shared["iterations"].numpy()
        self._since_round = shared["since_round"].numpy()
        if self.layout.num_trainers > 1 and self.algorithm.topology is Topology.ALL_REDUCE:
            self._leaders = dist.new_group(list(self.layout.leaders), timeout=self._timeout, backend="gloo")

    def on_train_start(self) -> None:
        """Share the optimizer state and begin to synchronise."""
        super().on_train_start()
        assert self.lightning_module is not None
        refuse_clocks(self.lightning_module.trainer)
        refuse_different_schedules(self.lightning_module.trainer)
        if self.workers_per_trainer > 1:
            share_optimizer_state(self.optimizers, team_size=self.workers_per_trainer)
        if self._synchronises and self.rounds == "foreground":
            assert self._changes is not None
            self._changes.before_train_epoch_end(self._leave_rounds)
            self._changes.before_validation_data(self._leave_rounds)
            if self.algorithm.topology is Topology.ALL_REDUCE and self.workers_per_trainer > 1:
                self._standstill = Standstill.open(team_size=self.workers_per_trainer)
        self._driver = self._make_driver() if self._synchronises else None
        self._restore_replica()
        self._training = True
        self.barrier("all replicas are there")
        self._start_driver()

    def _make_driver(self) -> Driver | None:
        assert self._replica is not None
        self.algorithm.start(self._replica.flat)
        restored = self._restored or {}
        if restored.get("algorithm") == type(self.algorithm).__name__:
            self.algorithm.load_state_dict(restored["state"])
        rounds: Rounds
        if self.algorithm.topology is Topology.CENTRAL:
            pieces = self._open_center(restored.get(CENTER, self._replica.flat))
            if not self._leads and self.rounds == "background":
                return None
            rounds = CenterRounds(self.algorithm, self._replica.flat, pieces=pieces)
        else:
            if not self._leads:
                return None
            rounds = MeanRounds(self.algorithm, self._replica.flat, group=self._leaders)
        if self.rounds == "background":
            return ShadowThread(rounds, interval=self.interval)
        worker = self.layout.worker_of(self.global_rank)
        steps = self._since_round[worker : worker + 1]
        schedule = RoundSchedule(gap=self.gap, interval=self.interval, steps=steps)
        alone = nullcontext if self._standstill is None else self._standstill.alone
        return ForegroundHook(rounds, schedule=schedule, alone=alone)

    def _open_center(self, initial: Tensor) -> list[DenseStore]:
        """The centre's pieces; the first rank makes them, the others find them."""
        servers = self.stores("sync")
        chunks = list(zip(servers, chunk_evenly(initial.numel(), len(servers)), strict=False))
        if self.is_global_zero:
            for server, (start, stop) in chunks:
                with suppress(KeyError):
                    server.remove(CENTER_STORE)  # left by a run before, where servers outlive runs
                server.create_dense_store(CENTER_STORE, initial[start:stop].clone())
        self.barrier("the centre is there")
        return [server.dense_store(CENTER_STORE) for server, _ in chunks]

    # --- Training ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Hear of errors beside training; go on after an epoch's end."""
        super().on_train_batch_start(batch, batch_idx)
        if self._averaged:
            self._resume()
        if self._driver is not None:
            self._driver.check()
            if not self._driver.is_active:  # since the last epoch's end
                self._driver.start()
        if self._others_before is None:
            self._others_before = self._iterations_of_others()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, count, and run the foreground's round where one is due."""
        still = self._standstill
        with nullcontext(closure) if still is None else still.update_after(closure) as compute:
            output = super().optimizer_step(optimizer, compute, model, **kwargs)
        if self._training:
            self._iterations[self.layout.worker_of(self.global_rank)] += 1
            if self._others_before is not None:
                self._staleness.append(self._iterations_of_others() - self._others_before)
                self._others_before = None
            if self._driver is not None:
                self._driver.after_step()
        return output

    def _iterations_of_others(self) -> int:
        own = self._iterations[self.layout.worker_of(self.global_rank)]
        return int(self._iterations.sum() - own)

    def _start_driver(self) -> None:
        if self._driver is not None:
            self._driver.start()

    def _leave_rounds(self) -> None:
        """In the foreground, before this rank waits for others: take part in the rounds of those who still train."""
        if self._driver is not None and self.rounds == "foreground":
            self._driver.stop()

    def _pause(self) -> None:
        """Wait until every rank is here and no round is under way; all updates are where they belong then."""
        if self._tables is not None:
            self._tables.flush()
        self._leave_rounds()
        self.barrier("everybody has stopped training")  # shadow threads go on meanwhile
        if self._driver is not None:
            self._driver.stop()
        self.barrier("no round is under way")

    def _resume(self) -> None:
        """Swap the replicas back in and go on; all ranks call this together."""
        self.barrier("nobody needs the average any more")
        self._swap_average_out()
        self.barrier("all replicas are back")
        self._start_driver()

    # --- One set of weights ------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Swap the average of the replicas in, and rank 0's buffers; nothing is synchronised meanwhile."""
        if self._training:
            self._pause()
            self._swap_average_in()

    def on_validation_end(self) -> None:
        """Go on, unless the epoch is over: what its end saves is then what was validated."""
        if self._averaged and not self._epoch_is_over():
            self._resume()

    def _epoch_is_over(self) -> bool:
        """For every rank: some may have a batch left."""
        assert self.lightning_module is not None
        return self.reduce_boolean_decision(self.lightning_module.trainer.fit_loop.epoch_loop._is_training_done)

    def finish_training(self) -> None:
        """Let callbacks find what validation sees, each rank in memory of its own."""
        if not self._training or self._finished:
            return
        if not self._averaged:
            self._pause()
            self._swap_average_in()
        assert self._replica is not None
        self._replica.detach()
        self._finished = True

    def on_train_end(self) -> None:
        """Make all replicas the final model, but for parameters that a callback has changed: those are rank 0's."""
        if not self._training:
            return
        self.finish_training()
        assert self._replica is not None
        seen = self._replica.flat
        final = (seen if self.final == "average" or self._own_weights is None else self._own_weights).clone()
        self._replica.merge_changes(final)
        dist.broadcast(final, src=0)
        self._replica.assign(final)
        self._replica.attach(seen)
        self._training = self._finished = self._averaged = False
        self._own_weights = None
        self._take_buffers()
        self.barrier("all replicas are the final model")

    def _average(self) -> Tensor:
        """The mean of all replicas; all ranks call this together, and each trainer's first worker brings its own."""
        assert self._replica is not None
        mean = self._replica.flat.clone() if self._leads else torch.zeros_like(self._replica.flat)
        dist.all_reduce(mean)
        return mean.div_(self.layout.num_trainers)

    def _swap_average_in(self) -> None:
        if self._synchronises:
            assert self._replica is not None
            average = self._average()
            if self._leads:
                self._own_weights = self._replica.flat.clone()
                self._replica.flat.copy_(average)
        if self._averages is not None:
            self._averages.meet()
        self._take_buffers()
        self._averaged = True
        self.barrier("the average is in place")

    def _swap_average_out(self) -> None:
        if self._own_weights is not None:  # a leader's
            assert self._replica is not None
            self._replica.flat.copy_(self._own_weights)
        self._averaged, self._own_weights = False, None

    def _take_buffers(self) -> None:
        """Buffers, such as the statistics of batch norms, are each worker's own until now: take rank 0's."""
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers():
            dist.broadcast(buffer, src=0)

    @contextmanager
    def _average_in_place(self) -> Iterator[None]:
        """The average as the model's weights, whether it stands there already or training is interrupted for it."""
        if not self._training or self._averaged:
            yield
            return
        self._pause()
        self._swap_average_in()
        yield
        self._resume()

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """While training, the average of the replicas, which is what validation sees; all ranks call this."""
        with self._average_in_place():
            if self._training:
                self._saved, self._saved_trainer = self._sync_state(), self._trainer_state()
            state = super().lightning_module_state_dict()
            if self._replica is None:
                return state
            return {
                name: value.clone() if isinstance(value, Tensor) and self._replica.holds(value) else value
                for name, value in state.items()
            }

    def _sync_state(self) -> dict[str, Any]:
        if self._driver is None or not self.is_global_zero:
            return {}
        state = {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}
        saved: dict[str, Any] = {"algorithm": type(self.algorithm).__name__, "state": state}
        if isinstance(self._driver.rounds, CenterRounds):
            saved[CENTER] = self._driver.rounds.pull_center()
        return saved

    def _trainer_state(self) -> dict[str, Any] | None:
        """What each trainer has of its own, and its first worker adds to a checkpoint."""
        if not (self._synchronises and self._leads):
            return None
        assert self._replica is not None
        replica = self._replica.flat if self._own_weights is None else self._own_weights
        return {
            "replica": replica.clone(),
            "optimizer_states": [x.state_dict() for x in self.optimizers],
            "since_round": torch.from_numpy(self._since_round).clone(),
        }

    @property
    def saves_folders(self) -> bool:  # noqa: D102 - inherited
        return super().saves_folders or (self._training and self._synchronises)

    def checkpoint_extras(self) -> dict[str, Any] | None:  # noqa: D102 - inherited
        return self._saved_trainer

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, with the algorithm's memory and every trainer's replica and optimizers."""
        if "optimizer_states" not in checkpoint:  # weights only
            self._saved_trainer = None
        elif self._saved:
            checkpoint[CHECKPOINT_KEY] = self._saved
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, with what this trainer had; a trainer that the saved run had not starts from the average."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if is_folder(checkpoint_path):
            trusted = weights_only is False
            self._restored_trainer = read_extras(checkpoint_path, self.trainer_index, weights_only=not trusted)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and keep the algorithm's memory for the start of training."""
        self._restored = checkpoint.get(CHECKPOINT_KEY)
        super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this trainer's own where the checkpoint has it, else the first trainer's."""
        super().load_optimizer_state_dict(self._restored_trainer or checkpoint)

    def _restore_replica(self) -> None:
        if self._restored_trainer is not None and self._synchronises and self._leads:
            assert self._replica is not None
            self._replica.flat.copy_(self._restored_trainer["replica"])
            saved = self._restored_trainer["since_round"].numpy()
            count = min(len(saved), self.workers_per_trainer)
            self._since_round[:count] = saved[:count]
        if self._leaders is not None and self._leads:
            # A trainer that the saved run had not would come to its rounds at other steps than those that wait for it.
            steps = torch.from_numpy(self._since_round[:1])
            dist.broadcast(steps, src=self.layout.leaders[0], group=self._leaders)

    # --- Telemetry and the end ---------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Synchronisation, staleness and traffic of this process so far; see ``docs/shadowsync.md`` for each name."""
        values: dict[str, Any] = {}
        driver = self._driver
        exchanged = 0
        if driver is not None and driver.rounds.count:
            rounds = driver.rounds
            per_worker = self.rounds == "foreground" and self.algorithm.topology is Topology.CENTRAL
            steps = self._iterations[self.layout.worker_of(self.global_rank)] if per_worker else self._iterations.sum()
            values["sync/gap"] = float(steps / rounds.count)
            values["sync/rounds"] = rounds.count / max(driver.active_seconds, 1e-9)
            if rounds.divergence is not None:
                values["sync/divergence"] = rounds.divergence
            exchanged = rounds.exchanged_bytes
        if self.workers_per_trainer > 1 and self._staleness:
            values["staleness/hogwild"] = torch.tensor(self._staleness, dtype=torch.float32)
        served = super().telemetry()
        for name in ("comm/sent_bytes", "comm/received_bytes"):
            served[name] += exchanged
        return values | served

    def teardown(self) -> None:
        """Stop the shadow thread and leave the shared memory; then all that the base class does."""
        if self._driver is not None:
            self._driver.abandon()
        if self._standstill is not None:
            self._standstill.close()
            self._standstill = None
        if self._replica is not None:
            self._replica.detach()
        if self._leaders is not None and self._succeeded() and dist.is_initialized():
            dist.destroy_process_group(self._leaders)
        super().teardown()
        self._reset()
