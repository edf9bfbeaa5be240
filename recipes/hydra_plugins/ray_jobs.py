"""The jobs of a sweep as tasks of a cluster of Ray, as a launcher of Hydra: for a grid as for a search by Optuna.

Hydra looks for plugins in the package ``hydra_plugins`` alone, which is why this file lies there. (The plugin of
Hydra's own repository starts clusters at a cloud, and works with Ray 1 only.)
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

log = logging.getLogger(__name__)


class RayJobs(Launcher):
    """Runs each job in a process of a cluster of Ray, as many at a time as there is room for.

    The folder that the sweep is started in has to be there on all nodes, under the same path, with the package. A job
    whose process dies has failed, and the others go on.

    Args:
        address: Where the cluster is. By default where ``RAY_ADDRESS`` says, or one of this machine for the sweep.
        num_cpus: CPUs that a job holds.
        num_gpus: GPUs that it holds.
        resources: Further resources, by Ray's names.
        max_retries: So often a job begins again whose process or node has died; -1: always.
    """

    def __init__(
        self, address: str | None, num_cpus: float, num_gpus: float, resources: Mapping[str, float], max_retries: int
    ) -> None:
        self._address = address
        self._options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(resources),
            "max_retries": max_retries,
        }

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what all jobs share."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs, and return what became of each, in their order.

        Raises:
            ImportError: Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise ImportError('hydra/launcher=ray needs Ray: pip install -e ".[ray]".') from error

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        if not ray.is_initialized():
            ray.init(address=self._address)  # until this process ends: a search comes here for every few trials
        given = ray.put(ray.cloudpickle.dumps((self._context, self._config, self._task, Singleton.get_state())))
        run = ray.remote(**self._options)(_in_a_worker(Path.cwd(), list(sys.path)))
        tasks = [
            run.remote(given, list(overrides), number)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        return [_outcome(task, overrides) for task, overrides in zip(tasks, job_overrides, strict=True)]


def _in_a_worker(here: Path, found_here: Sequence[str]) -> Any:
    """The function that Ray runs: it travels whole, for a worker finds the recipes only after its first line."""

    def run(given: bytes, overrides: list[str], number: int) -> JobReturn:
        os.chdir(here)  # Ray has led each worker into a folder of its own
        sys.path += [place for place in found_here if place not in sys.path]
        from hydra_plugins.ray_jobs import run_one

        return run_one(given, overrides, number)

    return run


def run_one(given: bytes, overrides: Sequence[str], number: int) -> JobReturn:
    """Run a job in this process.

    Args:
        given: The pickled context, configuration and task of the sweep, and Hydra's state.
        overrides: Words of the command line that this job has beside those of all.
        number: Place of the job in the sweep, from 0, by which its folder is named.
    """
    import ray

    context, config, task, state = ray.cloudpickle.loads(given)
    setup_globals()
    Singleton.set_state(state)
    of_job = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(of_job):
        of_job.hydra.job.id = f"{of_job.hydra.job.name}_{number}"
        of_job.hydra.job.num = number
    HydraConfig.instance().set_config(of_job)
    return run_job(
        hydra_context=context,
        task_function=task,
        config=of_job,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _outcome(task: Any, overrides: Sequence[str]) -> JobReturn:
    """The outcome of a job, also where its process has died."""
    import ray

    try:
        found: JobReturn = ray.get(task)
    except ray.exceptions.RayError as error:
        log.error("The job with %s has ended without an outcome: %s", " ".join(filter_overrides(overrides)), error)
        found = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        found.return_value = RuntimeError(f"its process on the cluster has died: {error}")
    return found
