"""The strategies that a plan compares: how each is made, measured and started, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    DESStrategy,
    ForkserverDDPStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)


@dataclass(frozen=True)
class Method:
    """A strategy, as a plan knows it.

    Args:
        name: Its name in tables.
        overrides: Its words on the command line of ``train``.
        make: Makes it, of the number of workers and of what the servers for a measurement are found by. Where it is
            ``grouped``, of a group's workers and of the arguments of its strategy for several groups.
        measured: Numbers of workers that are measured: 1, 2, or both. One worker alone sends others nothing.
        in_step: Whether the workers go in step.
        served: Whether its servers can be started beforehand, on machines of their own.
        has_servers: Whether it has servers.
        grouped: Whether its workers are in groups, one on each machine, with servers of their own there.
        shares_batch: Whether all workers train on one batch.
        exact: Whether it trains as one process does with the joined batches.
        warm_seconds: Seconds of a measurement that are not counted.
    """

    name: str
    overrides: tuple[str, ...]
    make: Callable[..., Any]
    measured: tuple[int, ...]
    in_step: bool
    served: bool
    has_servers: bool
    grouped: bool = False
    shares_batch: bool = False
    exact: bool = False
    warm_seconds: float = 2.0


def _single(workers: int) -> str:
    return "auto"


def _ddp(workers: int) -> Any:
    return ForkserverDDPStrategy()


def _des(workers: int) -> Any:
    return DESStrategy()


def _hybrid(workers: int, **servers: Any) -> Any:
    return HETStrategy(algorithm="hybrid", **servers)


def _het(workers: int, **servers: Any) -> Any:
    return HETStrategy(staleness=100, **servers)


def _shadowsync(workers: int, **servers: Any) -> Any:
    return ShadowSyncStrategy(num_trainers=workers, **servers)


def _async_ps(workers: int, **servers: Any) -> Any:
    return AsyncParameterServerStrategy(**servers)


def _hierarchical(workers: int, **groups: Any) -> Any:
    return HierarchicalStrategy(trainers_per_group=workers, transport="tcp", **groups)


IN_STEP: dict[str, Any] = {"in_step": True, "served": False, "has_servers": False}
CACHED: dict[str, Any] = {"in_step": True, "served": True, "has_servers": True}
FREE: dict[str, Any] = {"in_step": False, "has_servers": True}

METHODS: Mapping[str, Method] = {
    each.name: each
    for each in (
        Method("single", ("strategy=single",), _single, (1,), exact=True, **IN_STEP),
        Method("ddp", ("strategy=ddp",), _ddp, (2,), exact=True, **IN_STEP),
        Method("des", ("strategy=des",), _des, (2,), exact=True, shares_batch=True, **IN_STEP),
        Method("hybrid", ("strategy=het_hybrid",), _hybrid, (1, 2), exact=True, **CACHED),
        Method("het", ("strategy=het", "strategy.staleness=100"), _het, (1, 2), warm_seconds=15.0, **CACHED),
        Method("shadowsync", ("strategy=shadowsync",), _shadowsync, (1,), served=True, **FREE),
        Method("async_ps", ("strategy=async_ps",), _async_ps, (1,), served=True, **FREE),
        Method("hierarchical", ("strategy=hierarchical",), _hierarchical, (1,), served=False, grouped=True, **FREE),
    )
}
