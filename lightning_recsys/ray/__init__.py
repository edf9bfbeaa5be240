"""Training on a cluster of Ray: ``pip install "lightning-recsys[ray]"``."""

from typing import TYPE_CHECKING

from lightning_recsys.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_recsys.ray.backend import RecsysTorchConfig
    from lightning_recsys.ray.checkpoints import ReportCheckpoints, last_checkpoint, path_in
    from lightning_recsys.ray.encoding import EncodedDatasets, encode_datasets
    from lightning_recsys.ray.environment import RayEnvironment
    from lightning_recsys.ray.fitting import Worker, fit
    from lightning_recsys.ray.module import RayDataModule
    from lightning_recsys.ray.servers import RayServers

# Imported when first asked for: the actors of servers, and tasks that encode rows, do without Lightning, which takes a
# process longer to import than all the rest.
_MODULES = {
    "EncodedDatasets": "encoding",
    "RayDataModule": "module",
    "RayEnvironment": "environment",
    "RayServers": "servers",
    "RecsysTorchConfig": "backend",
    "ReportCheckpoints": "checkpoints",
    "Worker": "fitting",
    "encode_datasets": "encoding",
    "fit": "fitting",
    "last_checkpoint": "checkpoints",
    "path_in": "checkpoints",
}


if not TYPE_CHECKING:  # which would make a type checker believe in every name
    __getattr__ = lazy_names(__name__, _MODULES)


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
