"""LightningModules that folder checkpoints are read into, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """As Lightning's; a folder becomes a file first, in the folder for temporary files and for as long as it takes.

        Args:
            checkpoint_path: A file, a folder, or an open file.
            map_location: The device that tensors are loaded to, as Lightning's ``load_from_checkpoint`` takes it.
            hparams_file: A file with hyperparameters, as Lightning's ``load_from_checkpoint`` takes it.
            strict: Whether all keys must fit, as Lightning's ``load_from_checkpoint`` takes it.
            weights_only: Whether only tensors and plain values are unpickled, as in :func:`torch.load`; ``None`` is
                ``True`` for a folder.
            **kwargs: Arguments of the class, which replace the saved hyperparameters.

        Raises:
            DamagedCheckpointError: the checkpoint is not what was written.
        """
        load: Callable[..., Self] = partial(
            super().load_from_checkpoint,
            map_location=map_location,
            hparams_file=hparams_file,
            strict=strict,
            weights_only=weights_only,
            **kwargs,
        )
        if not isinstance(checkpoint_path, str | Path):
            return load(checkpoint_path)
        if not is_folder(checkpoint_path):
            check_file(checkpoint_path)
            return load(checkpoint_path)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "model.ckpt"
            to_file(checkpoint_path, file, weights_only=weights_only is not False)
            return load(file)
