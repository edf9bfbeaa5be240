"""Runs of the real command line, and configs as the recipes use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
RECIPES, CONF = ROOT / "recipes", ROOT / "conf"
sys.path.insert(0, str(RECIPES))

from recipe_tools.build import self_contained  # noqa: E402 - from the path above
from recipe_tools.quiet import be_quiet  # noqa: E402
from recipe_tools.record import RunRecord, isolated_job  # noqa: E402
from train import train  # noqa: E402

TINY_DATA = ("data.train_rows=1000", "data.val_rows=400", "data.test_rows=400", "data.batch_size=100")
TINY = (*TINY_DATA, "model.embedding_dim=4", "model.bottom_hidden=[8]", "model.top_hidden=[8]")


def run_recipe(recipe: str, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in ``folder`` as a user would, every warning shown."""
    return subprocess.run(
        [sys.executable, "-W", "default", str(RECIPES / recipe), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def train_here(config: DictConfig, folder: Path) -> RunRecord:
    """What train.py does with the config, in this process."""
    container = plain(config)
    with isolated_job():
        be_quiet()
        with RunRecord(folder, config=container, overrides=[]) as record:
            train(container, record)
    return record


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as the recipes use it."""
    return self_contained(OmegaConf.to_container(config, resolve=True))
