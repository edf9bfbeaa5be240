"""Runs of ``recipes/train.py`` with what they logged, kept in a cache so that an interrupted suite goes on there."""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hydra import compose
from recipe_tools.build import plain
from recipe_tools.record import FILE_NAME, RunRecord, completed_record, digest, isolated_job

Metrics = dict[str, float]

log = logging.getLogger("benchmark")


def trained(name: str, overrides: Sequence[str], *, cache: Path, root: str) -> Metrics:
    """A run's metrics, from its folder in the cache or by running it; NaN what was not finite."""
    metrics = run_record(name, overrides, cache=cache, root=root)["metrics"]
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def trained_from_seeds(
    name: str, overrides: Sequence[str], seeds: Sequence[int], *, cache: Path, root: str
) -> list[Metrics]:
    """As :func:`trained`, a run for each seed."""
    return [trained(f"{name}-seed{seed}", [*overrides, f"seed={seed}"], cache=cache, root=root) for seed in seeds]


def run_record(name: str, overrides: Sequence[str], *, cache: Path, root: str) -> dict[str, Any]:
    """What ``metrics.json`` has of a run, from its folder in the cache or by running it."""
    # Named by all that the run's result depends on: its whole configuration, paths aside.
    folder = cache.absolute() / f"{name}-{digest(configuration(overrides, folder=Path('/'), root='/'))}"

    def train(config: dict[str, Any], record: RunRecord) -> None:
        from recipe_tools.jobs.training import train

        train(config, record)
        log.info("%s: test NE %.5f in %.0f s", name, record.metrics["test/ne"], record.wall_time)

    return kept_run(folder, configuration(overrides, folder=folder, root=root), overrides, train)


def kept_run(
    folder: Path,
    config: dict[str, Any],
    overrides: Sequence[str],
    train: Callable[[dict[str, Any], RunRecord], None],
) -> dict[str, Any]:
    """What ``metrics.json`` has of a run, as a folder has it or from running it there.

    Args:
        folder: Where a run like this one is, or will be.
        config: Its whole configuration.
        overrides: The overrides of which that is made.
        train: Makes the run.
    """
    if (record := completed_record(folder)) is not None:
        return record
    if folder.exists():
        shutil.rmtree(folder)  # an interrupted run's
    with isolated_job(), RunRecord(folder, config=config, overrides=list(overrides)) as run:
        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # plans of placement, run after run
        with redirect_stdout(io.StringIO()):  # its closing table: here it is one of many
            train(config, run)
    return dict(json.loads((folder / FILE_NAME).read_text()))


def configuration(overrides: Sequence[str], *, folder: Path, root: str) -> dict[str, Any]:
    """The configuration as ``recipes/train.py`` has it."""
    own = [f"paths.output_dir={folder}", f"paths.data={root}"]
    quiet = ["callbacks/progress_bar=none", "logger=none"]
    composed = compose("train", [*overrides, *own, *quiet])
    return plain(composed)
