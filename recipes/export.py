"""Publish the model of a finished run, or write it for others: ``python recipes/export.py checkpoint=... out=FOLDER``.

The checkpoint carries the configuration of its run; overrides change it, such as ``data.root=/elsewhere``.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from recipe_tools.checkpoint_config import offer_checkpoint_config
from recipe_tools.overrides import explained_overrides


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
def main(cfg: DictConfig) -> None:
    from recipe_tools.jobs.exporting import run  # once there is something to do: torch and Lightning take seconds

    run(cfg)


if __name__ == "__main__":
    offer_checkpoint_config(sys.argv[1:], recipe="export", key="checkpoint")
    with explained_overrides("export"):
        main()
