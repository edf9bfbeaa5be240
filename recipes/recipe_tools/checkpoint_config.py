"""The configuration that a checkpoint carries, for the command lines that go by it."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from recipe_tools.command import command
from recipe_tools.overrides import find_value

# What the recipes decide anew; everything else is as in training.
OWN_KEYS = ("ckpt_path", "paths")


def offer_checkpoint_config(arguments: Sequence[str], *, recipe: str = "evaluate", key: str = "ckpt_path") -> None:
    """Give Hydra the configuration in the checkpoint, so that overrides are checked against what was trained.

    Files of another schema lie where that one is, unless the command line says otherwise: the root in the checkpoint
    may be the folder of the schema that was trained with.

    Args:
        arguments: Of the command line.
        recipe: Which recipe this is, for messages.
        key: By which override the command line names the checkpoint.
    """
    path = find_value(arguments, key)
    if path is None:
        if not any(argument.startswith("-") for argument in arguments):
            raise SystemExit(f"{key}: name the checkpoint, as in {command(recipe)} {key}=best.ckpt")
        ConfigStore.instance().store("checkpoint", node={})  # --help and the like
        return
    # Once there is one to read: torch takes seconds, which --help need not wait for.
    from recipe_tools.trained import load_checkpoint

    from lightning_recsys.checkpoints import has_checkpoint

    if not has_checkpoint(path):
        raise SystemExit(f"{key}: there is no checkpoint {path}")
    trained = load_checkpoint(path, key).get("hyper_parameters", {}).get("config")
    if trained is None:
        raise SystemExit(f"{key}: {path} carries no configuration; was it written by {command('train')}?")
    node = {key: value for key, value in trained.items() if key not in OWN_KEYS}
    if find_value(arguments, "data.schema") is not None and "root" in node.get("data", {}):
        node["data"] = {**node["data"], "root": None}
    ConfigStore.instance().store("checkpoint", node=OmegaConf.create(node))
