"""One checkpoint as a folder, by :mod:`torch.distributed.checkpoint`.

.. code-block:: text

    last.ckpt/
      current                 the name of the version that counts; replaced in one step once all of it is written
      00000500-3f2a9c01/
        .metadata, *.distcp   the tensors of the model's state dict, rows included (torch.distributed.checkpoint)
        meta.pt               the rest of Lightning's checkpoint: loops, callbacks, optimizers, hyperparameters
        extras-00000.pt       what a rank adds of its own, such as its trainer's replica

A process that is killed while it saves leaves ``current`` as it was. torch alone reads a version:
``python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER/VERSION FILE``.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_recsys.checkpoints.stored import StoredRows, StoredTensor

POINTER = "current"
_STATE = "state_dict"
_META = "meta.pt"
_EXTRAS = "extras-"
_SAVED_BY_TORCH = (Tensor, StoredTensor)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder checkpoint lies there."""
    return (Path(path) / POINTER).is_file()


def save_folder(path: str | os.PathLike[str], checkpoint: Mapping[str, Any], *, extras: Any = None) -> None:
    """Write a checkpoint; every rank of the default process group calls this, with the same path.

    What lay there is replaced when the new one is complete; a single file of that name is as well.

    Args:
        path: The folder; made where it is missing.
        checkpoint: Lightning's dict. Its ``state_dict`` may hold :class:`StoredTensor` and :class:`StoredRows`, of
            which each rank writes its share; everything else in it is rank 0's.
        extras: What this rank adds; nothing if ``None``.

    Raises:
        ValueError: the folder exists and holds something else.

    Communication: torch's plan of who writes what, and one barrier.
    """
    rank, folder = _rank(), Path(path)
    version = folder.parent / _agree_on(_new_version(folder, checkpoint) if rank == 0 else None)
    version.mkdir(parents=True, exist_ok=True)
    state = {key: value for key, value in checkpoint["state_dict"].items() if not isinstance(value, StoredRows)}
    own = {key: value for key, value in state.items() if isinstance(value, StoredTensor if rank else _SAVED_BY_TORCH)}
    for key, value in checkpoint["state_dict"].items():
        own |= value.to_save(key) if isinstance(value, StoredRows) else {}
    with _without_warning():
        writer = FileSystemWriter(version)
        save({_STATE: own}, storage_writer=writer, planner=_Shares(), no_dist=not _is_distributed())
    if extras is not None:
        torch.save(extras, version / f"{_EXTRAS}{rank:05}.pt")
    if rank == 0:
        others = {key: value for key, value in state.items() if not isinstance(value, _SAVED_BY_TORCH)}
        torch.save({**checkpoint, _STATE: others}, version / _META)
    if _is_distributed():
        dist.barrier()
    if rank == 0:
        _commit(version)
        if version.parent != folder:  # a single file was there until now
            folder.unlink()
            version.parent.rename(folder)


def read_checkpoint(
    path: str | os.PathLike[str], *, without: Container[str] = (), weights_only: bool = True
) -> dict[str, Any]:
    """Lightning's dict, with the state dict in memory.

    Args:
        path: The folder.
        without: Keys of the state dict to leave out, because :func:`read_stored` fetches them.
        weights_only: As for :func:`torch.load`: refuse everything but tensors and plain containers.

    Raises:
        FileNotFoundError: no checkpoint lies there.
    """
    checkpoint = read_description(path, weights_only=weights_only)
    reader = FileSystemReader(_version(path))
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.removeprefix(f"{_STATE}.") not in without
    }
    with _without_warning():
        load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    checkpoint[_STATE] |= {key.removeprefix(f"{_STATE}."): tensor for key, tensor in tensors.items()}
    return checkpoint


def read_description(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Lightning's dict without the tensors of its state dict: hyperparameters, the data module's state, loops.

    Args:
        path: The folder.
        weights_only: As for :func:`read_checkpoint`.

    Raises:
        FileNotFoundError: no checkpoint lies there.
    """
    description: dict[str, Any] = torch.load(_version(path) / _META, map_location="cpu", weights_only=weights_only)
    return description


def read_stored(path: str | os.PathLike[str], targets: Mapping[str, StoredTensor | StoredRows]) -> None:
    """Write saved rows into their stores, each process its share, a block at a time.

    Args:
        path: The folder.
        targets: Where each key of the state dict goes.

    Raises:
        FileNotFoundError: no checkpoint lies there.
        KeyError: the checkpoint lacks a key.
        ValueError: a saved tensor has another shape.
    """
    version = _version(path)
    saved = FileSystemReader(version).read_metadata().state_dict_metadata
    whole: dict[str, StoredTensor] = {}
    for key, value in targets.items():
        whole |= _rows_to_load(version, key, value) if isinstance(value, StoredRows) else {key: value}
    for key, target in whole.items():
        entry = saved.get(f"{_STATE}.{key}")
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"{path} has no {key!r}.")
        if entry.size != target.shape:
            raise ValueError(f"{path}: {key!r} has the shape {list(entry.size)}, the model's has {list(target.shape)}.")
        for first, num_rows in target.blocks():
            block = torch.empty((num_rows, *target.shape[1:]), dtype=target.dtype)
            planner = _Block(key, target, first, block)
            with _without_warning():
                load({}, storage_reader=FileSystemReader(version), planner=planner, no_dist=True)
            target.write(first, block)


def _rows_to_load(version: Path, prefix: str, rows: StoredRows) -> dict[str, StoredTensor]:
    """What the saved ids of tables, or the lack of ids where all rows were saved, make of them."""
    saved = FileSystemReader(version).read_metadata().state_dict_metadata
    targets: dict[str, StoredTensor] = {}
    for table in rows.tables:
        entry = saved.get(f"{_STATE}.{prefix}.{table}.ids")
        if isinstance(entry, TensorStorageMetadata):
            ids = torch.empty(entry.size, dtype=torch.int64)
            tensors = {f"{_STATE}.{prefix}.{table}.ids": ids}
            with _without_warning():
                planner = DefaultLoadPlanner(flatten_state_dict=False)
                load(tensors, storage_reader=FileSystemReader(version), planner=planner, no_dist=True)
        else:
            entry = saved.get(f"{_STATE}.{prefix}.{table}.weight")
            if not isinstance(entry, TensorStorageMetadata):
                raise KeyError(f"{version.parent} has no '{prefix}.{table}.weight'.")
            ids = torch.arange(entry.size[0])
        targets |= rows.to_load(prefix, table, ids)
    return targets


def read_extras(path: str | os.PathLike[str], index: int, *, weights_only: bool = True) -> Any:
    """What the ``index``-th of the ranks that added something did add; ``None`` where fewer did."""
    files = sorted(_version(path).glob(f"{_EXTRAS}*.pt"))
    return None if index >= len(files) else torch.load(files[index], map_location="cpu", weights_only=weights_only)


class _Shares(DefaultSavePlanner):
    """Saves tensors, and this rank's share of stored ones."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        target = self.state_dict[index.fqn]
        return target.block_at(index) if isinstance(target, StoredTensor) else super().lookup_object(index)


class _Block(DefaultLoadPlanner):
    """Loads one stretch of rows of one saved tensor into a tensor."""

    def __init__(self, key: str, target: StoredTensor, first: int, block: Tensor) -> None:
        super().__init__()
        self.key, self.target, self.first, self.block = f"{_STATE}.{key}", target, first, block

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata[self.key]
        assert isinstance(saved, TensorStorageMetadata)
        chunk = self.target.chunk(self.first, self.block.shape[0])
        return LoadPlan(create_read_items_for_chunk_list(self.key, saved, [chunk]))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.block


def _new_version(folder: Path, checkpoint: Mapping[str, Any]) -> str | ValueError:
    """Where the new version goes, from the folder's parent; beside a single file, which counts until it is written."""
    if folder.is_dir() and not is_folder(folder) and set(folder.iterdir()) - set(_versions(folder)):
        return ValueError(f"{folder} is a folder, but no checkpoint: it has no file {POINTER!r}. Choose another path.")
    place = f"{folder.name}.folder" if folder.is_file() else folder.name
    return f"{place}/{int(checkpoint.get('global_step', 0)):08}-{uuid.uuid4().hex[:8]}"


def _agree_on(version: str | ValueError | None) -> str:
    """Rank 0's choice, on every rank; its error too."""
    chosen = [version]
    if _is_distributed():
        dist.broadcast_object_list(chosen, src=0)
    if isinstance(chosen[0], ValueError):
        raise chosen[0]
    assert chosen[0] is not None
    return chosen[0]


def _commit(version: Path) -> None:
    """Let the pointer name the new version, then clear away the others."""
    folder = version.parent
    draft = folder / f".{POINTER}"
    draft.write_text(version.name)
    draft.replace(folder / POINTER)
    for other in _versions(folder):
        if other != version:
            shutil.rmtree(other, ignore_errors=True)


def _versions(folder: Path) -> list[Path]:
    return [child for child in folder.iterdir() if re.fullmatch(r"\d{8,}-[0-9a-f]{8}", child.name)]


def _version(path: str | os.PathLike[str]) -> Path:
    if not is_folder(path):
        raise FileNotFoundError(
            f"{path} holds no folder checkpoint (its file {POINTER!r} is missing)."
            " If the run was killed while it saved for the first time, there is none yet."
        )
    return Path(path) / (Path(path) / POINTER).read_text()


@contextmanager
def _without_warning() -> Iterator[None]:
    """Torch warns where one process reads or writes alone, which is what we ask for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0
