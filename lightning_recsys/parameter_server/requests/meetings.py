"""Meetings of a run's workers at a server: each brings bytes, and all get the same ones when everybody has come.

Nobody is answered late: who comes too early is told to ask again. The end of a meeting is written to the folder before
anybody hears of it, so a server that is started again tells it to the others as well. The room for that is set aside
when a run's first request comes, so a file system that others fill later ends no run.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.parameter_server.messages.wire import Request
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_arrays, take_plain
from lightning_recsys.parameter_server.requests.kept import KeptBytes
from lightning_recsys.parameter_server.requests.operations import Operations
from lightning_recsys.sync.leases import IN_FLIGHT, ShardLeases
from lightning_recsys.sync.membership import Membership, Met

MEETINGS = ".meetings-"  # a beginning that no store's name can have; then the run's id
LEASES = "-leases"  # behind the run's id
MAX_RUN, MAX_KIND, MAX_SIZE = 64, 200, 1 << 16
MAX_RUNS = 8  # that a server which outlives runs remembers
WAIT, SEND, OVER, FAILED = range(4)  # how a meeting stands; the first number of an answer

log = logging.getLogger(__name__)

_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass
class _Run:
    """The state of a run's workers on a server.

    Args:
        membership: Who takes part in the run, and who has died.
        kept: The end of the last meeting, in the server's folder.
        kept_leases: The leases, there as well.
        brought: What has come to the meeting under way, uint8, by rank.
        result: The bytes that the last meeting gave, uint8; ``None`` where an earlier server could not keep them.
        leases: Shares of the pass through the data that is under way, once a worker has asked for one.
        number: Number of the pass through the data that ``leases`` belongs to.
        waiting: The ranks of processes that are to take the places of dead workers, and do not take part yet.
        state: The worker that has left for them what it knows of the run, with the numbers of the meeting behind which
            and of the pass through the data within which it did so; ``None`` where nobody has.
        is_over: All workers have come to the end of the run.
    """

    membership: Membership
    kept: KeptBytes
    kept_leases: KeptBytes
    brought: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    leases: ShardLeases | None = None
    number: int = 0
    waiting: set[int] = field(default_factory=set)
    state: tuple[int, int, int] | None = None
    is_over: bool = False

    def place_of_state(self) -> list[int]:
        """The meeting and the pass that the state for those that join is from; empty where that is over.

        Both are needed: a run that neither validates nor saves goes from pass to pass without a meeting.
        """
        last = self.membership.last
        place = [] if self.state is None else list(self.state[1:])
        return place if last is not None and place == [last.number, self.number] else []


class MeetingRequests:
    """The operations of a server for workers that meet at it, and for who watches over them.

    Args:
        folder: Where the ends of meetings are kept.

    Attributes:
        operations: What is offered here. All of it may be asked again, so nothing needs a sequence number.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self.operations = Operations(
            reads={
                "meet": self._meet,
                "lose": self._lose,
                "lost": self._tell_lost,
                "look": self._look,
                "wait_to_join": self._wait_to_join,
                "leave_state": self._leave_state,
                "join": self._join,
                "end_run": self._end_run,
                "take_share": self._take,
                "finish_share": self._finish,
                "end_pass": self._end_pass,
            }
        )

    def close(self) -> None:
        """Let go of the files."""
        for known in self._runs.values():
            known.kept.close()
            known.kept_leases.close()

    def _meet(self, request: Request) -> object:
        kinds: dict[str, Any] = {"rank": int, "number": int, "kind": str, "may_miss": bool, "combine": str}
        run, size, rank, number, kind, may_miss, combine = take_arguments(request, run=str, size=int, **kinds)
        brought = take_arrays(request, ("brought", torch.uint8, 1)) if request.arrays else []
        if len(kind) > MAX_KIND:
            raise ValueError(f"kind must have at most {MAX_KIND} characters")
        _check_way(combine)
        known = self._run(run, size)
        membership = known.membership
        # A worker comes with what it brings, and then asks without it until the meeting is over. Where it asks for a
        # meeting that is under way and this server does not know it, the server was started anew meanwhile: it has to
        # bring it once more.
        if brought or membership.has(rank, number) or number != membership.number:
            membership.come(rank, number, kind, may_miss=may_miss)
            if brought and number == membership.number:
                known.brought[rank] = brought[0].clone()  # the frame goes with the request
        else:
            return _answer(SEND)
        if (met := membership.met()) is not None:
            # What fails here leaves the meeting under way, so that all who ask for its end hear of it.
            result = _combined([known.brought[x] for x in met.present], combine)
            # On the disk before anybody hears of it. Killed before that, the server leaves a meeting that all bring
            # their parts to once more; killed behind it, the next server answers the rest from the file.
            _keep(known, met, result)
            membership.end(met)
            known.brought, known.result = {}, result
        last = membership.last
        if last is None or last.number != number:
            return _answer(WAIT)
        if last.missing is not None:
            return _answer(FAILED, last.missing)
        if known.result is None:
            raise RuntimeError(
                f"what came of meeting {number} of workers was lost with the server before, whose folder had no room"
            )
        head = [len(last.members), *last.members, len(last.present), *last.present]
        return *_answer(OVER, *head), known.result

    def _lose(self, request: Request) -> object:
        """Take note that a worker has died: whether its run can go on, which it cannot before all have met once."""
        run, size, rank = take_plain(request, run=str, size=int, rank=int)
        known = self._run(run, size)
        if known.membership.last is None:
            return False
        known.membership.lose(rank)
        known.waiting.discard(rank)
        if known.state is not None and known.state[0] == rank:
            known.state = None  # who joins by it would find nobody that has become the first yet
        if known.leases is not None:
            known.leases.lose(rank)
        _keep(known, known.membership.last, known.result)
        return True

    def _tell_lost(self, request: Request) -> object:
        """The workers that have died."""
        run, size = take_plain(request, run=str, size=int)
        return sorted(self._run(run, size).membership.lost)

    # A process that takes the place of a dead worker says that it waits. The first worker hears of it (`look`) between
    # two steps of a pass through the data, and leaves a file for it, with the numbers of the last meeting and the pass.
    # As long as no other meeting ends, and no other pass begins, every member is within that pass, at its end, or
    # behind: there the process can join, if there is a lease for it. Leases are written before members are. A server
    # that is killed between the two leaves a lease of one that is still dead, whose batches go to the others; one that
    # is killed behind both answers the second question as it would have answered the first.

    def _look(self, request: Request) -> object:
        """The first worker that lives, -1 for none; then those that wait to join and for which nothing is left."""
        run, size = take_plain(request, run=str, size=int)
        known = self._run(run, size)
        first = known.membership.first
        waiting = [] if known.place_of_state() else sorted(known.waiting)
        return [-1 if first is None else first, *waiting]

    def _wait_to_join(self, request: Request) -> object:
        """Wait for the state of the run: the meeting and the pass that it is from, nothing where there is none yet.

        ``None`` where the run is over.
        """
        run, size, rank = take_plain(request, run=str, size=int, rank=int)
        known = self._run(run, size)
        _check_rank(rank, size)
        if known.is_over:
            return None
        if rank not in known.membership.lost:
            raise ValueError(f"worker {rank} lives: nobody can take its place")
        known.waiting.add(rank)
        if len(known.waiting) == size:  # together, so that whoever starts workers finds that all of them have failed
            raise ValueError("all workers of this run have died: go on from its last checkpoint")
        return known.place_of_state()

    def _leave_state(self, request: Request) -> object:
        """A worker has left what those need that join behind this meeting, within this pass."""
        run, size, rank, meeting, number = take_plain(request, run=str, size=int, rank=int, meeting=int, number=int)
        known = self._run(run, size)
        _check_rank(rank, size)
        if rank not in known.membership.lost:
            known.state = rank, meeting, number
        return None

    def _join(self, request: Request) -> object:
        """Take part: ``[OVER, the last meeting, the pass, members ...]``; ``[WAIT]`` where that cannot be yet."""
        run, size, rank, meeting, number = take_plain(request, run=str, size=int, rank=int, meeting=int, number=int)
        known = self._run(run, size)
        _check_rank(rank, size)
        membership, last = known.membership, known.membership.last
        if last is None or [last.number, known.number] != [meeting, number] or known.leases is None:
            return _answer(WAIT)
        if rank in membership.lost:
            if not known.place_of_state():
                return _answer(WAIT)
            with _leases_kept(known):
                has_lease = known.leases.join(rank)
            if not has_lease:
                return _answer(WAIT)
            membership.join(rank)
            known.brought.pop(rank, None)
            known.waiting.discard(rank)
            known.state = None  # the next one gets a newer one
            try:
                _keep(known, last, known.result)
            except BaseException:  # it is told that it does not take part
                membership.lose(rank)
                known.leases.lose(rank)
                raise
        elif rank not in membership.joined:
            raise ValueError(f"worker {rank} lives: nobody can take its place")
        return _answer(OVER, meeting, number, *membership.expected)

    def _end_run(self, request: Request) -> object:
        """All workers have come to the end of the run: nobody joins it any more."""
        run, size = take_plain(request, run=str, size=int)
        known = self._run(run, size)
        if known.membership.last is not None:
            known.is_over = True
            _keep(known, known.membership.last, known.result)
        return None

    def _take(self, request: Request) -> object:
        """A worker's next lease in a pass through the data: ``[SEND, number, owner, first, last]``, or how it stands.

        The first who asks begins the pass. A worker that is behind finds that its own pass is over: nobody begins the
        next one while another may have something to train.
        """
        kinds: dict[str, Any] = {"rank": int, "number": int, "shard": int, "lease": int, "latest": int, "pauses": bool}
        optional = {"pauses": False, "in_flight": IN_FLIGHT}
        run, size, rank, number, shard, lease, latest, pauses, in_flight = take_plain(
            request, optional, run=str, size=int, **kinds, in_flight=int
        )
        known = self._run(run, size)
        _check_rank(rank, size)
        if known.leases is not None and number < known.number:
            return _answer(OVER, known.leases.dealt_again)
        with _leases_kept(known):
            # The counts of the pass before go on, and its dead stay dead: their shares are the others' from the start.
            if known.leases is None or number > known.number:
                before = 0 if known.leases is None else known.leases.dealt_again
                leases = ShardLeases(size, shard_size=shard, lease_size=lease, in_flight=in_flight)
                known.number, known.leases = number, leases
                known.leases.dealt_again = before
                for lost in known.membership.lost:
                    known.leases.lose(lost)
            # A worker whose answer was lost names the lease before as its latest, and gets the same one again.
            taken = known.leases.take(rank, latest=latest, pauses=pauses)
        if taken is None:
            return _answer(OVER, known.leases.dealt_again) if known.leases.is_dealt_out else _answer(WAIT)
        return _answer(SEND, taken.number, taken.owner, taken.first, taken.last)

    def _finish(self, request: Request) -> object:
        kinds: dict[str, Any] = {"rank": int, "number": int, "lease": int}
        run, size, rank, number, lease = take_plain(request, run=str, size=int, **kinds)
        known = self._run(run, size)
        _check_rank(rank, size)
        if known.leases is not None and number == known.number:
            with _leases_kept(known):
                known.leases.finish(rank, lease)
        return None

    def _end_pass(self, request: Request) -> object:
        """A worker stops within a pass through the data, and the others with it: nothing more of it is leased."""
        run, size, rank, number = take_plain(request, run=str, size=int, rank=int, number=int)
        known = self._run(run, size)
        _check_rank(rank, size)
        if known.leases is not None and number == known.number:
            with _leases_kept(known):
                known.leases.end()
        return None

    def _run(self, run: str, size: int) -> _Run:
        if not run.isalnum() or len(run) > MAX_RUN or not 1 <= size <= MAX_SIZE:
            raise ValueError(f"run must have 1 to {MAX_RUN} letters and digits, and size be 1 to {MAX_SIZE}")
        known = self._runs.get(run)
        if known is None:
            known = self._runs[run] = self._read(run, size)
            while len(self._runs) > MAX_RUNS:
                _, old = self._runs.popitem(last=False)
                old.kept.remove()
                old.kept_leases.remove()
        if known.membership.size != size:
            raise ValueError(f"run {run} has {known.membership.size} workers, got {size}")
        return known

    def _read(self, run: str, size: int) -> _Run:
        """The state that an earlier server of the folder had of a run, or a new one."""
        path = self._folder / f"{MEETINGS}{run}"
        kept = KeptBytes(path, what="what workers bring to their meetings")
        kept_leases = KeptBytes(path.with_name(f"{path.name}{LEASES}"), what="what workers lease of the data")
        known = _Run(Membership(size), kept, kept_leases)
        if (content := kept.read()) is not None:
            head, _, result = content.partition(b"\n")
            plain = json.loads(head)
            last: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in plain["last"].items()
            }
            known.membership = Membership(plain["size"])
            known.membership.restore(Met(**last), plain["lost"], plain.get("joined", ()))
            known.is_over = plain.get("is_over", False)
            if not plain.get("has_result", True):
                known.result = None
            elif result:
                known.result = torch.frombuffer(bytearray(result), dtype=torch.uint8)
        _read_leases(known)
        return known


def _keep(known: _Run, last: Met, result: Tensor | None) -> None:
    """Write the last meeting alone: all members have heard of the one before when one is over.

    Where there is no room for what came of it, that it is over is written all the same, and the rest is in memory. A
    server that is killed then leaves a successor that knows who lives, and refuses to tell what came of the meeting.

    Raises:
        OSError: there is no room for either.
    """
    membership = known.membership
    head = {"size": membership.size, "lost": sorted(membership.lost), "last": asdict(last)}
    if last is membership.last and membership.joined:
        head["joined"] = membership.joined
    if known.is_over:
        head["is_over"] = True
    if result is not None:
        try:
            known.kept.write(json.dumps(head).encode() + b"\n", result.numpy().tobytes())
            return
        except OSError as error:
            log.warning("What came of meeting %d of workers is kept in memory only: %s", last.number, error)
    known.kept.write(json.dumps(head | {"has_result": False}).encode() + b"\n")


@contextmanager
def _leases_kept(known: _Run) -> Iterator[None]:
    """Around a change of the leases, which is on the disk before a worker hears of it, or has not happened.

    So no batch is leased twice by a server that was started anew, and none is lost whose lease could not be written.
    """
    try:
        yield
        assert known.leases is not None
        plain = {"number": known.number, "leases": known.leases.to_plain()}
        known.kept_leases.write(json.dumps(plain).encode())
    except BaseException:
        _read_leases(known)
        raise


def _read_leases(known: _Run) -> None:
    """Take the leases as they were written last."""
    content = known.kept_leases.read()
    known.number, known.leases = 0, None
    if content is not None:
        plain = json.loads(content)
        known.number, known.leases = plain["number"], ShardLeases.from_plain(plain["leases"])
        # Deaths are in the other file. Killed before the next lease, the server left them out of this one.
        for lost in known.membership.lost:
            known.leases.lose(lost)


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")


def _answer(*numbers: int) -> tuple[Tensor, ...]:
    return (torch.tensor(numbers, dtype=torch.int64),)


def _check_way(combine: str) -> None:
    """Raise ``ValueError`` unless ``combine`` is ``all`` or ``<operation> <dtype>``."""
    name, _, kind = combine.partition(" ")
    known = name in (*_REDUCE, "mean") and isinstance(getattr(torch, kind, None), torch.dtype)
    if combine != "all" and not known:
        raise ValueError(f"there is no way to combine called {combine!r:.100}")


def _combined(brought: Sequence[Tensor], combine: str) -> Tensor:
    """The contributions of all, one after another or reduced, as uint8."""
    if not brought:  # the meeting has failed
        return torch.empty(0, dtype=torch.uint8)
    if combine == "all":
        return torch.cat(list(brought))
    name, _, kind = combine.partition(" ")
    values = [x.view(getattr(torch, kind)) for x in brought]
    total = reduce(_REDUCE["sum" if name == "mean" else name], values)
    return (total / len(values) if name == "mean" else total).to(values[0].dtype).view(torch.uint8)
