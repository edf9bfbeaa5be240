"""One simulation from its overrides, or what a folder of finished ones has of the same configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import OmegaConf
from recipe_tools.build import Config, self_contained
from recipe_tools.record import RunRecord, completed_record, digest, isolated_job
from recipe_tools.report import console

Simulate = Callable[..., dict[str, Any]]
"""``simulate(config, record, label=...)``, as in ``recipes/simulate.py``."""


def simulated(simulate: Simulate, label: str, overrides: Sequence[str], *, cache: Path, root: str) -> dict[str, Any]:
    """What came of a simulation, now or when it was made before.

    Args:
        simulate: Makes one simulation.
        label: Name of the simulation, with which the name of its folder in the cache begins.
        overrides: Overrides of the configuration ``simulate``.
        cache: Finished simulations, a folder each, named by a digest of the configuration: what differs is made anew.
        root: ``paths.data``, which is no part of the digest.
    """
    config = _configuration(overrides, folder=Path("/"), root="/")
    folder = cache.absolute() / f"{re.sub(r'[^A-Za-z0-9._]+', '-', label)}-{digest(config)}"
    if (kept := completed_record(folder)) is not None:
        metrics = {name: math.nan if value is None else value for name, value in kept["metrics"].items()}
        console().print(f"{label}: taken from {folder}", markup=False)
        return {**kept.get("simulation", {}), "metrics": metrics}
    config = _configuration(overrides, folder=folder, root=root)
    with isolated_job(), RunRecord(folder, config=config, overrides=list(overrides)) as record:
        found = simulate(config, record, label=label)
        record.details["simulation"] = {name: part for name, part in found.items() if name != "metrics"}
        record.metrics |= found["metrics"]
    return found


def _configuration(overrides: Sequence[str], *, folder: Path, root: str) -> Config:
    """What one simulation runs with; the figure that it belongs to changes nothing of it."""
    composed = compose("simulate", [*overrides, f"paths.output_dir={folder}", f"paths.data={root}"])
    config: Config = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    del config["figure"]
    return self_contained(config)
