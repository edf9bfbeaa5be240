"""How a recipe is called: by its file in the repository, as a command where the package was installed from a wheel."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

import lightning_recsys


def command(recipe: str) -> str:
    """What to type to run a recipe, for messages and help texts."""
    installed = Path(__file__).resolve().is_relative_to(Path(lightning_recsys.__file__).resolve().parent)
    return f"lightning-recsys {recipe}" if installed else f"python recipes/{recipe}.py"


OmegaConf.register_new_resolver("command", command, replace=True)
