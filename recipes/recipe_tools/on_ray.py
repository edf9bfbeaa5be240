"""``launcher=ray``: the processes of a run are workers of Ray Train."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from recipe_tools.build import Config
from recipe_tools.quiet import be_quiet
from recipe_tools.record import RunRecord

if TYPE_CHECKING:  # the extra lightning-recsys[ray]
    from lightning_recsys.ray.servers import RunningServers

log = logging.getLogger(__name__)

Train = Callable[[Config, RunRecord], None]


class RayLauncher:
    """Runs the recipe in workers on a cluster of Ray, and starts them again when one fails.

    Args:
        num_workers: Processes of the run.
        min_workers: So few will do where the cluster has room for no more, at the start and when workers start again;
            by default ``num_workers``.
        resources_per_worker: What each of them has, by Ray's names; by default a CPU, and a GPU with ``use_gpu``.
        use_gpu: Each worker has a GPU.
        placement_strategy: How Ray spreads workers over nodes.
        max_failures: So often all workers start again, from the last checkpoint, when one fails.
        num_servers: Servers of the strategy's stores that outlive workers; 0: servers beside the workers.
        store_folder: Where these servers keep their files, on a disk of each node; an absolute path.
        address: Where the cluster is. By default where ``RAY_ADDRESS`` says, or one of this machine for the run alone.

    Raises:
        ValueError: there is to be no worker, or more at least than at most, or servers have no folder.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        min_workers: int | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        use_gpu: bool = False,
        placement_strategy: str = "PACK",
        max_failures: int = 3,
        num_servers: int = 0,
        store_folder: str | None = None,
        address: str | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"launcher.num_workers must be at least 1, got {num_workers}.")
        if min_workers is not None and not 1 <= min_workers <= num_workers:
            raise ValueError(f"launcher.min_workers must be from 1 to num_workers={num_workers}, got {min_workers}.")
        if num_servers and store_folder is None:
            raise ValueError(
                f"launcher.num_servers={num_servers}, and launcher.store_folder does not say where they keep their"
                " files. Name an absolute path on a disk of each node."
            )
        self._num_servers, self._store_folder = num_servers, store_folder
        self._num_workers = num_workers
        self._scaling = {
            "num_workers": num_workers if min_workers in (None, num_workers) else (min_workers, num_workers),
            "use_gpu": use_gpu,
            "placement_strategy": placement_strategy,
            "resources_per_worker": None if resources_per_worker is None else dict(resources_per_worker),
        }
        cpus = float((resources_per_worker or {}).get("CPU", 1.0))
        self._cpus = num_workers * cpus + num_servers
        self._least_cpus = (min_workers or num_workers) * cpus + num_servers
        self._max_failures, self._address = max_failures, address

    def __call__(self, train: Train, record: RunRecord) -> None:
        """Run ``train`` in all workers; what rank 0 has learned stands in ``record`` then.

        Raises:
            ImportError: Ray is not installed.
            ValueError: workers are to be replaced one by one, and servers would end with them, or their number may
                change.
            ray.train.TrainingFailedError: workers failed once too often.
            RuntimeError: the worker that tested the model died over it.
        """
        try:
            import ray.train.torch
        except ImportError as error:
            raise ImportError('launcher=ray needs Ray: pip install -e ".[ray]".') from error
        from lightning_recsys.ray import RecsysTorchConfig
        from lightning_recsys.ray.environment import tell_fewer_workers

        folder, here, config = record.path.parent.absolute(), Path.cwd(), record.config
        run_id, found_here, at_most = uuid4().hex, list(sys.path), self._num_workers
        replaces = bool(config["trainer"]["strategy"].get("max_replacements")) and self._num_workers > 1
        if replaces and not self._num_servers:
            raise ValueError(
                "strategy.max_replacements needs servers that outlive workers: launcher.num_servers=2"
                " launcher.store_folder=/data/stores. Without max_replacements all workers start again when one dies."
            )
        if replaces and isinstance(self._scaling["num_workers"], tuple):
            raise ValueError(
                "strategy.max_replacements does not go with launcher.min_workers: one worker is replaced, or all of"
                " them start again, as many as there is room for."
            )
        with _cluster(self._address, self._cpus, self._least_cpus), self._servers() as servers:

            def work() -> None:
                # Ray has led each worker into a folder of its own.
                found = None if servers is None else servers.find(Path.cwd())
                os.chdir(here)
                sys.path += [place for place in found_here if place not in sys.path]  # with models of one's own
                tell_fewer_workers(at_most)
                run_worker(train, config, folder, run_id, found)

            trainer = ray.train.torch.TorchTrainer(
                work,
                torch_config=RecsysTorchConfig(replaces_workers=replaces),
                scaling_config=ray.train.ScalingConfig(**self._scaling),
                run_config=ray.train.RunConfig(
                    name=f"{config['name']}-{run_id[:8]}",
                    storage_path=str(folder / "ray"),
                    failure_config=ray.train.FailureConfig(max_failures=self._max_failures),
                ),
            )
            trainer.fit()
        learned = read_learned(folder, run_id)
        record.metrics |= learned["metrics"]
        record.details |= learned["details"]

    @contextmanager
    def _servers(self) -> Iterator[RunningServers | None]:
        from lightning_recsys.ray.servers import RayServers, RunningServers

        if not self._num_servers or self._store_folder is None:
            yield None
            return
        with RayServers(self._num_servers, store_folder=self._store_folder) as servers:
            yield RunningServers(servers.actors)


def run_worker(train: Train, config: Config, folder: Path, run_id: str, servers: tuple[list[str], Path] | None) -> None:
    """Run the recipe in one of the workers; the first of them leaves what it has learned in the folder.

    Args:
        train: The recipe.
        config: Its configuration.
        folder: The run's folder, which all nodes share.
        run_id: Names this run, in whatever number of tries.
        servers: Endpoints of the servers of the strategy's stores, and a file with keys to them; ``None`` where the
            strategy has its own servers.
    """
    from lightning_recsys.errors import RunOverError

    be_quiet()
    config = config | {"trainer": config["trainer"] | {"num_nodes": 1, "devices": 1, "enable_progress_bar": False}}
    if servers is not None:
        endpoints, key_file = servers
        config["trainer"]["strategy"] |= {"servers": endpoints, "key_file": str(key_file)}
    if _was_begun(folder / "ray" / f"begun-{run_id}"):
        config |= {"ckpt_path": "last"}
    record = RunRecord(folder, config=config, overrides=[])
    try:
        train(config, record)
    except RunOverError as over:
        print(over)
    else:
        if rank_zero_only.rank == 0:
            learned = {"metrics": record.metrics, "details": record.details}
            _learned(folder, run_id).write_text(json.dumps(learned, default=str))


def read_learned(folder: Path, run_id: str) -> dict[str, Any]:
    """Metrics and details of the run, as its first worker has left them.

    Raises:
        RuntimeError: it has left nothing: where workers are replaced one by one nobody tests in its place.
    """
    try:
        learned: dict[str, Any] = json.loads(_learned(folder, run_id).read_text())
    except FileNotFoundError:
        raise RuntimeError(
            "the run has trained, and the worker that tested the model died over it. The same command with"
            f" hydra.run.dir={folder} ckpt_path=last tests it."
        ) from None
    return learned


def _learned(folder: Path, run_id: str) -> Path:
    return folder / "ray" / f"learned-{run_id}.json"


def worker_arguments(config: Config) -> dict[str, Any]:
    """What ``Trainer`` needs beside the configuration: where this worker stands among Ray's."""
    if config.get("launcher") is None:
        return {}
    from lightning_recsys.ray import RayEnvironment

    return {"plugins": [RayEnvironment()]}


def refuse_one_process(trainer: pl.Trainer, config: Config) -> None:
    """See that all of Ray's workers train together.

    Raises:
        ValueError: the strategy trains on one process, so each worker would train a model of its own.
    """
    if (launcher := config.get("launcher")) is None:
        return
    at_most = launcher["num_workers"]
    if not (launcher["min_workers"] or at_most) <= trainer.world_size <= at_most:
        raise ValueError(
            f"launcher.num_workers={launcher['num_workers']}, and this strategy trains on {trainer.world_size} process:"
            " choose strategy=ddp, shadowsync, het or another one of several workers, or launcher.num_workers=1."
        )


def _was_begun(marks: Path) -> bool:
    """Whether workers of this run have begun before these, in a start that left its mark here."""
    from lightning_recsys.ray.backend import START

    own = marks / os.environ[START]
    marks.mkdir(parents=True, exist_ok=True)
    own.touch()
    return any(mark != own for mark in marks.iterdir())


@contextmanager
def _cluster(address: str | None, cpus: float, least: float) -> Iterator[None]:
    """A connection to the cluster; one that this process had before stays.

    Args:
        address: Where it is. Where nobody says, there is one of this machine for the run alone, with room for it.
        cpus: CPUs of all workers and servers of the run.
        least: CPUs of so few as will do.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    is_own = address is None and "RAY_ADDRESS" not in os.environ
    room = {"num_cpus": max(math.ceil(cpus), os.cpu_count() or 1)} if is_own else {}
    ray.init(address=address, runtime_env={"worker_process_setup_hook": _leave_out_noise}, **room)
    if (has := ray.cluster_resources().get("CPU", 0.0)) < least:
        log.warning("The cluster has %g CPUs, and this run waits for %g, of workers and servers.", has, least)
    try:
        yield
    finally:
        ray.shutdown()


def _leave_out_noise() -> None:
    """Say nothing of Ray's dashboard, each second, where it is not installed; in each process of the run."""
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)
