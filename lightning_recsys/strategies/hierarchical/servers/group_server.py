"""The program of a group server: it computes parts of a model for the nets of its group, and trains them.

The replica lies in a file of the server's folder, with the optimizers' states. A server that is killed and started
again has every update that it had made, and nothing of one that it had begun.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.parameter_server.access.own_files import open_own
from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.parameter_server.parts.operators import OperatorRequests
from lightning_recsys.parameter_server.parts.trained_part import TrainedPart
from lightning_recsys.parameter_server.parts.update_undo import UpdateUndo, changed_by, undo_bytes
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_plain
from lightning_recsys.parameter_server.requests.operations import Operations
from lightning_recsys.parameter_server.server import serve as serve_stores
from lightning_recsys.stores.folders.room import reserve
from lightning_recsys.strategies.hierarchical.draining import WANTED, GroupState
from lightning_recsys.strategies.hierarchical.servers.group_parts import (
    CHANGED,
    FILE,
    MEMORY,
    REPLICA,
    UNDO,
    Change,
    GroupMemory,
    GroupParts,
    map_memory,
)
from lightning_recsys.strategies.hierarchical.servers.sync_agent import Meeting, SyncAgent
from lightning_recsys.sync import Topology

SYNCHRONISES = "synchronises"  # a file that is there while rounds are to be made

log = logging.getLogger(__name__)


def serve(folder: Path, *, num_nets: int = 1, **options: Any) -> None:
    """Run a group server in this process until it is told to stop.

    Args:
        folder: The stores and the parts, which a rank of this machine writes.
        num_nets: Nets of the group, each of which computes one thing at a time.
        options: As for :func:`lightning_recsys.parameter_server.server.serve`.
    """
    serve_stores(folder, offer=partial(GroupRequests, num_nets=num_nets), **options)


class GroupRequests:
    """The operations of a group server besides those of stores.

    Args:
        folder: Folder of the server. Where an earlier server left its parts there, they are served as it left them.
        limits: What a request, and its reply, may take.
        peer: Tells over which connection the present request came.
        num_nets: Number of nets that the server computes for; see :func:`serve`.

    Attributes:
        operators: The operations that compute the parts.
        operations: The operations that a client may ask for, by name.
    """

    def __init__(self, folder: Path, limits: Limits, peer: Callable[[], Peer | None], *, num_nets: int = 1) -> None:
        self.operators = OperatorRequests(limits, peer, num_threads=num_nets)
        self._folder, self._limits, self._peer = folder, limits, peer  # as given
        self._memory = torch.empty(0, dtype=torch.uint8)  # the parts' numbers, mapped from then on
        self._agent: SyncAgent | None = None  # of the parts, where there are other groups
        self._num_changes = 0  # of what the parts read, since they came
        self._synchronises = False  # between `begin_sync` and `end_sync`
        self._ending: Future[object] | None = None  # of the last rounds, if they were asked to end
        self._state: GroupState | None = None  # once there are parts
        self._rejoining: Future[object] | None = None  # from the end of a drain until the centre's weights are there
        self._nets: dict[bytes, tuple[Peer | None, bool]] = {}  # that have looked, by client, and whether they wait
        own = {
            "load_parts": self._load,
            "change_parts": self._change,
            "read_memory": self._read,
            "begin_sync": self._begin,
            "end_sync": self._end,
            "look": self._look,
        }
        self.operations = self.operators.operations | Operations(reads={**own})
        if (folder / MEMORY).exists():
            self._restore()

    def status(self) -> dict[str, Any]:
        """Numbers for the server's status."""
        rounds = 0 if self._agent is None else self._agent.rounds
        return {**self.operators.status(), "sync_rounds": rounds}

    def close(self) -> None:
        """Compute no more."""
        if self._agent is not None:
            self._agent.abandon()
        self.operators.close()

    # --- Parts -------------------------------------------------------------------------------------------------------

    def _load(self, request: Request) -> object:
        """Serve the parts of the folder's file, in place of those of before, and tell the size of their memory."""
        take_plain(request)
        if not (self._folder / FILE).exists():
            raise KeyError(f"no rank of this machine has written parts to {self._folder}")
        if self._synchronises:
            raise ValueError("the parts are being synchronised with other groups: end that first")
        parts = GroupParts.load(self._folder)
        parts.start_algorithm()
        layout = GroupMemory(parts)
        (self._folder / CHANGED).unlink(missing_ok=True)  # of the parts of before
        self._num_changes = 0
        new, records = (
            self._folder / f".{MEMORY}",
            self._folder / f".{UNDO}",
        )  # become what they are once both are whole
        sizes = [undo_bytes(changed_by(part.optimizer)) for part in parts.parts.values()]
        _remove(new, records)
        try:
            self._set_aside(new, layout.num_bytes, "the parts of a model")
            self._set_aside(records, sum(sizes), "the undo records of a model's parts")
        except OSError:
            _remove(new, records)
            raise
        layout.fill(layout.views(map_memory(new, layout.num_bytes)), parts)
        # Records of the parts of before say nothing of the new ones. Killed between the two lines, the server leaves
        # the old parts, of which nobody trains any: a memory with records of nothing is whole.
        records.rename(self._folder / UNDO)
        new.rename(self._folder / MEMORY)
        self._serve(parts, layout)
        return layout.num_bytes

    def _set_aside(self, path: Path, num_bytes: int, what: str) -> None:
        with os.fdopen(open_own(path), "r+b") as file:
            reserve(file.fileno(), 0, max(num_bytes, 1), what=what, folder=self._folder)

    def _change(self, request: Request) -> object:
        """Compute the parts by the modules of a net's file from now on, with their numbers as they are.

        The nets of a group make the same changes, and the first that brings one is heeded. The file becomes that of
        the last change when it is done: the successor of a server that was killed before does it again when it is
        asked again, and of one that was killed later has it.
        """
        number, by = take_arguments(request, number=int, by=int)
        path = self._folder / f"{CHANGED}-{by}"
        if number > self._num_changes:
            if not path.exists():
                raise KeyError(f"no rank of this machine has written changes to {path}")
            self._take(Change.load(path), with_buffers=True)
            path.rename(self._folder / CHANGED)
        path.unlink(missing_ok=True)
        return None

    def _take(self, change: Change, *, with_buffers: bool) -> None:
        for name, module in change.modules.items():
            self.operators.parts[name].change(module, with_buffers=with_buffers)
        self._num_changes = change.number

    def _restore(self) -> None:
        parts = GroupParts.load(self._folder)
        self._state = GroupState.read(self._folder)
        layout = GroupMemory(parts)
        self._serve(parts, layout)
        if (self._folder / CHANGED).exists():
            self._take(
                Change.load(self._folder / CHANGED), with_buffers=False
            )  # whose numbers are in the memory, with all that was trained since
        updates = {name: int(part.version) for name, part in self.operators.parts.items()}
        log.warning(
            "Parts are served as the server before left them, after so many updates: %s. Batches whose backward passes"
            " it had not made are lost for these parts.",
            updates,
        )
        if parts.sync is None:
            return
        if parts.sync.algorithm.topology is not Topology.CENTRAL:
            # What the server before knew of the rounds is lost. It takes part again when all groups meet next.
            parts.sync.algorithm.start(layout.views(self._memory)[REPLICA])
        elif (self._folder / SYNCHRONISES).exists():
            self._start_agent(None)

    def _serve(self, parts: GroupParts, layout: GroupMemory) -> None:
        self._memory = map_memory(self._folder / MEMORY, layout.num_bytes)
        views = layout.views(self._memory)
        layout.replica.assign(views[REPLICA])  # before they move there, which would bring their own values along
        layout.replica.attach(views[REPLICA])
        for name, buffer in parts.buffers.items():
            buffer.data = views[f"buffer.{name}"]
        for name, (parameter, key, _) in parts.states().items():
            for part in parts.parts.values():
                if part.optimizer is not None and parameter in part.optimizer.state:
                    part.optimizer.state[parameter][key] = views[name]
        undos = self._recover(parts, views)  # before anybody reads the numbers
        # A killed server's successor finds the numbers in the memory: they need not lie in two files. This comes before
        # optimizers train the parameters by other names.
        parts.save(self._folder, memory=self._memory)
        order = parts.sync
        self._agent = None if order is None else SyncAgent(order, views[REPLICA])
        if self._state is None:
            can_drain = self._agent is not None and self._agent.has_center
            self._state = GroupState(order.group if order else 0, order.num_groups if order else 1, can_drain)
            self._state.write(self._folder)
        self.operators.compression = parts.compression
        self.operators.parts = {
            name: TrainedPart(part.module, part.optimizer, version=views[f"version.{name}"], undo=undos[name])
            for name, part in parts.parts.items()
        }
        # A server that was started anew does not draw the same once more.
        updates = sum(int(part.version) for part in self.operators.parts.values())
        torch.manual_seed((parts.seed + updates) % 2**63)

    def _recover(self, parts: GroupParts, views: Mapping[str, Tensor]) -> dict[str, UpdateUndo]:
        """Put back what a killed server had changed by updates that do not count; the records for the next ones."""
        changed = {name: changed_by(part.optimizer) for name, part in parts.parts.items()}
        sizes = [undo_bytes(tensors) for tensors in changed.values()]
        self._set_aside(self._folder / UNDO, sum(sizes), "the undo records of a model's parts")
        memory = map_memory(self._folder / UNDO, sum(sizes))
        undos = {
            name: UpdateUndo(tensors, views[f"version.{name}"], piece)
            for (name, tensors), piece in zip(changed.items(), torch.split(memory, sizes), strict=True)
        }
        for name, undo in undos.items():
            if undo.recover():
                log.warning("An update of part %s that the server before had begun and not ended was undone.", name)
        return undos

    def _read(self, request: Request) -> object:
        """A piece of the memory, as bytes."""
        start, stop = take_arguments(request, start=int, stop=int)
        if not 0 <= start <= stop <= self._memory.numel():
            raise IndexError(f"the memory has {self._memory.numel()} bytes, got {start} to {stop}")
        if stop - start > self._limits.message_bytes:
            raise ValueError(f"a reply has at most {self._limits.message_bytes} bytes: ask in pieces")
        return self._memory[start:stop].clone()

    # --- Rounds ------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> object:
        """Synchronise from now on."""
        nobody = {"host": "", "port": 0, "number": 0, "groups": []}
        host, port, number, groups = take_arguments(request, nobody, host=str, port=int, number=int, groups=list)
        if not self._synchronises and not self._is_drained:
            self._start_agent(Meeting(host, port, number, groups) if host else None)
        return None

    def _start_agent(self, meeting: Meeting | None) -> None:
        if self._agent is None:
            raise ValueError("there is nothing to synchronise with other groups")
        if meeting is None and not self._agent.has_center:
            raise ValueError("groups that average among themselves need a place where they meet")
        self._agent.start(meeting)
        self._synchronises, self._ending = True, None
        (self._folder / SYNCHRONISES).touch()

    def _end(self, request: Request) -> object:
        """Synchronise no more; answered when only nets change the replica, with numbers of the rounds so far."""
        take_plain(request)
        ending, rejoining = self._end_rounds(), self._rejoining
        return ending if rejoining is None else self.operators.submit(partial(_result_behind, rejoining, ending))

    def _end_rounds(self) -> Future[object] | None:
        if self._synchronises:
            assert self._agent is not None
            (self._folder / SYNCHRONISES).unlink(missing_ok=True)
            self._synchronises, self._ending = False, self.operators.submit(self._agent.stop)
        return self._ending  # asked again, the answer is the same

    # --- Draining ----------------------------------------------------------------------------------------------------

    @property
    def _is_drained(self) -> bool:
        return self._state is not None and self._state.drained

    def _look(self, request: Request) -> object:
        """A net looks whether its group is drained, and says whether it waits for the end of that.

        What somebody wants is found out here, since nets look often. A drained group's rounds have ended, or are about
        to. Where it is to come back, it does so while a net waits, and is drained until the centre's weights are in the
        replica. Where they cannot be had, it stays drained, and the next look of a net that waits tries again.
        """
        (waits,) = take_arguments(request, waits=bool)
        if self._state is None:
            return False
        self._nets = {client: net for client, net in self._nets.items() if net[0] is None or net[0].is_alive}
        self._nets[request.client] = self._peer(), waits
        wanted = (self._folder / WANTED).exists()
        if wanted and self._state.can_drain and not self._is_drained:
            self._end_rounds()
            log.warning("Group %d is drained: it makes no rounds with the others.", self._state.group)
        elif waits and not wanted and self._is_drained and self._rejoining is None:
            self._rejoining = self.operators.submit(partial(self._rejoin, self._ending))
        if waits and self._rejoining is not None and self._rejoining.done():
            error, self._rejoining = self._rejoining.exception(), None
            if error is None:
                self._start_agent(None)
                self._tell(drained=False)
                log.warning("Group %d is back, with the centre's weights.", self._state.group)
                return False
            log.error("Group %d has not come back, and tries again: %s", self._state.group, error)
        self._tell(drained=self._is_drained or (wanted and self._state.can_drain))
        return self._is_drained

    def _rejoin(self, ending: Future[object] | None) -> None:
        """Take the centre's weights, once the last rounds have ended."""
        if ending is not None:
            wait([ending])
        assert self._agent is not None
        self._agent.take_center()

    def _tell(self, *, drained: bool) -> None:
        assert self._state is not None
        waiting = sum(waits for _, waits in self._nets.values())
        state = replace(self._state, drained=drained, nets=len(self._nets), waiting=waiting)
        if state != self._state:
            self._state = state
            state.write(self._folder)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _result_behind(first: Future[object], second: Future[object] | None) -> object:
    """The result of a future, if there is one, when another has ended, too, in whatever way."""
    wait([first])
    return None if second is None else second.result()
