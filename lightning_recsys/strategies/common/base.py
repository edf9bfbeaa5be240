"""The base class of this package's strategies: how their workers start, find their servers and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.strategies.registry import _StrategyRegistry
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_recsys.checkpoints import StoredRows, StoredTensor, let_lightning_read_folders
from lightning_recsys.checkpoints.plugin import WithFolderIO
from lightning_recsys.compression import make_codec
from lightning_recsys.launchers import ForkserverLauncher, Launched, ServerSpec
from lightning_recsys.runtime import fork_between_threads
from lightning_recsys.strategies.common.averaged_copies import AveragedCopies, averaging_callbacks
from lightning_recsys.strategies.common.own_values import OwnValues
from lightning_recsys.strategies.common.refusals import (
    refuse_arguments,
    refuse_other_namespace,
    refuse_other_namespace_in,
    refuse_settings_of_servers,
    refuse_to_fit,
    without_defaults,
)
from lightning_recsys.strategies.common.run.changes import RunChanges
from lightning_recsys.strategies.common.run.checkpoints import RunCheckpoints
from lightning_recsys.strategies.common.run.servers import RunServers, check_servers
from lightning_recsys.strategies.common.schedules import (
    refuse_metrics_of_all_ranks,
    refuse_rows_of_all_ranks,
    refuse_unequal_batches,
)
from lightning_recsys.strategies.common.settings import require_kind, require_one_of, require_whole
from lightning_recsys.strategies.common.stored_rows import dense_parameters, rows_left_out, stored_tensors
from lightning_recsys.strategies.common.workers.living import among_the_living, has_met
from lightning_recsys.strategies.common.workers.meeting import join_process_group
from lightning_recsys.strategies.common.workers.ranks import check_lost_workers, check_started, step_back, take_placed
from lightning_recsys.strategies.parts import DensePart, Rows

if TYPE_CHECKING:  # importing this package is quick; stores and their kernels come with the first use
    from lightning_recsys.parameter_server.meetings import ShareDealer
    from lightning_recsys.stores.interfaces import Stores
    from lightning_recsys.strategies.common.workers.joining import Joining

Transport = Literal["auto", "tcp"]

PATIENCE = timedelta(days=7)  # of a worker that has finished early; those that die are noticed at once


class RecsysStrategy(WithFolderIO, DDPStrategy):
    """The plumbing of a strategy: a subclass says what it does, this class how it lives beside Lightning.

    It is a ``DDPStrategy`` because Lightning knows those: samplers, logging, ``torch.compile`` and barriers work.
    Processes come from a fork server, or from ``torchrun`` or SLURM where these start them. Construction has no side
    effect but that Lightning reads folders from then on (``let_lightning_read_folders``), as it does in workers from
    :meth:`setup_environment` on. The object can be pickled, and :meth:`teardown` may be called without :meth:`setup`,
    and repeatedly.

    Servers, if :meth:`server_specs` asks for any, run beside the workers from before they start until after they end.
    The ranks are workers only.

    Args:
        num_threads: Threads per worker, as in :func:`lightning_recsys.runtime.configure_worker`.
        servers: Endpoints of servers that run already (``tcp://host:port``, a range ``tcp://host:5790-5797``,
            ``ipc:///socket``); nothing is started then, and each of them serves every kind.
        key_file: Keys to ``servers`` on TCP: as ``lightning-recsys-server --make-keys`` writes them, or the token that
            a server on loopback leaves in its folder. Servers that are started here get keys of their own.
        transport: ``auto`` reads and writes through shared memory where a server runs on the same machine; ``tcp``
            never does.
        compression: How embedding rows and their gradients travel between this process and servers: ``none`` as they
            are, ``bf16`` in half the bytes, rounded. Nothing travels, and nothing is rounded, through shared memory.
        store_folder: Where servers started here keep files: a disk if tables exceed memory. Default: shared memory.
        max_restarts: How often each server that dies is started again before it ends the run, or its group.
        server_metrics_port: Port of the metrics of the first server started here; others' are above. Default: none.
        timeout: How long a worker waits for others; by default 30 minutes, and a week where workers are free to fall
            behind.
        **kwargs: As for ``DDPStrategy``, except a start method. One that has its default counts as not given:
            ``LightningCLI`` hands over all of them.

    Attributes:
        dense: Who trains the parameters that are no rows: each process here. A subclass with another one sets it before
            it calls ``super().__init__()``, and is as ``asynchronous`` and wraps the model as that says. Settling,
            checkpoints and refusals are asked of it in ``ServedStrategy`` alone.
        rows: Where the rows of the model's tables live: in the process here, all of them on each rank.
        asynchronous: Workers may be at different steps: nothing waits for all of them between two batches.
        wraps_model: Gradients are averaged by ``DistributedDataParallel``, if there are several workers. Otherwise
            parameters and buffers are broadcast from rank 0 at the start, and gradients stay where they are. A subclass
            where an argument decides either of the two sets it before it calls ``super().__init__()``.
        endpoints: Servers by kind, in index order; in workers, from :meth:`setup_environment` on.
        dealer: Deals this worker its part of each epoch, while it trains, in runs that lease their epochs.
        changes: Temporary patches to Lightning, from :meth:`setup` to :meth:`teardown` of a run that fits.
        averages: What callbacks that average weights keep, in such a run with one of them.
        launches: Whether workers are processes of our launcher, on this machine; there from the start.
        checkpoints: Saves and loads checkpoints whose rows are not in rank 0's memory.
        run_name: Name of this launch, which no other has; empty where the launcher is not ours.
        min_workers: An asynchronous run on our launcher goes on without workers that die as long as so many are left.
        max_replacements: How many of them are replaced, where the dense part can have them.
        launched: How our launcher, or an engine that replaces single workers, has started this process; else ``None``.
        joining: The way of this process into a run that others train, until that is over; else ``None``.

    Raises:
        ValueError: ``max_restarts`` is negative, ``transport`` or ``compression`` is unknown, ``servers`` are no
            endpoints, or a ``key_file`` comes without them.
        TypeError: an argument that nobody has, or that only ``DistributedDataParallel`` could use, or is of another
            type, or an object from ``lightning.pytorch``.
    """

    strategy_name: ClassVar[str]
    asynchronous: bool = False
    wraps_model: bool = True
    min_workers: int = 1
    max_replacements: int = 0
    launched: Launched | None = None
    _has_first_place: bool = False  # the workers before this one have died
    dense: DensePart
    rows: Rows

    def __init__(
        self,
        *,
        num_threads: int = 1,
        servers: Sequence[str] | None = None,
        transport: Transport = "auto",
        compression: str = "none",
        key_file: str | Path | None = None,
        store_folder: str | Path | None = None,
        max_restarts: int = 3,
        server_metrics_port: int | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        require_whole("num_threads", num_threads)
        require_whole("max_restarts", max_restarts, at_least=0, hint="0 starts none again.")
        require_kind("key_file", key_file, (str, PathLike), "a path", optional=True)
        require_kind("store_folder", store_folder, (str, PathLike), "a path", optional=True)
        wanted = "a datetime.timedelta, such as timedelta(minutes=30)"
        require_kind("timeout", timeout, timedelta, wanted, optional=True)
        require_one_of("transport", transport, get_args(Transport))
        make_codec(compression, "rows")
        endpoints = check_servers(servers, key_file, server_metrics_port)
        if "dense" in vars(self):
            self.asynchronous, self.wraps_model = self.dense.asynchronous, self.dense.wraps_model
        else:
            self.dense = DensePart()
        refuse_other_namespace(*kwargs.values())
        kwargs = without_defaults(kwargs)
        refuse_arguments(self, kwargs)
        timeout = timeout or (PATIENCE if self.asynchronous else default_pg_timeout)
        super().__init__(start_method="forkserver", timeout=timeout, **kwargs)
        let_lightning_read_folders()
        self.num_threads = num_threads
        self.servers = endpoints
        self.transport: Transport = transport
        self.compression = compression
        self.key_file = key_file
        self.store_folder = store_folder
        self.max_restarts = max_restarts
        self.server_metrics_port = server_metrics_port
        self.endpoints: dict[str, list[str]] = {}
        self.launches = False
        self.run_name = ""
        self.run_servers = RunServers(self)
        self.checkpoints = RunCheckpoints(self)
        self.rows = Rows()
        self._reset()
        for part in (self.dense, self.rows):
            part.attach(self)

    def _reset(self) -> None:
        """Have nothing of a run: at the start, when one is over, and in copies. Subclasses add what they keep of one.

        It is called on an object without anything else as well, to learn what a copy is to have.
        """
        self.changes: RunChanges | None = None
        self.joining: Joining | None = None
        self.averages: AveragedCopies | None = None
        self.dealer: ShareDealer | None = None  # of this worker's part of each epoch, while it trains
        self._frozen: list[tuple[str, nn.Parameter]] = []  # parameters that no worker shares, while a run trains
        self._shares_buffers = False  # they become rank 0's at each batch, where nothing that wraps the model does it

    def __getstate__(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        fresh._reset()
        return vars(self) | vars(fresh) | {"launched": None}

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the strategy known to ``Trainer(strategy=<strategy_name>)``."""
        description = (cls.__doc__ or "").partition("\n")[0]
        strategy_registry.register(cls.strategy_name, cls, description=description, override=True)

    # --- For subclasses ----------------------------------------------------------------------------------------------

    def server_specs(self) -> list[ServerSpec]:
        """The servers that this strategy wants; each runs on the node that its spec says."""
        return []

    def bind_backends(self) -> None:
        """Let the model's tables look rows up in :meth:`stores`; before devices, wrappers and optimizers."""

    def unbind_backends(self) -> None:
        """Undo :meth:`bind_backends` and leave trained rows in the model where they fit.

        What the main process gets is read afterwards. Also called without :meth:`bind_backends`, and repeatedly.
        """

    def binds_rows(self) -> bool:
        """Whether the rows of this run are where :meth:`bind_backends` brings them: a folder's then wait for it."""
        return bool(self.server_specs()) and self.task.trainer.state.fn == TrainerFn.FITTING

    def finish_training(self) -> None:
        """Bring the trained model into this process's memory, where the callbacks' ``on_train_end`` may change it.

        Every rank calls this once, before those. What rank 0 has in the end is what the main process gets.
        """

    def show_weights(self) -> None:
        """Bring the dense weights of the moment into this process's model, where they are trained elsewhere.

        Rank 0 calls this between two steps, such as to publish the model, while others train on.
        """
        self.dense.show()

    def set_world_ranks(self) -> None:
        """Take as many processes as an engine has started, or as the dense part says, where it says so."""
        take_placed(self)
        self.dense.take_ranks()
        super().set_world_ranks()
        step_back(self)

    @property
    def patience(self) -> timedelta:
        """How long ranks wait for each other."""
        return self._timeout or default_pg_timeout

    def telemetry(self) -> Mapping[str, Any]:
        """Values for ``TelemetryMonitor``: numbers or tensors of many observations, by name. Must not communicate."""
        return {}

    @property
    def gradient_scale(self) -> float:
        """The factor of a worker's row gradients where rows are on servers."""
        return 1.0

    @property
    def maps_stores(self) -> bool:
        """Whether files of servers on the same machine are written without asking the server, and without a lock."""
        return self.transport == "auto"

    def stores(self, kind: str) -> list[Stores]:
        """The servers of a kind, in index order, connected on first use and until :meth:`teardown`.

        Raises:
            KeyError: the strategy has no servers of this kind.
            ServerInUseError: the servers run already, and another run has them.
        """
        return self.run_servers.connect(kind)

    @property
    def task(self) -> pl.LightningModule:
        """The LightningModule of the run, once a trainer has given the strategy one."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def succeeded(self) -> bool:
        """Whether the run has not failed: only then may :meth:`teardown` talk to other ranks."""
        return self._trainer is not None and not self._has_failed

    @property
    def _trainer(self) -> pl.Trainer | None:
        return self.lightning_module._trainer if self.lightning_module is not None else None

    @property
    def _has_failed(self) -> bool:
        """This rank's run has: the others may be waiting elsewhere, or for ever, so it waits for none of them."""
        return self._trainer is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED

    def stored_tensors(self) -> Mapping[str, StoredTensor | StoredRows]:
        """Tensors of a checkpoint that are elsewhere than in this process's model, by keys in the state dict."""
        if self.lightning_module is None:
            return {}
        return stored_tensors(self.task, rank=self.living_rank, world_size=self.num_living)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the rows is this worker's, in loaders that are made from now on: one of the living."""
        if not torch.distributed.is_initialized():
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.num_living, "rank": self.living_rank}

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker saves and logs for all: rank 0, or the first of those that live since that died."""
        return self._has_first_place or (self.global_rank == 0 and not (self.launched and self.launched.replaces))

    @property
    def living_rank(self) -> int:
        """This worker's place among those that live."""
        return dist.get_rank() if has_met() else self.global_rank

    @property
    def num_living(self) -> int:
        """Workers that live, as of the last time that all of them met."""
        return dist.get_world_size() if has_met() else self.world_size

    @property
    def saves_folders(self) -> bool:
        """Whether a checkpoint is a folder at the moment: there is something that rank 0 does not have."""
        return self.dense.is_spread or bool(self.stored_tensors())

    def checkpoint_extras(self) -> dict[str, Any] | None:
        """The part that this rank adds to a folder with more than weights, in plain containers and tensors."""
        return None

    @property
    def sees_own_examples(self) -> bool:
        """Whether this rank's batches are its own; where several ranks see the same, those of one count."""
        return True

    @contextmanager
    def counting_once(self) -> Iterator[None]:
        """Meanwhile metrics that are summed over the ranks count what several ranks have seen once, after a run too."""
        yield

    # --- Life --------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self.launches = True
            check_lost_workers(self)
            self._launcher = ForkserverLauncher(
                self,
                num_threads=self.num_threads,
                serving=self.run_servers.beside_workers,
                survive=self.run_servers.survive,
                max_replacements=self.max_replacements,
                lost=self.run_servers.lost_ranks,
            )

    def setup_environment(self) -> None:
        """Join the process group and find the servers; start them if no launcher of ours has.

        Raises:
            ValueError: there are more or fewer processes than the trainer was told, or servers for a strategy without.
            TypeError: a part of the trainer comes from ``lightning.pytorch``.
        """
        assert self.cluster_environment is not None
        let_lightning_read_folders()  # a worker process has this object from a pickle, which constructs nothing
        fork_between_threads()
        specs = self.server_specs()
        if self.lightning_module is not None:
            refuse_other_namespace_in(self.task.trainer)
        check_started(self)
        if not specs:
            refuse_settings_of_servers(self)
        super().setup_environment()
        self.run_servers.find(specs)
        if self.joining is not None:
            self.joining.wait()

    def setup_distributed(self) -> None:
        """Join the process group, as ``workers.meeting.join_process_group`` does."""
        join_process_group(self, super().setup_distributed)

    def setup(self, trainer: pl.Trainer) -> None:
        """Bind backends, then all that Lightning does.

        Raises:
            ValueError: a setting of the trainer makes workers wait for each other that are not to, a callback averages
                weights that they would not keep, or a lazy module has seen no batch.
            TypeError: a callback trains on trial.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_to_fit(self, trainer)
            self.changes = RunChanges(trainer)
            self.changes.before_train_end(self.finish_training)
            self.changes.end_by_signal(together=self.world_size > 1 and not self.asynchronous)
            if self.world_size > 1:
                self.changes.rank_checkpoints_by(self.broadcast)
            if self.asynchronous:
                refuse_metrics_of_all_ranks(trainer.lightning_module)
                self.changes.log_through(OwnValues(self).log)
            if self.run_servers.meeting_place() is not None:
                from lightning_recsys.strategies.common.workers.dealing import share_validation

                share_validation(self, self.changes)
        if self.joining is not None:
            self.joining.take_agreed(trainer)
        self.bind_backends()
        self.checkpoints.load_rows()
        if trainer.state.fn == TrainerFn.FITTING and averaging_callbacks(trainer):
            self.averages = AveragedCopies(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.asynchronous:
            refuse_rows_of_all_ranks(trainer.lightning_module, strategy=type(self).__name__)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wrap the model, or start all workers from rank 0's.

        A worker that is alone keeps its model as it is: its gradients would only be copied there and back. So does one
        whose model trains embedding rows alone, in which ``DistributedDataParallel`` would find nothing to average.
        """
        assert self.model is not None
        wraps = self.wraps_model and self.world_size > 1
        if wraps and any(x.requires_grad for x in self.model.parameters()):
            super().configure_ddp()
        else:
            _sync_module_states(self.model)
            self._shares_buffers = wraps and self._ddp_kwargs.get("broadcast_buffers", True)
        if self.world_size > 1:
            dense = dense_parameters(self.task)
            self._frozen = [(name, x) for name, x in dense if not x.requires_grad]
        self.dense.start()

    def on_train_start(self) -> None:
        """Refuse what would leave the ranks waiting for each other; where they are free, deal shares out.

        Raises:
            ValueError: the ranks have unequal numbers of training batches; where they are free, something makes them
                wait at each batch, or different numbers of times.
        """
        trainer = self.task.trainer
        with nullcontext() if self.joining is None else self.joining.at_start(trainer):
            self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        self.rows.foresee()
        if self.asynchronous:
            from lightning_recsys.strategies.common.workers import running_free

            self.dealer = running_free.begin_to_run_free(self)
        else:
            refuse_unequal_batches(trainer)
        self.rows.begin()
        self.dense.begin()
        if self.asynchronous:
            running_free.stop_together(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Stop where a server is gone for good or lent anew, or a frozen parameter is frozen no more.

        Buffers of a model that trains rows alone become rank 0's, as ``DistributedDataParallel`` has them.

        Raises:
            ValueError: a parameter is trained that was frozen when workers agreed on what they share.
        """
        for check in self.run_servers.checks:
            check()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} was frozen when training began, and {type(self).__name__} keeps together what was not:"
                    " each worker would train it alone. Let it require a gradient from the start, in a parameter"
                    " group with lr=0 for as long as it is to stay, or train it in another fit."
                )
        for buffer in self.task.buffers() if self._shares_buffers else ():  # which a step may have replaced by others
            dist.broadcast(buffer, 0)
        self.dense.begin_batch(batch_idx)

    def process_dataloader(self, dataloader: object) -> object:
        """Let the rows know what batches are to come, where they ask for it."""
        return self.rows.look_at(super().process_dataloader(dataloader))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step as the dense part does, and let the rows know that those which wait for it may be updated."""
        lightning_step = super().optimizer_step

        def make(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
            output = lightning_step(optimizer, closure, *args, **kwargs)
            self.rows.step(waited=True)
            return output

        return self.dense.step(optimizer, closure, make)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, from wherever the dense part has it."""
        self.dense.fill(optimizer)
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def post_backward(self, closure_loss: Tensor) -> None:
        """Let the rows know that gradients are there."""
        super().post_backward(closure_loss)
        self.rows.step(waited=False)

    def on_train_end(self) -> None:
        """Wait for workers that are behind: the first one's process holds what lets them find each other."""
        if self.asynchronous:
            self.barrier("all workers have finished")

    def teardown(self) -> None:
        """Undo :meth:`setup` and :meth:`setup_environment`, as far as they have come."""
        if self.dealer is not None:
            self.dealer.close()
        if self.joining is not None:
            self.joining.end()
        self.dense.stop()
        self.checkpoints.close()
        self.unbind_backends()
        if self.averages is not None:
            self.averages.release()
        try:
            self.run_servers.disconnect()
        finally:
            if self.changes is not None:
                self.changes.undo()
            self._reset()
            self.run_servers.leave(self.barrier)
            super().teardown()

    # --- Metrics and checkpoints -------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, which all give the same name; one whose run has failed does not wait."""
        if self._has_failed:
            return
        if args and self.asynchronous and dist.is_initialized():
            from lightning_recsys.strategies.common.workers.process_group import MeetingGroup

            if isinstance(group := dist.group.WORLD, MeetingGroup):
                # Ranks that have drifted apart are at different barriers, and each would go on from the other's.
                group.wait_for(args[0])
                return
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object of rank ``src``; a rank whose run has failed keeps its own."""
        return obj if self._has_failed else among_the_living(partial(super().broadcast, obj, src))

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce over the ranks; a mean of integers is not rounded, and a rank whose run has failed keeps its own.

        Lightning floors it (its issue 21838), which inflates ``self.log(..., sync_dist=True)`` where ranks logged
        different numbers of examples.
        """
        is_mean = reduce_op in ("mean", "avg", ReduceOp.AVG)
        if is_mean:
            reduce_op = "mean"  # ReduceOp.AVG is not for gloo
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return tensor if self._has_failed else super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so, or any; Lightning compares with the number of ranks that the run began with."""
        own = torch.tensor(int(decision), device=self.root_device)
        return bool(self.reduce(own, dist.group.WORLD, reduce_op="min" if all else "max"))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's tensors, without the rows that are in stores; :meth:`save_checkpoint` takes those from there."""
        if not self.stored_tensors():
            return super().lightning_module_state_dict()
        with rows_left_out(self.task):
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save: a folder where :attr:`saves_folders`, each rank a share of the rows, otherwise a file.

        What the main process of a failed run holds is not saved: the weights from before that run. Lightning runs
        ``on_exception`` of the callbacks there, and some of them save checkpoints.

        Raises:
            TypeError: ``storage_options`` for a folder.
        """
        if not self.checkpoints.save(checkpoint, filepath, storage_options):
            write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
            self.checkpoints.write(checkpoint, write)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder; a folder's rows wait for :meth:`bind_backends` where that brings them elsewhere."""
        loaded = self.checkpoints.load(checkpoint_path, weights_only=weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only) if loaded is None else loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and the rows as well where they are in stores already; every rank calls this."""
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.stored_tensors():  # in the middle of a run
            self.checkpoints.load_rows()
