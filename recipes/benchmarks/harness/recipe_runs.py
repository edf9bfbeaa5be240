"""Runs of ``recipes/train.py`` with what they logged, kept in a cache so that an interrupted suite goes on there."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hydra import compose
from recipe_tools.build import plain
from recipe_tools.record import FILE_NAME, RunRecord, isolated_job

Metrics = dict[str, float]

log = logging.getLogger("benchmark")


def trained(name: str, overrides: Sequence[str], *, cache: Path, root: str) -> Metrics:
    """A run's metrics, from its folder in the cache or by running it; NaN what was not finite."""
    metrics = run_record(name, overrides, cache=cache, root=root)["metrics"]
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def run_record(name: str, overrides: Sequence[str], *, cache: Path, root: str) -> dict[str, Any]:
    """What ``metrics.json`` has of a run, from its folder in the cache or by running it."""
    folder = cache.absolute() / f"{name}-{digest(overrides)}"
    if (path := folder / FILE_NAME).exists():
        record = json.loads(path.read_text())
        if record["status"] == "completed":
            return dict(record)
        shutil.rmtree(folder)  # an interrupted run's
    config = configuration(overrides, folder=folder, root=root)
    with isolated_job(), RunRecord(folder, config=config, overrides=list(overrides)) as run:
        from train import train

        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # plans of placement, run after run
        with redirect_stdout(io.StringIO()):  # its closing table: here it is one of many
            train(config, run)
    log.info("%s: test NE %.5f in %.0f s", name, run.metrics["test/ne"], run.wall_time)
    return dict(json.loads(path.read_text()))


def digest(overrides: Sequence[str]) -> str:
    """Of all that the run's result depends on: its whole configuration, paths aside."""
    config = configuration(overrides, folder=Path("/"), root="/")
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def configuration(overrides: Sequence[str], *, folder: Path, root: str) -> dict[str, Any]:
    """The configuration as ``recipes/train.py`` has it."""
    own = [f"paths.output_dir={folder}", f"paths.data={root}"]
    quiet = ["callbacks/progress_bar=none", "logger=none"]
    composed = compose("train", [*overrides, *own, *quiet])
    return plain(composed)
