"""Which strategy, on which machines: ``python recipes/plan.py machines=machines.yaml [overrides]``, ``--help``."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import explained_overrides


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
def main(cfg: DictConfig) -> None:
    from recipe_tools.jobs.planning import run  # once there is something to do: torch and Lightning take seconds

    run(cfg)


if __name__ == "__main__":
    with explained_overrides("plan"):
        main()
