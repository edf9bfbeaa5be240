"""Folder checkpoints for strategies that know single files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning_fabric.plugins import CheckpointIO
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_recsys.checkpoints.files import check_file, standing, write_file
from lightning_recsys.checkpoints.folder import is_folder, read_checkpoint, remove_folder
from lightning_recsys.checkpoints.places import place_of


class FolderCheckpointIO(TorchCheckpointIO):
    """Lightning's own way with checkpoint files, which also loads folders: the whole model, into every process.

    A file that is saved takes the place of the file or folder there in one step, and is on the disk by then.

    >>> from pytorch_lightning import Trainer
    >>> trainer = Trainer(plugins=[FolderCheckpointIO()], accelerator="cpu", logger=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Save a file, beside its goal until it is whole; one at a URL as Lightning does, by one request.

        Raises:
            OSError: it cannot be written; what was there is as it was.
        """
        files, goal = url_to_fs(str(path))
        if storage_options is not None or not isinstance(files, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            if is_folder(path):  # whose objects lie beside it there; until now it counted
                remove_folder(place_of(path))
        else:  # Lightning writes to TMPDIR, and from another file system that is copied over what was there
            write_file(Path(goal), checkpoint)

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder; ``None`` for ``weights_only`` is torch's default, ``True``.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        if is_folder(path):
            return read_checkpoint(path, weights_only=weights_only is not False)
        if "://" not in str(path):
            path = str(standing(path))
        check_file(path)
        options = {} if map_location is None else {"map_location": map_location}
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only, **options)
        return checkpoint


class WithFolderIO:
    """A base of Lightning strategies that read folders with :class:`FolderCheckpointIO`, unless told otherwise."""

    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that reads and writes single files: the trainer's, or ours where nobody has chosen another one.

        One that wraps another, such as ``AsyncCheckpointIO``, is given ours where it wraps none yet.
        """
        if self._checkpoint_io is None:
            self._checkpoint_io = FolderCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = FolderCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io
