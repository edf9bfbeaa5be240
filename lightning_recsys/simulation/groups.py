"""A group of hierarchical training at work: a net's step goes through its trainer and the group servers, leg by leg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

import numpy as np

from lightning_recsys.placement.communication import Network
from lightning_recsys.simulation.events import Process, Signal, Station, VirtualClock
from lightning_recsys.simulation.machines import check_at_least, check_whole


@dataclass(frozen=True)
class Leg:
    """A stretch of a net's step on one device.

    Args:
        server: The group server that computes it; ``None``: the net's own trainer.
        seconds: Time that it takes on one core of that device.
        sent_bytes: Bytes that the trainer sends to the server before.
        returned_bytes: Bytes that the server sends back afterwards.

    Raises:
        ValueError: a number is out of range.
    """

    server: int | None
    seconds: float
    sent_bytes: float = 0.0
    returned_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_whole("a leg's server", 0 if self.server is None else self.server, 0)
        for name in ("seconds", "sent_bytes", "returned_bytes"):
            check_at_least(f"a leg's {name}", getattr(self, name), 0.0)


@dataclass(frozen=True)
class Group:
    """The machines of a group, and what a net does on them in a step.

    A net goes through its legs one after the other, and asks for those that stand together all at once: it goes on when
    the last of their answers is there. A core serves one leg at a time, and a port one message at a time, first come,
    first served; each way of a port is a queue of its own.

    Args:
        legs: The legs of a step, in their order; a sequence of legs has those on servers that are asked for together.
        num_trainers: How many trainers the group has.
        nets_per_trainer: Nets of a trainer, which share its cores and its port.
        num_servers: Number of group servers.
        trainer_cores: Number of cores of a trainer.
        server_cores: Number of cores of a group server.
        link: The link of every trainer and every group server.
        deviation: By how much the time of a leg varies: the standard deviation of a normal distribution, as a share.

    Raises:
        ValueError: there are no legs, one is on a server that there is not, one of several together is not on a server,
            or a number is out of range.
    """

    legs: Sequence[Leg | Sequence[Leg]]
    num_trainers: int = 1
    nets_per_trainer: int = 1
    num_servers: int = 0
    trainer_cores: int = 1
    server_cores: int = 1
    link: Network = field(default_factory=Network)
    deviation: float = 0.05

    def __post_init__(self) -> None:
        for name in ("num_trainers", "nets_per_trainer", "trainer_cores", "server_cores"):
            check_whole(f"group.{name}", getattr(self, name), 1)
        check_whole("group.num_servers", self.num_servers, 0)
        check_at_least("group.deviation", self.deviation, 0.0)
        if not self.legs or self.deviation >= 1:
            raise ValueError(f"cluster.group needs at least one leg, and a deviation below 1, got {self.deviation}.")
        for together in (legs for legs in self.legs if not isinstance(legs, Leg)):
            if not together or any(leg.server is None for leg in together):
                raise ValueError(
                    f"cluster.group: legs that stand together are on servers, each of them, got {together}."
                )
        for leg in self.all_legs:
            if leg.server is not None and not 0 <= leg.server < self.num_servers:
                raise ValueError(
                    f"cluster.group: a leg is on server {leg.server}, but the group has {self.num_servers} servers."
                )

    @property
    def num_nets(self) -> int:
        """The number of nets of all its trainers."""
        return self.num_trainers * self.nets_per_trainer

    @property
    def all_legs(self) -> list[Leg]:
        """All legs of a step, whether they stand alone or together."""
        return [leg for legs in self.legs for leg in ([legs] if isinstance(legs, Leg) else legs)]

    @property
    def cycle_seconds(self) -> float:
        """Seconds of a step that waits for nobody else's."""
        return sum(self._seconds([legs] if isinstance(legs, Leg) else legs) for legs in self.legs)

    def _seconds(self, legs: Sequence[Leg]) -> float:
        """Seconds of legs that are asked for together: messages follow each other in the trainer's port, both ways.

        Each is taken to have a core of its own.
        """
        if legs[0].server is None:
            return legs[0].seconds
        sent = accumulate(leg.sent_bytes / self.link.bandwidth for leg in legs)
        computed = ((left + 2 * self.link.latency + leg.seconds, leg) for left, leg in zip(sent, legs, strict=True))
        end = 0.0
        for ready, leg in sorted(computed, key=itemgetter(0)):
            end = max(end, ready) + leg.returned_bytes / self.link.bandwidth
        return end + 2 * self.link.latency


class _Machine:
    """Cores and a port."""

    def __init__(self, clock: VirtualClock, cores: int) -> None:
        self.cores, self.inward, self.outward = Station(clock, cores), Station(clock), Station(clock)
        self.count = cores


class GroupAtWork:
    """One group, while a cluster runs.

    Args:
        group: The machines of the group, and a net's way through them.
        clock: The cluster's virtual time.
        random: Random numbers, by which the times of legs vary.
    """

    def __init__(self, group: Group, clock: VirtualClock, random: np.random.Generator) -> None:
        self._group, self._clock, self._random = group, clock, random
        self._trainers = [_Machine(clock, group.trainer_cores) for _ in range(group.num_trainers)]
        self._servers = [_Machine(clock, group.server_cores) for _ in range(group.num_servers)]

    def step(self, trainer: int, slowness: float) -> Process:
        """The work of a trainer's net between its pull and its push.

        Args:
            trainer: The trainer's number in the group.
            slowness: By what the net's times are multiplied.
        """
        own = self._trainers[trainer]
        for legs in self._group.legs:
            if isinstance(legs, Leg):
                yield from self._go(own, legs, self._draw(legs.seconds) * slowness)
            else:
                yield from self._go_together(own, legs, slowness)

    def _go(self, own: _Machine, leg: Leg, seconds: float) -> Process:
        if leg.server is None:
            if wait := own.cores.serve(seconds):
                yield wait
            return
        server = self._servers[leg.server]
        yield from self._send(own, server, leg.sent_bytes)
        if wait := server.cores.serve(seconds):
            yield wait
        yield from self._send(server, own, leg.returned_bytes)

    def _go_together(self, own: _Machine, legs: Sequence[Leg], slowness: float) -> Process:
        everybody = Signal()
        missing = len(legs)

        def ask(leg: Leg, seconds: float) -> Process:
            nonlocal missing
            yield from self._go(own, leg, seconds)
            missing -= 1
            if not missing:
                self._clock.fire(everybody)

        for leg in legs:
            self._clock.start(ask(leg, self._draw(leg.seconds) * slowness))
        yield everybody

    def _draw(self, mean: float) -> float:
        return mean * max(1 + self._group.deviation * self._random.standard_normal(), 0.0)

    def _send(self, sender: _Machine, receiver: _Machine, num_bytes: float) -> Process:
        link = self._group.link
        seconds = num_bytes / link.bandwidth
        if wait := 2 * link.latency + max(sender.outward.serve(seconds), receiver.inward.serve(seconds)):
            yield wait

    def busy_shares(self, seconds: float) -> dict[str, float]:
        """How busy its machines were, by name: of trainers the mean, and each group server."""
        machines = {f"group server {i}": [server] for i, server in enumerate(self._servers)}
        shares = {}
        for name, of_name in {"trainers": self._trainers, **machines}.items():
            count = len(of_name)
            shares[f"{name} processor"] = sum(x.cores.busy_seconds / x.count for x in of_name) / seconds / count
            shares[f"{name} in"] = sum(x.inward.busy_seconds for x in of_name) / seconds / count
            shares[f"{name} out"] = sum(x.outward.busy_seconds for x in of_name) / seconds / count
        return shares
