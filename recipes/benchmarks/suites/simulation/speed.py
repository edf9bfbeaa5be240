"""How fast thousands of workers are simulated, beside plain training of the same model, and what memory that takes.

``python -m benchmarks.suites.simulation.speed '{"overrides": ..., ...}'`` is one measurement in turns, in a process of
its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.processes import RECIPES, environment, python
from benchmarks.harness.report import Row
from benchmarks.harness.turns import Measurement, Turn, in_turns
from rich.table import Table

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
_LOOK = 0.2  # seconds between two looks at a process's memory


@dataclass(frozen=True)
class Run:
    """What a process took.

    Args:
        name: What the process did, for the table.
        seconds: The time from its start to its end.
        gib: The peak of its resident set; ``None`` where the system does not tell.
    """

    name: str
    seconds: float
    gib: float | None


@dataclass(frozen=True)
class Runs:
    """Processes beside each other."""

    runs: Sequence[Run]

    def table(self) -> Table:
        """One line for each."""
        table = Table("process", "minutes", "GiB at its peak", title="time and memory", title_justify="left")
        for run in self.runs:
            table.add_row(run.name, f"{run.seconds / 60:.1f}", "" if run.gib is None else f"{run.gib:.2f}")
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {"runs": [asdict(run) for run in self.runs]}


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
        root: The folder of the data sets, for ``paths.data``.
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
    return [*rows, Runs(runs)], bars


def watched(name: str, command: Sequence[str]) -> tuple[str, Run]:
    """What a process printed, how long it ran, and the peak of its resident set, which is looked at meanwhile.

    Raises:
        RuntimeError: the process failed; has what it wrote to its standard error.
    """
    gib: float | None = None
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=printed, stderr=said, env=environment())  # noqa: S603 - our own
        try:
            while process.poll() is None:
                gib = _peak_gib(process.pid) or gib
                time.sleep(_LOOK)
        finally:
            process.kill()
            process.wait()
        taken = time.perf_counter() - began
        printed.seek(0)
        said.seek(0)
        if process.returncode:
            raise RuntimeError(f"{name} failed:\n{said.read()}")
        return printed.read(), Run(name, taken, gib)


def _peak_gib(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM")), None)


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
