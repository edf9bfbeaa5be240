"""One simulation from its overrides, or what a folder of finished ones has of the same configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.utils import get_object
from omegaconf import OmegaConf
from recipe_tools.build import Config, self_contained
from recipe_tools.record import RunRecord, completed_record, digest, isolated_job
from recipe_tools.report import console

from lightning_recsys.__about__ import __version__
from lightning_recsys.data import PreparedDataModule, TabularDataModule
from lightning_recsys.data.files import file_identities
from lightning_recsys.data.prepared.manifest import MANIFEST
from lightning_recsys.data.raw import TabularFormat

Simulate = Callable[..., dict[str, Any]]
"""``simulate(config, record, label=...)``, as in ``recipes/simulate.py``."""


def simulated(simulate: Simulate, label: str, overrides: Sequence[str], *, cache: Path, root: str) -> dict[str, Any]:
    """What came of a simulation, now or when it was made before.

    Args:
        simulate: Makes one simulation.
        label: Name of the simulation, with which the name of its folder in the cache begins; one of the same
            configuration is found under any label.
        overrides: Overrides of the configuration ``simulate``.
        cache: Finished simulations, a folder each, named by a digest of the configuration: what differs is made anew,
            as is one of files that have changed since, or of another version of this package.
        root: ``paths.data``, which is no part of the digest.
    """
    config = _configuration(overrides, folder=Path("/"), root="/")
    name = digest(config)
    folder = cache.absolute() / f"{re.sub(r'[^A-Za-z0-9._]+', '-', label)}-{name}"
    folder = next(iter(sorted(cache.absolute().glob(f"*-{name}"))), folder)  # made under another label
    config = _configuration(overrides, folder=folder, root=root)
    inputs = _inputs(config)
    if (kept := completed_record(folder)) is not None:
        then = kept.get("inputs")  # earlier versions did not write them down
        if None in (inputs, then) or inputs == then:
            metrics = {name: math.nan if value is None else value for name, value in kept["metrics"].items()}
            console().print(f"{label}: taken from {folder}", markup=False)
            return {**kept.get("simulation", {}), "metrics": metrics}
        changed = "version of this package" if then["version"] != inputs["version"] else "data"
        console().print(f"{label}: made anew, since {folder} is of another {changed}", markup=False)
    with isolated_job(), RunRecord(folder, config=config, overrides=list(overrides)) as record:
        found = simulate(config, record, label=label)
        record.details["inputs"] = inputs
        record.details["simulation"] = {name: part for name, part in found.items() if name != "metrics"}
        record.metrics |= found["metrics"]
    return found


def _inputs(config: Config) -> dict[str, Any] | None:
    """What a simulation depends on beside its configuration: the version of this package, and the files of its rows.

    ``None`` where the files are not at hand: a figure can be drawn from finished simulations alone.
    """
    data, files = config["data"], []
    try:
        if get_object(data["_target_"]) is TabularDataModule:
            raw_format = TabularFormat(schema=data["schema"], root=Path(data["root"] or ""))
            of_splits = (raw_format.files(split) for split in ("train", "validation", "test"))
            files = [*chain.from_iterable(of_splits), *raw_format.side_files()]
        elif get_object(data["_target_"]) is PreparedDataModule:
            files = [Path(data["root"]) / MANIFEST]
        if (machines := config["machines"]["file"]) is not None:
            files.append(Path(machines).expanduser())
        found = file_identities(files)
    except FileNotFoundError:
        return None
    return {"version": __version__, "files": [[about["bytes"], about["fingerprint"], time] for about, time in found]}


def _configuration(overrides: Sequence[str], *, folder: Path, root: str) -> Config:
    """What one simulation runs with; its figure, and what a sweep compares, change nothing of it."""
    composed = compose("simulate", [*overrides, f"paths.output_dir={folder}", f"paths.data={root}"])
    config: Config = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    del config["figure"], config["optimized_metric"]
    return self_contained(config)
