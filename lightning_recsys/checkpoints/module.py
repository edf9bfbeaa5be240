"""LightningModules that folder checkpoints are read into, whatever the strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self

import pytorch_lightning as pl
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.core import saving

from lightning_recsys.checkpoints.files import check_file
from lightning_recsys.checkpoints.folder import is_folder, read_checkpoint
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
        """Load as Lightning does; a folder is first turned into a temporary file, which is removed afterwards.

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


def let_lightning_read_folders() -> None:
    """Have Lightning's own ``load_from_checkpoint``, of any LightningModule or data module, take folders from now on.

    Making a strategy of this package does this for its process, for ``MyModule.load_from_checkpoint(best_model_path)``
    after a run. A program that makes none calls it once. Further calls change nothing, and files are read as before.
    ``map_location`` is ignored for folders, whose tensors are read into the processor's memory.
    """
    load: Callable[..., Any] = vars(saving)["pl_load"]
    if getattr(load, "reads_folders", False):
        return

    @functools.wraps(load)
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, str | Path) and is_folder(path):
            return read_checkpoint(path, weights_only=weights_only is not False)
        return load(path, map_location=map_location, weights_only=weights_only)

    vars(read)["reads_folders"] = True
    vars(saving)["pl_load"] = read
