"""How a model comes to its group servers as training begins: a plan for all ranks, and what each of them does by it."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytorch_lightning as pl
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim import Optimizer

from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.parts.remote_parts import RemoteParts
from lightning_recsys.partition.fc_split import LayerSplit, split_layers
from lightning_recsys.partition.parts import PartitionedModel, split
from lightning_recsys.partition.tracing import check_traceable, trace
from lightning_recsys.placement.operators import server_name
from lightning_recsys.placement.plan import OperatorPlan
from lightning_recsys.strategies.common.workers.meeting import LOOPBACK
from lightning_recsys.strategies.hierarchical.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.eight_bit import compute_in_eight_bits
from lightning_recsys.strategies.hierarchical.leader import GroupServers
from lightning_recsys.strategies.hierarchical.news import News
from lightning_recsys.strategies.hierarchical.planning import given_splits, make_plan
from lightning_recsys.strategies.hierarchical.remote_forward import Net
from lightning_recsys.strategies.hierarchical.request_costs import measure_requests
from lightning_recsys.strategies.hierarchical.sample_call import sample_call
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts, SyncOrder
from lightning_recsys.strategies.shadowsync.replica import Replica
from lightning_recsys.strategies.shadowsync.rounds import SYNC, open_center

if TYPE_CHECKING:
    from lightning_recsys.strategies.hierarchical.strategy import HierarchicalStrategy

Planned = dict[str, Any]
"""The device of each operator, and the layers that are split before that; plain values."""

_RUNS = itertools.count()  # runs of this process; all ranks of a job count alike

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


def plan_ahead(strategy: HierarchicalStrategy, task: pl.LightningModule, model: nn.Module) -> Planned | None:
    """Plan before training, so that what cannot be cut, or finds no room, is refused then.

    Args:
        strategy: The strategy; see :func:`plan_operators`.
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
            return plan_operators(strategy, model, sample)
        check_traceable(split_layers(model, given_splits(strategy.fc_splits, strategy.servers_per_group)).model)
    except OperatorRoomError:
        raise
    except ValueError as error:
        raise ValueError(
            f"strategy=hierarchical cuts {type(model).__name__} over group servers: {error} Or use strategy=shadowsync,"
            " which keeps models whole."
        ) from error
    return None


def plan_operators(strategy: HierarchicalStrategy, model: nn.Module, sample: Sequence[Any]) -> Planned:
    """Say what is computed where; one rank does this for all.

    Args:
        strategy: With the settings, and the servers, which tell how much room they have.
        model: The model that is to be cut.
        sample: Arguments of one call of the model.

    Raises:
        OperatorRoomError: a group has no room for the model.
        ValueError: the model cannot be cut, or a file is no plan of it.
    """
    servers = strategy.group_connections()
    told = [server.request("status").value.get("free_bytes") for server in servers]
    costs = measure_requests(servers)
    log.info("A request to a group server: %s.", ", ".join(f"{x} {1e3 * y:.2f} ms" for x, y in costs.items()))
    sharing = 1 if strategy.num_nodes > 1 else strategy.num_groups * strategy.servers_per_group
    splits, plan, prediction = make_plan(
        model,
        sample,
        strategy.operator_placement,
        fc_splits=strategy.fc_splits,
        groups=strategy.groups,
        compression=strategy.operator_compression,
        rooms=[room and room // sharing for room in told],
        measured=costs,
        fc_forward=strategy.fc_forward,
    )
    log.info("Operators on the devices of a group:\n%s", prediction)
    if splits:
        log.info("Layers in pieces: strategy.fc_splits={%s}", ", ".join(f"{x.path}: {x.by}" for x in splits))
    return {"devices": dict(plan.devices), "splits": [[x.path, x.by, x.num_pieces] for x in splits]}


@dataclass(frozen=True, eq=False)
class Brought:
    """What a rank has of a model that is on its group servers.

    Args:
        partitioned: The model, whose parts on servers are computed there.
        net: This rank's side of the group servers, which has the parts computed.
        servers: The parts on the group's servers, which its first rank leads; any rank of the group can become that.
        meeting: Where group servers meet that average among themselves, if this rank keeps that place.
    """

    partitioned: PartitionedModel
    net: Net
    servers: GroupServers
    meeting: TCPStore | None


class Bringing:
    """One rank's part in bringing a model to the group servers.

    Each rank comes to this at its first batch, and waits only for those who have something that it needs.

    Args:
        strategy: The strategy of this rank.
        model: The model that is to be cut.
        optimizer: The optimizer of the run.
    """

    def __init__(self, strategy: HierarchicalStrategy, model: nn.Module, optimizer: Optimizer) -> None:
        self._strategy, self._model, self._optimizer = strategy, model, optimizer
        self._group = strategy.groups.group_of(strategy.global_rank)
        self._leads = strategy.global_rank in strategy.groups.leaders
        store = PrefixStore(f"lightning_recsys/hierarchical/{next(_RUNS)}", _get_default_store())
        self._news = News(store, lost=strategy.run_servers.lost_ranks)
        self._meeting: TCPStore | None = None

    def bring(self, sample: Sequence[Any]) -> Brought:
        """Return when this rank's group has the model on its servers.

        Args:
            sample: Arguments of the model's first call.

        Raises:
            RuntimeError: a rank that this one waits for has failed, or died.
        """
        with self._news.owing(self._strategy.global_rank, self._owes()):
            return self._bring(sample)

    def _owes(self) -> list[str]:
        """What other ranks wait for from this one."""
        owed = [f"group-{self._group}"] if self._leads else []
        if self._strategy.is_global_zero:
            owed += ["plan", "meeting", *(f"center-{number}" for number in range(self._strategy.servers_per_group))]
        return owed

    def _bring(self, sample: Sequence[Any]) -> Brought:
        strategy, groups = self._strategy, self._strategy.groups
        devices = [server_name(index) for index in range(strategy.servers_per_group)]
        connections = dict(zip(devices, strategy.group_connections(), strict=True))
        if strategy.is_global_zero:
            self._news.tell("plan", strategy.planned or plan_operators(strategy, self._model, sample))
        told = self._news.ask("plan", by=0)
        plan = OperatorPlan(told["devices"], num_servers=strategy.servers_per_group)
        layers = CutLayers(self._model, [LayerSplit(*split) for split in told["splits"]], self._optimizer)
        partitioned = split(trace(layers.model, sample), plan)
        if strategy.fc_forward == "int8":
            for part in (part for device in devices for part in partitioned.on(device)):
                compute_in_eight_bits(part)
        parts = {device: GroupParts.of(partitioned.on(device), layers.optimizer) for device in devices}
        for number, device in enumerate(devices):
            layers.check(parts[device])
            parts[device].compression = strategy.operator_compression
            parts[device].seed = torch.initial_seed() + self._group * strategy.servers_per_group + number
            parts[device].sync = self._sync_order(parts[device], number)
        servers = GroupServers(connections, parts, layers, meeting=self._meeting_place(connections[devices[0]]))
        if self._leads:
            # The centres are made: they start at the mean over groups, as a checkpoint has it, and each group where it
            # was.
            for name, parameter in self._model.named_parameters():
                if name in strategy.restored:
                    parameter.data.copy_(strategy.restored[name])
            layers.give_model()
            servers.load()
            self._news.tell(f"group-{self._group}")
        self._news.ask(f"group-{self._group}", by=groups.leaders[self._group])
        numbers = {name: part.groups for own in parts.values() for name, part in own.parts.items()}
        remote = {
            device: RemoteParts(connection, strategy.operator_compression) for device, connection in connections.items()
        }
        net = Net(remote, self._optimizer, numbers)
        partitioned.runners = dict.fromkeys(devices, net.run)
        return Brought(partitioned, net, servers, self._meeting)

    def _sync_order(self, parts: GroupParts, number: int) -> SyncOrder | None:
        """How a server keeps its share together with those of other groups; rank 0 makes the centre of it."""
        strategy, news = self._strategy, self._news
        if strategy.num_groups == 1 or not parts.parameters:
            return None
        store, initial = f"center-{number}", Replica(parts.parameters.items()).values()  # where all groups start, too
        servers: Sequence[str] = ()
        if strategy.has_center:

            def wait(_: str) -> None:
                if strategy.is_global_zero:
                    news.tell(store)
                news.ask(store, by=0)

            open_center(strategy.stores(SYNC), initial, is_first=strategy.is_global_zero, barrier=wait, name=store)
            servers = strategy.endpoints[SYNC]
        return SyncOrder(
            strategy.algorithm,
            servers,
            strategy.run_servers.keys,
            initial,
            store,
            strategy.interval,
            self._group,
            strategy.num_groups,
        )

    def _meeting_place(self, own: Connection) -> tuple[str, int] | None:
        """Where group servers meet that average among themselves: a store that the first group's first rank keeps.

        Args:
            own: Connection to a server of this group, which listens at an address of this machine.
        """
        strategy = self._strategy
        if strategy.num_groups == 1 or strategy.has_center:
            return None
        if strategy.is_global_zero:
            host = LOOPBACK if strategy.num_nodes == 1 else urlsplit(own.endpoint).hostname or LOOPBACK
            listening = socket.create_server((host, 0))
            port = listening.getsockname()[1]
            self._meeting = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            self._news.tell("meeting", [host, port])
        host, port = self._news.ask("meeting", by=0)
        return str(host), int(port)
