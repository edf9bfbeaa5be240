"""How fast thousands of workers are simulated, beside plain training of the same model, and what memory that takes.

``python -m benchmarks.suites.simulation.speed '{"overrides": ..., ...}'`` is one measurement in turns, in a process of
its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.processes import RECIPES, python, watched
from benchmarks.harness.report import Columns, Row
from benchmarks.harness.turns import Measurement, Turn, in_turns

PLAIN, SIMULATED = "plain training", "simulated"
SMALL, DEFAULT = "deepfm_small", "deepfm"
PUSHES = 200.0
"""Per second, of the small model."""
SHARE = 0.8
"""Of plain training's steps, of the default model."""
MEMORY = 8.0
"""GiB, of everything that runs."""
MINUTES = 10.0
"""Of the whole command."""


def measure(
    *,
    common: Sequence[str],
    models: Sequence[str],
    command: Sequence[str],
    rounds: int,
    seconds: float,
    root: str,
) -> Measured:
    """Measure models in turns with plain training, then one whole command.

    Args:
        common: Overrides of ``recipes/simulate.py`` for the measurements in turns.
        models: Names of the models (``model=``) that are measured, one after the other.
        command: Overrides of ``recipes/simulate.py`` for the whole command; none: it is left out.
        rounds: How many rounds are measured, behind the one that is not counted.
        seconds: How long one turn of a variant takes.
        root: Folder of the data sets, for ``paths.data``.
    """
    rows, runs, bars = [], [], []
    for model in models:
        settings = {
            "overrides": [f"model={model}", *common, f"paths.data={root}"],
            "rounds": rounds,
            "seconds": seconds,
        }
        printed, run = watched(
            f"{model}, both in turns", python("-m", "benchmarks.suites.simulation.speed", json.dumps(settings))
        )
        found = json.loads(printed.splitlines()[-1])
        row = Row(f"{model}, {found['workers']} workers, B={found['batch_size']}", Measurement(found["rates"]), PLAIN)
        rows.append(row)
        runs.append(run)
        if model == SMALL:
            rate = row.measured.median(SIMULATED) / found["batch_size"]
            bars.append(Bar(f"{model}, pushes per second", rate, "at least", PUSHES))
        if model == DEFAULT:
            share = row.measured.ratio(SIMULATED, PLAIN)
            bars.append(Bar(f"{model}, pushes per step of plain training", share, "at least", SHARE))
        bars.append(Bar(f"{model}, memory", run.gib, "at most", MEMORY, " GiB"))
    if command:
        name = f"simulate.py {' '.join(command)}"
        with tempfile.TemporaryDirectory() as folder:
            own = [f"hydra.run.dir={folder}", f"paths.data={root}"]
            _, run = watched(name, python(str(RECIPES / "simulate.py"), *command, *own))
        runs.append(run)
        bars.append(Bar(name, run.seconds / 60, "at most", MINUTES, " minutes"))
        bars.append(Bar(f"{name}, memory", run.gib, "at most", MEMORY, " GiB"))
    lines = [[x.name, f"{x.seconds / 60:.1f}", "" if x.gib is None else f"{x.gib:.2f}"] for x in runs]
    header, details = ("process", "minutes", "GiB at its peak"), {"runs": [asdict(run) for run in runs]}
    return [*rows, Columns("time and memory", header, lines, details)], bars


def main(settings: str) -> None:
    """Measure in turns, and print the examples per second of each round."""
    from hydra import compose, initialize_config_dir
    from recipe_tools.build import build, plain
    from recipe_tools.overrides import CONFIG_DIR
    from recipe_tools.quiet import be_quiet

    from lightning_recsys.runtime import configure_worker

    given = json.loads(settings)
    be_quiet()
    configure_worker()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = plain(compose("simulate", [*given["overrides"], "name=speed", "paths.output_dir=/"]))
    cluster = build(config["cluster"])
    variants = {PLAIN: partial(_train, config), SIMULATED: partial(_simulate, config, cluster)}
    measured = in_turns(variants, rounds=given["rounds"], seconds=given["seconds"])
    found = {"rates": measured.rates, "batch_size": config["data"]["batch_size"], "workers": cluster.num_workers}
    print(json.dumps(found))


def _train(config: Mapping[str, Any], turn: Turn) -> None:
    """A loop with the module's own optimizer, and nothing else."""
    task, batches = _task_and_batches(config)
    optimizer = task.configure_optimizers()
    for step, batch in enumerate(batches):
        task.training_step(batch, step)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        turn.step_done(len(batch.labels))


def _simulate(config: Mapping[str, Any], cluster: Any, turn: Turn) -> None:
    """The cluster; pushes count from when there were as many as there are workers: then all of them are at work."""
    task, batches = _task_and_batches(config)
    pushes = 0

    def pushed(_: object) -> None:
        nonlocal pushes
        pushes += 1
        if pushes > cluster.num_workers:
            turn.step_done(config["data"]["batch_size"])

    cluster.train(task, batches, seed=config["seed"], watch=pushed)


def _task_and_batches(config: Mapping[str, Any]) -> tuple[Any, Any]:
    from recipe_tools.build import build_datamodule, build_task

    from lightning_recsys.simulation import batches

    datamodule = build_datamodule(dict(config))
    return build_task(dict(config), datamodule), batches(datamodule.train_dataloader(), sys.maxsize)


if __name__ == "__main__":
    main(sys.argv[1])
