"""Suite ``quality``: test metrics of every model on real rows, ours and FuxiCTR's, over several seeds."""

from __future__ import annotations

import logging
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.choices import check_choices, check_numbers
from benchmarks.harness.recipe_runs import Metrics, configuration, kept_run
from benchmarks.peers import fuxictr
from hydra import compose
from recipe_tools.overrides import CONFIG_DIR
from recipe_tools.record import RunRecord, digest
from rich.table import Column, Table
from rich.text import Text

Library = Literal["ours", "fuxictr"]
METRICS = ("auc", "logloss", "ne")
FUXICTR_RATE = 1e-3  # of its Adam, the default of all its models

log = logging.getLogger("benchmark")


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        experiment: Leaf of ``conf/experiment``.
        model: Leaf of ``conf/model``.
        settings: Overrides of the model's layers and, of ours, of its optimizer.
        library: Who trains it.
        rate_factor: Times the experiment's learning rate of embedding rows, or FuxiCTR's default learning rate.
        seed: Of start values and the order of rows; the splits do not depend on it.
    """

    experiment: str
    model: str
    settings: tuple[str, ...]
    library: Library
    rate_factor: float = 1
    seed: int = 0

    def overrides(self) -> list[str]:
        """What ``recipes/train.py`` is told beside the seed."""
        chosen = [f"experiment={self.experiment}", f"model={self.model}", *self.settings]
        if self.library == "ours" and self.rate_factor != 1:
            rate = compose("train", chosen).optim.rows.lr
            chosen.append(f"optim.rows.lr={rate * self.rate_factor:g}")
        return chosen

    def config(self, *, folder: Path, data: str) -> dict[str, Any]:
        """The whole configuration of the run, as ``recipes/train.py`` has it."""
        own = [f"seed={self.seed}", f"name={self.model}-{self.experiment}-{self.library}"]
        return configuration([*self.overrides(), *own], folder=folder, root=data)

    def key(self, config: dict[str, Any]) -> str:
        """Name of the run's folder: what it is, and a digest of all that its result depends on."""
        own = ("optim", "embeddings") if self.library == "ours" else ()
        parts = {name: config[name] for name in ("model", "seed", *own)}
        parts["data"] = {name: value for name, value in config["data"].items() if name != "root"}
        parts["trainer"] = {name: value for name, value in config["trainer"].items() if name != "default_root_dir"}
        parts["best"] = [config["callbacks"]["model_checkpoint"][name] for name in ("monitor", "mode")]
        parts["job"] = ["ours"] if self.library == "ours" else [self.library, self.rate_factor]
        return f"{self.experiment}-{self.model}-{self.library}-x{self.rate_factor:g}-seed{self.seed}-{digest(parts)}"


@dataclass(frozen=True)
class Runs:
    """One model of one library: the seeds' metrics, and how the learning rate was chosen.

    Args:
        job: The first seed's.
        seeds: All seeds.
        metrics: For each seed.
        tried: Factor of the learning rate -> validation AUC of the first seed.
    """

    job: Job
    seeds: Sequence[int]
    metrics: Sequence[Metrics]
    tried: dict[float, float]

    def mean(self, metric: str) -> float:
        """Mean over the seeds."""
        return statistics.mean(metrics[metric] for metrics in self.metrics)

    def deviation(self, metric: str) -> float:
        """Standard deviation over the seeds; 0 of one seed."""
        values = [metrics[metric] for metrics in self.metrics]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def command(self) -> str:
        """The command that gives these numbers."""
        if self.job.library == "ours":
            overrides = [*self.job.overrides(), f"seed={','.join(map(str, self.seeds))}"]
            return shlex.join(["python", "recipes/train.py", "-m", *overrides])
        chosen = {
            "experiments": self.job.experiment,
            "models": self.job.model,
            "libraries": self.job.library,
            "rate_factors.fuxictr": f"{self.job.rate_factor:g}",
        }
        overrides = [f"suite.{name}=[{value}]" for name, value in chosen.items()]
        return shlex.join(["python", "recipes/benchmark.py", "suite=quality", *overrides])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {
            "model": self.job.model,
            "library": self.job.library,
            "rate_factor": self.job.rate_factor,
            "validation_auc_by_rate_factor": self.tried,
            "mean": {name: self.mean(f"test/{name}") for name in METRICS},
            "deviation": {name: self.deviation(f"test/{name}") for name in METRICS},
            "seeds": dict(zip(self.seeds, self.metrics, strict=True)),
            "command": self.command(),
        }


@dataclass(frozen=True)
class Comparison:
    """All models of one experiment; a result as :func:`benchmarks.harness.report.write` takes it."""

    experiment: str
    runs: Sequence[Runs]

    def ahead(self, model: str) -> float | None:
        """Test AUC of ours minus FuxiCTR's; None where one of them was not run."""
        auc = {runs.job.library: runs.mean("test/auc") for runs in self.runs if runs.job.model == model}
        return auc["ours"] - auc["fuxictr"] if len(auc) == 2 else None

    def table(self) -> Table:
        """Mean and deviation of the test metrics."""
        headers = ("model", "library", "rate", "AUC", "log loss", "NE", "ahead")
        columns = [Column(header, no_wrap=True) for header in headers]
        table = Table(*columns, Column("command", no_wrap=True, max_width=60), title=f"experiment {self.experiment}")
        table.title_justify = "left"
        for runs in self.runs:
            cells = [f"{runs.mean(f'test/{name}'):.4f} ± {runs.deviation(f'test/{name}'):.4f}" for name in METRICS]
            ahead = self.ahead(runs.job.model) if runs.job.library == "ours" else None
            shown = "" if ahead is None else f"{ahead:+.4f}"
            settings = (runs.job.model, runs.job.library, f"x {runs.job.rate_factor:g}")
            table.add_row(*settings, *cells, shown, Text(f"`{runs.command()}`"))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        models = dict.fromkeys(runs.job.model for runs in self.runs)
        return {
            "workload": self.experiment,
            "auc_ahead": {model: self.ahead(model) for model in models},
            "runs": [runs.to_dict() for runs in self.runs],
        }


def run(
    *,
    experiments: list[str],
    models: list[str],
    sizes: Mapping[str, list[str]],
    ours: Mapping[str, Mapping[str, list[str]]],
    libraries: list[Library],
    seeds: list[int],
    rate_factors: Mapping[Library, list[float]],
    cache: str,
    data: str,
) -> list[Comparison]:
    """Train what is not in the cache yet; see ``conf/suite/quality.yaml`` for the arguments.

    Raises:
        ValueError: an experiment, a model or a library that there is not.
    """
    check_choices("suite.experiments", experiments, _leaves("experiment"))
    check_choices("suite.models", models, _leaves("model"))
    check_choices("suite.libraries", libraries, rate_factors)
    check_numbers("suite.seeds", seeds, least=0)
    if "fuxictr" in libraries and not fuxictr.is_available():
        log.info("FuxiCTR is not installed, so it is left out; recipes/benchmarks/peers/fuxictr.py says how to add it.")
        libraries = [library for library in libraries if library != "fuxictr"]

    def metrics(job: Job) -> Metrics:
        return cached(job, Path(cache), data=data)

    def runs(first: Job) -> Runs:
        tried: dict[float, float] = {}

        def validated(factor: float) -> float:
            if factor not in tried:
                tried[factor] = metrics(replace(first, rate_factor=factor))["val/auc"]
            return tried[factor]

        best = replace(first, rate_factor=climb(rate_factors[first.library], validated))
        return Runs(best, seeds, [metrics(replace(best, seed=seed)) for seed in seeds], tried)

    def job(experiment: str, model: str, library: Library) -> Job:
        settings = [*sizes.get(model, ())]
        if library == "ours":
            settings += ours.get(experiment, {}).get(model, ())
        return Job(experiment, model, tuple(settings), library, seed=seeds[0])

    def compared(experiment: str) -> Comparison:
        jobs = [job(experiment, model, library) for model in models for library in libraries]
        return Comparison(experiment, [runs(job) for job in jobs])

    return [compared(experiment) for experiment in experiments]


def _leaves(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def climb(steps: Sequence[float], height: Callable[[float], float]) -> float:
    """Where ``height`` is no lower than at both neighbours, going uphill from 1 (from the middle where 1 is missing).

    So no result lies at an end of a grid that was too narrow, unless it is the end of ``steps``.

    >>> climb([0.1, 0.3, 1, 3, 10, 30], lambda x: -abs(x - 9))
    10
    """
    steps = sorted(steps)
    here = steps.index(1) if 1 in steps else len(steps) // 2
    while True:
        near = range(max(here - 1, 0), min(here + 2, len(steps)))
        best = max(near, key=lambda i: (height(steps[i]), i == here))
        if best == here:
            return steps[here]
        here = best


def cached(job: Job, cache: Path, *, data: str) -> Metrics:
    """The job's metrics, from its folder in the cache or by running it."""
    folder = cache.absolute() / job.key(job.config(folder=cache, data=data))
    config = job.config(folder=folder, data=data)
    return dict(kept_run(folder, config, job.overrides(), partial(_train, job))["metrics"])


def _train(job: Job, config: dict[str, Any], record: RunRecord) -> None:
    if job.library == "ours":
        from recipe_tools.jobs.training import train

        train(config, record)
    else:
        from benchmarks.peers import fuxictr_training

        fuxictr_training.train(config, record, model=job.model, learning_rate=FUXICTR_RATE * job.rate_factor)
    log.info("%s: test AUC %.4f in %.0f s", record.path.parent.name, record.metrics["test/auc"], record.wall_time)
