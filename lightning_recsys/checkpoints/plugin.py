"""Folder checkpoints for strategies that know single files only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.types import _PATH

from lightning_recsys.checkpoints.files import check_file
from lightning_recsys.checkpoints.folder import is_folder, read_checkpoint


class FolderCheckpointIO(TorchCheckpointIO):
    """Lightning's own way with checkpoint files, which also loads folders: the whole model, into every process.

    A file that is saved where a folder lies takes its place.

    >>> from pytorch_lightning import Trainer
    >>> trainer = Trainer(plugins=[FolderCheckpointIO()], accelerator="cpu", logger=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Save a file."""
        if not is_folder(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # Lightning would move the file into the folder, which would go on to count.
        folder = Path(path)
        file, aside = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("new", "old"))
        super().save_checkpoint(checkpoint, file, storage_options)
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed in the next two lines
        folder.rename(aside)
        file.rename(folder)
        shutil.rmtree(aside)

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder; ``None`` for ``weights_only`` is torch's default, ``True``.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        if is_folder(Path(path)):
            return read_checkpoint(Path(path), weights_only=weights_only is not False)
        check_file(path)
        options = {} if map_location is None else {"map_location": map_location}
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only, **options)
        return checkpoint
