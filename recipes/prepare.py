"""Prepare data: ``python recipes/prepare.py schema [overrides]``; with ``--help``, what there is to say."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import CONFIG_DIR, explained_overrides

from lightning_recsys.data import guess_schema

log = logging.getLogger("prepare")


@hydra.main(version_base="1.3", config_path="../conf/prepare", config_name="schema")
def schema(cfg: DictConfig) -> None:
    """Guess what the columns of a file mean, and write it down as a schema to correct."""
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise SystemExit(f"{out} exists. Choose another out=, or overwrite=true.")
    guessed = guess_schema(cfg.raw, label=cfg.label)
    out.write_text(guessed.to_yaml(), encoding="utf-8")
    log.info("Wrote %s. Look it over: a remark says why each column is where it is. Then train:", out)
    log.info("  python recipes/train.py data=tabular data.schema=%s", out)


def main() -> None:
    if sys.argv[1:2] != ["schema"]:
        raise SystemExit(f"usage: python recipes/prepare.py schema [overrides]\n\n  schema: {schema.__doc__}")
    del sys.argv[1]
    with explained_overrides("schema", config_dir=CONFIG_DIR / "prepare"):
        schema()


if __name__ == "__main__":
    main()
