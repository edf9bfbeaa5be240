"""Train as a cluster would, in virtual time: ``python recipes/simulate.py [overrides]``, ``--help`` for the choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import hydra
import pytorch_lightning as pl
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from recipe_tools.build import Config, build, build_datamodule, build_task, count_parameters, self_contained
from recipe_tools.config_types import check_complete, check_types
from recipe_tools.overrides import explained_overrides
from recipe_tools.pictures import draw
from recipe_tools.quiet import be_quiet
from recipe_tools.record import RunRecord, finite, isolated_job
from recipe_tools.report import console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_recsys.data import Batch
from lightning_recsys.metrics import NormalizedEntropy, StreamingAUROC
from lightning_recsys.runtime import configure_worker
from lightning_recsys.simulation import Results
from lightning_recsys.tasks import CTRTask

# A single run, as a figure.
RUN = {"title": None, "paper": None, "panels": ["ne", "ne_by_time", "staleness", "utilization"], "x": None}


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
def main(cfg: DictConfig) -> None:
    be_quiet()
    check_complete(cfg)
    config = plain(cfg)
    job = HydraConfig.get()
    overrides = list(job.overrides.task)
    number = job.job.num if job.mode == RunMode.MULTIRUN else None
    record = RunRecord(Path(config["paths"]["output_dir"]), config=config, overrides=overrides, job=number)
    with isolated_job(), record:
        figure = config.get("figure") or {"series": {config["name"]: []}, **RUN}
        runs = {}
        for label, added in runs_of(figure).items():
            composed = plain(compose("simulate", overrides=[*added, *overrides])) if added else config
            runs[label] = simulate(composed, record, label=label)
        report(figure, runs, record)


def plain(cfg: DictConfig) -> Config:
    """The configuration in plain containers, without what depends on the folder it is read in."""
    return self_contained(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]


def runs_of(figure: Config) -> dict[str, list[str]]:
    """Overrides by label: each series, at each place of the x axis where there is one (``series @ 10``)."""
    if (axis := figure["x"]) is None:
        return dict(figure["series"])
    return {
        f"{label} @ {value}": [*overrides, *(f"{key}={value}" for key in axis["keys"])]
        for label, overrides in figure["series"].items()
        for value in axis["values"]
    }


def simulate(config: Config, record: RunRecord, *, label: str) -> dict[str, Any]:
    """One cluster, from its configuration to its results.

    Raises:
        ValueError: the data are no clicks.
    """
    check_types(config)
    if not issubclass(get_object(target := config["task"]["_target_"]), CTRTask):
        raise ValueError(f"data: simulations are of clicks, but {config['data']['_target_']} is for {target}.")
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    configure_worker()
    datamodule = build_datamodule(config)
    task = build_task(config, datamodule)
    cluster = build(config["cluster"])
    record.details["parameters"] = count_parameters(task.model, datamodule)
    total = config["examples"] or len(datamodule.rows("train"))
    wall, processor = monotonic(), process_time()
    with Watch(label, total) as watch:
        results = cluster.train(
            task,
            batches(datamodule, total),
            seed=config["seed"],
            mark_every=config["evaluation"]["every"],
            evaluate=lambda module: evaluate(module, datamodule, config["evaluation"]["rows"]),
            watch=watch,
        )
    found: dict[str, Any] = results.to_dict()
    found["wall"] = {"seconds": monotonic() - wall, "processor_seconds": process_time() - processor}
    return found


def batches(datamodule: Any, examples: int) -> Iterator[Batch]:
    """So many examples, in as many epochs as that takes; batches stay whole."""
    loader, dealt = datamodule.train_dataloader(), 0
    while True:  # an epoch
        for batch in loader:
            if dealt >= examples:
                return
            yield batch
            dealt += len(batch.labels)


def evaluate(task: Any, datamodule: Any, rows: int) -> dict[str, float]:
    """Metrics on the first validation rows, or test rows."""
    metrics = {"val/ne": NormalizedEntropy(from_logits=True), "val/auc": StreamingAUROC(from_logits=True)}
    loader = datamodule.val_dataloader() or datamodule.test_dataloader()
    task.eval()
    with torch.no_grad():
        for batch in islice(loader, max(rows // datamodule.batch_size, 1)):
            logits = task(batch)
            for metric in metrics.values():
                metric.update(logits, batch.labels)
    task.train()
    return {name: float(metric.compute()) for name, metric in metrics.items()}


class Watch:
    """A bar with the time left, drawn a few times a second; around a run it gives what the run calls after pushes."""

    def __init__(self, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console(), refresh_per_second=2)
        self._task = self._bar.add_task(label, total=total, state="")
        self._due = 0.0

    def __enter__(self) -> Callable[[Results], None]:
        self._bar.start()
        return self._watch

    def _watch(self, results: Results) -> None:
        if (now := monotonic()) >= self._due:
            self._due = now + 0.5
            last = results.curve[-1].get("val/ne", float("nan")) if results.curve else float("nan")
            state = f"{results.examples:,} examples  val/ne {last:.4f}"
            self._bar.update(self._task, completed=results.examples, state=state)

    def __exit__(self, *_: object) -> None:
        self._bar.update(self._task, completed=self._bar.tasks[0].total)
        self._bar.stop()


def report(figure: Config, runs: dict[str, dict[str, Any]], record: RunRecord) -> None:
    """Print a line for each run; write everything beside the record, and draw it where matplotlib is installed."""
    folder = record.path.parent
    names = sorted({name for run in runs.values() for name in run["metrics"]})
    table = Table("metric", *runs, title=figure["title"] or "simulation", title_justify="left")
    for name in names:
        table.add_row(name, *(format(run["metrics"].get(name, float("nan")), ",.5g") for run in runs.values()))
    console().print(table)
    if figure["paper"]:
        console().print(f"The paper: {figure['paper']}")
    record.metrics |= {
        f"{label}/{name}": value for label, run in runs.items() for name, value in run["metrics"].items()
    }
    (folder / "simulation.json").write_text(json.dumps(finite({"figure": figure, "runs": runs}), indent=1) + "\n")
    picture = draw(figure, runs, folder / "simulation.png")
    console().print(f"wrote {folder / 'simulation.json'}" + (f" and {picture}" if picture else ""))


if __name__ == "__main__":
    with explained_overrides("simulate"):
        main()
