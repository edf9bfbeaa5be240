"""A group server's thread that keeps its share of the replica together with those of the other groups."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from lightning_recsys.parameter_server.connect import connect
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies.common.workers.meeting import MEETING_TIME, connect_members
from lightning_recsys.strategies.hierarchical.servers.group_parts import SyncOrder
from lightning_recsys.strategies.replicas.drivers import ShadowThread
from lightning_recsys.strategies.replicas.rounds import CenterRounds, MeanRounds, Rounds
from lightning_recsys.sync import Topology

PATIENCE = timedelta(days=7)  # with groups that are behind in a round; one that ends is noticed at once
LOOK_SECONDS = 0.05  # from one look who has come to the next

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Where, and with whom, a group's server averages from one time that rounds begin to the next.

    Args:
        host: Host of the store by which the servers find each other.
        port: Port of that store.
        number: Number of the meeting; all groups count alike.
        groups: Numbers of the groups that are asked to come.
    """

    host: str
    port: int
    number: int
    groups: Sequence[int]


class _MeetingRounds(MeanRounds):
    """Rounds that let go of their process group where a server is lost: others may wait for what does not come then."""

    def _exchange(self, *, leaving: bool) -> tuple[Tensor, int]:
        try:
            return super()._exchange(leaving=leaving)
        except RuntimeError:
            self._group = None  # the last reference
            raise


class SyncAgent:
    """ShadowSync's rounds over a group server's share of the replica, in a thread of the server.

    Groups that average among themselves meet anew each time that rounds begin. Where one of them is lost meanwhile, the
    others make no more rounds until then.

    Args:
        order: What to do; its algorithm has begun.
        replica: The share, float32, which nets train meanwhile.
    """

    def __init__(self, order: SyncOrder, replica: Tensor) -> None:
        self._order, self._replica = order, replica
        self._servers: list[Stores] = []
        self._thread: ShadowThread | None = None
        self._starting: threading.Thread | None = None
        self._stops = threading.Event()  # rounds are to end, and may not have begun
        self._error: BaseException | None = None  # that kept the thread from starting
        self._rounds_before = 0  # that were made when the last meeting was called
        self._groups: tuple[int, ...] = ()  # of the last meeting
        self._failed: tuple[int, ...] | None = None  # the same, if it failed before its first round

    @property
    def has_center(self) -> bool:
        """Whether the groups have a centre; otherwise they average among themselves."""
        return self._order.algorithm.topology is Topology.CENTRAL

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return 0 if self._thread is None else self._thread.rounds.count

    def start(self, meeting: Meeting | None = None) -> None:
        """Make rounds from now on. Servers find each other meanwhile, and nobody waits for that.

        Args:
            meeting: Needed by those that average among themselves.
        """
        self._error, self._rounds_before = None, self.rounds
        self._groups = () if meeting is None else tuple(sorted(meeting.groups))
        self._stops.clear()
        self._starting = threading.Thread(target=self._start, args=(meeting,), name="meeting", daemon=True)
        self._starting.start()

    def _start(self, meeting: Meeting | None) -> None:
        try:
            thread = self._made_thread()
            if meeting is not None:
                group = self._gather(meeting) if len(meeting.groups) > 1 else None
                if group is None:
                    return
                cast(MeanRounds, thread.rounds).enter(group)
            thread.start()
        except BaseException as error:
            self._error = error

    def _made_thread(self) -> ShadowThread:
        """The thread, which is made with its rounds when it is first needed; the centre's servers are found then."""
        if self._thread is None:
            order = self._order
            rounds: Rounds
            if self.has_center:
                self._servers = [connect(endpoint, keys=order.keys) for endpoint in order.servers]
                pieces = [server.dense_store(order.store) for server in self._servers]
                rounds = CenterRounds(order.algorithm, self._replica, pieces=pieces)
            else:
                rounds = _MeetingRounds(order.algorithm, self._replica, group=None)
            self._thread = ShadowThread(rounds, interval=order.interval)
        return self._thread

    def take_center(self) -> None:
        """Take the centre's weights for the replica, whatever that has; no rounds may be under way."""
        self._replica.copy_(cast(CenterRounds, self._made_thread().rounds).pull_center())
        self._error = None  # the servers were found after all

    def _gather(self, meeting: Meeting) -> dist.ProcessGroupGloo | None:
        """Wait until all have come, and make a process group of them; ``None`` where one would rather stop before.

        Which of the two it is one of them says, and all go by that: nobody is left to wait for one who has stopped.
        """
        group, groups = self._order.group, self._groups
        store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=MEETING_TIME, wait_for_workers=False)
        places = PrefixStore(f"{self._order.store}/{meeting.number}", store)
        # Where the server before this one has come, and died, the others connect to that.
        is_late = places.check(["fate"])
        # The fate of a meeting is written once, by whoever is first: `on` by one that has seen all come, `off` by one
        # that is to stop. Where a server dies on its way the others wait until they are told to stop.
        if not is_late:
            places.set(f"here-{group}", "")
        while not places.check(["fate"]):
            if self._stops.is_set():
                places.compare_set("fate", "", "off")
            elif places.check([f"here-{x}" for x in groups]):
                places.compare_set("fate", "", "on")
            else:
                self._stops.wait(LOOK_SECONDS)
        if not is_late and places.get("fate") == b"on":
            return connect_members(places, groups.index(group), len(groups), host=meeting.host, patience=PATIENCE)
        missing = [x for x in groups if (is_late and x == group) or not places.check([f"here-{x}"])]
        if missing:
            message = "Groups %s make no rounds until they meet again: meeting %d was without groups %s."
            log.warning(message, list(groups), meeting.number, missing)
        return None

    def stop(self) -> dict[str, float]:
        """Return when no round is under way, with numbers for telemetry; what the thread died of is raised.

        Where another group's server has died there is another meeting, without that group or with the server that was
        started in its place. Only where the same groups were cut off before their first round twice, one time after
        the other, is that an error.
        """
        self._stops.set()
        if self._starting is not None:
            self._starting.join()
        try:
            if self._error is not None:
                raise self._error
            if self._thread is not None:
                self._thread.stop()
            self._failed = None
        except RuntimeError as error:
            has_met = self.rounds > self._rounds_before
            if not self._groups or (self._failed == self._groups and not has_met):
                raise
            self._failed = None if has_met else self._groups
            log.warning("Groups made no more rounds after %d of them, until they meet again: %s", self.rounds, error)
        seconds = 0.0 if self._thread is None else self._thread.active_seconds
        return {"rounds": float(self.rounds), "seconds": seconds}

    def abandon(self) -> None:
        """Stop without the others: the server ends."""
        self._stops.set()
        if self._thread is not None:
            self._thread.abandon()
