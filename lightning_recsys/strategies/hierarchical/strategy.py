"""Hierarchical Training: few dense replicas, each trained by a group of trainers and computed by group servers."""

from __future__ import annotations

import inspect
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim import Optimizer

from lightning_recsys.checkpoints import is_folder, read_extras
from lightning_recsys.compression import Compression
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.parameter_server.remote_parts import RemoteParts
from lightning_recsys.partition.fc_split import LayerSplit
from lightning_recsys.partition.parts import PartitionedModel, split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.operators import TRAINER, server_name
from lightning_recsys.placement.plan import OperatorPlan
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies.common.buffers import meet_buffers
from lightning_recsys.strategies.common.meeting import LOOPBACK
from lightning_recsys.strategies.common.ranks import check_ranks, take_ranks
from lightning_recsys.strategies.common.schedules import refuse_clocks, refuse_different_schedules
from lightning_recsys.strategies.common.served import EMBEDDING, ServedStrategy, require_positive
from lightning_recsys.strategies.hierarchical.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.group_parts import GroupParts, SyncOrder
from lightning_recsys.strategies.hierarchical.groups import Groups
from lightning_recsys.strategies.hierarchical.leader import GroupLeader, initial_replica
from lightning_recsys.strategies.hierarchical.news import News
from lightning_recsys.strategies.hierarchical.planning import (
    FCSplits,
    OperatorPlacement,
    PlacementMethod,
    check_splits,
    make_plan,
)
from lightning_recsys.strategies.hierarchical.refusals import (
    cut_module,
    refuse_optimizers,
    refuse_switched,
    refuse_trainer,
    switches,
)
from lightning_recsys.strategies.hierarchical.remote_forward import CutForward, Net
from lightning_recsys.strategies.shadowsync.rounds import open_center
from lightning_recsys.sync import SyncAlgorithm, Topology, make_algorithm

GROUP, SYNC = "group", "sync"  # kinds of servers
PROGRAM = "lightning_recsys.strategies.hierarchical.group_server"
ANSWER_SECONDS = 60.0  # for a group server to compute something, before it is asked again

_RUNS = itertools.count()  # runs of this process; all ranks of a job count alike

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class HierarchicalStrategy(ServedStrategy):
    """Groups of trainers, each with one dense replica that its group servers compute and train; rows on servers.

    Every rank is a *net* of one trainer. It reads batches, looks rows up and drives the step; operators with parameters
    are computed by the servers of its group, which update them as soon as their gradients are there, without a lock
    between nets (Hogwild), by the LightningModule's own optimizer with its present learning rate. Each server keeps its
    share of the replica together with those of other groups in the background.

    Args:
        num_groups: Dense replicas.
        trainers_per_group: Trainers that train one of them.
        servers_per_group: Group servers, over which a replica is cut by operators.
        nets_per_trainer: Ranks of a trainer, all on one node.
        algorithm: What keeps groups together: ``easgd``, ``ma``, ``bmuf``, a name registered with
            :func:`~lightning_recsys.sync.register_algorithm`, or an algorithm.
        alpha: Elastic parameter, in ``(0, 1]``: how far a round moves a replica; ``None`` is the algorithm's default.
        interval: Seconds from one round to the next; by default as often as 0.35 % of a core allows.
        eta: BMUF's step size; ``None`` is its default, 1.
        block_momentum: BMUF's momentum; ``None`` is its default, 0.
        nesterov: BMUF's look-ahead; ``None`` is its default, off.
        num_embedding_servers: Servers for rows.
        num_sync_servers: Servers for the centre, where there are several groups.
        module: Path of the module that is cut, which has all trained parameters of the dense part and is called once in
            a training step. Default: the task's ``model``, or the task itself where it has none.
        operator_placement: Where operators are computed: a method's name, or
            :class:`~lightning_recsys.strategies.hierarchical.OperatorPlacement`, by which a plan can be read and saved.
        fc_splits: Which fully connected layers are computed by several group servers, in a piece on each: ``none``,
            ``auto`` (some, where that makes the predicted step shorter), or a mapping of layers' paths in the module
            that is cut to ``output`` or ``input``.
        compression: How activations and gradients travel between trainers and group servers: ``none`` or ``bf16``, or a
            mapping with ``activations`` (none, bf16, int8) and ``gradients`` (none, bf16, topk).
        top_k_fraction: For ``topk``: share of the elements that are sent.
        row_compression: How embedding rows and their gradients travel: ``none`` or ``bf16``.
        **kwargs: As for :class:`~lightning_recsys.strategies.common.served.ServedStrategy`, such as
            ``table_placement``; not ``servers``.

    Raises:
        ValueError: an argument is out of range; as training starts, a setting that needs gradients before they are
            applied; at the first batch, a model that cannot be traced.

    Communication: per step and part on a server, inputs and gradients of outputs to it, outputs and gradients of inputs
    back; rows as under ShadowSync. Between groups, per round and server, its share of the replica and of the centre.
    Reference: Huang et al. 2021, "Hierarchical Training: scaling deep recommendation models on large CPU clusters".
    Differs from the paper: nets are processes, not threads; updates of one part take turns.

    >>> from pytorch_lightning import Trainer
    >>> strategy = HierarchicalStrategy(num_groups=2, trainers_per_group=2)
    >>> Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False).world_size
    4
    """

    strategy_name = "hierarchical"
    asynchronous = True
    wraps_model = False

    def __init__(
        self,
        *,
        num_groups: int = 1,
        trainers_per_group: int = 1,
        servers_per_group: int = 1,
        nets_per_trainer: int = 1,
        algorithm: str | SyncAlgorithm = "easgd",
        alpha: float | None = None,
        interval: float | None = None,
        eta: float | None = None,
        block_momentum: float | None = None,
        nesterov: bool | None = None,
        num_embedding_servers: int = 1,
        num_sync_servers: int = 1,
        module: str | None = None,
        operator_placement: OperatorPlacement | PlacementMethod = "auto",
        fc_splits: FCSplits = "none",
        compression: str | Mapping[str, str] = "none",
        top_k_fraction: float = 0.1,
        row_compression: str = "none",
        **kwargs: Any,
    ) -> None:
        super().__init__(compression=row_compression, **kwargs)
        self.operator_compression = Compression.from_option(compression, top_k_fraction=top_k_fraction)
        self.operator_placement = (
            OperatorPlacement(operator_placement) if isinstance(operator_placement, str) else operator_placement
        )
        if self.servers is not None:
            raise ValueError(
                f"strategy.servers={list(self.servers)}: group servers compute parts of the run's own model, which does"
                " not travel over a network, so they are started with the run. Leave strategy.servers out."
            )
        Groups(num_groups, trainers_per_group, nets_per_trainer, servers_per_group)  # which checks them
        require_positive("num_embedding_servers", num_embedding_servers)
        require_positive("num_sync_servers", num_sync_servers)
        if interval is not None and not 0 <= interval < float("inf"):
            raise ValueError(f"strategy.interval must be a finite number of seconds, at least 0, got {interval}.")
        options = {"alpha": alpha, "eta": eta, "block_momentum": block_momentum, "nesterov": nesterov}
        self.algorithm = make_algorithm(algorithm, options) if isinstance(algorithm, str) else algorithm
        check_splits(fc_splits, self.operator_placement, num_servers=servers_per_group)
        self.fc_splits: FCSplits = fc_splits if isinstance(fc_splits, str) else dict(fc_splits)
        self.num_groups = num_groups
        self.trainers_per_group = trainers_per_group
        self.servers_per_group = servers_per_group
        self.nets_per_trainer = nets_per_trainer
        self.interval = interval
        self.num_embedding_servers = num_embedding_servers
        self.num_sync_servers = num_sync_servers
        self.module = module
        self._reset()

    def _reset(self) -> None:
        self._cut: nn.Module | None = None  # the module in parts, from the start of training on
        self._own_forward: Callable[..., Any] | None = None  # of that module
        self._partitioned: PartitionedModel | None = None  # from the first batch on
        self._switches: dict[str, bool] = {}  # of that module, as group servers have them
        self._net: Net | None = None
        self._leader: GroupLeader | None = None  # on the first rank of each group
        self._calls = 0  # forward passes since the last step
        self._shows = False  # the module has the weights of the moment
        self._rounds: dict[str, float] = {}  # numbers of the rounds between groups, as far as they are known
        self._own_replica: dict[str, Tensor] = {}  # this group's parameters, where the module has the mean over groups
        self._restored: dict[str, Tensor] = {}  # the same, of the checkpoint that the run goes on from
        self._saves_optimizers = False
        self._meeting: TCPStore | None = None  # where group servers meet, if this rank keeps it

    def __getstate__(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        fresh._reset()
        return super().__getstate__() | fresh.__dict__

    # --- Who is who --------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups:
        """Which rank and which server belong to which group; known once a ``Trainer`` has the strategy."""
        sizes = self.num_groups, self.trainers_per_group, self.nets_per_trainer, self.servers_per_group
        return Groups(*sizes, num_nodes=self.num_nodes)

    @property
    def _has_center(self) -> bool:
        return self.num_groups > 1 and self.algorithm.topology is Topology.CENTRAL

    @property
    def needs_all_workers(self) -> str | None:
        """Why the run ends with a net: the first one of each group brings the group's weights together."""
        return (
            "strategy=hierarchical does not go on without a net that dies: the first one of a group brings its weights"
            " together, and writes its share of checkpoints. Go on from the last checkpoint."
        )

    def set_world_ranks(self) -> None:
        """Take as many processes as the groups need."""
        needed = self.groups.ranks_per_node
        settings = (
            f"strategy.num_groups={self.num_groups} with strategy.trainers_per_group={self.trainers_per_group} and"
            f" strategy.nets_per_trainer={self.nets_per_trainer}"
        )
        take_ranks(self, needed)
        check_ranks(self, needed, settings=settings, what="groups")
        super().set_world_ranks()

    def server_specs(self) -> list[ServerSpec]:
        """Embedding servers, the groups' own, and sync servers where several groups have a centre."""
        groups = self.groups
        options = {"num_nets": groups.nets_per_group}
        specs = [ServerSpec(EMBEDDING, index) for index in range(self.num_embedding_servers)]
        specs += [
            ServerSpec(GROUP, index, PROGRAM, options, groups.node_of(group))
            for group in range(self.num_groups)
            for index in groups.servers_of(group)
        ]
        if self._has_center:
            specs += [ServerSpec(SYNC, index) for index in range(self.num_sync_servers)]
        return specs

    # --- Training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """As the base class, and refuse what cannot be trained in parts.

        Raises:
            ValueError: a setting of the trainer, the task or its optimizers does not go with parts on servers.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_trainer(trainer, self.precision_plugin)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_optimizers(trainer.lightning_module, self.optimizers, cut=self.module)

    def on_train_start(self) -> None:
        """Have the model cut at its first forward pass, which shows what goes into it."""
        super().on_train_start()
        assert self.lightning_module is not None
        refuse_clocks(self.lightning_module.trainer)
        refuse_different_schedules(self.lightning_module.trainer)
        self._cut = cut_module(self.lightning_module, self.module)
        self._own_forward = self._cut.forward
        self._cut.forward = CutForward(self._cut, self._forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module that is cut returns."""
        assert self._cut is not None
        assert self._own_forward is not None
        if not self._cut.training and (self._shows or self._partitioned is None):
            return self._own_forward(*args, **kwargs)
        if not self._cut.training:
            raise ValueError(
                "strategy=hierarchical: the model was put into evaluation mode within training, where only group"
                " servers have its weights. Evaluate it in validation_step."
            )
        self._shows = False
        if self._partitioned is None:
            self._partitioned = self._distribute(args, kwargs)
            self._switches = switches(self._cut)
        refuse_switched(self._switches, self._cut)
        self._calls += torch.is_grad_enabled()
        if self._calls > 1:
            raise ValueError(
                "strategy=hierarchical: the training step calls the model twice before one optimizer step, which group"
                " servers would take for two updates. Join what the two calls are to compute in one batch."
            )
        return self._partitioned(*args, **kwargs)

    def _distribute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PartitionedModel:
        """Cut the model, and bring its parts to the group servers."""
        assert self._cut is not None
        assert self._own_forward is not None
        # Each rank comes here at its first batch, and waits only for those who have something that it needs.
        news = News(PrefixStore(f"lightning_recsys/hierarchical/{next(_RUNS)}", _get_default_store()))
        sample = _positional(self._own_forward, args, kwargs)
        del self._cut.forward
        try:
            with news.owing(self.global_rank, self._owes()):
                return self._bring(sample, news)
        finally:
            self._cut.forward = CutForward(self._cut, self._forward)

    def _owes(self) -> list[str]:
        """What other ranks wait for from this one."""
        leaders = self.groups.leaders
        owed = [f"group-{leaders.index(self.global_rank)}"] if self.global_rank in leaders else []
        if self.is_global_zero:
            owed += ["plan", "meeting", *(f"center-{number}" for number in range(self.servers_per_group))]
        return owed

    def _bring(self, sample: Sequence[Any], news: News) -> PartitionedModel:
        assert self._cut is not None
        groups = self.groups
        group = groups.group_of(self.global_rank)
        devices = [server_name(index) for index in range(self.servers_per_group)]
        connections = dict(zip(devices, (self._group_connections()[x] for x in groups.servers_of(group)), strict=True))
        if self.is_global_zero:
            news.tell("plan", self._plan(sample, list(connections.values())))
        told = news.ask("plan")
        plan = OperatorPlan(told["devices"], num_servers=self.servers_per_group)
        (optimizer,) = self.optimizers
        layers = CutLayers(self._cut, [LayerSplit(*split) for split in told["splits"]], optimizer)
        partitioned = split(trace(layers.model, sample), plan)
        parts = {device: GroupParts.of(partitioned.on(device), layers.optimizer) for device in devices}
        for number, device in enumerate(devices):
            layers.check(parts[device])
            parts[device].compression = self.operator_compression
            parts[device].seed = torch.initial_seed() + group * self.servers_per_group + number
            parts[device].sync = self._sync_order(parts[device], number, group, news)
        if self.global_rank in groups.leaders:
            # The centres are made: they start at the mean over groups, as a checkpoint has it, and each group where it
            # was.
            for name, parameter in self._cut.named_parameters():
                if name in self._restored:
                    parameter.data.copy_(self._restored[name])
            layers.give_model()
            meeting = self._meeting_place(news, connections[devices[0]])
            self._leader = GroupLeader(connections, parts, layers, meeting=meeting)
            self._leader.load()
            self._leader.begin_sync()
            news.tell(f"group-{group}")
        news.ask(f"group-{group}")
        numbers = {name: part.groups for own in parts.values() for name, part in own.parts.items()}
        remote = {
            device: RemoteParts(connection, self.operator_compression) for device, connection in connections.items()
        }
        self._net = Net(remote, optimizer, numbers)
        partitioned.runners = dict.fromkeys(devices, self._net.run)
        return partitioned

    def _plan(self, sample: Sequence[Any], servers: Sequence[Connection]) -> dict[str, Any]:
        """The device of each operator, and the layers that are split before that."""
        assert self._cut is not None
        told = [server.request("status").value.get("free_bytes") for server in servers]
        sharing = 1 if self.num_nodes > 1 else self.num_groups * self.servers_per_group
        splits, plan, prediction = make_plan(
            self._cut,
            sample,
            self.operator_placement,
            fc_splits=self.fc_splits,
            groups=self.groups,
            compression=self.operator_compression,
            rooms=[room and room // sharing for room in told],
        )
        log.info("Operators on the devices of a group:\n%s", prediction)
        if splits:
            log.info("Layers in pieces: strategy.fc_splits={%s}", ", ".join(f"{x.path}: {x.by}" for x in splits))
        return {"devices": dict(plan.devices), "splits": [[x.path, x.by, x.num_pieces] for x in splits]}

    def _group_connections(self) -> list[Connection]:
        servers: list[Stores] = self._run_servers.connect(GROUP, by_messages=True, timeout=ANSWER_SECONDS)
        assert all(isinstance(server, RemoteStores) for server in servers)
        return [server.connection for server in servers if isinstance(server, RemoteStores)]

    def _sync_order(self, parts: GroupParts, number: int, group: int, news: News) -> SyncOrder | None:
        """How a server keeps its share together with those of other groups; rank 0 makes the centre of it."""
        if self.num_groups == 1 or not parts.parameters:
            return None
        store, initial = f"center-{number}", initial_replica(parts)
        servers: Sequence[str] = ()
        if self._has_center:

            def wait(_: str) -> None:
                if self.is_global_zero:
                    news.tell(store)
                news.ask(store)

            open_center(self.stores(SYNC), initial, is_first=self.is_global_zero, barrier=wait, name=store)
            servers = self.endpoints[SYNC]
        keys = self._run_servers.keys
        return SyncOrder(self.algorithm, servers, keys, initial, store, self.interval, group, self.num_groups)

    def _meeting_place(self, news: News, own: Connection) -> tuple[str, int] | None:
        """Where group servers meet that average among themselves: a store that the first group's first rank keeps.

        Args:
            news: Tells the other groups' first ranks.
            own: To a server of this group, which listens at an address of this machine.
        """
        if self.num_groups == 1 or self._has_center:
            return None
        if self.is_global_zero:
            host = LOOPBACK if self.num_nodes == 1 else urlsplit(own.endpoint).hostname or LOOPBACK
            listening = socket.create_server((host, 0))
            port = listening.getsockname()[1]
            self._meeting = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            news.tell("meeting", [host, port])
        host, port = news.ask("meeting")
        return str(host), int(port)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Let the backward pass update the parts; the optimizer itself steps for the rows."""

        def compute() -> Any:
            self._calls = 0
            output = closure()
            self._refuse_own_gradients(optimizer)
            return output

        return super().optimizer_step(optimizer, compute, model, **kwargs)

    def _refuse_own_gradients(self, optimizer: Optimizer) -> None:
        for parameter in (x for group in optimizer.param_groups for x in group["params"]):
            if parameter.grad is not None and parameter.numel():
                assert self.lightning_module is not None
                names = {id(x): name for name, x in self.lightning_module.named_parameters()}
                raise ValueError(
                    f"strategy=hierarchical: {names.get(id(parameter), 'a parameter')} has a gradient from outside the"
                    " model's forward pass, such as a penalty on weights, and this process trains no dense parameters."
                    " Use the optimizer's weight_decay, or strategy=shadowsync."
                )

    # --- One set of weights ------------------------------------------------------------------------------------------

    def _settle(self, *, goes_on: bool = True) -> None:
        """Bring the weights of the moment into every rank's model: the mean over groups. All ranks call this."""
        if self.tables is not None:
            self.tables.flush()
        if self._partitioned is None:
            return
        assert self._cut is not None
        has_trained = torch.tensor(not self._shows, dtype=torch.int64)
        dist.all_reduce(has_trained)  # which returns when everybody has stopped training
        if not has_trained:
            return  # what was validated is saved: meanwhile the groups go on towards each other
        if self._leader is not None:
            self._rounds = self._leader.end_sync() or self._rounds
            self._leader.pull_model()
            if self.num_groups > 1:
                self._own_replica = {name: x.detach().clone() for name, x in self._cut.named_parameters()}
        self.barrier("no round is under way")
        with torch.no_grad():
            self._meet()
        self._shows = True
        if goes_on and self._leader is not None:
            self._leader.begin_sync()

    def _meet(self) -> None:
        """Give all ranks the mean of what the groups' first ranks have."""
        assert self.lightning_module is not None
        assert self._partitioned is not None
        # Running values of a part on a server are its first rank's to bring, too; other ranks have them from the start.
        remote = (part.module.buffers() for part in self._partitioned.parts if part.device != TRAINER)
        served = {x for buffers in remote for x in buffers if x.is_floating_point()}
        for tensor in (
            *self.lightning_module.parameters(),
            *(x for x in self.lightning_module.buffers() if x in served),
        ):
            if self.num_groups == 1:
                dist.broadcast(tensor.data, src=0)
                continue
            if self._leader is None:
                tensor.data.zero_()
            dist.all_reduce(tensor.data)
            tensor.data.div_(self.num_groups)
        meet_buffers(self.lightning_module)

    def on_validation_start(self) -> None:
        """Validate with every update of every group."""
        super().on_validation_start()
        self._settle()

    def on_validation_end(self) -> None:
        """Train on when all have seen what they are to: a net that runs free would change the rows under the others."""
        super().on_validation_end()
        if self._partitioned is not None:
            self.barrier("everybody has validated")

    def finish_training(self) -> None:
        """Bring the trained model into this process, and the optimizer's state with it.

        Under a launcher that is not ours the process lives on, and may save a checkpoint when the servers are gone.
        """
        self._settle(goes_on=False)
        if self._leader is not None:
            self._leader.pull_state()
        self._restore_forward()
        self._partitioned = None

    def _restore_forward(self) -> None:
        if self._cut is not None:
            with suppress(AttributeError):
                del self._cut.forward
        self._cut = None

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """While training, with every update of every group; all ranks call this."""
        self._settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, from this group's servers."""
        if self._leader is not None and self._partitioned is not None:
            self._leader.pull_state()
        return super().optimizer_state(optimizer)

    @property
    def saves_folders(self) -> bool:  # noqa: D102 - inherited
        return super().saves_folders or (self._partitioned is not None and self.num_groups > 1)

    def checkpoint_extras(self) -> dict[str, Any] | None:
        """Each group's own replica and optimizer state; its first rank adds them."""
        if self._leader is None or not self._own_replica or not self._saves_optimizers:
            return None
        states = [x.state_dict() for x in self.optimizers]
        return {"num_groups": self.num_groups, "replica": self._own_replica, "optimizer_states": states}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, with each group's own replica unless it is to be weights only."""
        self._saves_optimizers = "optimizer_states" in checkpoint
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, with what this group had; in a run of another number of groups all start from their mean."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self.num_groups > 1 and is_folder(checkpoint_path):
            group = self.groups.group_of(self.global_rank)
            kept = read_extras(checkpoint_path, group, weights_only=weights_only is not False) or {}
            if kept.get("num_groups") == self.num_groups:
                loaded["optimizer_states"] = kept["optimizer_states"]  # instead of the first group's
                self._restored = kept["replica"]
        return loaded

    # --- Telemetry and the end ---------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Staleness within the group, rounds between groups and traffic of this process so far."""
        values: dict[str, Any] = super().telemetry()
        if self._net is not None and len(self._net.staleness):
            values["staleness/group"] = self._net.staleness
        if self._net is not None and self._net.lost:
            values["group/lost_passes"] = float(self._net.lost)
        if self._net is not None and (saved := self._net.traffic.raw_bytes - self._net.traffic.encoded_bytes):
            values["compression/saved_bytes"] = float(saved)
            values["compression/cpu_seconds"] = self._net.traffic.cpu_seconds
        if self._rounds:  # as of the last time that weights were brought together
            values["sync/rounds"] = self._rounds["rounds"] / max(self._rounds["seconds"], 1e-9)
        return values

    def teardown(self) -> None:
        """Give the model its own forward pass again; then all that the base class does."""
        self._restore_forward()
        super().teardown()
        self._reset()


def _positional(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call by their order."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())
