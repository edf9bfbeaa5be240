"""Training on a cluster of Ray: ``pip install "lightning-recsys[ray]"``."""

from lightning_recsys.ray.backend import RecsysTorchConfig
from lightning_recsys.ray.checkpoints import ReportCheckpoints, last_checkpoint, path_in
from lightning_recsys.ray.encoding import EncodedDatasets, encode_datasets
from lightning_recsys.ray.environment import RayEnvironment
from lightning_recsys.ray.fitting import Worker, fit
from lightning_recsys.ray.module import RayDataModule
from lightning_recsys.ray.servers import RayServers

__all__ = [
    "EncodedDatasets",
    "RayDataModule",
    "RayEnvironment",
    "RayServers",
    "RecsysTorchConfig",
    "ReportCheckpoints",
    "Worker",
    "encode_datasets",
    "fit",
    "last_checkpoint",
    "path_in",
]
