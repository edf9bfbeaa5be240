"""How fast the machines of a virtual cluster are: distributions of time, workers, links, servers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from lightning_recsys.placement.communication import Network
from lightning_recsys.simulation.events import Station, VirtualClock


@dataclass(frozen=True)
class Duration(ABC):
    """A distribution of seconds.

    Args:
        mean: Mean of the durations, in seconds.

    Raises:
        ValueError: a number is negative or not finite.
    """

    mean: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_at_least(f"{type(self).__name__}.{name}", value, 0.0)

    @abstractmethod
    def draw(self, random: np.random.Generator) -> float:
        """A time, never negative."""


@dataclass(frozen=True)
class Constant(Duration):
    """Always the mean."""

    def draw(self, random: np.random.Generator) -> float:  # noqa: D102 - inherited
        return self.mean


@dataclass(frozen=True)
class Exponential(Duration):
    """Times of a Poisson process: how long is left does not depend on how long it has been going on."""

    def draw(self, random: np.random.Generator) -> float:  # noqa: D102 - inherited
        return self.mean * random.standard_exponential()


@dataclass(frozen=True)
class Normal(Duration):
    """Normal-like: drawn again until it is positive.

    Args:
        mean: Before what is not positive is left out.
        deviation: In seconds; below the mean, so that few draws are repeated.
    """

    deviation: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deviation and self.deviation >= self.mean:
            raise ValueError(f"Normal.deviation must be below the mean {self.mean}, got {self.deviation}.")

    def draw(self, random: np.random.Generator) -> float:  # noqa: D102 - inherited
        while (seconds := self.mean + self.deviation * random.standard_normal()) <= 0 < self.deviation:
            pass
        return seconds


@dataclass(frozen=True)
class Workers:
    """The workers of a cluster: their times, speeds and failures.

    Args:
        compute: Seconds of a batch on a usual worker.
        elsewhere: Seconds between a batch's push and the next pull: reading data, say. Other workers' pushes meanwhile
            make nothing stale.
        speed_deviation: How much workers differ: each has a speed, drawn once from a normal distribution around 1 with
            this deviation, and again where it is below a tenth. Its times are divided by it.
        straggler_share: Share of the workers that are slow for good.
        straggler_factor: How many times as long as the others stragglers take.
        cores: Workers of one replica that compute at full speed at the same time; with more of them each takes as much
            longer. ``None``: all. Processor cores or the bandwidth of memory set such a limit: it is an input.
        failures: Seconds from a worker's start to its failure, which loses the batch that it has begun and not yet
            pushed, if there is one. ``None``: never.
        restart: Seconds until it is there again, and takes a batch.

    Raises:
        ValueError: a number is out of its range.
    """

    compute: Duration = field(default_factory=lambda: Constant(0.1))
    elsewhere: Duration = field(default_factory=lambda: Constant(0.0))
    speed_deviation: float = 0.0
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    cores: float | None = None
    failures: Duration | None = None
    restart: Duration = field(default_factory=lambda: Constant(0.0))

    def __post_init__(self) -> None:
        check_at_least("workers.speed_deviation", self.speed_deviation, 0.0)
        check_at_least("workers.straggler_factor", self.straggler_factor, 1.0)
        check_at_least("workers.straggler_share", self.straggler_share, 0.0)
        if self.straggler_share > 1:
            raise ValueError(f"cluster.workers.straggler_share must be at most 1, got {self.straggler_share}.")
        if self.cores is not None and (isinstance(self.cores, bool) or not self.cores > 0):
            raise ValueError(f"cluster.workers.cores must be above 0, or null for enough, got {self.cores}.")
        if self.failures is not None and self.failures.mean <= self.compute.mean:
            raise ValueError(
                f"cluster.workers.failures must be further apart than a batch takes ({self.compute.mean} s), got a mean"
                f" of {self.failures.mean} s: hardly any batch would be finished."
            )

    def slowness(self, count: int, per_replica: int, random: np.random.Generator) -> list[float]:
        """By what each of the workers' times are multiplied.

        Raises:
            ValueError: failures come more often than the slowest worker computes a batch.
        """
        speeds = 1 + self.speed_deviation * random.standard_normal(count)
        while (low := speeds < 0.1).any():
            speeds[low] = 1 + self.speed_deviation * random.standard_normal(int(low.sum()))
        factors = max(1.0, per_replica / self.cores if self.cores else 1.0) / speeds
        factors[random.permutation(count)[: round(self.straggler_share * count)]] *= self.straggler_factor
        if self.failures is not None and self.failures.mean <= (slowest := self.compute.mean * float(factors.max())):
            raise ValueError(
                "cluster.workers.failures must be further apart than a batch takes on the slowest worker"
                f" ({slowest:.4g} s, with speed, stragglers and cores), got a mean of {self.failures.mean} s: it would"
                " hardly finish one."
            )
        return [float(factor) for factor in factors]


@dataclass(frozen=True)
class Servers:
    """Servers over which rows and vectors are striped evenly, so that all are equally busy: one queue stands for all.

    Args:
        count: Number of servers.
        link: The link of each server's port, which all requests share; each way is a queue of its own.
        pull: Seconds of one server's processor for a whole pull; striped, each of the servers takes a part of it.
        push: Seconds of one server's processor for a whole push, striped likewise.

    Raises:
        ValueError: there is no server.
    """

    count: int = 1
    link: Network = field(default_factory=Network)
    pull: Duration = field(default_factory=lambda: Constant(0.0))
    push: Duration = field(default_factory=lambda: Constant(0.0))

    def __post_init__(self) -> None:
        check_whole("servers.count", self.count, 1)


class ServerQueues:
    """Servers at work.

    Args:
        servers: Number, links and times of the servers.
        worker_link: The link of the worker that asks them. One request of a worker is on its way at a time, so there is
            no queue.
        clock: The cluster's virtual time.
        random: Random numbers, by which times are drawn.
    """

    def __init__(
        self, servers: Servers, worker_link: Network, clock: VirtualClock, random: np.random.Generator
    ) -> None:
        self._servers, self._worker_link, self._random = servers, worker_link, random
        self.inward, self.processor, self.outward = Station(clock), Station(clock), Station(clock)

    def ask(self) -> float:
        """Seconds until a few bytes have come from a worker to the servers."""
        return self._servers.link.latency + self._worker_link.latency

    def send(self, num_bytes: float) -> float:
        """Seconds until bytes have come from a worker to the servers."""
        return self._pass(self.inward, num_bytes)

    def answer(self, num_bytes: float) -> float:
        """Seconds until bytes have come from the servers to a worker."""
        return self._pass(self.outward, num_bytes)

    def work(self, duration: Duration) -> float:
        """Seconds until the servers have dealt with a request."""
        return self.processor.serve(duration.draw(self._random) / self._servers.count)

    def busy_shares(self, name: str, seconds: float) -> dict[str, float]:
        """How busy ports and processor have been, as shares of so many seconds, each behind the servers' name."""
        stations = {"in": self.inward, "out": self.outward, "processor": self.processor}
        return {f"{name} {part}": station.busy_seconds / seconds for part, station in stations.items()}

    def _pass(self, port: Station, num_bytes: float) -> float:
        link, own = self._servers.link, self._worker_link
        through_port = port.serve(num_bytes / self._servers.count / link.bandwidth)
        return link.latency + own.latency + max(through_port, num_bytes / own.bandwidth)


def check_at_least(name: str, value: float, least: float) -> None:
    """Refuse what is below a bound or not finite."""
    if isinstance(value, bool) or not (math.isfinite(value) and value >= least):
        raise ValueError(f"cluster: {name} must be a finite number of at least {least:g}, got {value}.")


def check_whole(name: str, value: int, least: int) -> None:
    """Refuse what is below a bound, or no whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"cluster: {name} must be a whole number of at least {least}, got {value}.")
