"""Runs whose results are kept in the tree, and trained again: what ``recipes/results.py`` does.

A kept run is a folder ``recipes/results/DATA/MODEL`` with ``config.yaml`` (the command's overrides and the resolved
configuration) and, for each seed, ``seed-N.json`` (metrics, epochs, versions) and ``seed-N.csv`` (the log).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from recipe_tools.record import FILE_NAME
from recipe_tools.records import COMPARED, train_again
from recipe_tools.report import console
from rich.table import Table

KEPT = ("metrics", "epochs", "best_epoch", "parameters", "wall_time_s", "versions", "git_commit")


def keep(run: Path, name: str, root: Path) -> Path:
    """Copy what tells of a completed run, without the paths of the machine that it ran on.

    Args:
        run: Folder of the run, such as ``logs/train/<time>``, in which ``metrics.json`` says that it is complete.
        name: Where it is kept below ``root``: ``DATA/MODEL``, such as ``criteo/dlrm``. Seeds of one configuration share
            it.
        root: The folder of kept runs.

    Raises:
        ValueError: the name is not of that form, there is no run, it is not complete, or other seeds under this name
            have another configuration.
    """
    if len(Path(name).parts) != 2:
        raise ValueError(f"a kept run is called DATA/MODEL, such as criteo/dlrm; got {name!r}.")
    if not (run / FILE_NAME).is_file():
        raise ValueError(f"there is no {FILE_NAME} in {run}, as the folder of a run has one: name logs/train/<time>.")
    record = json.loads((run / FILE_NAME).read_text(encoding="utf-8"))
    if record["status"] != "completed":
        raise ValueError(f"{run} is {record['status']}: only completed runs are kept.")
    config = _without_paths(record["config"])
    seed = config.pop("seed")
    if config["data"].get("seed") == seed:  # one configuration for all seeds
        config["data"]["seed"] = "${seed}"
    overrides = [x for x in record["overrides"] if not x.startswith(("seed=", "paths.", "hydra."))]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump({"overrides": overrides, "config": config}, sort_keys=False, width=120)
    path = folder / "config.yaml"
    if path.exists() and path.read_text(encoding="utf-8") != content and list(folder.glob("seed-*.json")):
        raise ValueError(f"{folder} has runs of another configuration: choose another name, or remove them.")
    path.write_text(content, encoding="utf-8")
    kept = {key: record.get(key) for key in KEPT}
    (folder / f"seed-{seed}.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    _copy_log(run / "curves" / "metrics.csv", folder / f"seed-{seed}.csv")
    return folder


def _copy_log(source: Path, target: Path) -> None:
    """The lines of evaluation, and the last of training before each; all lines would be megabytes."""
    if not source.is_file():
        return
    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = [row for row in rows if any(row[x] for x in row if x.startswith(("val/", "test/")))]
    if wanted:
        with target.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(
                file, [x for x in wanted[0] if any(row[x] for row in wanted)], extrasaction="ignore"
            )
            writer.writeheader()
            writer.writerows(wanted)


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the machine's own folders replaced by what stands for them."""
    paths = config.pop("paths")
    names = {paths["output_dir"]: "${paths.output_dir}", str(Path(paths["data"]).absolute()): "${paths.data}"}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(x) for key, x in value.items()}
        if isinstance(value, list):
            return [replaced(x) for x in value]
        for path, name in names.items():
            if isinstance(value, str) and value.startswith(path):
                return name + value.removeprefix(path)
        return value

    plain: dict[str, Any] = replaced(config)
    return plain


def kept_runs(names: list[str], root: Path) -> Iterator[tuple[str, int, list[str], dict[str, Any]]]:
    """Name, seed, overrides and record of each kept run of these names, or of all.

    Raises:
        ValueError: nothing is kept under a name.
    """
    known = sorted(path.parent.relative_to(root).as_posix() for path in root.glob("*/*/config.yaml"))
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"nothing is kept as {unknown[0]}. There are {', '.join(known) or 'none'}.")
    for name in names or known:
        overrides = yaml.safe_load((root / name / "config.yaml").read_text(encoding="utf-8"))["overrides"]
        for path in sorted((root / name).glob("seed-*.json")):
            yield name, int(path.stem.removeprefix("seed-")), overrides, json.loads(path.read_text(encoding="utf-8"))


def by_name(names: list[str], root: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """The records of each seed, by name."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, seed, _, record in kept_runs(names, root):
        found.setdefault(name, {})[seed] = record
    return found


def check(names: list[str], root: Path, *, tolerance: float, seeds: list[int]) -> bool:
    """Train kept runs again and compare; whether all came out as before."""
    table = Table("run", "seed", "metric", "kept", "now", "", title=f"tolerance {tolerance:g}", title_justify="left")
    good = True
    for name, seed, overrides, kept in kept_runs(names, root):
        if seeds and seed not in seeds:
            continue
        now = train_again(overrides, seed).get("metrics", {})
        for metric in COMPARED:
            before, after = kept["metrics"].get(metric), now.get(metric)
            if before is None:
                continue
            same = after is not None and abs(after - before) <= tolerance
            good &= same
            shown = "failed" if after is None else f"{after:.5f}"
            table.add_row(name, str(seed), metric, f"{before:.5f}", shown, "" if same else "DIFFERS")
    console().print(table)
    return good
