"""Measure: ``python recipes/benchmark.py suite=single``, ``--help`` for the suites."""

from __future__ import annotations

import os

# One thread per worker, before torch reads it: ratios taken with more are the scheduler's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import explained_overrides


@hydra.main(version_base="1.3", config_path="../conf", config_name="benchmark")
def main(cfg: DictConfig) -> None:
    from benchmarks.harness.run import run  # once there is something to do: torch and Lightning take seconds

    run(cfg)


if __name__ == "__main__":
    with explained_overrides("benchmark"):
        main()
