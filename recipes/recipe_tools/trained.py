"""What a checkpoint says of its run, for the recipes that go by it."""

from __future__ import annotations

import os
from pickle import UnpicklingError
from typing import Any

from lightning_recsys.checkpoints import is_folder, load_file, read_description


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
