"""Train a click-through-rate model: ``python recipes/train.py [overrides]``, ``--help`` for what there is to choose."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import explained_overrides, schema_changes
from recipe_tools.quiet import be_quiet


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    from recipe_tools.jobs.training import run  # once there is something to do: torch and Lightning take seconds

    return run(cfg)


if __name__ == "__main__":
    be_quiet()  # before Hydra makes its callbacks
    sys.argv[1:] = schema_changes(sys.argv[1:])
    with explained_overrides("train"):
        main()
