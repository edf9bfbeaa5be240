"""A simulated training, or a figure of several: what ``recipes/simulate.py`` does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import monotonic, process_time
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig
from recipe_tools.build import (
    Config,
    build,
    build_datamodule,
    build_task,
    check_train_rows,
    count_parameters,
    seed_everything,
)
from recipe_tools.config_types import check_types
from recipe_tools.figures import (
    RUN,
    Watch,
    check_overrides,
    check_panels,
    check_rates,
    composed,
    introduce,
    is_alone,
    report,
    run_all,
    run_at_best_rates,
    runs_of,
)
from recipe_tools.on_machines import on_machines
from recipe_tools.record import RunRecord, task_overrides
from recipe_tools.simulated import simulated
from recipe_tools.sweep import optimized_value, recipe_job

from lightning_recsys.runtime import configure_worker
from lightning_recsys.simulation import batches, count_batches, evaluate
from lightning_recsys.tasks import CTRTask


def run(cfg: DictConfig) -> float | None:
    """Simulate as ``cfg`` says, show the results; in a sweep, the value that it compares."""
    with recipe_job(cfg) as record:
        config = record.config
        overrides = task_overrides()
        figure = {**RUN, "series": {config["name"]: []}, **(config.get("figure") or {})}
        check_overrides(figure, overrides)
        check_panels(figure)
        check_rates(figure)
        series = {label: [*added, *overrides] for label, added in runs_of(figure).items()}
        configs = {label: config if each == overrides else composed(label, each) for label, each in series.items()}

        def make(label: str, chosen: list[str]) -> dict[str, Any]:
            if figure["cache"] is not None:
                cache = Path(figure["cache"])
                return simulated(simulate, label, chosen, cache=cache, root=config["paths"]["data"])
            return simulate(configs.get(label) or composed(label, chosen), record, label=label)

        introduce(figure, list(series))
        if figure["rates"] is not None:
            runs = run_at_best_rates(figure, series, configs, make, record)
        else:
            runs = run_all(figure, list(series), lambda label: make(label, series[label]), record)
        report(figure, runs, record)
        if not record.sweeping or not is_alone(figure):
            return None
        return optimized_value(record.metrics, config["optimized_metric"])


def simulate(config: Config, record: RunRecord, *, label: str) -> dict[str, Any]:
    """One cluster, from its configuration to its results.

    Raises:
        ValueError: the data are no clicks or have no rows to be judged by, or a number of examples or rows is none.
    """
    check_types(config)
    for name, value in (
        ("examples", config["examples"]),
        *((f"evaluation.{key}", each) for key, each in config["evaluation"].items()),
    ):
        if value is None and name != "evaluation.rows":  # one epoch, and one point at its end
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if not issubclass(get_object(target := config["task"]["_target_"]), CTRTask):
        raise ValueError(f"data: simulations are of clicks, but {config['data']['_target_']} is for {target}.")
    seed_everything(config["seed"])
    configure_worker()
    datamodule = build_datamodule(config)
    check_train_rows(datamodule)
    task = build_task(config, datamodule)
    cluster = build(on_machines(config["cluster"], config["machines"]))
    record.details["parameters"] = count_parameters(task.model, datamodule)
    rows, examples = len(datamodule.rows("train")), config["examples"]
    total = rows if examples is None else examples
    if not (loader := datamodule.val_dataloader() or datamodule.test_dataloader()):
        raise ValueError(
            "data: a simulation is judged by validation rows, or by test rows, and these data have neither."
        )
    training: Any = datamodule.train_dataloader()
    num_batches = count_batches(training, total, batch_size=datamodule.batch_size, rows=rows)
    task.total_steps = cluster.num_updates(num_batches)
    wall, processor = monotonic(), process_time()
    with Watch(label, total) as watch:
        results = cluster.train(
            task,
            batches(training, total),
            seed=config["seed"],
            mark_every=config["evaluation"]["every"],
            evaluate=partial(evaluate, loader=loader, examples=config["evaluation"]["rows"]),
            watch=watch,
        )
    found: dict[str, Any] = results.to_dict()
    found["wall"] = {"seconds": monotonic() - wall, "processor_seconds": process_time() - processor}
    return found
