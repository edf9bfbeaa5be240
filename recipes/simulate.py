"""Train as a cluster would, in virtual time: ``python recipes/simulate.py [overrides]``, ``--help`` for the choices."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import explained_overrides
from recipe_tools.quiet import be_quiet


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
def main(cfg: DictConfig) -> float | None:
    from recipe_tools.jobs.simulation import run  # once there is something to do: torch and Lightning take seconds

    return run(cfg)


if __name__ == "__main__":
    be_quiet()  # before Hydra makes its callbacks
    with explained_overrides("simulate"):
        main()
