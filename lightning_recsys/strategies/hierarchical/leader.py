"""The servers of a group: its first rank brings the parts to them, and their numbers back; all ranks start rounds."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.strategies.hierarchical.cut.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.servers.group_parts import (
    CHANGED,
    REPLICA,
    Change,
    GroupMemory,
    GroupParts,
)


class GroupServers:
    """A group's parts on its servers.

    Args:
        servers: Connections to the group's servers, by the names of devices.
        parts: The parts that each of them is to have, by the same names.
        layers: The model's layers, some of which may be in pieces; parts have the pieces, and the run's model and
            optimizer the whole layers.
        meeting: Host and port of the store by which servers of several groups meet that average among themselves.
    """

    def __init__(
        self,
        servers: Mapping[str, Connection],
        parts: Mapping[str, GroupParts],
        layers: CutLayers,
        *,
        meeting: tuple[str, int] | None = None,
    ) -> None:
        self._meeting = meeting
        self._servers, self._parts = dict(servers), dict(parts)
        self._layers = layers
        self._layouts = {device: GroupMemory(own) for device, own in parts.items()}

    def load(self) -> None:
        """Bring the parts, with parameters and optimizer states as they are, to the servers of this machine.

        Raises:
            RuntimeError: a server has other numbers than was asked for.
        """
        for device, connection in self._servers.items():
            self._parts[device].save(Path(connection.request("hello").value["folder"]))
            loaded = connection.request("load_parts").value
            if loaded != self._layouts[device].num_bytes:
                raise RuntimeError(f"{connection.endpoint} has {loaded} bytes of {device}'s parts")

    def change(self, number: int, modules: Mapping[str, Mapping[str, nn.Module]], *, buffers: Collection[str]) -> None:
        """Have the servers of this machine compute by other modules, unless another net has done so with the same ones.

        Parameters that the servers do not train go along each time: they may have been changed here.

        Args:
            number: Number of the change.
            modules: The modules by devices and names of parts.
            buffers: Names of the buffers whose numbers are to replace the servers'.
        """
        for device, connection in self._servers.items():
            path = Path(connection.request("hello").value["folder"]) / f"{CHANGED}-{os.getpid()}"
            trained = set(self._parts[device].parameters.values())
            Change.of(number, modules[device], buffers=buffers, trained=trained).save(path)
            connection.request("change_parts", arguments={"number": number, "by": os.getpid()})

    def take_buffers(self, modules: Mapping[str, Mapping[str, nn.Module]]) -> None:
        """Bring buffers into these modules from now on, which have other tensors than the parts of before."""
        for device, own in modules.items():
            self._parts[device].buffers.update(pair for module in own.values() for pair in module.named_buffers())

    def begin_sync(self, number: int, groups: Sequence[int]) -> None:
        """Let the servers keep the replica together with those of other groups from now on.

        Args:
            number: How often all groups have stopped so far.
            groups: Numbers of the groups that train.
        """
        arguments: dict[str, Any] = {}
        if self._meeting is not None:
            host, port = self._meeting
            arguments = {"host": host, "port": port, "number": number, "groups": list(groups)}
        for device, connection in self._servers.items():
            if self._parts[device].sync is not None:
                connection.request("begin_sync", arguments=arguments)

    def end_sync(self) -> dict[str, float]:
        """Return when no round is under way; rounds and their seconds, of the server with the fewest."""
        # All are asked before one is waited for: where groups average among themselves, each waits for its peers.
        asked = [self._servers[device] for device, parts in self._parts.items() if parts.sync is not None]
        pending = [connection.begin("end_sync") for connection in asked]
        told = [connection.wait(x).value for connection, x in zip(asked, pending, strict=True)]
        return min((x for x in told if x), key=lambda numbers: float(numbers["rounds"]), default={})

    def pull_model(self, *, keep: Collection[str] = ()) -> None:
        """Take parameters and buffers into the model, without the buffers of some names."""
        for device in self._servers:
            layout = self._layouts[device]
            views = layout.views(self._read(device, layout.model_bytes))
            layout.replica.assign(views[REPLICA])
            for name, buffer in self._parts[device].buffers.items():
                if name not in keep:
                    buffer.copy_(views[f"buffer.{name}"])
        self._layers.take_model()

    def pull_state(self) -> None:
        """Take the state that the servers' optimizers have into the run's own."""
        for device in self._servers:
            layout = self._layouts[device]
            views = layout.views(self._read(device, layout.num_bytes))
            for name, (parameter, key, _) in self._parts[device].states().items():
                self._layers.state_of(parameter)[key] = views[name].clone()
        self._layers.take_state()

    def _read(self, device: str, num_bytes: int) -> Tensor:
        connection, pieces = self._servers[device], []
        step = connection.limits.message_bytes
        for start in range(0, num_bytes, step):
            arguments = {"start": start, "stop": min(start + step, num_bytes)}
            pieces.append(connection.request("read_memory", arguments=arguments).arrays[0])
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
