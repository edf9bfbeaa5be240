"""The process group of workers that may die: all of its collectives are meetings at a server."""

# Collectives have the forms by which `torch.distributed` calls them. torch's stubs list others, which nothing uses, and
# lack a name and a constructor that torch's own groups in Python use.
# mypy: disable-error-code="override, attr-defined, call-arg"

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ScatterOptions,
    Store,
    Work,
    _create_work_from_future,
)
from torch.futures import Future

from lightning_recsys.errors import RequestRefusedError, WorkerLostError
from lightning_recsys.parameter_server.meetings import Alone, MeetingPlace, Meetings

BACKEND = "recsys_meetings"  # its name among torch's backends
CHUNK_BYTES = 64 << 20  # of one meeting; a server's messages have a limit
LOOK_SECONDS = 2.0  # from one look who lives to the next
MAX_NAME = 100  # characters of a barrier's name; what a meeting is for has a limit, too

T = TypeVar("T")

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

_OPERATIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


class MeetingGroup(dist.ProcessGroup):
    """Collectives of all workers that live, for ``torch.distributed`` and all that is built on it.

    A worker that dies leaves the group at the next barrier, broadcast or reduction, and ranks and size are those of the
    living from then on: rank 1 of the group may be worker 2. A mean is one over those whose values came. Collectives
    that gather one value of each rank cannot miss one; after a death they raise
    :class:`~lightning_recsys.errors.WorkerLostError` on all ranks unless one of the others came before. So does a
    broadcast whose root dies before it has brought all of its tensor, unless that is the first worker: the next one
    takes its place, and brings its own.
    :func:`~lightning_recsys.strategies.common.workers.living.among_the_living` does what consists of several
    collectives again then.

    Tensors travel through the server, so this is for what workers seldom do together, and not for every step.

    A process that is to take the place of a dead worker is alone in it, and meets nobody, until :meth:`join`.

    Args:
        meetings: The meetings of this worker with the others.
        size: Number of workers at the start of the run.
        take_first_place: Called once this worker is the first of those that live, where it was not from the start:
            behind a meeting, or in :meth:`look_who_lives`.
        leave_state: Called on the first worker in :meth:`look_who_lives` while others wait to join; the pass through
            the data of which it has left what they need, 0 where it has not. ``None`` where nobody joins.
    """

    def __init__(
        self,
        meetings: Meetings | Alone,
        *,
        size: int,
        take_first_place: Callable[[], None] = lambda: None,
        leave_state: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(meetings.rank, size)
        self._meetings = meetings
        self._is_first, self._take_first_place = not self.is_alone and meetings.rank == 0, take_first_place
        self._leave_state = leave_state
        self._next_look = 0.0
        self._may_miss = True  # workers that died, in barriers, broadcasts and reductions

    def among_the_living(self, together: Callable[[], T]) -> T:
        """Do what all workers do together; see the function of this name, which asks the default group."""
        if not self._may_miss:
            return together()
        while True:
            self._may_miss = False
            try:
                return together()
            except WorkerLostError as lost:
                found = lost
            finally:
                self._may_miss = True
            self.barrier()  # behind it nobody counts on the dead
            if self.rank() == 0:
                log.warning(
                    "Worker %d died while all workers were at %r, which the others do again without what it had.",
                    found.rank,
                    found.kind,
                )

    @property
    def is_alone(self) -> bool:
        """Whether this worker meets nobody, as it has not joined the others."""
        return isinstance(self._meetings, Alone)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile this worker meets nobody: what it does needs none of the others, who do something else."""
        meetings, self._meetings = self._meetings, Alone(self._meetings.rank)
        try:
            yield
        finally:
            self._meetings = meetings

    def join(self, meetings: Meetings) -> None:
        """Meet the others from now on."""
        self._meetings = meetings

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that live, by the ranks that they began with; the first one, which saves and logs, is ahead."""
        return self._meetings.members

    def rank(self) -> int:
        """This worker's place among the living."""
        return self._meetings.members.index(self._meetings.rank)

    def size(self) -> int:
        """Workers that live, as of the last collective."""
        return len(self._meetings.members)

    def getBackendName(self) -> str:
        """The name among torch's backends."""
        return BACKEND

    def shutdown(self) -> None:
        """Meet nobody any more."""
        self._meetings.close()

    def _meet(self, kind: str, brought: Tensor, *, may_miss: bool, combine: str = "all") -> Tensor:
        try:
            met = self._meetings.meet(kind, brought, combine=combine, may_miss=may_miss)
        except RequestRefusedError as refused:
            refused.add_note(
                "Workers that run free meet only where they stop, validate and save for the same reasons. Look for what"
                " one of them decides alone or by its own number of steps: trainer.should_stop, max_steps, min_steps,"
                " callbacks that count steps, collectives in hooks."
            )
            raise
        if self.rank() == 0 and not self.is_alone:
            self._be_first()
        return met

    def _be_first(self) -> None:
        if not self._is_first:
            self._is_first = True
            self._take_first_place()

    def look_who_lives(self) -> None:
        """Between two meetings, which may be hours apart: be the first worker once all before this one have died.

        The first one leaves what those need that wait to join. The server is asked every few seconds. Members stay as
        they are until all meet.
        """
        meetings = self._meetings
        if isinstance(meetings, Alone) or (self._is_first and self._leave_state is None):
            return
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        first, waiting = meetings.look()
        if first == meetings.rank:
            self._be_first()
        if self._is_first and waiting and self._leave_state is not None and (number := self._leave_state()):
            meetings.leave_state(number)

    # --- Collectives, by torch's names -------------------------------------------------------------------------------

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # noqa: D102
        self.wait_for("barrier")
        return _done(None)

    def wait_for(self, what: str) -> None:
        """A barrier with a name, so that no worker takes it for another one."""
        self._meet(what[:MAX_NAME], torch.empty(0, dtype=torch.uint8), may_miss=self._may_miss)

    def allreduce(  # noqa: D102
        self, tensors: Sequence[Tensor], opts: AllreduceOptions | ReduceOptions | None = None
    ) -> Work:
        operation = ReduceOp.SUM if opts is None else opts.reduceOp
        name = next((name for known, name in _OPERATIONS.items() if operation == known), None)
        if name is None:
            raise ValueError(f"workers that may die reduce by {sorted(_OPERATIONS.values())}, got {operation}.")
        for tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            kind, combine = f"allreduce of {tensor.numel()}", f"{name} {dtype}"
            parts = _chunks(_bytes_of(tensor), CHUNK_BYTES)
            reduced = partial(self._reduce_parts, kind, parts, combine=combine)
            _put(reduced() if len(parts) == 1 else self.among_the_living(reduced), tensor)
        return _done(tensors)

    reduce = allreduce_coalesced = allreduce  # type: ignore[assignment]  # torch's stubs have three signatures of each

    def _reduce_parts(self, kind: str, parts: Sequence[Tensor], *, combine: str) -> Tensor:
        return torch.cat([self._meet(kind, x, combine=combine, may_miss=self._may_miss) for x in parts])

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Work:  # noqa: D102
        for tensor in tensors:
            while not self._broadcast(tensor, opts.rootRank):
                pass  # the first worker has died, and there is another one
        return _done(tensors)

    def _broadcast(self, tensor: Tensor, root_rank: int) -> bool:
        """Whether the root has brought all of its tensor; all ranks find the same. Any root but the first raises."""
        own, nothing = _bytes_of(tensor), torch.empty(0, dtype=torch.uint8)
        root = self.members[root_rank]
        kind = f"broadcast of {tensor.numel()} from {root_rank}"
        parts = []
        for part in _chunks(own, CHUNK_BYTES):
            brought = part if root == self._meetings.rank else nothing
            parts.append(self._meet(kind, brought, may_miss=self._may_miss))
            # The root died before it came. Its rank may be among the members all the same, as another process's, which
            # has joined behind all others and counts on another root already.
            if parts[-1].numel() != part.numel():
                if root_rank:
                    raise WorkerLostError(root, kind)
                return False
        _put(torch.cat(parts), tensor)
        return True

    def allgather(  # noqa: D102
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        for targets, own in zip(outputs, inputs, strict=True):
            for target, value in zip(targets, self._gather("allgather", own, len(targets)), strict=True):
                _put(value, target)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: AllgatherOptions | None = None) -> Work:  # noqa: D102
        return self.allgather([list(output.view(-1).chunk(self.size()))], [own], opts)

    def gather(  # noqa: D102
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: GatherOptions
    ) -> Work:
        for own in inputs:
            values = self._gather(f"gather to {opts.rootRank}", own, self.size())
            if self.rank() == opts.rootRank:
                for target, value in zip(outputs[0], values, strict=True):
                    _put(value, target)
        return _done(outputs)

    def scatter(  # noqa: D102
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions
    ) -> Work:
        size, rank = self.size(), self.rank()
        whole = torch.cat([_bytes_of(x) for x in inputs[0]]) if rank == opts.rootRank else None
        num_bytes = outputs[0].nbytes
        kind = f"scatter of {outputs[0].numel()} from {opts.rootRank}"
        parts = []
        for start in range(0, size * num_bytes, CHUNK_BYTES):
            brought = torch.empty(0, dtype=torch.uint8) if whole is None else whole[start : start + CHUNK_BYTES]
            parts.append(self._meet(kind, brought, may_miss=False))
        _put(torch.cat(parts)[rank * num_bytes : (rank + 1) * num_bytes], outputs[0])
        return _done(outputs)

    def _gather(self, kind: str, own: Tensor, size: int) -> list[Tensor]:
        if size != self.size():
            raise ValueError(f"{kind}: there is room for {size} values, and {self.size()} workers live.")
        meet = partial(self._meet, f"{kind} of {own.numel()}", may_miss=False)
        parts = [meet(part).chunk(size) for part in _chunks(_bytes_of(own), CHUNK_BYTES // size)]
        return [torch.cat(list(value)) for value in zip(*parts, strict=True)]


def use_meetings(
    place: MeetingPlace,
    *,
    cancelled: Callable[[], bool],
    take_first_place: Callable[[], None],
    leave_state: Callable[[], int] | None = None,
    joins: bool = False,
) -> str:
    """Let ``torch.distributed`` make the default group of this process one that meets there; the backend's name.

    Args:
        place: The server where the workers meet.
        cancelled: Asked while this worker waits; once ``True`` it waits a few seconds more.
        take_first_place: Called once all workers before this one have died; see :class:`MeetingGroup`.
        leave_state: Called on the first worker while others wait to join; see there.
        joins: Whether this worker is alone until it joins the others.
    """

    def make(_: Store, rank: int, size: int, timeout: timedelta) -> MeetingGroup:
        seconds = timeout.total_seconds()
        meetings = Alone(rank) if joins else Meetings(place, rank=rank, timeout=seconds, cancelled=cancelled)
        return MeetingGroup(meetings, size=size, take_first_place=take_first_place, leave_state=leave_state)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
    return BACKEND


def _bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's values as uint8 in this process's memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _put(values: Tensor, tensor: Tensor) -> None:
    """Write bytes, as :func:`_bytes_of` has them, into a tensor."""
    if values.numel() != tensor.nbytes:
        raise RuntimeError(f"workers exchanged {values.numel()} bytes where {tensor.nbytes} were expected.")
    if tensor.numel():
        with torch.no_grad():
            aligned = torch.empty_like(values).copy_(values)  # a part of a message may begin anywhere
            tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))


def _chunks(values: Tensor, size: int) -> Sequence[Tensor]:
    return torch.split(values, max(size // 16 * 16, 16)) if values.numel() else [values]


def _done(result: Any) -> Work:
    future: Future[Any] = Future()
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work
