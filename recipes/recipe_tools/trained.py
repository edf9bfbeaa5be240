"""What a checkpoint says of its run, for the recipes that go by it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from recipe_tools.command import command
from recipe_tools.overrides import find_value

from lightning_recsys.checkpoints import has_checkpoint, is_folder, load_file, read_description

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
    if not has_checkpoint(path):
        raise SystemExit(f"{key}: there is no checkpoint {path}")
    trained = load_checkpoint(path, key).get("hyper_parameters", {}).get("config")
    if trained is None:
        raise SystemExit(f"{key}: {path} carries no configuration; was it written by {command('train')}?")
    node = {key: value for key, value in trained.items() if key not in OWN_KEYS}
    if find_value(arguments, "data.schema") is not None and "root" in node.get("data", {}):
        node["data"] = {**node["data"], "root": None}
    ConfigStore.instance().store("checkpoint", node=OmegaConf.create(node))


def load_checkpoint(path: str, key: str = "ckpt_path") -> dict[str, Any]:
    """The checkpoint; its tensors are left on disk."""
    if is_folder(path):
        return read_description(path)
    if os.path.exists(path) and not os.path.getsize(path):
        raise SystemExit(f"{key}: {path} is empty, and no checkpoint: its writing was cut off")
    try:
        checkpoint: dict[str, Any] = load_file(path)
    except (RuntimeError, UnpicklingError) as error:
        raise SystemExit(f"{key}: {path} cannot be read as a checkpoint ({str(error).splitlines()[0]})") from None
    return checkpoint


def without_tables(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose tables have no rows: they are read from the checkpoint."""
    return {**config, "embeddings": {**config["embeddings"], "device": "meta"}}


def makes_rows(config: dict[str, Any]) -> bool:
    """Whether the run made rows when they were first trained, so that its checkpoint has some of a table's."""
    strategy = config.get("strategy")
    return isinstance(strategy, dict) and bool(strategy.get("dynamic_rows"))
