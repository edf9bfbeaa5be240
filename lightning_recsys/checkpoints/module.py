"""LightningModules that folder checkpoints are read into, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self

import pytorch_lightning as pl
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_recsys.checkpoints.files import check_file
from lightning_recsys.checkpoints.folder import is_folder
from lightning_recsys.checkpoints.plugin import FolderCheckpointIO
from lightning_recsys.checkpoints.single_file import to_file


class ReadsFolders(pl.LightningModule):
    """A LightningModule that takes a folder wherever Lightning takes a checkpoint's file.

    Lightning opens ``ckpt_path`` as a file. A trainer with a strategy of this package reads folders by itself; this
    class is for the others, such as ``Trainer().validate(task, ckpt_path=folder)``, and for
    :meth:`load_from_checkpoint`. Inherit from it, or give the trainer ``plugins=[FolderCheckpointIO()]``.

    A subclass that has a ``setup`` of its own calls this one.
    """

    def setup(self, stage: str) -> None:
        """Let the trainer read folders, unless it was given a plugin of its own for checkpoints."""
        strategy = self.trainer.strategy
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = FolderCheckpointIO()

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path | IO[bytes], *args: Any, **kwargs: Any) -> Self:
        """As Lightning's; a folder becomes a file first, in the folder for temporary files and for as long as it takes.

        Args:
            checkpoint_path: A file, a folder, or an open file.
            *args: Further arguments of Lightning's ``load_from_checkpoint``.
            **kwargs: The same by name. ``weights_only`` is ``True`` for a folder, unless it is given.

        Raises:
            DamagedCheckpointError: the checkpoint is not what was written.
        """
        load: Callable[..., Self] = super().load_from_checkpoint
        if not isinstance(checkpoint_path, str | Path):
            return load(checkpoint_path, *args, **kwargs)
        if not is_folder(checkpoint_path):
            check_file(checkpoint_path)
            return load(checkpoint_path, *args, **kwargs)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "model.ckpt"
            to_file(checkpoint_path, file, weights_only=kwargs.get("weights_only") is not False)
            return load(file, *args, **kwargs)
