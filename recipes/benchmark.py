"""Measure: ``python recipes/benchmark.py suite=single``, ``--help`` for the suites."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

# One thread per worker, before torch reads it: ratios taken with more are the scheduler's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hydra
from benchmarks.harness import report
from benchmarks.harness.jobs.job import sigterm_exits
from omegaconf import DictConfig, OmegaConf
from recipe_tools.build import build
from recipe_tools.overrides import explained_overrides
from recipe_tools.quiet import be_quiet

from lightning_recsys.runtime import configure_worker

log = logging.getLogger("benchmark")


@hydra.main(version_base="1.3", config_path="../conf", config_name="benchmark")
def main(cfg: DictConfig) -> None:
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if page := config["page"]:
        report.around(Path(page), suite=config["name"])  # says now if the page has no place for what comes
    be_quiet()
    configure_worker()
    with sigterm_exits():
        rows = build(config["suite"])
    report.show(rows)
    folder = Path(config["paths"]["output_dir"])
    for path in report.write(rows, folder, suite=config["name"], settings=config["suite"]):
        log.info("wrote %s", path)
    if page:
        report.fill(Path(page), folder, suite=config["name"])


if __name__ == "__main__":
    with explained_overrides("benchmark"):
        main()
