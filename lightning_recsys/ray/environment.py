"""Where this process stands among the workers of a run of Ray Train."""

from __future__ import annotations

import logging
import os
from functools import cache

import ray
import ray.train
import torch.distributed as dist

from lightning_recsys.launchers import EngineEnvironment, Launched
from lightning_recsys.ray.backend import REPLACES, START
from lightning_recsys.ray.checkpoints import url_of

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class RayEnvironment(EngineEnvironment):
    """The ranks of a run of Ray Train: ``Trainer(plugins=[RayEnvironment()], strategy=...)`` in a training function.

    Ray may put more workers on one node than on another. A strategy of this package takes all ranks from here, so
    ``Trainer`` needs neither ``num_nodes`` nor ``devices``. Workers that Ray replaces one by one count as nodes of
    their own: another one may be on any node.

    Raises:
        RuntimeError: this process is no worker of Ray Train.
    """

    def __init__(self) -> None:
        if not is_worker():
            raise RuntimeError(
                "RayEnvironment is for workers of Ray Train: make the Trainer in the function that"
                " lightning_recsys.ray.fit, or ray.train.torch.TorchTrainer, runs in each of them."
            )

    def __reduce__(self) -> tuple[type[RayEnvironment], tuple[()]]:
        return RayEnvironment, ()

    @staticmethod
    def detect() -> bool:
        """Whether this process is a worker of Ray Train."""
        return is_worker()

    def node_of_ranks(self) -> tuple[int, ...]:
        """The node of each rank. Ranks of several nodes tell each other theirs, once: all of them call this."""
        context = ray.train.get_context()
        if self.launched() is not None:
            return tuple(range(context.get_world_size()))
        if context.get_local_world_size() == context.get_world_size():
            return (0,) * int(context.get_world_size())
        return _gathered_nodes(context.get_world_size(), context.get_node_rank())

    def launched(self) -> Launched | None:
        """How Ray has started this worker, where ``RecsysTorchConfig(replaces_workers=True)`` lets others go on."""
        if (replaces := os.environ.get(REPLACES)) is None:
            return None
        storage = ray.train.get_context().get_storage()
        folder = url_of(storage.storage_filesystem, storage.experiment_fs_path)
        return Launched(os.environ[START], folder, replaces=replaces == "1")

    @property
    def job(self) -> str:
        """Ray's name of the run, which it keeps when its workers are started again, and of the cluster's session."""
        session = ray.get_runtime_context().get_session_name()
        return f"ray/{session}/{ray.train.get_context().get_experiment_name()}"

    @property
    def main_address(self) -> str:
        """The node of rank 0, as Ray has told all workers."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """Where the ranks meet, which is another port each time that they are started."""
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:  # noqa: D102 - inherited
        return int(ray.train.get_context().get_world_size())

    def global_rank(self) -> int:  # noqa: D102 - inherited
        return int(ray.train.get_context().get_world_rank())

    def local_rank(self) -> int:  # noqa: D102 - inherited
        return int(ray.train.get_context().get_local_rank())

    def node_rank(self) -> int:  # noqa: D102 - inherited
        context = ray.train.get_context()
        return int(context.get_node_rank() if self.launched() is None else context.get_world_rank())

    def set_world_size(self, size: int) -> None:
        """Ray has decided it."""

    def set_global_rank(self, rank: int) -> None:
        """Ray has decided it."""


def tell_fewer_workers(at_most: int) -> None:
    """Say on rank 0 that fewer workers train than could, as fewer examples make one step of all of them then.

    Args:
        at_most: Number of workers that the run may have.
    """
    context = ray.train.get_context()
    if (size := context.get_world_size()) < at_most and context.get_world_rank() == 0:
        log.warning(
            "%d of at most %d workers train, each with its own batch size: a step has fewer examples.", size, at_most
        )


def is_worker() -> bool:
    """Whether this process is a worker of Ray Train."""
    try:
        ray.train.get_context()
    except RuntimeError:
        return False
    return True


@cache
def _gathered_nodes(world_size: int, own: int) -> tuple[int, ...]:
    nodes: list[int] = [0] * world_size
    dist.all_gather_object(nodes, own)
    return tuple(nodes)
