"""Answer requests by a published model: ``python recipes/serve.py url=FOLDER``, ``--help`` for what it answers."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import explained_overrides


@hydra.main(version_base="1.3", config_path="../conf", config_name="serve")
def main(cfg: DictConfig) -> None:
    from recipe_tools.jobs.serving import run  # once there is something to do: torch takes seconds

    run(cfg)


if __name__ == "__main__":
    with explained_overrides("serve"):
        main()
