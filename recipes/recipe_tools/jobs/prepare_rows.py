"""Raw text turned into shards, with a progress bar: what ``recipes/prepare.py data=...`` does."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from recipe_tools.build import Config, build
from recipe_tools.command import command
from recipe_tools.config_types import check_complete
from recipe_tools.overrides import CONFIG_DIR
from recipe_tools.report import console, rows_of_files
from rich.table import Table

from lightning_recsys.data import guess_schema
from lightning_recsys.data.files import check_md5, find_files
from lightning_recsys.data.preparation import BySchema, Preparation, split_rule
from lightning_recsys.data.preparation.progress import progress_bar
from lightning_recsys.data.prepared import Manifest
from lightning_recsys.data.raw.columns import SkippedRows
from lightning_recsys.typed_yaml import load_yaml

GUESS = "guess"


def run(cfg: DictConfig) -> None:
    """Prepare as ``cfg`` says."""
    check_complete(cfg)
    prepare_rows(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]


def prepare_rows(config: Config) -> Manifest:
    """Do what the config says, show how far it is, print what came of it."""
    out = Path(config["out"])
    raw_format = build(with_schema(config, out=out))
    files = raw_format.files("train") if config["raw"] is None else find_files(config["raw"])
    evaluation = [config["split"][name] for name in ("validation", "test") if config["split"]["by"] == "file"]
    own = [file for patterns in evaluation if patterns for file in find_files(patterns)]
    check_md5([*files, *own], config["checksums"] or {})
    with progress_bar(console()) as on_progress:
        preparation = Preparation(
            out,
            raw_format=raw_format,
            files=files,
            split=BySchema(raw_format) if config["split"]["by"] == "schema" else split_rule(**config["split"]),
            preprocessing=build(config["preprocessing"]),
            on_bad_row=config["on_bad_row"],
            shard_bytes=config["shard_bytes"],
            compression=config["compression"],
            num_threads=config["num_threads"],
            on_progress=on_progress,
        )
        manifest = preparation.run()
    print_manifest(manifest, out)
    return manifest


def with_schema(config: Config, *, out: Path) -> Config:
    """The config of the raw format; ``data.schema`` may also name a data set of train.py, or be guessed."""
    data: Config = config["data"]
    schema = data.get("schema")
    if schema == GUESS:
        if config["raw"] is None:
            raise ValueError("data.schema=guess needs raw=...: the files to look at.")
        path = out / "schema.yaml"
        if not path.is_file():  # as it was, when a preparation goes on
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(guess_schema(config["raw"]).to_yaml(), encoding="utf-8")
        console().print(f"The schema is a guess; look it over: {path}", markup=False, soft_wrap=True)
        return {**data, "schema": str(path)}
    if isinstance(schema, str) and not Path(schema).is_file() and (known := ready_schemas()).get(schema):
        root = data["root"] or os.environ.get("LIGHTNING_RECSYS_DATA", "data")
        return {**data, "schema": known[schema], "root": root}
    return data


def ready_schemas() -> dict[str, Config]:
    """The schemas of train.py's data sets, by the name of the set."""
    files = {path.stem: load_yaml(path) for path in (CONFIG_DIR / "data").glob("*.yaml")}
    return {name: config["schema"] for name, config in files.items() if isinstance(config.get("schema"), dict)}


def print_manifest(manifest: Manifest, root: Path) -> None:
    """Print rows, positives and shards of each split, what became of the rows of each file, and what to do next."""
    table = Table("split", "rows", "positive", "shards", "bytes", title=str(root), title_justify="left")
    statistics = manifest.details["statistics"]
    for split, shards in manifest.splits.items():
        rows = sum(shard.rows for shard in shards)
        positive = f"{statistics['positives'].get(split, 0) / rows:.2%}" if rows else ""
        table.add_row(split, f"{rows:,}", positive, str(len(shards)), f"{sum(shard.bytes for shard in shards):,}")
    output = console()
    output.print(table)
    for about, account in rows_of_files(manifest.details.get("rows", {})):
        output.print(f"{about}: {account}", markup=False, highlight=False, soft_wrap=True)
    for path, skipped in manifest.details["skipped"].items():
        message = SkippedRows(**skipped).describe(path)
        output.print(message, markup=False, highlight=False, soft_wrap=True)
    learned = manifest.details["learned"]
    if learned.get("raised"):
        output.print(
            f"Vocabularies hold values of at least {learned['min_count']} rows only: max_vocabulary was reached."
        )
    words = shlex.join(["data=prepared", f"data.root={root}"])
    output.print(f"Train: {command('train')} {words}", markup=False, soft_wrap=True)
