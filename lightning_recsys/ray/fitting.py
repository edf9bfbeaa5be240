"""A run of Ray Train whose workers train by a strategy of this package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from ray.train import CheckpointConfig, DataConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lightning_recsys.errors import RunOverError
from lightning_recsys.ray.backend import RecsysTorchConfig
from lightning_recsys.ray.checkpoints import ReportCheckpoints, last_checkpoint, with_saved
from lightning_recsys.ray.encoding import EncodedDatasets
from lightning_recsys.ray.environment import RayEnvironment, tell_fewer_workers
from lightning_recsys.ray.servers import RayServers, RunningServers
from lightning_recsys.strategies import DESStrategy, ServedGroups
from lightning_recsys.strategies.common.base import RecsysStrategy


class Worker:
    """The argument of a training function of :func:`fit`, in each worker.

    Args:
        strategy: The strategy that the workers train by.
        servers: The servers of its stores; ``None`` where the strategy has them started, if it needs some.
        keeps: Which checkpoints stay, where workers are replaced one by one.
    """

    def __init__(
        self,
        strategy: RecsysStrategy,
        servers: RunningServers | None = None,
        keeps: CheckpointConfig | None = None,
    ) -> None:
        self._strategy, self._servers, self._keeps = strategy, servers, keeps

    def trainer(self, **arguments: Any) -> pl.Trainer:
        """A ``Trainer`` on all workers of the run, which reports a checkpoint to Ray at the end of each epoch.

        Args:
            **arguments: As for ``Trainer``, without ``strategy``, ``num_nodes`` and ``devices``. ``callbacks`` and
                ``plugins`` are added to those that Ray needs.
        """
        callbacks = _listed(arguments.pop("callbacks", None))
        plugins = _listed(arguments.pop("plugins", None))
        strategy = copy.deepcopy(self._strategy)
        if self._servers is not None:
            endpoints, strategy.key_file = self._servers.find(Path.cwd())  # Ray has made this folder for the run
            strategy.servers = tuple(endpoints)
        return pl.Trainer(
            strategy=strategy,
            plugins=[RayEnvironment(), *plugins],
            callbacks=[*callbacks, ReportCheckpoints(self._keeps)],
            **arguments,
        )

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint to go on from, as ``trainer.fit(..., ckpt_path=worker.checkpoint)``; ``None`` at the start."""
        return last_checkpoint()


def fit(
    train: Callable[[Worker], Any],
    *,
    strategy: RecsysStrategy,
    scaling: ScalingConfig,
    servers: RayServers | None = None,
    run: RunConfig | None = None,
    datasets: EncodedDatasets | Mapping[str, Any] | None = None,
) -> Result:
    """Train in Ray's workers.

    .. code-block:: python

        def train(worker: Worker) -> None:
            data = SyntheticDataModule(batch_size=2048)
            task = CTRTask(DeepFM(data.num_dense, data.fields, embedding_dim=16))
            trainer = worker.trainer(max_epochs=3)
            trainer.fit(task, datamodule=data, ckpt_path=worker.checkpoint)

        result = fit(train, strategy=ShadowSyncStrategy(), scaling=ScalingConfig(num_workers=2))

    Args:
        train: What each worker does. It travels to the workers by pickle.
        strategy: The strategy of this package by which ``worker.trainer()`` trains.
        scaling: How many workers, with which resources. With ``num_workers=(1, 4)`` so few will do where the cluster
            has room for no more, at the start and when workers start again.
        servers: Servers of the strategy's stores, which outlive workers. By default the strategy has its own, beside
            the workers, which end with them.
        run: Name, storage and ``FailureConfig`` of the run.
        datasets: Data sets of Ray Data: those of :func:`encode_datasets`, for a :class:`RayDataModule`, or others by
            name, for ``ray.train.get_dataset_shard``.

    Returns:
        Ray's result: the last metrics, and the last checkpoint (:func:`path_in`).

    Raises:
        ray.train.TrainingFailedError: a worker failed, more often than ``FailureConfig`` allows.
        ValueError: the strategy takes no ``servers``, as group servers hold the code of the run; or workers are to be
            replaced one by one (``strategy.max_replacements``), which needs ``servers``,
            failures that the run allows, and rows that any worker can read.
    """
    if servers is not None and isinstance(strategy.dense, ServedGroups):
        raise ValueError(
            "servers: group servers hold the code of the run, so the strategy has all of its own. Leave it out."
        )
    running = None if servers is None else RunningServers(servers.actors)
    replaces = strategy.max_replacements > 0 and scaling.num_workers != 1
    run = run or RunConfig()
    if replaces:
        _check_replaces(run, scaling, has_servers=servers is not None, has_datasets=datasets is not None)
    keeps = run.checkpoint_config
    at_most: int = scaling.max_workers  # type: ignore[attr-defined]  # which the class for Ray Tune lacks

    def work() -> None:
        tell_fewer_workers(at_most)
        try:
            train(Worker(strategy, running, keeps))
        except RunOverError as over:
            print(over)  # Ray shows it beside what other workers print

    config: DataConfig | None = None
    given: Any = datasets
    if isinstance(datasets, EncodedDatasets):
        config, given = datasets.data_config(split=not isinstance(strategy, DESStrategy)), datasets.datasets
    trainer = TorchTrainer(
        work,
        torch_config=RecsysTorchConfig(replaces_workers=replaces),
        scaling_config=scaling,
        run_config=run,
        datasets=given,
        dataset_config=config,
    )
    result = trainer.fit()
    return with_saved(result) if replaces else result


def _check_replaces(run: RunConfig, scaling: ScalingConfig, *, has_servers: bool, has_datasets: bool) -> None:
    """Refuse to replace workers one by one where that cannot be.

    Raises:
        ValueError: servers would end with workers, the number of workers may change, shares are fixed, or no failure
            is allowed.
    """
    if not has_servers:
        why = "needs servers that outlive workers: fit(..., servers=RayServers(...))"
    elif isinstance(scaling.num_workers, tuple):
        why = (
            f"does not go with num_workers={scaling.num_workers}, where all workers start again if their number changes"
        )
    elif has_datasets:
        why = "does not go with data sets of Ray Data, of which each worker streams a share of its own"
    elif run.failure_config is None or run.failure_config.max_failures == 0:
        why = "needs failures that the run allows: RunConfig(failure_config=FailureConfig(max_failures=3))"
    else:
        return
    raise ValueError(
        f"strategy.max_replacements {why}. Without max_replacements all workers start again when one dies."
    )


def _listed(given: Any) -> list[Any]:
    """The argument of ``Trainer``, which takes one alone or in a list, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
