"""Rows of a saved tensor, read from a folder checkpoint as they are asked for."""

from __future__ import annotations

import math
import mmap
import os
import struct
import warnings
import zipfile
from collections import deque
from tempfile import TemporaryFile
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.checkpoints.files import open_own_file, read_pieces
from lightning_recsys.checkpoints.folder import version_of
from lightning_recsys.checkpoints.manifest import SavedChunk, Version
from lightning_recsys.checkpoints.places import is_remote

_NAME_LENGTHS = 26  # where the header of an entry of a ZIP file says how long its name and its extra field are
_HEADER_BYTES = 30


class SavedRows:
    """The rows of one tensor of a folder checkpoint, which stay on the disk.

    A chunk of the tensor is compared with its sum when a row of it is first asked for, a piece at a time; from then on
    it is mapped. In memory are the rows that were returned, and what the system keeps of the file for as long as it has
    room. A chunk at a URL is copied to a file without a name in ``TMPDIR`` first.

    Args:
        path: The folder of the checkpoint, or a version of it.
        key: The tensor's key in the state dict.

    Raises:
        FileNotFoundError: no checkpoint lies there.
        KeyError: the checkpoint has no such tensor.
        ValueError: it is cut otherwise than between rows, or is neither float32 nor bfloat16; nothing here writes such
            a one.
        DamagedCheckpointError: the list of its tensors is damaged.
    """

    def __init__(self, path: str | os.PathLike[str] | Version, key: str) -> None:
        self._version = version_of(path)
        if (saved := self._version.manifest.tensors.get(key)) is None:
            raise KeyError(f"{self._version.checkpoint} has no {key!r}.")
        self._saved = saved
        self.shape = torch.Size(saved.shape)
        self._chunks = sorted(saved.chunks, key=lambda chunk: chunk.offsets)
        self._starts = np.array([chunk.offsets[0] for chunk in self._chunks])
        self._mapped: dict[int, Tensor] = {}
        if saved.dtype not in (torch.float32, torch.bfloat16) or any(
            chunk.shape[1:] != saved.shape[1:] for chunk in self._chunks
        ):
            raise ValueError(
                f"{self._version.checkpoint}: {key!r} is {saved.dtype} in chunks that are not whole rows, not rows"
                " of float32 or bfloat16."
            )

    def take(self, rows: Tensor) -> Tensor:
        """The rows with these numbers (int64, shape ``[U]``), in that order, as float32.

        Raises:
            DamagedCheckpointError: the file is missing, too short, or other bytes than were written.
        """
        rows_U = rows.numpy()
        chunk_U = np.searchsorted(self._starts, rows_U, side="right") - 1
        values = torch.empty(len(rows_U), *self.shape[1:])
        for number in np.unique(chunk_U).tolist():
            places = torch.from_numpy(np.flatnonzero(chunk_U == number))
            values[places] = self._map(number)[rows[places] - int(self._starts[number])].float()
        return values

    def _map(self, number: int) -> Tensor:
        if number not in self._mapped:
            chunk, folder = self._chunks[number], self._version.folder
            # All pieces are compared with their sum, on their way.
            pieces = read_pieces(folder, chunk.stretch, checkpoint=self._version.checkpoint)
            if is_remote(folder):
                with TemporaryFile() as file:
                    file.writelines(pieces)
                    file.flush()
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                deque(pieces, maxlen=0)
                with open_own_file(folder / chunk.stretch.file) as own:
                    end = chunk.stretch.start + chunk.stretch.length
                    mapped = mmap.mmap(own.fileno(), end, access=mmap.ACCESS_READ)
            dtype, size = self._saved.dtype, math.prod(chunk.shape)
            start = _start_of_values(mapped, chunk, dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written to
                values = torch.frombuffer(mapped, dtype=dtype, count=size, offset=start)
            self._mapped[number] = values.view(chunk.shape)
        return self._mapped[number]


def _start_of_values(mapped: mmap.mmap, chunk: SavedChunk, dtype: torch.dtype) -> int:
    """Where the values of the chunk begin that a mapping ends with: ``torch.save`` makes a ZIP file, not compressed."""
    archive = zipfile.ZipFile(cast(BinaryIO, mapped))  # whose places count from the start of the mapping
    (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    assert entry.compress_type == zipfile.ZIP_STORED
    assert entry.file_size == dtype.itemsize * math.prod(chunk.shape)
    name_length, extra_length = struct.unpack_from("<HH", mapped, entry.header_offset + _NAME_LENGTHS)
    return entry.header_offset + _HEADER_BYTES + int(name_length) + int(extra_length)
