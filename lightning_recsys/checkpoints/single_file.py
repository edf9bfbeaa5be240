"""From a folder checkpoint to the single file of ``Trainer(strategy="auto")``, and back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from lightning_recsys.checkpoints.files import check_file, write_file
from lightning_recsys.checkpoints.folder import read_checkpoint, save_folder


def to_file(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, weights_only: bool = True) -> None:
    """Write a folder checkpoint as one file, which Lightning loads with any strategy and torch without Lightning.

    What single ranks added (replicas of other trainers) is left out. Needs memory for the whole model once.

    Args:
        folder: The folder checkpoint.
        file: The file; replaced as a whole if it exists.
        weights_only: As for :func:`torch.load`.

    Raises:
        OSError: the file cannot be written, as where the disk is full or a folder lies there; what was there is as it
            was.
    """
    if Path(file).is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder lies there", os.fspath(file))
    write_file(Path(file), read_checkpoint(folder, weights_only=weights_only))


def to_folder(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, weights_only: bool = True) -> None:
    """Write a single-file checkpoint as a folder.

    Args:
        file: The checkpoint file that ``Trainer.save_checkpoint`` wrote, under any strategy.
        folder: The folder; a checkpoint that is there is replaced.
        weights_only: As for :func:`torch.load`.

    Raises:
        DamagedCheckpointError: the file is not what was written.
        ValueError: the file is no checkpoint.
    """
    check_file(file)
    try:
        checkpoint = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError as error:
        raise ValueError(f"{file} cannot be read as a checkpoint ({str(error).splitlines()[0]})") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{file} is no checkpoint of Lightning's: it has no state_dict")
    save_folder(folder, checkpoint)
