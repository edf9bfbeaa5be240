"""Lightning strategies: how the processes of a run divide the work.

Each is imported when it is first asked for: a run uses one of them, or none, and together they bring servers, stores
and caches.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_recsys.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_fabric.strategies.registry import _StrategyRegistry

    from lightning_recsys.launchers import ServerSpec as ServerSpec
    from lightning_recsys.strategies.async_ps import AsyncParameterServerStrategy as AsyncParameterServerStrategy
    from lightning_recsys.strategies.async_ps import ServedDense as ServedDense
    from lightning_recsys.strategies.common.base import RecsysStrategy as RecsysStrategy
    from lightning_recsys.strategies.composed import ComposedStrategy as ComposedStrategy
    from lightning_recsys.strategies.composed import compose as compose
    from lightning_recsys.strategies.ddp import ForkserverDDPStrategy as ForkserverDDPStrategy
    from lightning_recsys.strategies.ddp import FreeRowsDDPStrategy as FreeRowsDDPStrategy
    from lightning_recsys.strategies.des import DESStrategy as DESStrategy
    from lightning_recsys.strategies.het import HETStrategy as HETStrategy
    from lightning_recsys.strategies.hierarchical import HierarchicalStrategy as HierarchicalStrategy
    from lightning_recsys.strategies.hierarchical import ServedGroups as ServedGroups
    from lightning_recsys.strategies.parts import DensePart as DensePart
    from lightning_recsys.strategies.parts import Free as Free
    from lightning_recsys.strategies.parts import InStep as InStep
    from lightning_recsys.strategies.parts import Pace as Pace
    from lightning_recsys.strategies.parts import Rows as Rows
    from lightning_recsys.strategies.rows.cached import CachedRows as CachedRows
    from lightning_recsys.strategies.rows.served import ServedRows as ServedRows
    from lightning_recsys.strategies.rows.versioned import VersionedRows as VersionedRows
    from lightning_recsys.strategies.served import ServedStrategy as ServedStrategy
    from lightning_recsys.strategies.shadowsync import Replicas as Replicas
    from lightning_recsys.strategies.shadowsync import ShadowSyncStrategy as ShadowSyncStrategy

_MODULES = {
    "AsyncParameterServerStrategy": "async_ps",
    "CachedRows": "rows.cached",
    "ComposedStrategy": "composed",
    "DESStrategy": "des",
    "DensePart": "parts",
    "ForkserverDDPStrategy": "ddp",
    "Free": "parts",
    "FreeRowsDDPStrategy": "ddp",
    "HETStrategy": "het",
    "HierarchicalStrategy": "hierarchical",
    "InStep": "parts",
    "Pace": "parts",
    "RecsysStrategy": "common.base",
    "Replicas": "shadowsync",
    "Rows": "parts",
    "ServedDense": "async_ps",
    "ServedGroups": "hierarchical",
    "ServedRows": "rows.served",
    "ServedStrategy": "served",
    "ServerSpec": "common.base",  # of `lightning_recsys.launchers`
    "ShadowSyncStrategy": "shadowsync",
    "VersionedRows": "rows.versioned",
    "compose": "composed",
}

__all__ = [*_MODULES]

# What ``Trainer(strategy=...)`` takes -> the class, and arguments that differ from its defaults.
_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "async_ps": ("AsyncParameterServerStrategy", {}),
    "ddp_forkserver": ("ForkserverDDPStrategy", {}),
    "ddp_free": ("FreeRowsDDPStrategy", {}),
    "des": ("DESStrategy", {}),
    "het": ("HETStrategy", {}),
    "hierarchical": ("HierarchicalStrategy", {}),
    "het_hybrid": ("HETStrategy", {"algorithm": "hybrid"}),
    "shadowsync": ("ShadowSyncStrategy", {}),
    "shadowsync_easgd": ("ShadowSyncStrategy", {"algorithm": "easgd"}),
    "shadowsync_ma": ("ShadowSyncStrategy", {"algorithm": "ma"}),
    "shadowsync_bmuf": ("ShadowSyncStrategy", {"algorithm": "bmuf"}),
}


_import = lazy_names(__name__, _MODULES)

if not TYPE_CHECKING:  # which would make a type checker believe in every name
    __getattr__ = _import


def register(registry: _StrategyRegistry) -> None:
    """Make every strategy known to ``Trainer(strategy=...)`` by its names, without importing any."""
    for name, (kind, arguments) in _NAMES.items():
        registry.register(name, partial(_make, kind), description=kind, override=True, **arguments)


def _make(kind: str, **arguments: Any) -> RecsysStrategy:
    strategy: RecsysStrategy = _import(kind)(**arguments)
    return strategy
