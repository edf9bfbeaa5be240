"""A plan, from its configuration to its table and picture: what ``recipes/plan.py`` does."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from recipe_tools.build import Config, build_datamodule, build_task, check_train_rows, seed_everything
from recipe_tools.config_types import check_types
from recipe_tools.plan_picture import draw_plan
from recipe_tools.record import RunRecord, machine, task_overrides, versions
from recipe_tools.report import console
from recipe_tools.sweep import recipe_job
from rich.table import Table

from lightning_recsys.planning import Machines, Measured, Plan, compare, machines_from, measure, read_machines
from lightning_recsys.planning.plan import check_narrowed, command_of, keep, kept
from lightning_recsys.runtime import configure_worker

MEASURED_WITH = ("task", "model", "data", "optim", "embeddings", "strategies", "seconds")


def run(cfg: DictConfig) -> None:
    """Plan as ``cfg`` says, show it."""
    with recipe_job(cfg) as record:
        config = record.config
        check_types(config)
        machines = _machines(config["machines"])
        narrowed = {name: config[name] for name in ("metric", "at_most_staleness", "exact", "survives")}
        check_narrowed(machines, **narrowed)
        made = compare(_measured(config), machines, **narrowed)
        _report(made, record)


def _measured(config: Config) -> Measured:
    """What steps cost here: kept from before, or measured and kept."""
    path = None if config["cache"] is None else Path(config["cache"]) / f"{_key(config)}.json"
    if path is not None and (before := kept(path)) is not None:
        console().print(f"Steps were measured before: {path}")
        return before
    seed_everything(config["seed"])
    configure_worker()
    datamodule = build_datamodule(config)
    check_train_rows(datamodule)
    task = build_task(config, datamodule)
    with console().status("Measuring") as status:
        measured = measure(
            *(task, datamodule),
            methods=config["strategies"],
            seconds=config["seconds"],
            tell=lambda what: status.update(f"Measuring {what}"),
        )
    if path is not None:
        keep(measured, path)
    return measured


def _key(config: Config) -> str:
    """Of all that a measurement depends on, this machine and the installed versions among it."""
    parts = {name: config.get(name) for name in MEASURED_WITH} | {"versions": versions(), "machine": machine()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _machines(path: str | None) -> Machines:
    if path is not None:
        return read_machines(path)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return machines_from({"machine": {"number": 2, "cores": os.cpu_count() or 1, "memory_gib": round(gib, 1)}})


def _report(made: Plan, record: RunRecord) -> None:
    folder = record.path.parent
    (folder / "plan.json").write_text(json.dumps(made.to_dict(), indent=1, default=str))
    titles, *rows = made.table(every=record.config["every"])
    table = Table(title=f"{record.config['name']}: best first", show_lines=True)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if rows:
        console().print(table)
    for name, why in made.refused.items():
        console().print(f"{name}: {why}")
    console().print(f"\n{made.reason()}\n")
    for line in command_of(made.best, task_overrides_of_training()):
        console().print(line, soft_wrap=True)
    if (picture := draw_plan(made, folder / "plan.png")) is not None:
        console().print(f"\nExamples per second against machines: {picture}")
    record.metrics["plan/examples_per_second"] = made.best.examples_per_second


def task_overrides_of_training() -> list[str]:
    """Those of the command line's words that ``train`` takes as well."""
    own: set[Any] = {"machines", "metric", "at_most_staleness", "exact", "survives", "strategies", "seconds"}
    own |= {"cache", "every"}
    return [word for word in task_overrides() if word.split("=")[0].lstrip("+~") not in own]
