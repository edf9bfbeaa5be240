"""A folder of arrays that every process of the machine maps: raw files, and a JSON file that says what they are."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import as_loop_array
from lightning_recsys.errors import StoreReplacedError
from lightning_recsys.stores.folders.room import check_room, fill_holes, has_holes, reserve

META = "meta.json"
_BUILDING, _DOOMED = ".making-", ".removing-"  # what folders that are not whole begin with; no store's name does
GENERATION = ".generation"  # a number of 8 bytes: which of all that ever had the folder's name it is; 0 once removed
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Array name -> its dtype's name and its shape."""


class MappedArrays:
    """Arrays in the files of one folder, mapped ``MAP_SHARED``: a write is there for every process at once.

    What was written outlives the process that wrote it, ``kill -9`` included. Files start as zeros, and the file system
    has set their pages aside by then: a page that it found no memory for later would end the process that writes to it
    with a bus error. Pages that a file lacks are set aside when it is opened; those of growing arrays by :meth:`keep`.

    A folder that is removed, and perhaps made again under its name, leaves whoever has it open with memory that nobody
    else has. So the number of its generation is mapped as well: who removes it writes 0 there first, and from then on
    every access raises. One that is under way at that moment still ends.

    Args:
        folder: Where the files are, as :meth:`create` left them.

    Attributes:
        generation: Drawn when the folder was made, above 0.

    Raises:
        FileNotFoundError: the folder or one of its files is not there, or it was being removed.
        OSError: a file lacks pages, and there is no room for them; the message says how many bytes are missing.
        RuntimeError: a file is not as long as the folder's ``meta.json`` says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stored = json.loads((folder / META).read_text())
        word = _map_file(folder / GENERATION, "int64", (1,)).numpy()
        self._word: NDArray[np.int64] | None = word  # the generation, as it is now; None once this is closed
        self.generation = int(word[0])
        if not self.generation:
            raise FileNotFoundError(f"{folder} was being removed when that was cut short: remove it again.")
        self.meta: dict[str, Any] = stored["meta"]
        growing: list[str] = stored.get("growing", [])
        self._tensors: dict[str, Tensor] | None = {
            name: (_map_ahead if name in growing else _map_file)(folder / name, dtype, tuple(shape))
            for name, (dtype, shape) in stored["arrays"].items()
        }
        # Held open: their folder may have lost its name by the time that they grow.
        self._growing = {name: (folder / name).open("r+b", buffering=0) for name in growing}

    @classmethod
    def create(
        cls,
        folder: Path,
        meta: dict[str, Any],
        shapes: Shapes,
        fill: Callable[[Self], None],
        *,
        growing: Collection[str] = (),
    ) -> Self:
        """Make a folder of arrays; the others see it once it is filled, or never.

        Args:
            folder: What to create; its parent is there.
            meta: Plain data to keep beside the arrays.
            shapes: Element type and shape of each array, by its name.
            fill: Writes the first values.
            growing: Arrays whose files begin empty: their shapes are what they may become, and only what
                :meth:`grow` has made room for may be touched.

        Raises:
            FileExistsError: the folder is there, perhaps made by another process meanwhile.
            OSError: there is no room for the arrays; the message says how many bytes are missing.
        """
        remove_leftovers(folder.parent)
        fixed = {name: shape for name, shape in shapes.items() if name not in growing}
        check_room(folder.parent, total_bytes(fixed), what=folder.name)
        with _building(folder) as building:
            for name in shapes:
                with (building / name).open("wb") as file:
                    if name in fixed:
                        reserve(
                            file.fileno(), 0, total_bytes({name: fixed[name]}), what=folder.name, folder=folder.parent
                        )
            stored = {"meta": meta, "arrays": dict(shapes), "growing": sorted(growing)}
            (building / META).write_text(json.dumps(stored, indent=1))
            (building / GENERATION).write_bytes(_new_generation())
            arrays = cls(building)
            fill(arrays)
            try:
                building.rename(folder)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise FileExistsError(f"{folder} is there already.") from error
                raise
        arrays.folder = folder
        return arrays

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is None:
            raise RuntimeError(f"{self.folder} was closed by this process; open the store again.")
        if self.is_removed:
            raise StoreReplacedError(str(self.folder))
        return self._tensors[name]

    def memory(self, name: str) -> NDArray[Any]:
        """An array as NumPy has it, which knows no bfloat16: its bits are uint16 there."""
        return as_loop_array(self[name])

    @property
    def is_removed(self) -> bool:
        """Whether the files are no longer those that others find under the folder's name, or this was closed."""
        return self._word is None or bool(self._word[0] != self.generation)

    def __contains__(self, name: object) -> bool:
        return self._tensors is not None and name in self._tensors

    def grow(self, first: int, stop: int) -> None:
        """Make room for rows ``first`` to ``stop`` of the growing arrays.

        What is there stays where it is, in the file and in memory: nothing is copied or mapped anew.

        Raises:
            OSError: there is no room for all of them; the message says how many bytes are missing. Nothing has changed
                then that anybody looks at: a later call asks for the same pages again.
        """
        row_bytes = self._row_bytes()
        what = f"{stop - first} more rows of {self.folder.name}"
        check_room(self.folder.parent, (stop - first) * sum(row_bytes.values()), what=what)
        for name, file in self._growing.items():
            start, end = first * row_bytes[name], stop * row_bytes[name]
            reserve(file.fileno(), start, end, what=what, folder=self.folder.parent)

    def keep(self, stop: int) -> None:
        """Set aside what the files lack of rows of the growing arrays that exist, the first ``stop``.

        Raises:
            OSError: there is no room; the message says how many bytes are missing.
        """
        row_bytes = self._row_bytes()
        for name, file in self._growing.items():
            what = f"{name} of {self.folder.name}, a file without all of its pages,"
            fill_holes(file.fileno(), stop * row_bytes[name], what=what, folder=self.folder.parent)

    def _row_bytes(self) -> dict[str, int]:
        return {name: math.prod(self[name].shape[1:]) * self[name].itemsize for name in self._growing}

    def close(self) -> None:
        """Let go of the mapping, once nobody holds a tensor of it; the files stay."""
        self._tensors = self._word = None
        for file in self._growing.values():
            file.close()


def read_meta(folder: Path) -> dict[str, Any]:
    """The plain values that are kept beside the arrays of a folder.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    meta: dict[str, Any] = json.loads((folder / META).read_text())["meta"]
    return meta


def remove_arrays(folder: Path) -> None:
    """Delete a folder of arrays; from now on it is of no use to those that have it open.

    Cut short between the first two steps, the folder is there and opens for nobody; it can be removed again. Cut short
    between the last two, what is left is removed as a leftover.
    """
    descriptor = _lock(folder)
    try:
        # An earlier version's folder has none. Written in place, for it is mapped.
        with suppress(FileNotFoundError), (folder / GENERATION).open("r+b") as file:
            file.write(bytes(8))
        doomed = Path(tempfile.mkdtemp(prefix=f"{_DOOMED}{folder.name}-", dir=folder.parent))
        folder.rename(doomed)  # at once: nobody opens half of it
        shutil.rmtree(doomed, ignore_errors=True)  # who takes it for a leftover may be faster
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete what processes that were killed have left half made, or half removed, among a folder's stores.

    Who is still at work holds a lock on what it makes or removes, which the system lets go of when the process ends.
    """
    for path in [*folder.glob(f"{_BUILDING}*"), *folder.glob(f"{_DOOMED}*")]:
        if (descriptor := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A new folder beside another one, ours until it is renamed to that; gone if it is not."""
    descriptor = None
    while descriptor is None:  # somebody who takes it for a leftover may be faster than our lock
        building = Path(tempfile.mkdtemp(prefix=f"{_BUILDING}{folder.name}-", dir=folder.parent))
        descriptor = _lock(building)
    try:
        yield building
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds a folder until it is closed; ``None`` where somebody else does, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _new_generation() -> bytes:
    """A random number from 1 to 2**62: what a message can carry."""
    return (1 + secrets.randbelow(2**62)).to_bytes(8, "little")


def check_name(name: str) -> str:
    """The name, where it can be a folder's.

    Raises:
        ValueError: it is empty, too long, starts with a dot or holds other characters than letters, digits, ``_-.``.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a store's name must be 1 to 128 letters, digits, '_', '-' or '.', and not start with '.' or '-', "
            f"got {name!r}."
        )
    return name


def total_bytes(shapes: Shapes) -> int:
    """The bytes that the arrays need in all."""
    return sum(math.prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in shapes.values())


def _map_file(path: Path, dtype: str, shape: tuple[int, ...]) -> Tensor:
    # Looked at first: torch would make a missing file, lengthen a short one, and hide the damage.
    status, expected = path.stat(), math.prod(shape) * _ITEM_BYTES[dtype]
    if (size := status.st_size) != expected:
        raise RuntimeError(
            f"{path} has {size:,} bytes and should have {expected:,} ({dtype} {list(shape)}): the file was damaged. "
            f"Remove {path.parent} and start from a checkpoint."
        )
    if has_holes(status, size):
        with path.open("r+b") as file:
            what = f"{path.name} of {path.parent.name}, a file without all of its pages,"
            fill_holes(file.fileno(), size, what=what, folder=path.parent.parent)
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=_DTYPES[dtype]).view(shape)


def _map_ahead(path: Path, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Map what a file may become; what lies behind its end must not be touched before the file is longer."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.truncate(math.prod(shape) * _ITEM_BYTES[dtype])  # takes no room, and torch insists
        try:
            return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=_DTYPES[dtype]).view(shape)
        finally:
            file.truncate(size)
