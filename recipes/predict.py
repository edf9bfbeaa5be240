"""Predict: ``python recipes/predict.py checkpoint=logs/.../best.ckpt data=new.csv out=predictions.csv [id=COLUMN]``.

The checkpoint carries the configuration of its run, and what was learned from its rows; the new rows need no label.
Of a graph all nodes of the run are predicted, or the best items of all its users.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from recipe_tools.checkpoint_config import offer_checkpoint_config
from recipe_tools.overrides import explained_overrides


@hydra.main(version_base="1.3", config_path="../conf", config_name="predict")
def main(cfg: DictConfig) -> None:
    from recipe_tools.jobs.prediction import run  # once there is something to do: torch and Lightning take seconds

    run(cfg)


if __name__ == "__main__":
    # `data` is the group that the run's rows come from; here it names those to predict.
    sys.argv = [
        f"rows{argument.removeprefix('data')}" if argument.startswith("data=") else argument for argument in sys.argv
    ]
    offer_checkpoint_config(sys.argv[1:], recipe="predict", key="checkpoint")
    with explained_overrides("predict"):
        main()
