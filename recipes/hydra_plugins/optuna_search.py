"""A search by Optuna as a sweeper of Hydra: each trial is a job, proposed from those before, and kept in a journal.

Hydra looks for plugins in the package ``hydra_plugins`` alone, which is why this file lies there. (The plugin of
Hydra's own repository works with Optuna 2 only, whose searches cannot be taken up again.)
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

JOURNAL = "search.journal"
"""The file in the sweep's folder that all trials stand in."""
RESULTS = "optimization_results.yaml"

log = logging.getLogger(__name__)


class OptunaSearch(Sweeper):
    """Trials whose settings are proposed from the results of those before.

    All trials stand in a journal in the sweep's folder. The same command with ``hydra.sweep.dir`` of a search that was
    stopped or killed goes on with it, until there are ``n_trials`` in all; a trial that was running then counts as
    failed. One process at a time searches in a folder.

    Args:
        direction: ``minimize`` or ``maximize`` what the jobs return.
        n_trials: Number of trials in all, failed ones included.
        n_jobs: Number of trials that are proposed together, for launchers that run several jobs at a time.
        sampler: Name of a class of ``optuna.samplers``.
        seed: Makes the same command propose the same settings; ``None`` for others each time.
        params: What is searched by default, by key, as it would stand behind ``key=`` on the command line, where a
            fixed value for a key takes it out of the search.
    """

    def __init__(
        self, direction: str, n_trials: int, n_jobs: int, sampler: str, seed: int | None, params: Mapping[str, Any]
    ) -> None:
        self._direction, self._n_trials, self._n_jobs = direction, n_trials, n_jobs
        self._sampler, self._seed, self._params = sampler, seed, params
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra hands to each sweeper."""
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials that are not there yet, and write the best one down.

        Args:
            arguments: The overrides of the command line.

        Raises:
            ModuleNotFoundError: Optuna is not installed.
            ValueError: nothing is to be searched, or a range is none; or the folder has a search for other settings, or
                one that is under way.
            SystemExit: the folder has as many trials as asked for, and each of them failed.
        """
        assert self.config is not None
        assert self.launcher is not None
        if find_spec("optuna") is None:
            raise ModuleNotFoundError('a search needs Optuna: pip install "lightning-recsys[sweeps]"')
        fixed, space = self._space(arguments)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            OmegaConf.save(self.config, folder / "multirun.yaml")
            study = self._study(folder, space)
            while (done := len(study.trials)) < self._n_trials:
                trials = [study.ask(dict(space)) for _ in range(min(self._n_jobs, self._n_trials - done))]
                jobs = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
                self.validate_batch_is_legal(jobs)
                for trial, job in zip(trials, self.launcher.launch(jobs, initial_job_idx=done), strict=True):
                    _tell(study, trial, job)
            _write_best(study, folder)

    def _space(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, BaseDistribution]]:
        """The overrides of all jobs, and what differs between them."""
        parser = OverridesParser.create()
        given = parser.parse_overrides([f"{key}={value}" for key, value in self._params.items()])
        asked = parser.parse_overrides(list(arguments))
        named = {override.get_key_element() for override in asked}
        fixed, space = [], {}
        for override in [*(x for x in given if x.get_key_element() not in named), *asked]:
            if override.is_sweep_override():
                space[override.get_key_element()] = _distribution(override)
            else:
                fixed.append(str(override.input_line))
        if not space:
            raise ValueError("nothing is searched: give a key several values, such as 'model=choice(lr,fm)'.")
        return fixed, space

    def _study(self, folder: Path, space: Mapping[str, BaseDistribution]) -> optuna.Study:
        """The search that the folder has, or a new one.

        Raises:
            ValueError: the search there was for other settings, or in another direction.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        if not hasattr(optuna.samplers, self._sampler):
            raise ValueError(f"hydra.sweeper.sampler: optuna.samplers has no class {self._sampler!r}.")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        study = optuna.create_study(
            storage=storage, study_name="search", direction=self._direction, load_if_exists=True
        )
        if study.direction.name.lower() != self._direction:
            raise ValueError(f"{folder} has a search that is to {study.direction.name.lower()}: name another folder.")
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        if study.trials:
            before = max((dict(trial.distributions) for trial in study.trials), key=len)
            # A kill while the very first trial was proposed leaves one that lacks settings.
            begun = len(study.trials) == 1 and all(space.get(key) == values for key, values in before.items())
            if before != dict(space) and not begun:
                raise ValueError(
                    f"{folder} has a search over {_told(before)}, not {_told(space)}: name another folder."
                )
            log.info("%s: going on after %d trials", folder / JOURNAL, len(study.trials))
        # A sampler that starts anew must not propose again what it has proposed at the beginning.
        seed = {} if self._seed is None else {"seed": self._seed + len(study.trials)}
        study.sampler = getattr(optuna.samplers, self._sampler)(**seed)
        return study


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system lets go of when the process ends, however it does.

    Raises:
        ValueError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process searches in {folder}: wait until it has ended, or name another folder."
            ) from None
        except OSError as error:  # file systems of networks may have no locks
            log.info("%s cannot be locked (%s): let no other process search there", folder, error)
        yield
    finally:
        os.close(descriptor)


def _distribution(override: Override) -> BaseDistribution:
    """The values that an override of several ones may have."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        kind = IntDistribution if isinstance(value.start, int) else FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    choices = list(override.sweep_iterator(transformer=Transformer.encode))
    if isinstance(value, RangeSweep) and all(isinstance(choice, int) for choice in choices):
        return IntDistribution(min(choices), max(choices), step=abs(int(value.step)))
    return CategoricalDistribution(choices)


def _tell(study: optuna.Study, trial: optuna.Trial, job: JobReturn) -> None:
    """Tell the search what a job has returned; a job that failed is a trial that failed."""
    from optuna.trial import TrialState

    if job.status == JobStatus.COMPLETED:
        study.tell(trial, float(job.return_value))
    else:
        study.tell(trial, state=TrialState.FAIL)


def _write_best(study: optuna.Study, folder: Path) -> None:
    from optuna.trial import TrialState

    if not study.get_trials(states=(TrialState.COMPLETE,)):
        raise SystemExit(f"none of {len(study.trials)} trials succeeded; see above, or error in comparison.csv")
    best = {"name": "optuna", "best_params": study.best_params, "best_value": study.best_value}
    (folder / RESULTS).write_text(yaml.safe_dump(best, sort_keys=False), encoding="utf-8")
    log.info("best of %d trials: %s = %s", len(study.trials), study.best_params, study.best_value)


def _told(space: Mapping[str, BaseDistribution]) -> str:
    return ", ".join(f"{key} in {distribution}" for key, distribution in space.items())
