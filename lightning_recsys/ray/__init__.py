"""Training on a cluster of Ray: ``pip install "lightning-recsys[ray]"``."""

from lightning_recsys.ray.backend import RecsysTorchConfig
from lightning_recsys.ray.checkpoints import ReportCheckpoints, last_checkpoint, path_in
from lightning_recsys.ray.environment import RayEnvironment
from lightning_recsys.ray.fitting import Worker, fit
from lightning_recsys.ray.servers import RayServers

__all__ = [
    "RayEnvironment",
    "RayServers",
    "RecsysTorchConfig",
    "ReportCheckpoints",
    "Worker",
    "fit",
    "last_checkpoint",
    "path_in",
]
