"""A guess of what columns mean, written down as a schema: what ``recipes/prepare.py schema`` does."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from recipe_tools.advice import first_run, show_guess
from recipe_tools.command import command
from recipe_tools.config_types import check_complete

from lightning_recsys.data import guess_schema

log = logging.getLogger("prepare")


def run(cfg: DictConfig) -> None:
    """Guess as ``cfg`` says, write the schema, tell of it."""
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
    words = ["data=tabular", f"data.schema={out}", *first_run(training_rows)]
    log.info("  %s %s", command("train"), shlex.join(words))
