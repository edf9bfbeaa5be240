"""The share of a group server when training starts: its parts of the model, and where their numbers lie in memory."""

from __future__ import annotations

import copy
import errno
import io
import math
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Buffer

from lightning_recsys.compression import Compression
from lightning_recsys.parameter_server.access.keys import ClientKeys
from lightning_recsys.parameter_server.access.own_files import open_own
from lightning_recsys.partition.parts import Part
from lightning_recsys.stores.folders.room import free_bytes, no_room
from lightning_recsys.strategies.replicas.replica import (
    LINE_BYTES,
    Replica,
    make_state,
    optimizer_like,
    own_attributes,
)
from lightning_recsys.sync import SyncAlgorithm

FILE = "parts"  # in a group server's folder
CHANGED = "changed"  # the last change of what the parts read
REPLICA = "replica"
MEMORY = "memory"
UNDO = "undo"


@dataclass(frozen=True)
class SyncOrder:
    """How a group server keeps its share of the replica together with those of other groups.

    Args:
        algorithm: The algorithm that keeps this group's replica together with others; no other group uses the object.
        servers: Endpoints of the sync servers; none where the algorithm has no centre.
        keys: The clients' keys to the sync servers; ``None`` where they ask for none.
        initial: The share where all groups start; ``None`` once the algorithm has begun there.
        store: Name of the centre's pieces there, or of the meeting of those that average among themselves.
        interval: Seconds from one round to the next; ``None`` for as often as the pace allows.
        group: Number of the group.
        num_groups: Number of groups of the run.
    """

    algorithm: SyncAlgorithm
    servers: Sequence[str]
    keys: ClientKeys | Path | str | None
    initial: Tensor | None
    store: str
    interval: float | None
    group: int
    num_groups: int


@dataclass(eq=False)
class ServedPart:
    """A part with the optimizer of its parameters.

    Args:
        module: The module that computes the part.
        optimizer: Optimizer of the part's parameters, as they are in the module; ``None`` where none is trained.
        groups: Numbers of the groups of the run's optimizer that belong to the part.
    """

    module: nn.Module
    optimizer: Optimizer | None
    groups: list[int]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_attributes": {} if self.optimizer is None else own_attributes(self.optimizer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = state.pop("_attributes")  # which an optimizer does not take along itself
        vars(self).update(state)
        if self.optimizer is not None:
            vars(self.optimizer).update(attributes)


@dataclass(eq=False)
class GroupParts:
    """The parts of one group server. Tensors that belong together are the same objects, here and after pickling.

    Args:
        parts: The parts, by name.
        parameters: The trained parameters by their names in the model, in the order of the replica.
        buffers: The buffers of the parts, by their names in the model.
        sync: How the replica is kept together with those of other groups; ``None`` where there is one group.
        compression: Compression of activations and gradients.
        seed: Seed of what the server draws, such as what a dropout zeroes.
    """

    parts: dict[str, ServedPart]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    sync: SyncOrder | None = None
    compression: Compression = field(default_factory=lambda: Compression.from_option("none"))
    seed: int = 0

    @classmethod
    def of(cls, parts: Sequence[Part], optimizer: Optimizer) -> GroupParts:
        """The parts of a server, with shares of the run's optimizer whose state is made.

        Raises:
            TypeError: the optimizer's state cannot be made before its first step.
        """
        trained = {x for group in optimizer.param_groups for x in group["params"] if x.requires_grad}
        served: dict[str, ServedPart] = {}
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for part in parts:
            own = {name: x for name, x in part.module.named_parameters() if x in trained}
            parameters.update(own)
            buffers.update(part.module.named_buffers())
            served[part.name] = ServedPart(part.module, *_share_of(optimizer, set(own.values())))
        return cls(served, parameters, buffers)

    def start_algorithm(self) -> None:
        """Begin to synchronise where all groups start, unless that was done."""
        if self.sync is not None and self.sync.initial is not None:
            self.sync.algorithm.start(self.sync.initial)
            self.sync = replace(self.sync, initial=None)

    def states(self) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
        """The tensors of the optimizers' states, by a name each, with the parameter and their names in its state."""
        found: dict[str, tuple[nn.Parameter, str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            for part in self.parts.values():
                state = {} if part.optimizer is None else part.optimizer.state.get(parameter, {})
                tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
                found.update({f"state.{name}.{key}": (parameter, key, x) for key, x in sorted(tensors.items())})
        return found

    def save(self, folder: Path, *, memory: Tensor | None = None) -> None:
        """Write the file that a group server reads; the folder, like the file, is this user's alone.

        Args:
            folder: Folder of the group server.
            memory: What is mapped from the folder's memory: tensors that lie there are left out of the file.

        Raises:
            OSError: there is no room; the message says how many bytes are missing.
            TypeError: a module, or an attribute of the optimizer, cannot be pickled.
        """
        _write(folder / FILE, self, memory)

    @classmethod
    def load(cls, folder: Path) -> GroupParts:
        """Read it; tensors that were left out lie in the folder's memory, mapped.

        Raises:
            PermissionError: the file is not this user's alone.
        """
        with os.fdopen(open_own(folder / FILE), "rb") as file:
            parts: GroupParts = _Unpickler(file, folder / MEMORY).load()
        return parts


@dataclass(eq=False)
class Change:
    """Modules by which a group server is to compute its parts from now on.

    Args:
        number: Number of the change, from 1; all nets of a group make the same changes, and servers heed the first.
        modules: The modules, by names of parts. Parameters that servers train, and buffers that stay, have no numbers
            (``meta``).
    """

    number: int
    modules: dict[str, nn.Module]

    @classmethod
    def of(
        cls,
        number: int,
        modules: Mapping[str, nn.Module],
        *,
        buffers: Collection[str],
        trained: Collection[nn.Parameter],
    ) -> Change:
        """A change to these modules, which are copied.

        Args:
            number: Number of the change.
            modules: The modules, by names of parts.
            buffers: Names of the buffers whose numbers go along.
            trained: Parameters that servers train. The numbers of all others go along.
        """
        copies: dict[str, nn.Module] = {}
        for part, module in modules.items():
            memo: dict[int, Any] = {}
            for parameter in module.parameters():
                on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                memo[id(parameter)] = on_meta if parameter in trained else parameter
            for name, buffer in module.named_buffers():
                memo[id(buffer)] = buffer if name in buffers else buffer.to("meta")
            copies[part] = copy.deepcopy(module, memo)
        return cls(number, copies)

    def save(self, path: Path) -> None:
        """Write the file that a group server reads.

        Raises:
            OSError: there is no room; the message says how many bytes are missing.
            TypeError: a module cannot be pickled.
        """
        _write(path, self, None)

    @classmethod
    def load(cls, path: Path) -> Change:
        """Read it.

        Raises:
            PermissionError: the file is not this user's alone.
        """
        with os.fdopen(open_own(path), "rb") as file:
            change: Change = _Unpickler(file, path).load()
        return change


def map_memory(path: Path, num_bytes: int) -> Tensor:
    """The bytes of a group server's memory, uint8 ``[num_bytes]``, of a file that is so long."""
    return torch.from_file(str(path), shared=True, size=max(num_bytes, 1), dtype=torch.uint8)[:num_bytes]


def _write(path: Path, written: object, memory: Tensor | None) -> None:
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with os.fdopen(open_own(unfinished), "wb") as file:
            _Pickler(file, memory).dump(written)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        unfinished.unlink()
        raise TypeError(
            "strategy=hierarchical writes the parts of the model and their optimizer to files, by which group"
            f" servers get them, and this cannot be written: {error}. Functions and classes must be such as can"
            " be imported."
        ) from error
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        counted = _Counted()
        _Pickler(counted, memory).dump(written)
        what, there = f"the file {path.name} of a group server", free_bytes(path.parent)
        raise no_room(error.errno, what, path.parent, counted.num_bytes, there) from error
    unfinished.rename(path)


class _Counted(io.RawIOBase):
    """Counts what is written to it, and keeps none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def write(self, content: Buffer, /) -> int:
        size = memoryview(content).nbytes
        self.num_bytes += size
        return size


class _Pickler(pickle.Pickler):
    """Leaves out the numbers of tensors that lie in a memory."""

    def __init__(self, file: IO[bytes] | _Counted, memory: Tensor | None) -> None:
        super().__init__(file, protocol=5)
        self._start = None if memory is None else memory.untyped_storage().data_ptr()

    def persistent_id(self, obj: object) -> torch.dtype | None:
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.data_ptr() == self._start:
            return obj.dtype
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], memory: Path) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: torch.dtype) -> torch.storage.TypedStorage:
        return torch.storage.TypedStorage(wrap_storage=self._storage, dtype=pid, _internal=True)  # type: ignore[no-untyped-call]

    @cached_property
    def _storage(self) -> torch.UntypedStorage:
        return map_memory(self._memory, self._memory.stat().st_size).untyped_storage()


def _share_of(optimizer: Optimizer, parameters: set[nn.Parameter]) -> tuple[Optimizer | None, list[int]]:
    """An optimizer like another one, for some of its parameters, and which groups of the other its groups are."""
    groups, numbers = [], []
    for number, group in enumerate(optimizer.param_groups):
        if own := [x for x in group["params"] if x in parameters]:
            groups.append(group | {"params": own})
            numbers.append(number)
    if not groups:
        return None, []
    share = optimizer_like(optimizer, groups, {x: dict(y) for x, y in optimizer.state.items() if x in parameters})
    make_state(share, setting="strategy=hierarchical")
    return share, numbers


class GroupMemory:
    """How the numbers of a group server's parts lie in its memory, which a trainer of the group reads as a whole.

    First come those that make the model: the replica (all trained parameters, in one float32 vector) and the buffers.
    Then come each part's updates so far, and the optimizers' states.

    Args:
        parts: The parts of the server, the same on both sides.

    Attributes:
        replica: Lays the trained parameters out in one vector.
        num_bytes: Size of the whole memory, in bytes.
        model_bytes: Size of its beginning, which makes the model, in bytes.
    """

    def __init__(self, parts: GroupParts) -> None:
        self.replica = Replica(parts.parameters.items())
        self.model_bytes = 0
        self._places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self.num_bytes = 0
        self._add(REPLICA, torch.float32, torch.Size([self.replica.size]))
        for name, buffer in parts.buffers.items():
            self._add(f"buffer.{name}", buffer.dtype, buffer.shape)
        self.model_bytes = self.num_bytes
        for name in parts.parts:
            self._add(f"version.{name}", torch.int64, torch.Size([1]))
        for name, (_, _, tensor) in parts.states().items():
            self._add(name, tensor.dtype, tensor.shape)

    def _add(self, name: str, dtype: torch.dtype, shape: torch.Size) -> None:
        self._places[name] = (self.num_bytes, dtype, shape)
        size = math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-size // LINE_BYTES) * LINE_BYTES

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors in a memory, uint8 ``[num_bytes]``, or in its beginning."""
        return {
            name: memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, dtype, shape) in self._places.items()
            if start + math.prod(shape) * dtype.itemsize <= memory.numel()
        }

    def fill(self, views: Mapping[str, Tensor], parts: GroupParts) -> None:
        """Write the numbers that the parts came with."""
        views[REPLICA].copy_(Replica(parts.parameters.items()).values())
        for name, buffer in parts.buffers.items():
            views[f"buffer.{name}"].copy_(buffer)
        for name, (_, _, tensor) in parts.states().items():
            views[name].copy_(tensor)
