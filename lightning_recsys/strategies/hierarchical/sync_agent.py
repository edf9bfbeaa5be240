"""A group server's thread that keeps its share of the replica together with those of the other groups."""

from __future__ import annotations

from torch import Tensor

from lightning_recsys.parameter_server.connect import connect
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies.hierarchical.group_parts import SyncOrder
from lightning_recsys.strategies.shadowsync.drivers import ShadowThread
from lightning_recsys.strategies.shadowsync.rounds import CenterRounds


class SyncAgent:
    """ShadowSync's rounds over a group server's share of the replica, in a thread of the server.

    Args:
        order: What to do.
        replica: The share, float32, which nets train meanwhile.
    """

    def __init__(self, order: SyncOrder, replica: Tensor) -> None:
        self._servers: list[Stores] = [connect(endpoint, keys=order.keys) for endpoint in order.servers]
        pieces = [server.dense_store(order.store) for server in self._servers]
        order.algorithm.start(replica)
        self._thread = ShadowThread(CenterRounds(order.algorithm, replica, pieces=pieces), interval=order.interval)

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return self._thread.rounds.count

    def start(self) -> None:
        """Make rounds from now on."""
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Return when no round is under way, with numbers for telemetry; what the thread died of is raised."""
        try:
            self._thread.stop()
            rounds = self._thread.rounds
            return {"rounds": float(rounds.count), "seconds": self._thread.active_seconds}
        finally:
            self._thread.rounds.close()
            for server in self._servers:
                server.close()

    def abandon(self) -> None:
        """Stop without the others: the server ends."""
        self._thread.abandon()
