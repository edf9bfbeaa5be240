"""One checkpoint as a folder, by :mod:`torch.distributed.checkpoint`.

.. code-block:: text

    last.ckpt/
      current                 the name of the version that counts; replaced in one step once all of it is written
      00000500-3f2a9c01/
        *.distcp              the tensors of the model's state dict, rows included (torch.distributed.checkpoint)
        meta.pt               the rest of Lightning's checkpoint: loops, callbacks, optimizers, hyperparameters
        extras-00000.pt       what a rank adds of its own, such as its trainer's replica
        manifest.json         what lies where, with the sum of every stretch of a file
        .metadata             torch's list of the tensors; nothing here reads it

A process that is killed while it saves leaves ``current`` as it was. At a URL, such as that of a bucket, these are
objects, and one request replaces ``current``. torch alone reads a version of a folder:
``python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER/VERSION FILE``.
"""

from __future__ import annotations

import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from upath import UPath

from lightning_recsys.checkpoints.files import (
    POINTER,
    Stretch,
    begin_from_whole,
    draft_of_folder,
    put_in_place,
    standing,
    summing_once,
    sync_folder,
    write_object,
)
from lightning_recsys.checkpoints.manifest import Manifest, Version, write_manifest
from lightning_recsys.checkpoints.places import Place, is_remote, make_folder, place_of, remove, size_of
from lightning_recsys.checkpoints.stored import StoredRows, StoredTensor
from lightning_recsys.checkpoints.writer import SummingWriter
from lightning_recsys.errors import CheckpointNotWrittenError, DamagedCheckpointError, network_errors

_STATE = "state_dict"
_META = "meta.pt"
_EXTRAS = "extras-"
_SAVED_BY_TORCH = (Tensor, StoredTensor)
_PATIENCE = 10.0  # seconds, until files of other machines are to be seen
_NAME = re.compile(r"\d{8,}-[0-9a-f]{8}")

T = TypeVar("T")


def is_folder(path: str | os.PathLike[str] | UPath) -> bool:
    """Whether a folder checkpoint lies there."""
    with network_errors():
        return (standing(path) / POINTER).is_file()


def has_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint lies there, a folder or a file, on this machine or at a URL."""
    with network_errors():
        return is_folder(path) or place_of(path).is_file()


def remove_folder(place: Place) -> None:
    """Remove a folder checkpoint at a URL; who is killed meanwhile leaves nothing that counts."""
    with network_errors():
        (place / POINTER).unlink()
    for version in _versions(place):
        remove(version)


def save_folder(path: str | os.PathLike[str], checkpoint: Mapping[str, Any], *, extras: Any = None) -> None:
    """Write a checkpoint; every rank of the default process group calls this, with the same path.

    What lay there is replaced when the new one is complete; a single file of that name is as well.

    Args:
        path: The folder, which all ranks see, or a URL that fsspec knows, such as ``s3://bucket/last.ckpt``; made where
            it is missing.
        checkpoint: Lightning's dict. Its ``state_dict`` may hold :class:`StoredTensor` and :class:`StoredRows`, of
            which each rank writes its share; everything else in it is rank 0's.
        extras: What this rank adds; nothing if ``None``.

    Raises:
        ValueError: the folder exists and holds something else.
        ImportError: fsspec needs a package for this URL.
        CheckpointNotWrittenError: a file cannot be written, as where the disk is full, or the first rank does not see
            what others wrote, as where machines do not share the path; on every rank. What was begun is removed, and
            what was there before still counts.

    Communication: torch's plan of who writes what, and a small object of each rank three times.
    """
    rank, folder = _rank(), place_of(path)
    version = folder.parent / _agree_on(folder, _new_version(folder, checkpoint) if rank == 0 else None)
    at = partial(_on_all_ranks, folder, version)
    own: dict[str, Tensor | StoredTensor] = {}
    at(lambda: own.update(_begin(version, checkpoint["state_dict"])))  # torch waits for all ranks in what follows
    writer = SummingWriter(version, prefix=f"{_STATE}.")
    with summing_once():
        files = at(lambda: _write(writer, own, checkpoint, extras))
    manifest = Manifest(writer.tensors, {file.file: file for some in files for file in some})
    at(lambda: _make_it_count(folder, version, manifest))


def _begin(version: Place, state: Mapping[str, Any]) -> dict[str, Tensor | StoredTensor]:
    """Make the version's folder; returns what this rank saves of the state dict."""
    make_folder(version)
    own = {
        key: value for key, value in state.items() if isinstance(value, StoredTensor if _rank() else _SAVED_BY_TORCH)
    }
    for key, value in state.items():
        own |= value.to_save(key) if isinstance(value, StoredRows) else {}
    return own


def _write(
    writer: SummingWriter, own: Mapping[str, Tensor | StoredTensor], checkpoint: Mapping[str, Any], extras: Any
) -> list[Stretch]:
    """Write this rank's files; returns those that torch's list does not have."""
    version, files = writer.folder, []
    with warnings.catch_warnings():  # torch warns where one process writes alone, which is what we ask for then
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save({_STATE: dict(own)}, storage_writer=writer, planner=_Shares(), no_dist=not _is_distributed())
    if extras is not None:
        files.append(write_object(version / f"{_EXTRAS}{_rank():05}.pt", extras))
    if _rank() == 0:
        known = (*_SAVED_BY_TORCH, StoredRows)
        others = {key: value for key, value in checkpoint[_STATE].items() if not isinstance(value, known)}
        files.append(write_object(version / _META, {**checkpoint, _STATE: others}))
    return files


def _make_it_count(folder: Place, version: Place, manifest: Manifest) -> None:
    """Rank 0's part at the end, when every file of every rank is on the disk."""
    if _rank():
        return
    _see_all_files(version, manifest)
    write_manifest(version, manifest)
    _commit(version)
    if is_remote(folder):
        if folder.is_file():  # an object of the same name, which does not count any more
            folder.unlink()
    elif not is_remote(made := version.parent) and made != folder:  # a single file is there until now
        put_in_place(made, folder)


def _see_all_files(version: Place, manifest: Manifest) -> None:
    """Look for every listed file in this rank's own folder: others may have written to disks of their own machines.

    Network file systems may show a file of another machine late, for which it waits a while.

    Raises:
        OSError: files are not there, or shorter than what was written.
    """
    chunks = (chunk.stretch for saved in manifest.tensors.values() for chunk in saved.chunks)
    sizes: dict[str, int] = {}
    for stretch in (*chunks, *manifest.files.values()):
        sizes[stretch.file] = max(sizes.get(stretch.file, 0), stretch.start + stretch.length)
    deadline = time.monotonic() + _PATIENCE
    while lacking := sorted(name for name, size in sizes.items() if size_of(version / name) < size):
        if time.monotonic() >= deadline:
            raise OSError(
                f"{len(lacking)} of its {len(sizes)} files, such as {lacking[0]}, were written by other ranks and are"
                " not whole in this rank's folder, as where each machine has a disk of its own. Save in a folder that"
                " all machines share, such as ModelCheckpoint(dirpath=...) on a network file system"
            )
        time.sleep(0.05)


def read_checkpoint(
    path: str | os.PathLike[str] | Version, *, without: Container[str] = (), weights_only: bool = True
) -> dict[str, Any]:
    """Lightning's dict, with the state dict in memory.

    Args:
        path: The folder; or a version of it, so that what is read in several calls is of one version.
        without: Keys of the state dict to leave out, because :func:`read_stored` fetches them.
        weights_only: As for :func:`torch.load`: refuse everything but tensors and plain containers.

    Raises:
        FileNotFoundError: no checkpoint lies there.
        DamagedCheckpointError: a file of it is missing, or not what was written.
    """
    version = version_of(path)
    checkpoint = _describe(version, weights_only=weights_only)
    saved = {key: value for key, value in version.manifest.tensors.items() if key not in without}
    checkpoint[_STATE] |= {key: version.read_tensor(value) for key, value in saved.items()}
    _give_rows_to_copies(checkpoint)
    return checkpoint


def _give_rows_to_copies(checkpoint: dict[str, Any]) -> None:
    """Complete what Lightning's averaging callbacks keep of the model besides its state dict.

    Rows that lay in stores were saved once, in the state dict, and are the same in model and average. Whoever loads a
    copy into a model with rows of its own needs them there; the tensors are shared.
    """
    callbacks = checkpoint.get("callbacks") or {}
    kept = [(x, "average_model_state") for x in callbacks.values() if isinstance(x, dict)]  # StochasticWeightAveraging
    for owner, key in [(checkpoint, "current_model_state"), *kept]:  # WeightAveraging
        copy = owner.get(key)
        if isinstance(copy, dict) and copy.keys() < checkpoint[_STATE].keys():
            owner[key] = checkpoint[_STATE] | copy


def read_description(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Lightning's dict without the tensors of its state dict: hyperparameters, the data module's state, loops.

    Args:
        path: The folder.
        weights_only: As for :func:`read_checkpoint`.

    Raises:
        FileNotFoundError: no checkpoint lies there.
        DamagedCheckpointError: as :func:`read_checkpoint`.
    """
    return _describe(version_of(path), weights_only=weights_only)


def _describe(version: Version, *, weights_only: bool) -> dict[str, Any]:
    description = version.read_file(_META, weights_only=weights_only)
    if not isinstance(description, dict) or not isinstance(description.get(_STATE), dict):
        raise DamagedCheckpointError(str(version.checkpoint), _META, "holds no checkpoint")
    return description


def read_stored(path: str | os.PathLike[str] | Version, targets: Mapping[str, StoredTensor | StoredRows]) -> None:
    """Write saved rows into their stores, each process its share, a block at a time.

    Args:
        path: The folder, or a version of it.
        targets: Where each key of the state dict goes.

    Raises:
        FileNotFoundError: no checkpoint lies there.
        KeyError: the checkpoint lacks a key.
        ValueError: a saved tensor has another shape.
        DamagedCheckpointError: as :func:`read_checkpoint`.
    """
    version = version_of(path)
    whole: dict[str, StoredTensor] = {}
    for key, value in targets.items():
        whole |= _rows_to_load(version, key, value) if isinstance(value, StoredRows) else {key: value}
    for key, target in whole.items():
        saved = version.manifest.tensors.get(key)
        if saved is None and target.optional:
            continue
        if saved is None:
            raise KeyError(f"{version.checkpoint} has no {key!r}.")
        if saved.shape != tuple(target.shape):
            raise ValueError(
                f"{version.checkpoint}: {key!r} has the shape {list(saved.shape)}, the model's has"
                f" {list(target.shape)}."
            )
        for first, block in version.read_blocks(saved, target.blocks()):
            target.write(first, block.to(target.dtype))


def _rows_to_load(version: Version, prefix: str, rows: StoredRows) -> dict[str, StoredTensor]:
    """The tables of a checkpoint, made of the saved ids of each, or of all rows where no ids were saved."""
    saved = version.manifest.tensors
    targets: dict[str, StoredTensor] = {}
    for table in rows.tables:
        if (entry := saved.get(f"{prefix}.{table}.ids")) is not None:
            ids = version.read_tensor(entry)
        elif (entry := saved.get(f"{prefix}.{table}.weight")) is not None:
            ids = torch.arange(entry.shape[0])
        else:
            raise KeyError(f"{version.checkpoint} has no '{prefix}.{table}.weight'.")
        targets |= rows.to_load(prefix, table, ids)
    return targets


def read_extras(path: str | os.PathLike[str], index: int, *, weights_only: bool = True) -> Any:
    """The addition of the ``index``-th rank that added something; ``None`` where fewer did, or there is no folder."""
    if not is_folder(path):
        return None
    version = version_of(path)
    names = sorted(name for name in version.manifest.files if name.startswith(_EXTRAS))
    return None if index >= len(names) else version.read_file(names[index], weights_only=weights_only)


def read_own(
    path: str | os.PathLike[str], key: str, wanted: Mapping[str, Any], *, expected: int, weights_only: bool = True
) -> dict[str, Any] | None:
    """The entry that a rank added under a key, with these entries in it; ``None`` where none did.

    Args:
        path: The checkpoint, which may be a single file: nobody adds anything to such.
        key: The key under which it was added.
        wanted: Entries that it must have.
        expected: How many ranks have added something before it did, if all did that were to. It is looked for there
            first: a rank that had died is missing, and others may have added something of their own.
        weights_only: Whether only tensors and plain containers are read.
    """
    for index in sorted(range(_num_extras(path)), key=lambda other: abs(other - expected)):
        own: dict[str, Any] = read_extras(path, index, weights_only=weights_only).get(key, {})
        if own and all(own.get(name) == value for name, value in wanted.items()):
            return own
    return None


def _num_extras(path: str | os.PathLike[str]) -> int:
    """How many ranks have added something; none to a checkpoint that is a single file."""
    return sum(name.startswith(_EXTRAS) for name in version_of(path).manifest.files) if is_folder(path) else 0


class _Shares(DefaultSavePlanner):
    """Saves tensors, and this rank's share of stored ones."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        target = self.state_dict[index.fqn]
        return target.block_at(index) if isinstance(target, StoredTensor) else super().lookup_object(index)


def _new_version(folder: Place, checkpoint: Mapping[str, Any]) -> str | Exception:
    """Where the new version goes, from the folder's parent, or why it cannot: other ranks wait to be told."""
    try:
        with network_errors() if is_remote(folder) else nullcontext():
            return _place_of_version(folder, checkpoint)
    except (OSError, ValueError) as error:
        return error


def _place_of_version(folder: Place, checkpoint: Mapping[str, Any]) -> str:
    """Where the new version goes, from the folder's parent; beside a single file, which counts until it is written."""
    if folder.is_dir() and not is_folder(folder) and set(folder.iterdir()) - set(_versions(folder)):
        raise ValueError(f"{folder} is a folder, but no checkpoint: it has no file {POINTER!r}. Choose another path.")
    place = folder
    if not is_remote(folder):
        begin_from_whole(folder)
        place = draft_of_folder(folder) if folder.is_file() else folder
    return f"{place.name}/{int(checkpoint.get('global_step', 0)):08}-{uuid.uuid4().hex[:8]}"


def _agree_on(folder: Place, version: str | Exception | None) -> str:
    """Rank 0's choice, on every rank; its error too."""
    chosen = [version]
    if _is_distributed():
        dist.broadcast_object_list(chosen, src=0)
    if isinstance(chosen[0], OSError):
        raise CheckpointNotWrittenError(str(folder), str(chosen[0])) from chosen[0]
    if isinstance(chosen[0], Exception):
        raise chosen[0]
    assert chosen[0] is not None
    return chosen[0]


def _on_all_ranks(folder: Place, version: Place, step: Callable[[], T]) -> list[T]:
    """Take a step on every rank and gather what it returned; where it fails on one, none goes on.

    Raises:
        CheckpointNotWrittenError: the system refused to write, on this rank or another.
    """
    error: BaseException | None = None
    returned: T | None = None
    try:
        returned = step()
    except (Exception, CheckpointException) as raised:  # torch's own is no Exception
        error = _cause_of(raised)
    told = (returned, None if error is None else f"{error} (rank {_rank()})")
    outcomes: list[Any] = [told]
    if _is_distributed():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, told)
    if failures := [failure for _, failure in outcomes if failure is not None]:
        # Every rank does it: they may write to several disks. It may be what fills them.
        with suppress(OSError):
            remove(version if version.parent == folder else version.parent)
        if _is_distributed():
            dist.barrier()  # the next save may make a folder of the same name
        if error is not None and not isinstance(error, OSError):
            raise error
        raise CheckpointNotWrittenError(str(folder), "; ".join(dict.fromkeys(failures))) from error
    return [value for value, _ in outcomes]


def _cause_of(error: BaseException) -> BaseException:
    """The error of this rank, out of what torch says of all of them."""
    if not isinstance(error, CheckpointException):
        return error
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    cause = failures.get(_rank()) or next(iter(failures.values()))
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))


def _commit(version: Place) -> None:
    """Let the pointer name the new version, then clear away the others."""
    folder = version.parent
    if is_remote(version):
        (folder / POINTER).write_bytes(version.name.encode())
    else:
        _replace_pointer(version)
    for other in _versions(folder):
        if other.name != version.name:
            with suppress(OSError):
                remove(other)


def _replace_pointer(version: Path) -> None:
    """Write the pointer beside itself, and let it take its own place once it is on the disk."""
    folder = version.parent
    draft = folder / f".{POINTER}"
    draft.unlink(missing_ok=True)  # of a save that was killed; or a link, which would be written through
    with draft.open("x") as file:
        file.write(version.name)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(version)
    draft.replace(folder / POINTER)
    sync_folder(folder)  # before what the pointer named until now is gone


def _versions(folder: Place) -> list[Place]:
    return [child for child in folder.iterdir() if _NAME.fullmatch(child.name)]


def version_of(path: str | os.PathLike[str] | Version) -> Version:
    """The version that counts; one that was found stays itself, though another may count by now.

    It lies in the checkpoint's own folder, whatever the pointer says.
    """
    if isinstance(path, Version):
        return path
    if not is_folder(path):
        raise FileNotFoundError(
            f"{path} holds no folder checkpoint (its file {POINTER!r} is missing)."
            " If the run was killed while it saved for the first time, there is none yet."
        )
    folder = standing(path)
    with network_errors():
        name = (folder / POINTER).read_bytes()[:200].decode("ascii", "backslashreplace")
    if not _NAME.fullmatch(name):
        raise DamagedCheckpointError(str(path), POINTER, f"names no version of a checkpoint, but {name!r}")
    if (folder / name).is_symlink() or not (folder / name).is_dir():
        raise DamagedCheckpointError(str(path), POINTER, f"names {name}, which is no folder in the checkpoint's own")
    return Version(folder, folder / name)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0
