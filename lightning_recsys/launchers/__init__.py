"""How the processes of a run come to life, and how what they learnt comes back."""

from lightning_recsys.launchers.forkserver import ForkserverLauncher
from lightning_recsys.launchers.node_servers import NodeServers
from lightning_recsys.launchers.sidecars import ServerSpec, Sidecars

__all__ = ["ForkserverLauncher", "NodeServers", "ServerSpec", "Sidecars"]
