"""A trained model for predictions: its rows stay in the checkpoint until a batch asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_recsys.checkpoints import (
    SavedRows,
    Version,
    check_file,
    is_folder,
    load_file,
    read_checkpoint,
    version_of,
)
from lightning_recsys.embeddings import EmbeddingBagCollection, ReadOnlyRows

Fetch = Callable[[Tensor], Tensor]


def load_for_prediction(
    module: pl.LightningModule, path: str | os.PathLike[str], *, weights_only: bool = True
) -> pl.LightningModule:
    """Give a module the weights of a checkpoint, a file or a folder, without its tables in memory.

    The rows of its embedding collections are read from the checkpoint as batches ask for them, so that a model which
    many processes trained together predicts on one machine. The module cannot be trained any more. Its collections need
    no rows of their own: build the model with ``device="meta"``.

    Args:
        module: What was trained, or a new one with the same model.
        path: A checkpoint of any strategy, a file or a folder.
        weights_only: As for :func:`torch.load`.

    Returns:
        The module, in evaluation mode.

    Raises:
        FileNotFoundError: no checkpoint lies there.
        KeyError: it lacks the rows of a table.
        ValueError: a table has another size there, as where its rows are made when they are first trained.
        RuntimeError: the rest of the model differs.
    """
    prefixes = {
        f"{name}.embedding_bags": part
        for name, part in module.named_modules()
        if isinstance(part, EmbeddingBagCollection) and part.tables
    }
    keys = {
        f"{prefix}.{table.name}.{kind}"
        for prefix, part in prefixes.items()
        for table in part.tables
        for kind in ("weight", *part.optimizer.initial_state(torch.zeros(1, part.embedding_dim)))
    }
    checkpoint: dict[str, Any]
    version = version_of(path) if is_folder(path) else None
    if version is not None:  # the run may replace it between what is read now and the rows
        checkpoint = read_checkpoint(version, without=keys, weights_only=weights_only)
    else:
        check_file(path)
        checkpoint = load_file(path, weights_only=weights_only)
    for prefix, part in prefixes.items():
        fetch = {
            table.name: _fetch(version or checkpoint["state_dict"], f"{prefix}.{table.name}.weight", shape)
            for table in part.tables
            for shape in [(table.num_embeddings, table.embedding_dim)]
        }
        part.bind(ReadOnlyRows(part.layout, part.optimizer, fetch), copy_rows=False)
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict({key: value for key, value in checkpoint["state_dict"].items() if key not in keys})
    return module.eval()


def _fetch(source: Version | Mapping[str, Tensor], key: str, shape: tuple[int, int]) -> Fetch:
    """The function that reads rows of a table, from a folder or from the mapped tensors of a file."""
    if isinstance(source, Version):
        saved = SavedRows(source, key)
        _check_shape(key, saved.shape, shape)
        return saved.take
    if key not in source:
        raise KeyError(f"the checkpoint has no {key!r}.")
    _check_shape(key, source[key].shape, shape)
    return lambda rows: source[key].index_select(0, rows).float()


def _check_shape(key: str, found: torch.Size, shape: tuple[int, int]) -> None:
    if tuple(found) != shape:
        raise ValueError(f"{key!r} has the shape {list(found)} in the checkpoint, the model's has {list(shape)}.")
