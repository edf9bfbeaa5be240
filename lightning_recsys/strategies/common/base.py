"""What the strategies of this package share: how their workers start, find their servers and end."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.registry import _StrategyRegistry
from lightning_fabric.utilities.distributed import _init_dist_connection
from lightning_fabric.utilities.seed import reset_seed
from lightning_fabric.utilities.types import _PATH
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout
from torchmetrics import Metric

from lightning_recsys.checkpoints import (
    FolderCheckpointIO,
    StoredRows,
    StoredTensor,
    is_folder,
    read_checkpoint,
    read_stored,
    save_folder,
)
from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.launchers import ForkserverLauncher, NodeServers, ServerSpec, Sidecars
from lightning_recsys.strategies.common.averaged_copies import (
    AveragedCopies,
    averaging_callbacks,
    copies_without_rows,
    refuse_statistics_after_averaging,
)
from lightning_recsys.strategies.common.meeting import (
    await_all_ranks,
    extend_timeout,
    launcher_keeps_store,
    loopback_store,
)
from lightning_recsys.strategies.common.run_changes import RunChanges
from lightning_recsys.strategies.common.stored_rows import (
    dense_parameters,
    row_keys,
    rows_left_out,
    rows_replaced,
    stored_tensors,
)
from lightning_recsys.strategies.common.tuners import refuse_tuners

if TYPE_CHECKING:  # importing this package is quick; stores and their kernels come with the first use
    from lightning_recsys.parameter_server.lease import RunLease
    from lightning_recsys.stores.interfaces import Stores

Transport = Literal["auto", "tcp"]

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

MEETING_TIME = timedelta(seconds=60)  # for the connections between machines, once all ranks are there
PATIENCE = timedelta(days=7)  # of a worker that has finished early; those that die are noticed at once


class RecsysStrategy(DDPStrategy):
    """The plumbing of a strategy: a subclass says what it does, this class how it lives beside Lightning.

    It is a ``DDPStrategy`` because Lightning knows those: samplers, logging, ``torch.compile`` and barriers work.
    Processes come from a fork server, or from ``torchrun`` or SLURM where these start them. Construction has no side
    effect, the object can be pickled, and :meth:`teardown` may be called without :meth:`setup`, and repeatedly.

    Servers, if :meth:`server_specs` asks for any, run beside the workers from before they start until after they end.
    The ranks are workers only.

    Args:
        num_threads: Threads per worker, as in :func:`lightning_recsys.runtime.configure_worker`.
        servers: Endpoints of servers that run already (``tcp://host:port``, ``ipc:///socket``); nothing is started
            then, and each of them serves every kind.
        key_file: Keys to ``servers`` on TCP: as ``lightning-recsys-server --make-keys`` writes them, or the token that
            a server on loopback leaves in its folder. Servers that are started here get keys of their own.
        transport: ``auto`` reads and writes through shared memory where a server runs on the same machine; ``tcp``
            never does.
        store_folder: Where the servers started here keep their files, in a folder of their own: a disk if tables are
            larger than memory. Default: shared memory.
        max_restarts: How often each server that dies is started again before the run fails.
        **kwargs: As for ``DDPStrategy``, except a start method. ``timeout`` is how long a worker waits for others, by
            default 30 minutes, and a week where workers are free to fall behind.

    Attributes:
        asynchronous: Workers may be at different steps: nothing waits for all of them between two batches.
        wraps_model: Gradients are averaged by ``DistributedDataParallel``, if there are several workers. Otherwise
            parameters and buffers are broadcast from rank 0 at the start, and gradients stay where they are. A subclass
            where an argument decides either of the two sets it before it calls ``super().__init__()``.
        endpoints: Servers by kind, in index order; in workers, from :meth:`setup_environment` on.

    Raises:
        ValueError: ``max_restarts`` is negative, ``transport`` is unknown, ``servers`` are no endpoints, or a
            ``key_file`` comes without them.
        TypeError: an argument that only ``DistributedDataParallel`` could use, or an object from ``lightning.pytorch``.
    """

    strategy_name: ClassVar[str]
    asynchronous: bool = False
    wraps_model: bool = True

    def __init__(
        self,
        *,
        num_threads: int = 1,
        servers: Sequence[str] | None = None,
        transport: Transport = "auto",
        key_file: str | Path | None = None,
        store_folder: str | Path | None = None,
        max_restarts: int = 3,
        **kwargs: Any,
    ) -> None:
        if max_restarts < 0:
            raise ValueError(
                f"strategy.max_restarts must be at least 0, got {max_restarts}. 0 ends the run with the server."
            )
        if transport not in ("auto", "tcp"):
            raise ValueError(f"strategy.transport must be 'auto' or 'tcp', got {transport!r}.")
        if servers is not None:
            _check_endpoints(servers)
        elif key_file is not None:
            raise ValueError(
                f"strategy.key_file={key_file} is for strategy.servers, of which there are none. Servers that are"
                " started here get keys of their own: leave it out, or name the servers that it belongs to."
            )
        _refuse_other_namespace(*kwargs.values())
        if self.asynchronous:
            kwargs.setdefault("timeout", PATIENCE)
        if kwargs.get("checkpoint_io") is None:
            kwargs["checkpoint_io"] = FolderCheckpointIO()
        super().__init__(start_method="forkserver", **kwargs)
        if not self.wraps_model and (useless := self._useless_arguments()):
            raise TypeError(
                f"{type(self).__name__} does not use DistributedDataParallel, so it has no use for {useless}."
            )
        self.num_threads = num_threads
        self.servers = None if servers is None else tuple(servers)
        self.transport: Transport = transport
        self.key_file = key_file
        self.store_folder = store_folder
        self.max_restarts = max_restarts
        self.endpoints: dict[str, list[str]] = {}
        self._node_servers: NodeServers | None = None
        self._stores: dict[str, list[Stores]] = {}
        self._changes: RunChanges | None = None
        self._lease: RunLease | None = None  # on `servers`, in rank 0, from the first use of a store on
        self._launches = False  # workers are processes of our launcher, on this machine
        self._borrows = False  # this run may use `servers`; the same on all ranks
        self._said_own = False  # that logged values are each worker's own
        self._being_logged: str | None = None  # the call of self.log that is under way in the training loop
        self._frozen: list[tuple[str, nn.Parameter]] = []  # parameters that no worker shares, while a run trains
        self._rows_to_load: Path | None = None  # a checkpoint, until the stores are there to take its rows
        self._waiting = ExitStack()  # while they wait, the model is loaded without them
        self._averages: AveragedCopies | None = None  # what callbacks average, while a run trains

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the strategy known to ``Trainer(strategy=<strategy_name>)``."""
        description = (cls.__doc__ or "").partition("\n")[0]
        strategy_registry.register(cls.strategy_name, cls, description=description, override=True)

    # --- For subclasses ----------------------------------------------------------------------------------------------

    def server_specs(self) -> list[ServerSpec]:
        """The servers that this strategy wants; server ``index`` runs on node ``index % num_nodes``."""
        return []

    def bind_backends(self) -> None:
        """Let the model's tables look rows up in :meth:`stores`; before devices, wrappers and optimizers."""

    def unbind_backends(self) -> None:
        """Undo :meth:`bind_backends` and leave trained rows in the model where they fit.

        What the main process gets is read afterwards. Also called without :meth:`bind_backends`, and repeatedly.
        """

    def binds_rows(self) -> bool:
        """Whether the rows of this run are where :meth:`bind_backends` brings them: a folder's then wait for it."""
        assert self.lightning_module is not None
        return bool(self.server_specs()) and self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def finish_training(self) -> None:
        """Bring the trained model into this process's memory, where the callbacks' ``on_train_end`` may change it.

        Every rank calls this before those, and again in :meth:`on_train_end`. What rank 0 has in the end is what the
        main process gets.
        """

    def telemetry(self) -> Mapping[str, Any]:
        """What ``TelemetryMonitor`` logs: numbers or tensors of many observations, by name. Must not communicate."""
        return {}

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
        if kind not in self.endpoints:
            raise KeyError(f"{type(self).__name__} has no servers of kind {kind!r}; it has {sorted(self.endpoints)}.")
        if kind not in self._stores:
            from lightning_recsys.parameter_server.connect import connect

            keys = self._node_servers.keys if self._node_servers is not None else self.key_file
            self._borrow_servers()
            transport: Transport = "auto" if self.maps_stores else "tcp"
            self._stores[kind] = [
                connect(endpoint, keys=keys, transport=transport, cancelled=self._is_asked_to_end)
                for endpoint in self.endpoints[kind]
            ]
            if self.is_global_zero:
                for endpoint, stores in zip(self.endpoints[kind], self._stores[kind], strict=True):
                    log.info("Server for %s at %s: by %s.", kind, endpoint, stores.route)
        return self._stores[kind]

    def _borrow_servers(self) -> None:
        """Take the lease on servers that outlive the run: rank 0, which is the first to change anything there."""
        if self.servers is None or not self.is_global_zero or self._lease is not None:
            return
        from lightning_recsys.parameter_server.connect import client_keys
        from lightning_recsys.parameter_server.lease import RunLease
        from lightning_recsys.strategies.common.run_identity import run_id, run_in_words

        self._lease = RunLease(
            self.servers,
            keys=client_keys(self.key_file),
            run=run_id(launched_by_others=not self._launches),
            holder=run_in_words(),
            cancelled=self._is_asked_to_end,
        )

    def _return_servers(self) -> None:
        """Give the lease back, once no rank needs the servers any more."""
        if self._borrows and self._succeeded():
            self.barrier("the servers are needed by nobody")
        self._borrows = False
        if self._lease is not None:
            self._lease.give_back()
            self._lease = None

    def _is_asked_to_end(self) -> bool:
        """Whether this process got a SIGTERM: it does not wait for a server that is gone, then."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.received_sigterm

    # --- Life --------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launches = True
            self._launcher = ForkserverLauncher(self, num_threads=self.num_threads, serving=self.serving)

    @contextmanager
    def serving(self) -> Iterator[Sidecars]:
        """Servers for the workers that the main process of a single machine launches."""
        specs = self.server_specs() if self.servers is None and self.num_nodes == 1 else ()
        with Sidecars(specs, store_folder=self.store_folder, max_restarts=self.max_restarts) as sidecars:
            self.endpoints = sidecars.endpoints
            try:
                yield sidecars
            finally:
                self.endpoints = {}

    def setup_environment(self) -> None:
        """Join the process group and find the servers; start them if no launcher of ours has.

        Raises:
            ValueError: there are more or fewer processes than the trainer was told, or servers for a strategy without.
            TypeError: a part of the trainer comes from ``lightning.pytorch``.
        """
        assert self.cluster_environment is not None
        specs = self.server_specs()
        if self.lightning_module is not None:
            _refuse_other_namespace_in(self.lightning_module.trainer)
        if self.servers is not None and not specs:
            raise ValueError(
                f"strategy.servers={list(self.servers)}: {type(self).__name__} keeps nothing on servers. Leave"
                " strategy.servers out."
            )
        if self.world_size != (asked := self.num_nodes * self.num_processes):
            raise ValueError(
                f"{self.world_size} processes were started, but trainer.num_nodes={self.num_nodes} times"
                f" trainer.devices={self.num_processes} is {asked}. Set both to what the processes' launcher was told."
            )
        super().setup_environment()
        if self.servers is not None:
            self.endpoints = {spec.kind: list(self.servers) for spec in specs}
            self._borrows = True
        elif specs and not self.endpoints:
            self._node_servers = NodeServers(
                specs,
                node=self.node_rank,
                num_nodes=self.num_nodes,
                rank=self.global_rank,
                is_starter=self.local_rank == 0,
                main_address=self.cluster_environment.main_address,
                store_folder=self.store_folder,
                max_restarts=self.max_restarts,
            )
            self.endpoints = self._node_servers.start()

    def setup_distributed(self) -> None:
        """Join the process group, on one machine where no other reaches it.

        Machines that cannot reach each other end soon, instead of one waiting for the other.

        Raises:
            RuntimeError: they cannot.
        """
        environment, patience = self.cluster_environment, self._timeout
        if self._launches and self.num_nodes == 1 and not torch.distributed.is_initialized():
            self._join_on_loopback()
            return
        if self.num_nodes == 1 or torch.distributed.is_initialized() or environment is None or patience is None:
            super().setup_distributed()
            return
        bounded = isinstance(environment, TorchElasticEnvironment) and launcher_keeps_store()
        if bounded:
            await_all_ranks(environment, patience)
            self._timeout = min(patience, MEETING_TIME)
        try:
            super().setup_distributed()
        except RuntimeError as error:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "the one of this machine's own name")
            raise RuntimeError(
                f"rank {environment.global_rank()} of {environment.world_size()} could not connect to the others (main"
                f" node {environment.main_address}:{environment.main_port}). Name the network interface on each machine"
                f" (GLOO_SOCKET_IFNAME=eth0; it is {interface}), and see that a firewall lets machines connect to any"
                f" port of each other. What was tried: {error}"
            ) from error
        finally:
            self._timeout = patience
        if bounded:
            extend_timeout(patience)

    def _join_on_loopback(self) -> None:
        """As ``DDPStrategy`` joins, by a store of our own: the one that torch would make listens to everybody."""
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        store = loopback_store(
            self.cluster_environment.main_port,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout or default_pg_timeout,
        )
        device = self.root_device if self.root_device.type != "cpu" else None
        options: dict[str, Any] = {"timeout": self._timeout, "device_id": device, "store": store}
        _init_dist_connection(self.cluster_environment, self._process_group_backend, **options)

    def setup(self, trainer: pl.Trainer) -> None:
        """Bind backends, then all that Lightning does.

        Raises:
            ValueError: a setting of the trainer makes workers wait for each other that are not to, or a callback
                averages weights that they would not keep.
            TypeError: a callback trains on trial.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            if self.asynchronous and self._layer_sync is not None:
                raise ValueError("trainer.sync_batchnorm=True makes every worker wait for all others at every layer.")
            if not self.wraps_model or self.server_specs():
                refuse_tuners(trainer, strategy=type(self).__name__)
            if self.asynchronous:
                refuse_statistics_after_averaging(trainer)
            self._changes = RunChanges(trainer)
            self._changes.before_train_end(self.finish_training)
            self._changes.end_by_signal(free=self.asynchronous)
            if self.asynchronous:
                _refuse_metrics_of_all_ranks(trainer.lightning_module)
                self._changes.log_through(self._log_in_training)
        self.bind_backends()
        self._load_waiting_rows()
        if trainer.state.fn == TrainerFn.FITTING and averaging_callbacks(trainer):
            self._averages = AveragedCopies(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wrap the model, or start all workers from rank 0's.

        A worker that is alone keeps its model as it is: its gradients would only be copied there and back.
        """
        if self.wraps_model and self.world_size > 1:
            super().configure_ddp()
        else:
            assert self.model is not None
            _sync_module_states(self.model)
        assert self.lightning_module is not None
        if self.world_size > 1:
            dense = dense_parameters(self.lightning_module)
            self._frozen = [(name, x) for name, x in dense if not x.requires_grad]

    def on_train_start(self) -> None:
        """Refuse data that would leave the ranks waiting for each other.

        Raises:
            ValueError: the ranks have unequal numbers of training batches.
        """
        if self.asynchronous:
            return
        assert self.lightning_module is not None
        per_rank: list[int | float] = [0] * self.world_size
        # inf where a loader has no length
        torch.distributed.all_gather_object(per_rank, self.lightning_module.trainer.num_training_batches)
        if len(set(per_rank)) > 1:
            raise ValueError(
                "every rank needs the same number of training batches, or the first to finish leaves the others waiting"
                f" for ever; got {per_rank} on ranks 0 to {self.world_size - 1}. Drop or repeat batches in the loader,"
                f" or set trainer.limit_train_batches={min(per_rank)}."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Stop where a server is gone for good or lent anew, or a frozen parameter is frozen no more.

        Raises:
            ValueError: a parameter is trained that was frozen when workers agreed on what they share.
        """
        if self._lease is not None:
            self._lease.check()
        if self._node_servers is not None:
            self._node_servers.check()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} was frozen when training began, and {type(self).__name__} keeps together what was not:"
                    " each worker would train it alone. Let it require a gradient from the start, in a parameter"
                    " group with lr=0 for as long as it is to stay, or train it in another fit."
                )

    def on_train_end(self) -> None:
        """Wait for workers that are behind: the first one's process holds what lets them find each other."""
        self.finish_training()
        if self.asynchronous:
            self.barrier("all workers have finished")

    def teardown(self) -> None:
        """Undo :meth:`setup` and :meth:`setup_environment`, as far as they have come."""
        self._rows_to_load = None
        self._frozen = []
        self._said_own, self._being_logged = False, None
        self._waiting.close()
        self.unbind_backends()
        if self._averages is not None:
            self._averages.release()
            self._averages = None
        try:
            self._close_stores()
        finally:
            self._undo_environment()

    def _close_stores(self) -> None:
        """All of them, whatever one has to say; where the run has failed its own error says it."""
        quiet = () if self._succeeded() else (ServerUnreachableError, RequestRefusedError)
        with ExitStack() as closing:
            for stores in self._stores.values():
                for opened in stores:
                    closing.enter_context(suppress(*quiet))
                    closing.callback(opened.close)
            self._stores = {}

    def _undo_environment(self) -> None:
        if self._changes is not None:
            self._changes.undo()
            self._changes = None
        if self._node_servers is not None:
            if self._succeeded():
                self.barrier("servers are needed by nobody")
            self._node_servers.stop()
            self._node_servers, self.endpoints = None, {}
        self._return_servers()
        super().teardown()

    def _succeeded(self) -> bool:
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.state.status != TrainerStatus.INTERRUPTED

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_stores": {},
            "_node_servers": None,
            "_changes": None,
            "_lease": None,
            "_borrows": False,
            "_averages": None,
            "_waiting": ExitStack(),
            "_rows_to_load": None,
            "_frozen": [],
            "_said_own": False,
            "_being_logged": None,
        }

    # --- Metrics and checkpoints -------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce over the ranks; a mean of integers is not rounded.

        Lightning floors it (its issue 21838), which inflates ``self.log(..., sync_dist=True)`` where ranks logged
        different numbers of examples.
        """
        is_mean = reduce_op in ("mean", "avg", ReduceOp.AVG)
        if is_mean:
            reduce_op = "mean"  # ReduceOp.AVG is not for gloo
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)

    def _log_in_training(self, log_value: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
        """Stand in for ``log_value`` of Lightning, by which ``self.log`` of any hook of the training loop goes.

        With ``sync_dist=True`` that reduces the value of a step over all ranks within the call, and the others are at
        other steps or have finished. Here each worker that runs free keeps its own. The value of an epoch is reduced
        when the epoch is over, where all ranks meet.
        """
        self._being_logged = f"self.log({name!r}, ..., sync_dist=True) in {fx}"
        try:
            log_value(fx, name, value, **{**options, "sync_dist_fn": self._reduce_logged})
        finally:
            self._being_logged = None

    def _reduce_logged(self, value: Tensor, **options: Any) -> Tensor:
        if self._being_logged is None:
            return self.reduce(value, **options)
        if not self._said_own and self.is_global_zero:
            log.warning(
                "%s: workers run free, so the value of a step is that of rank 0 alone. With on_epoch=True the value of"
                " an epoch is that of all workers.",
                self._being_logged,
            )
        self._said_own = True
        return value

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's tensors, without the rows that are in stores; :meth:`save_checkpoint` takes those from there."""
        if not self._stored_tensors():
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        with rows_left_out(self.lightning_module):
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save: a folder where :attr:`saves_folders`, each rank a share of the rows, otherwise a file.

        What the main process of a failed run holds is not saved: the weights from before that run. Lightning runs
        ``on_exception`` of the callbacks there, and some of them save checkpoints.

        Raises:
            TypeError: ``storage_options`` for a folder.
        """
        if isinstance(self.launcher, ForkserverLauncher) and self.launcher.failed:
            rank_zero_warn(
                f"{filepath} was not written: the run failed in its workers, and the main process has the weights from"
                " before it only. `ModelCheckpoint(every_n_train_steps=...)` saves while the workers run."
            )
            return
        self._say_that_optimizers_are_gone(checkpoint, filepath)
        if not self.saves_folders:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(f"{filepath} becomes a folder, which takes no storage_options, got {storage_options}.")
        whole = checkpoint | {"state_dict": checkpoint["state_dict"] | self._stored_tensors()}
        save_folder(self.broadcast(str(filepath)), whole, extras=self.checkpoint_extras())

    def _say_that_optimizers_are_gone(self, checkpoint: Mapping[str, Any], path: _PATH) -> None:
        """After a run the main process has weights and progress; optimizers and schedulers were the workers'."""
        has_stepped = bool(checkpoint.get("global_step"))  # steps of optimizers: none before a run, or without any
        if isinstance(self.launcher, ForkserverLauncher) and checkpoint.get("optimizer_states") == [] and has_stepped:
            rank_zero_warn(
                f"{path} has no state of optimizers and schedulers: it ended with the worker processes of the run."
                " To go on with training take a checkpoint that was written in the run, by a `ModelCheckpoint`;"
                " `trainer.save_checkpoint(path, weights_only=True)` leaves out the state without this warning."
            )

    @property
    def saves_folders(self) -> bool:
        """Whether a checkpoint is a folder at the moment: there is something that rank 0 does not have."""
        return bool(self._stored_tensors())

    def checkpoint_extras(self) -> dict[str, Any] | None:
        """What this rank adds to a folder checkpoint, in plain containers and tensors; every rank is asked."""
        return None

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder; a folder's rows wait for :meth:`bind_backends` where that brings them elsewhere."""
        assert self.lightning_module is not None
        keys = row_keys(self.lightning_module)
        if not (keys and self.binds_rows() and is_folder(checkpoint_path)):
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return loaded
        self._rows_to_load = Path(checkpoint_path)
        self._waiting.close()
        self._waiting.enter_context(copies_without_rows(self.lightning_module.trainer))
        return read_checkpoint(checkpoint_path, without=keys, weights_only=weights_only is not False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and the rows as well where they are in stores already; every rank calls this."""
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._stored_tensors():  # in the middle of a run
            self._load_waiting_rows()

    def _load_waiting_rows(self) -> None:
        """Bring the rows of a folder to the stores, each rank its share."""
        if self._rows_to_load is None:
            return
        assert self.lightning_module is not None
        self._waiting.close()
        with rows_replaced(self.lightning_module):
            targets = self._stored_tensors()
            for rows in targets.values():
                if isinstance(rows, StoredRows):
                    rows.clear()
            self.barrier("the rows from before are gone")
            read_stored(self._rows_to_load, targets)
            self._rows_to_load = None
            self.barrier("all rows are loaded")

    @property
    def sees_own_examples(self) -> bool:
        """Whether this rank's batches are its own; where several ranks see the same, those of one count."""
        return True

    @contextmanager
    def counting_once(self) -> Iterator[None]:
        """Meanwhile metrics that are summed over the ranks count what several ranks have seen once, after a run too."""
        yield

    def _stored_tensors(self) -> Mapping[str, StoredTensor | StoredRows]:
        if self.lightning_module is None:
            return {}
        return stored_tensors(self.lightning_module, rank=self.global_rank, world_size=self.world_size)

    def _useless_arguments(self) -> list[str]:
        named = {
            "ddp_comm_state": self._ddp_comm_state,
            "ddp_comm_hook": self._ddp_comm_hook,
            "ddp_comm_wrapper": self._ddp_comm_wrapper,
            "model_averaging_period": self._model_averaging_period,
        }
        return [*self._ddp_kwargs, *(name for name, value in named.items() if value is not None)]


def _check_endpoints(servers: Sequence[str]) -> None:
    """Before workers start: each of them would say what is wrong with one endpoint at a time."""
    listed = () if isinstance(servers, str) else servers
    if not listed or not all(re.fullmatch(r"tcp://[^/]+:[1-9][0-9]*|ipc:///.+", endpoint) for endpoint in listed):
        raise ValueError(
            f"strategy.servers must be a list of endpoints such as [tcp://10.0.0.7:5790], got {servers!r}. Leave it out"
            " to have servers started."
        )


def _refuse_metrics_of_all_ranks(module: pl.LightningModule) -> None:
    found = [path for path, x in module.named_modules() if isinstance(x, Metric) and x.dist_sync_on_step]
    if found:
        raise ValueError(
            f"{found[0]} has dist_sync_on_step=True, which makes every worker wait for all others at every step. Leave"
            " it out: a metric's value of an epoch is that of all workers."
        )


def _refuse_other_namespace(*objects: object) -> None:
    """Classes of ``lightning.pytorch`` are not those of ``pytorch_lightning``, and half of what they do gets lost."""
    for thing in objects:
        if any(base.__module__.partition(".")[0] == "lightning" for base in type(thing).__mro__):
            raise TypeError(
                f"{type(thing).__name__} is built on lightning.pytorch, this package and your trainer on"
                " pytorch_lightning; they do not mix. Import it from pytorch_lightning instead."
            )


def _refuse_other_namespace_in(trainer: pl.Trainer) -> None:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # all set by connectors
    data, profiler = trainer.datamodule, trainer.profiler  # type: ignore[attr-defined]
    _refuse_other_namespace(*callbacks, *trainer.loggers, data, profiler)
