"""How the processes of a run come to life, and how what they learnt comes back."""

from typing import TYPE_CHECKING

from lightning_recsys.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_recsys.launchers.engine import EngineEnvironment
    from lightning_recsys.launchers.forkserver import ForkserverLauncher
    from lightning_recsys.launchers.node_servers import NodeServers
    from lightning_recsys.launchers.sidecars import ServerSpec, Sidecars
    from lightning_recsys.launchers.started import Launched, Started, started_processes

# Imported when first asked for: processes that answer requests by a published model do without Lightning.
_MODULES = {
    "EngineEnvironment": "engine",
    "ForkserverLauncher": "forkserver",
    "Launched": "started",
    "NodeServers": "node_servers",
    "ServerSpec": "sidecars",
    "Sidecars": "sidecars",
    "Started": "started",
    "started_processes": "started",
}


if not TYPE_CHECKING:  # which would make a type checker believe in every name
    __getattr__ = lazy_names(__name__, _MODULES)


__all__ = [
    "EngineEnvironment",
    "ForkserverLauncher",
    "Launched",
    "NodeServers",
    "ServerSpec",
    "Sidecars",
    "Started",
    "started_processes",
]
