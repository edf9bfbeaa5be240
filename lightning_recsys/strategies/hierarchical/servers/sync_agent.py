"""A group server's thread that keeps its share of the replica together with those of the other groups."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from lightning_recsys.parameter_server.connect import connect
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies.hierarchical.servers.group_parts import SyncOrder
from lightning_recsys.strategies.shadowsync.drivers import ShadowThread
from lightning_recsys.strategies.shadowsync.rounds import CenterRounds, MeanRounds, Rounds
from lightning_recsys.sync import Topology

PATIENCE = timedelta(days=7)  # with groups that are behind; one that ends is noticed at once


class SyncAgent:
    """ShadowSync's rounds over a group server's share of the replica, in a thread of the server.

    Args:
        order: What to do; its algorithm has begun.
        replica: The share, float32, which nets train meanwhile.
        meeting: Where the servers that have this share in other groups meet, if they average among themselves: the
            store's host and port.
    """

    def __init__(self, order: SyncOrder, replica: Tensor, *, meeting: tuple[str, int] | None = None) -> None:
        self._order, self._replica, self._meeting = order, replica, meeting
        self._servers: list[Stores] = []
        self._thread: ShadowThread | None = None
        self._starting: threading.Thread | None = None
        self._error: BaseException | None = None  # that kept the thread from starting

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return 0 if self._thread is None else self._thread.rounds.count

    def start(self) -> None:
        """Make rounds from now on. The first time servers find each other meanwhile, and nobody waits for that."""
        self._starting = threading.Thread(target=self._start, name="meeting", daemon=True)
        self._starting.start()

    def _start(self) -> None:
        try:
            if self._thread is None:
                self._thread = ShadowThread(self._make_rounds(), interval=self._order.interval)
            self._thread.start()
        except BaseException as error:
            self._error = error

    def take_center(self) -> None:
        """Take the centre's weights for the replica, whatever that has; no rounds may be under way."""
        if self._thread is None:
            self._thread = ShadowThread(self._make_rounds(), interval=self._order.interval)
        rounds = self._thread.rounds
        assert isinstance(rounds, CenterRounds)
        self._replica.copy_(rounds.pull_center())
        self._error = None  # the servers were found after all

    def _make_rounds(self) -> Rounds:
        order = self._order
        if order.algorithm.topology is Topology.CENTRAL:
            self._servers = [connect(endpoint, keys=order.keys) for endpoint in order.servers]
            pieces = [server.dense_store(order.store) for server in self._servers]
            return CenterRounds(order.algorithm, self._replica, pieces=pieces)
        assert self._meeting is not None
        host, port = self._meeting
        store = TCPStore(host, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
        places = PrefixStore(order.store, store)
        # This process has no other use for the default group.
        dist.init_process_group("gloo", store=places, rank=order.group, world_size=order.num_groups, timeout=PATIENCE)
        return MeanRounds(order.algorithm, self._replica, group=dist.group.WORLD)

    def stop(self) -> dict[str, float]:
        """Return when no round is under way, with numbers for telemetry; what the thread died of is raised."""
        if self._starting is not None:
            self._starting.join()
        if self._error is not None:
            raise self._error
        assert self._thread is not None
        self._thread.stop()
        return {"rounds": float(self.rounds), "seconds": self._thread.active_seconds}

    def abandon(self) -> None:
        """Stop without the others: the server ends."""
        if self._thread is not None:
            self._thread.abandon()
