"""Writes tensors as :mod:`torch.distributed.checkpoint` does, and notes the sums of what it wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_recsys.checkpoints.files import Stretch, summed_file
from lightning_recsys.checkpoints.manifest import SavedChunk, SavedTensor
from lightning_recsys.checkpoints.places import Place, is_remote, make_folder, place_of


class SummingWriter(FileSystemWriter):
    """torch's writer, which sums what it writes.

    The sums of all ranks come to the first one with what torch gathers there anyway.

    Args:
        path: The version's folder; the files of tensors are made in it.
        prefix: The beginning of all tensors' keys; :attr:`tensors` has the keys without it.

    Attributes:
        tensors: On the first rank, once all is written: where each tensor lies, by key.
    """

    def __init__(self, path: Place, *, prefix: str) -> None:
        local = not is_remote(path)  # torch would sync all disks, as files elsewhere cannot be synced
        super().__init__(str(path), sync_files=local)
        self.fs = self._files = _SummingFiles()
        self.path, self.folder = cast(Path, path), path
        self.prefix = prefix
        self.tensors: dict[str, SavedTensor] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; each result carries the sum of its stretch."""
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        for result in written.value():
            place = result.storage_data
            place.crc32 = self._files.stretches[place.relative_path, place.offset].crc32
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note where everything lies, and let torch write its own list, which knows nothing of sums."""
        places = {}
        for result in (result for some in results for result in some):
            place = result.storage_data
            crc32 = vars(place).pop("crc32")
            places[result.index] = Stretch(place.relative_path, place.offset, place.length, crc32)
        for key, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{key} is no tensor"
            chunks = [
                SavedChunk(tuple(chunk.offsets), tuple(chunk.sizes), places[MetadataIndex(key, chunk.offsets)])
                for chunk in entry.chunks
            ]
            saved = SavedTensor(entry.properties.dtype, tuple(entry.size), tuple(chunks))
            self.tensors[key.removeprefix(self.prefix)] = saved
        super().finish(metadata, results)


class _SummingFiles(FileSystem):
    """torch's files, each of them summed while it is written; at URLs as well, which torch takes for paths."""

    def __init__(self) -> None:
        self.stretches: dict[tuple[str, int], Stretch] = {}  # by file and start

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        assert mode == "wb"
        with summed_file(place_of(path)) as file:
            yield file
        self.stretches |= {(x.file, x.start): x for x in file.stretches.values()}

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return cast(Path, place_of(path))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return cast(Path, place_of(path) / suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        place_of(path).rename(cast(Path, place_of(new_path)))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        make_folder(place_of(path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return place_of(path).exists()
