"""The description of a folder checkpoint's version: its tensors and files, with the sum of every stretch, as JSON.

torch's own list, ``.metadata``, is a pickle, and to read a pickle is to run it. It is written, for those who read a
version without this package, and never read here.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.checkpoints.files import Stretch, open_own_file, read_object, summed_file
from lightning_recsys.checkpoints.places import Place, size_of
from lightning_recsys.errors import DamagedCheckpointError, network_errors

MANIFEST = "manifest.json"
_MAX_CUT_DIMS = 4  # of a tensor in chunks; this package cuts along rows and columns
_FILE = re.compile(r"__\d+_\d+\.distcp|meta\.pt|extras-\d{5,}\.pt")


@dataclass(frozen=True)
class SavedChunk:
    """A part of a tensor, as it lies in a file.

    Args:
        offsets: Where the part begins in the tensor, along each dimension.
        shape: The part's shape.
        stretch: The bytes of a file that hold the part, as :func:`torch.save` writes a tensor.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    stretch: Stretch


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the state dict, in chunks that cover it.

    Args:
        dtype: The element type of all chunks.
        shape: The tensor's shape, once the chunks are put together; empty for a single number.
        chunks: The parts, which cover the tensor and do not overlap, in any order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


@dataclass(frozen=True)
class Manifest:
    """A version's contents.

    Args:
        tensors: The saved tensors, by their keys in the state dict.
        files: The files that hold one object each (``meta.pt``, extras), by name; each stretch is a whole file.
    """

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, Stretch]


class Version:
    """A version of a folder checkpoint, to be read.

    Args:
        checkpoint: The checkpoint's folder, which errors name.
        folder: The version's folder within it.

    Raises:
        DamagedCheckpointError: its manifest is missing, damaged, or no manifest.
    """

    def __init__(self, checkpoint: Place, folder: Place) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.manifest = read_manifest(checkpoint, folder)

    def read_file(self, name: str, *, weights_only: bool) -> Any:
        """The object in a file."""
        if (stretch := self.manifest.files.get(name)) is None:
            raise DamagedCheckpointError(str(self.checkpoint), MANIFEST, f"does not list {name}")
        return read_object(self.folder, stretch, checkpoint=self.checkpoint, weights_only=weights_only)

    def read_tensor(self, saved: SavedTensor) -> Tensor:
        """A tensor as a whole."""
        whole = [(0, saved.shape[0] if saved.shape else 1)]
        return next(tensor for _, tensor in self.read_blocks(saved, whole))

    def read_blocks(self, saved: SavedTensor, blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
        """Stretches of a tensor's rows, one after the other; a number is one row.

        A chunk is read and compared with its sum once, however many of the stretches have rows of it. It is kept from
        the first of them to the last.

        Args:
            saved: The tensor.
            blocks: First row and number of rows of each stretch, in rising order.

        Yields:
            The first row of a stretch, and its values.
        """
        kept: dict[SavedChunk, Tensor] = {}
        for first, num_rows in blocks:
            block = torch.empty((num_rows, *saved.shape[1:]) if saved.shape else (), dtype=saved.dtype)
            for chunk in saved.chunks:
                offset, length = (chunk.offsets[0], chunk.shape[0]) if saved.shape else (0, 1)
                low, high = max(offset, first), min(offset + length, first + num_rows)
                if low < high:
                    if chunk not in kept:
                        kept[chunk] = self._read_chunk(saved, chunk)
                    _copy_rows(kept[chunk], chunk, block, low, high, first)
                if offset + length <= first + num_rows:
                    kept.pop(chunk, None)
            yield first, block

    def _read_chunk(self, saved: SavedTensor, chunk: SavedChunk) -> Tensor:
        values = read_object(self.folder, chunk.stretch, checkpoint=self.checkpoint)
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.shape or values.dtype != saved.dtype:
            found = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise DamagedCheckpointError(
                str(self.checkpoint),
                chunk.stretch.file,
                f"has {found} where {saved.dtype} {list(chunk.shape)} should be",
            )
        return values


def _copy_rows(values: Tensor, chunk: SavedChunk, block: Tensor, low: int, high: int, first: int) -> None:
    """Copy a chunk's rows ``low`` to ``high`` of its tensor to their places in a block that begins at row ``first``."""
    if not block.dim():
        block.copy_(values)
        return
    columns = [slice(at, at + size) for at, size in zip(chunk.offsets[1:], chunk.shape[1:], strict=True)]
    block[(slice(low - first, high - first), *columns)] = values[low - chunk.offsets[0] : high - chunk.offsets[0]]


def write_manifest(folder: Place, manifest: Manifest) -> None:
    """Write a version's manifest; the last of its files, so that a version which has one is complete.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "tensors": {key: _tensor_to_plain(saved) for key, saved in manifest.tensors.items()},
        "files": {name: _stretch_to_plain(stretch) for name, stretch in manifest.files.items()},
    }
    with summed_file(folder / MANIFEST) as file:
        file.write(json.dumps({"crc32": _sum_of(content), "content": content}).encode())


def read_manifest(checkpoint: Place, folder: Place) -> Manifest:
    """The manifest of a version.

    Its sum can be a forger's. So whatever it says, nothing is made that is larger than what the version's files hold,
    and nothing is returned that was not read.

    Raises:
        DamagedCheckpointError: it is missing, damaged, or names what cannot be in a version; or a file is shorter than
            it says.
    """
    try:
        with network_errors(), open_own_file(folder / MANIFEST) as file:
            text = file.read()
        plain = json.loads(text)
        if plain["crc32"] != _sum_of(plain["content"]):
            raise ValueError("its sum is another")
        content = plain["content"]
        tensors = {key: _tensor_from_plain(value) for key, value in content["tensors"].items()}
        manifest = Manifest(tensors, {name: _stretch_from_plain(value) for name, value in content["files"].items()})
    except OSError as error:
        raise DamagedCheckpointError(
            str(checkpoint), MANIFEST, f"cannot be read ({error.strerror or error})"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(str(checkpoint), MANIFEST, f"is damaged: {error}") from error
    _check_sizes(checkpoint, folder, manifest)
    for saved in tensors.values():
        try:
            _check_cover(saved.dtype, saved.shape, saved.chunks)
        except ValueError as error:
            raise DamagedCheckpointError(str(checkpoint), MANIFEST, f"is damaged: {error}") from error
    return manifest


def _check_sizes(checkpoint: Place, folder: Place, manifest: Manifest) -> None:
    """Refuse a version whose stretches leave their files, or have more bytes together than these.

    Whoever reads finds missing files.
    """
    needed: dict[str, tuple[int, int]] = {}  # of each file: bytes of all stretches, and where the last one ends
    stretches = [chunk.stretch for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    for stretch in (*stretches, *manifest.files.values()):
        total, end = needed.get(stretch.file, (0, 0))
        needed[stretch.file] = total + stretch.length, max(end, stretch.start + stretch.length)
    for name, lengths in needed.items():
        path = folder / name
        if not path.is_symlink() and -1 < (size := size_of(path)) < max(lengths):
            raise DamagedCheckpointError(str(checkpoint), name, f"ends after {size} bytes, of {max(lengths)} at least")


def _sum_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _tensor_to_plain(saved: SavedTensor) -> dict[str, Any]:
    chunks = [[*map(list, (chunk.offsets, chunk.shape)), _stretch_to_plain(chunk.stretch)] for chunk in saved.chunks]
    return {"dtype": str(saved.dtype).removeprefix("torch."), "shape": list(saved.shape), "chunks": chunks}


def _tensor_from_plain(plain: Mapping[str, Any]) -> SavedTensor:
    dtype, shape = getattr(torch, str(plain["dtype"]), None), _numbers(plain["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no type {plain['dtype']!r}")
    chunks = [
        SavedChunk(_numbers(offsets), _numbers(size), _stretch_from_plain(stretch))
        for offsets, size, stretch in plain["chunks"]
    ]
    return SavedTensor(dtype, shape, tuple(chunks))


def _check_cover(dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[SavedChunk]) -> None:
    """Refuse chunks that do not make up a tensor: each of its numbers lies in one of them.

    Raises:
        ValueError: a chunk leaves the tensor, is larger than its stretch, or overlaps another one; or some of it is in
            none.
    """
    for chunk in chunks:
        if any(end > whole for end, whole in zip(_ends(chunk), shape, strict=True)):
            raise ValueError(f"a chunk leaves the shape {shape}")
        if (size := math.prod(chunk.shape) * dtype.itemsize) > chunk.stretch.length:
            raise ValueError(f"a chunk of {size} bytes cannot lie in {chunk.stretch.length}")
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks do not cover the shape {shape}")
    if not math.prod(shape):
        return
    # As many numbers as the tensor has, all within it: they cover it unless two chunks have the same one.
    cut = [dim for dim in range(len(shape)) if any(chunk.shape[dim] != shape[dim] for chunk in chunks)]
    if len(cut) > _MAX_CUT_DIMS:
        raise ValueError(f"a tensor is cut along at most {_MAX_CUT_DIMS} dimensions, got {len(cut)}")
    left = Counter({corner: -sign for corner, sign in _corners([0] * len(shape), shape, cut)})
    for chunk in chunks:
        for corner, sign in _corners(chunk.offsets, chunk.shape, cut):
            left[corner] += sign
    if any(left.values()):
        raise ValueError(f"two chunks overlap, so they do not cover the shape {shape}")


def _ends(chunk: SavedChunk) -> list[int]:
    return [at + size for at, size in zip(chunk.offsets, chunk.shape, strict=True)]


def _corners(
    offsets: Sequence[int], shape: Sequence[int], dims: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """The corners of a block of numbers, each with a sign that turns from a corner to the next one.

    How often a number lies in blocks, as a function of its place, is the running sum of their signs along each of the
    dimensions. So blocks have the same numbers as a whole one, each once, exactly where their signs add up to its own
    at every place: where blocks meet they cancel out. That takes one look at each block, wherever it lies.
    """
    for ends in itertools.product((0, 1), repeat=len(dims)):
        place = tuple(offsets[dim] + end * shape[dim] for dim, end in zip(dims, ends, strict=True))
        yield place, (-1) ** sum(ends)


def _stretch_to_plain(stretch: Stretch) -> list[Any]:
    return [stretch.file, stretch.start, stretch.length, stretch.crc32]


def _stretch_from_plain(plain: Any) -> Stretch:
    name, *numbers = plain
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no file of a version")
    return Stretch(name, *_numbers(numbers))


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r:.80} are no numbers from 0 on")
    return tuple(values)
