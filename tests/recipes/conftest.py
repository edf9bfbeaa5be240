"""Fixtures of the recipe tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from recipe_helpers import CONF, RecipeServer, recipe_server


@pytest.fixture(scope="session")
def run_forked() -> Iterator[RecipeServer]:
    """As ``run_recipe``, in a tenth of the time to start."""
    with recipe_server() as run:
        yield run


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Callable[..., DictConfig]]:
    """``composed("train", overrides...)``: the config as a recipe would get it, outputs in the test's folder."""

    def make(name: str, *overrides: str, folder: str = "conf") -> DictConfig:
        with initialize_config_dir(str(CONF.parent / folder), version_base="1.3"):
            config = compose(name, [f"hydra.runtime.output_dir={tmp_path}", *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        OmegaConf.set_readonly(config, False)
        OmegaConf.set_struct(config, False)
        del config["hydra"]
        return config

    yield make
    HydraConfig.instance().cfg = None
