"""A suite of measurements, from its configuration to its files: what ``recipes/benchmark.py`` does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.jobs.job import sigterm_exits
from omegaconf import DictConfig, OmegaConf
from recipe_tools.build import build
from recipe_tools.quiet import be_quiet

from lightning_recsys.runtime import configure_worker

log = logging.getLogger("benchmark")


def run(cfg: DictConfig) -> None:
    """Measure as ``cfg`` says, show and write the rows."""
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
