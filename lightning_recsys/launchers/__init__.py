"""How the processes of a run come to life, and how what they learnt comes back."""

from lightning_recsys.launchers.engine import EngineEnvironment
from lightning_recsys.launchers.forkserver import ForkserverLauncher
from lightning_recsys.launchers.node_servers import NodeServers
from lightning_recsys.launchers.sidecars import ServerSpec, Sidecars
from lightning_recsys.launchers.started import Launched, Started, started_processes

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
