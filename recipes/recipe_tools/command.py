"""How a recipe is called: by its file in the repository; as a command where it was started or installed as one."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

import lightning_recsys
from lightning_recsys.cli import recipes_folder


def command(recipe: str) -> str:
    """What to type to run a recipe, for messages and help texts."""
    installed = recipes_folder().is_relative_to(Path(lightning_recsys.__file__).parent)
    installed |= getattr(sys.modules["__main__"], "STARTED_AS_COMMAND", False)  # by lightning_recsys.cli
    return f"lightning-recsys {recipe}" if installed else f"python recipes/{recipe}.py"


OmegaConf.register_new_resolver("command", command, replace=True)
