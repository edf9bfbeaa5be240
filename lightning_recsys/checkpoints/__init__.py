"""Checkpoints that are folders: written by several processes at once, replaced as a whole, readable by any number."""

from lightning_recsys.checkpoints.files import check_file, load_file
from lightning_recsys.checkpoints.folder import (
    has_checkpoint,
    is_folder,
    read_checkpoint,
    read_description,
    read_extras,
    read_own,
    read_stored,
    save_folder,
    version_of,
)
from lightning_recsys.checkpoints.manifest import Version
from lightning_recsys.checkpoints.module import ReadsFolders, let_lightning_read_folders
from lightning_recsys.checkpoints.plugin import FolderCheckpointIO
from lightning_recsys.checkpoints.saved_rows import SavedRows
from lightning_recsys.checkpoints.single_file import to_file, to_folder
from lightning_recsys.checkpoints.stored import StoredRows, StoredTensor

__all__ = [
    "FolderCheckpointIO",
    "ReadsFolders",
    "SavedRows",
    "StoredRows",
    "StoredTensor",
    "Version",
    "check_file",
    "has_checkpoint",
    "is_folder",
    "let_lightning_read_folders",
    "load_file",
    "read_checkpoint",
    "read_description",
    "read_extras",
    "read_own",
    "read_stored",
    "save_folder",
    "to_file",
    "to_folder",
    "version_of",
]
