"""Prepare data: ``python recipes/prepare.py data=... raw=... out=...``; ``--help`` for what there is to choose.

``prepare.py schema`` guesses a schema, ``prepare.py cache`` shows what ``data=tabular`` keeps.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from recipe_tools.advice import first_run, show_guess
from recipe_tools.command import command
from recipe_tools.config_types import check_complete
from recipe_tools.overrides import CONFIG_DIR, explained_overrides
from recipe_tools.prepare_rows import prepare_rows
from recipe_tools.row_cache import show_cache

from lightning_recsys.data import guess_schema

log = logging.getLogger("prepare")


@hydra.main(version_base="1.3", config_path="../conf/prepare", config_name="schema")
def schema(cfg: DictConfig) -> None:
    """Guess what the columns of a file mean, and write it down as a schema to correct."""
    check_complete(cfg)
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise SystemExit(f"{out} exists. Choose another out=, or overwrite=true.")
    raw: Any = OmegaConf.to_container(cfg)["raw"]  # type: ignore[index,call-overload]
    try:
        guessed = guess_schema(raw, label=cfg.label, dates=cfg.dates)
    except (ValueError, FileNotFoundError) as error:  # most are questions
        raise SystemExit(str(error)) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(guessed.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"out: the schema cannot be written ({error})") from None
    show_guess(guessed)
    log.info("Wrote %s. Look it over: a remark says why each column is where it is. Then train:", out)
    training_rows = (guessed.num_rows or 0) * (1 - guessed.share("validation") - guessed.share("test"))
    log.info("  %s", " ".join([command("train"), "data=tabular", f"data.schema={out}", *first_run(training_rows)]))


@hydra.main(version_base="1.3", config_path="../conf/prepare", config_name="rows")
def rows(cfg: DictConfig) -> None:
    """Turn raw text into Parquet shards to train from."""
    check_complete(cfg)
    prepare_rows(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]


def main() -> None:
    if sys.argv[1:2] == ["cache"]:
        show_cache(sys.argv[2:])
        return
    name = "schema" if sys.argv[1:2] == ["schema"] else "rows"
    if name == "schema":
        del sys.argv[1]
    with explained_overrides(name, config_dir=CONFIG_DIR / "prepare"):
        (schema if name == "schema" else rows)()


if __name__ == "__main__":
    main()
