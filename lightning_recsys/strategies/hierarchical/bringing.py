"""How a model comes to its group servers as training begins: a plan for all ranks, and what each of them does by it."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytorch_lightning as pl
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim import Optimizer

from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.launchers.loopback import LOOPBACK
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.parts.remote_parts import RemoteParts
from lightning_recsys.partition.fc_split import LayerSplit, split_layers
from lightning_recsys.partition.parts import Part, PartitionedModel, split
from lightning_recsys.partition.tracing import check_traceable, trace
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import server_name
from lightning_recsys.strategies.hierarchical.cut.comparison import hold_against_whole
from lightning_recsys.strategies.hierarchical.cut.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.cut.eight_bit import compute_in_eight_bits
from lightning_recsys.strategies.hierarchical.cut.remote_forward import Net
from lightning_recsys.strategies.hierarchical.cut.sample_call import sample_call
from lightning_recsys.strategies.hierarchical.leader import GroupServers
from lightning_recsys.strategies.hierarchical.news import News
from lightning_recsys.strategies.hierarchical.planning import given_splits, make_plan
from lightning_recsys.strategies.hierarchical.request_costs import measure_requests
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts, SyncOrder
from lightning_recsys.strategies.replicas.replica import Replica
from lightning_recsys.strategies.replicas.rounds import SYNC, make_center

if TYPE_CHECKING:
    from lightning_recsys.strategies.hierarchical.served_groups import ServedGroups

Planned = dict[str, Any]
"""The device of each operator, and the layers that are split before that; plain values."""

_RUNS = itertools.count()  # runs of this process; all ranks of a job count alike

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


def plan_ahead(dense: ServedGroups, task: pl.LightningModule, model: nn.Module) -> Planned | None:
    """Plan before training, so that what cannot be cut, or finds no room, is refused then.

    Args:
        dense: The dense part of this rank; see :func:`plan_operators`.
        task: The LightningModule, whose training step calls the model.
        model: The model that is to be cut.

    Returns:
        ``None`` where nobody knows before the first batch what the model will be called with.

    Raises:
        OperatorRoomError: a group has no room for the model.
        ValueError: the model cannot be cut, or a file is no plan of it.
    """
    try:
        sample = sample_call(task, model)
        if sample is not None:
            return plan_operators(dense, model, sample)
        check_traceable(split_layers(model, given_splits(dense.fc_splits, dense.servers_per_group)).model)
    except OperatorRoomError:
        raise
    except ValueError as error:
        raise ValueError(
            f"strategy=hierarchical cuts {type(model).__name__} over group servers: {error} Or use strategy=shadowsync,"
            " which keeps models whole."
        ) from error
    return None


def plan_operators(dense: ServedGroups, model: nn.Module, sample: Sequence[Any]) -> Planned:
    """Say what is computed where; one rank does this for all.

    Args:
        dense: With the settings, and the servers, which tell how much room they have.
        model: The model that is to be cut.
        sample: Arguments of one call of the model.

    Raises:
        OperatorRoomError: a group has no room for the model.
        ValueError: the model cannot be cut, or a file is no plan of it.
    """
    servers = dense.group_connections()
    told = [server.request("status").value.get("free_bytes") for server in servers]
    costs = measure_requests(servers)
    log.info("A request to a group server: %s.", ", ".join(f"{x} {1e3 * y:.2f} ms" for x, y in costs.items()))
    sharing = 1 if dense.strategy.num_nodes > 1 else dense.num_groups * dense.servers_per_group
    splits, plan, prediction = make_plan(
        model,
        sample,
        dense.operator_placement,
        fc_splits=dense.fc_splits,
        groups=dense.groups,
        compression=dense.operator_compression,
        rooms=[room and room // sharing for room in told],
        measured=costs,
        fc_forward=dense.fc_forward,
    )
    log.info("Operators on the devices of a group:\n%s", prediction)
    if splits:
        log.info("Layers in pieces: strategy.fc_splits={%s}", ", ".join(f"{x.path}: {x.by}" for x in splits))
    return {"devices": dict(plan.devices), "splits": [[x.path, x.by, x.num_pieces] for x in splits]}


def _check_same_parts(before: PartitionedModel, after: PartitionedModel) -> None:
    for device in before.runners:
        one, other = before.on(device), after.on(device)
        if list(map(_interface, one)) != list(map(_interface, other)):
            raise ValueError(f"{device} would have other parts, which take or give other values or have other tensors.")


def _interface(part: Part) -> object:
    own = [*part.module.named_parameters(), *part.module.named_buffers()]
    return part.name, part.inputs, part.outputs, sorted((name, x.shape, x.dtype) for name, x in own)


@dataclass(frozen=True, eq=False)
class Brought:
    """The share of a rank in a model that is on its group servers.

    Args:
        partitioned: The model, whose parts on servers are computed there.
        net: This rank's side of the group servers, which has the parts computed.
        servers: The parts on the group's servers, which its first rank leads; any rank of the group can become that.
        meeting: Where group servers meet that average among themselves, if this rank keeps that place.
        plan: The device of each operator.
        layers: The model's layers, of which some may be in pieces.
        reads: Attributes that the parts were made of; see :class:`~lightning_recsys.partition.tracing.TracedModel`.
    """

    partitioned: PartitionedModel
    net: Net
    servers: GroupServers
    meeting: TCPStore | None
    plan: OperatorPlan
    layers: CutLayers
    reads: frozenset[tuple[str, str]]

    @property
    def served(self) -> dict[str, dict[str, nn.Module]]:
        """The modules of the parts that group servers compute, by devices and names of parts."""
        parts = {device: self.partitioned.on(device) for device in self.partitioned.runners}
        return {device: {part.name: part.module for part in own} for device, own in parts.items()}


class Bringing:
    """One rank's part in bringing a model to the group servers.

    Each rank comes to this at its first batch, and waits only for those who have something that it needs.

    Args:
        dense: The dense part of this rank.
        model: The model that is to be cut.
        optimizer: The optimizer of the run.
    """

    def __init__(self, dense: ServedGroups, model: nn.Module, optimizer: Optimizer) -> None:
        self._dense, self._model, self._optimizer = dense, model, optimizer
        self._group = dense.groups.group_of(dense.strategy.global_rank)
        self._leads = dense.leads_at_first
        store = PrefixStore(f"lightning_recsys/hierarchical/{next(_RUNS)}", _get_default_store())
        self._news = News(store, lost=dense.strategy.run_servers.lost_ranks)
        self._meeting: TCPStore | None = None
        self.num_changes = dense.agreed_changes  # that this rank has followed

    def bring(self, sample: Sequence[Any]) -> Brought:
        """Return when this rank's group has the model on its servers.

        Args:
            sample: Arguments of the model's first call.

        Raises:
            RuntimeError: a rank that this one waits for has failed, or died.
        """
        with self._news.owing(self._dense.strategy.global_rank, self._owes()):
            return self._bring(sample)

    def _owes(self) -> list[str]:
        """The news that other ranks wait for from this one."""
        owed = [f"group-{self._group}"] if self._leads else []
        if self._dense.strategy.is_global_zero:
            owed += ["plan", "meeting", *(f"center-{number}" for number in range(self._dense.servers_per_group))]
        return owed

    def _bring(self, sample: Sequence[Any]) -> Brought:
        dense, groups = self._dense, self._dense.groups
        devices = [server_name(index) for index in range(dense.servers_per_group)]
        connections = dict(zip(devices, dense.group_connections(), strict=True))
        if dense.strategy.is_global_zero:
            told = dense.planned or plan_operators(dense, self._model, sample)
        else:
            told = self._news.ask("plan", by=0)
        plan = OperatorPlan(told["devices"], num_servers=dense.servers_per_group)
        layers = CutLayers(self._model, [LayerSplit(*split) for split in told["splits"]], self._optimizer)
        traced = trace(layers.model, sample)
        partitioned = split(traced, plan)
        parts = {device: GroupParts.of(partitioned.on(device), layers.optimizer) for device in devices}
        if dense.strategy.is_global_zero:
            self._hold(sample, layers, partitioned, parts)
            self._news.tell("plan", told)  # others wait for it, and none trains what does not hold
        self._compute_as_chosen(partitioned, devices)
        for number, device in enumerate(devices):
            layers.check(parts[device])
            parts[device].compression = dense.operator_compression
            parts[device].seed = torch.initial_seed() + self._group * dense.servers_per_group + number
            parts[device].sync = self._sync_order(parts[device], number)
        servers = GroupServers(connections, parts, layers, meeting=self._meeting_place(connections[devices[0]]))
        if self._leads:
            # The centres are made: they start at the mean over groups, as a checkpoint has it, and each group where it
            # was.
            for name, parameter in self._model.named_parameters():
                if name in dense.restored:
                    parameter.data.copy_(dense.restored[name])
            layers.give_model()
            servers.load()
            self._news.tell(f"group-{self._group}")
        self._news.ask(f"group-{self._group}", by=groups.leaders[self._group])
        numbers = {name: part.groups for own in parts.values() for name, part in own.parts.items()}
        remote = {
            device: RemoteParts(connection, dense.operator_compression) for device, connection in connections.items()
        }
        net = Net(remote, self._optimizer, numbers)
        partitioned.runners = dict.fromkeys(devices, net.run)
        return Brought(partitioned, net, servers, self._meeting, plan, layers, layers.whole_reads(traced.reads))

    def _hold(
        self,
        sample: Sequence[Any],
        layers: CutLayers,
        partitioned: PartitionedModel,
        parts: Mapping[str, GroupParts],
        *,
        updates: bool = True,
    ) -> None:
        (connection, *_) = self._dense.group_connections()
        hold_against_whole(
            self._model,
            sample,
            layers=layers,
            partitioned=partitioned,
            parts=parts,
            optimizer=self._optimizer,
            updates=updates,
            folder=Path(connection.request("hello").value["folder"]),  # on this machine, as parts go to servers
        )

    def _compute_as_chosen(self, partitioned: PartitionedModel, devices: Iterable[str]) -> None:
        if self._dense.fc_forward == "int8":
            for part in (part for device in devices for part in partitioned.on(device)):
                compute_in_eight_bits(part)

    def follow(self, brought: Brought, sample: Sequence[Any], changed: Set[str]) -> Brought:
        """Cut the model by the same plan once more, since something that its parts were made of has changed.

        The servers go on with the parameters, optimizer states and buffers that they have, and take those buffers that
        were changed, and the parameters that nobody trains. Rank 0 holds the model in parts against the whole one
        again. All nets of a group have to make the same changes in the same order, as callbacks do. The first that
        makes one brings it to the servers, if it runs on their machine.

        Args:
            brought: The model as it was cut.
            sample: Arguments of the model's present call.
            changed: Names of what has changed.

        Raises:
            ValueError: the parts on servers would not be the same ones, or compute something else; names what has
                changed.
        """
        try:
            if parameters := changed & brought.layers.trained:
                raise ValueError(f"another parameter is in the place of {min(parameters)}, which group servers train.")
            brought.layers.follow(self._model, changed)
            traced = trace(brought.layers.model, sample)
            partitioned = split(traced, brought.plan).with_runners(brought.partitioned.runners)
            _check_same_parts(brought.partitioned, partitioned)
            if self._dense.strategy.is_global_zero:
                devices, optimizer = partitioned.runners, brought.layers.optimizer
                parts = {device: GroupParts.of(partitioned.on(device), optimizer) for device in devices}
                self._hold(sample, brought.layers, partitioned, parts, updates=False)
        except ValueError as error:
            reason = str(error).removeprefix("strategy=hierarchical: ")
            raise ValueError(
                f"strategy=hierarchical: {min(changed)} was changed in the midst of training, and group servers cannot"
                f" go on with the model as it is now: {reason} Change it before training, end"
                " training and go on from its checkpoint, or use strategy=shadowsync."
            ) from error
        self._compute_as_chosen(partitioned, partitioned.runners)
        after = replace(brought, partitioned=partitioned, reads=brought.layers.whole_reads(traced.reads))
        brought.servers.take_buffers(after.served)
        self.num_changes += 1
        if self._dense.strategy.node_rank == self._dense.groups.node_of(self._group):
            brought.servers.change(self.num_changes, after.served, buffers=changed)
        return after

    def _sync_order(self, parts: GroupParts, number: int) -> SyncOrder | None:
        """How a server keeps its share together with those of other groups; rank 0 makes the centre of it."""
        dense, news = self._dense, self._news
        if dense.num_groups == 1 or not parts.parameters:
            return None
        store, initial = f"center-{number}", Replica(parts.parameters.items()).values()  # where all groups start, too
        servers: Sequence[str] = ()
        if dense.has_center:
            if dense.strategy.is_global_zero:
                make_center(dense.strategy.stores(SYNC), initial, store)
                news.tell(store)
            news.ask(store, by=0)
            servers = dense.strategy.endpoints[SYNC]
        return SyncOrder(
            dense.algorithm,
            servers,
            dense.strategy.run_servers.keys,
            initial,
            store,
            dense.interval,
            self._group,
            dense.num_groups,
        )

    def _meeting_place(self, own: Connection) -> tuple[str, int] | None:
        """Where group servers meet that average among themselves: the launcher's store, or one that rank 0 keeps.

        Args:
            own: Connection to a server of this group, which listens at an address of this machine.
        """
        dense = self._dense
        if dense.num_groups == 1 or dense.has_center:
            return None
        if dense.strategy.launches:  # on this machine; its store outlives any worker
            assert dense.strategy.cluster_environment is not None
            return LOOPBACK, dense.strategy.cluster_environment.main_port
        if dense.strategy.is_global_zero:
            host = LOOPBACK if dense.strategy.num_nodes == 1 else urlsplit(own.endpoint).hostname or LOOPBACK
            listening = socket.create_server((host, 0))
            port = listening.getsockname()[1]
            self._meeting = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            self._news.tell("meeting", [host, port])
        host, port = self._news.ask("meeting", by=0)
        return str(host), int(port)
