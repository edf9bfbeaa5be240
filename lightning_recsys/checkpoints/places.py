"""Where checkpoints lie: paths of this machine and URLs that fsspec knows, by one interface, that of ``pathlib``."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec
from fsspec.utils import get_protocol
from typing_extensions import TypeIs
from upath import UPath

from lightning_recsys.errors import network_errors

Place = Path | UPath


def place_of(path: str | os.PathLike[str] | UPath) -> Place:
    """The place that a path or a URL names. A URL of a scheme that fsspec does not know is taken for a path.

    Raises:
        ImportError: fsspec needs a package for this URL, such as ``s3fs``.

    >>> place_of("runs/last.ckpt"), place_of("file:///runs/last.ckpt"), place_of("memory://runs").name
    (PosixPath('runs/last.ckpt'), PosixPath('/runs/last.ckpt'), 'runs')
    """
    if isinstance(path, Path | UPath):
        return path
    text = os.fspath(path)
    protocol = get_protocol(text)
    if protocol in ("file", "local"):
        return Path(fsspec.core.url_to_fs(text)[1] if "://" in text else text)
    if protocol not in fsspec.available_protocols():
        return Path(text)
    return UPath(text, use_listings_cache=False)  # other processes write there, too


def is_remote(place: Place) -> TypeIs[UPath]:
    """Whether a place is behind a URL: there a file is written as a whole or not at all, and nothing is renamed."""
    return not isinstance(place, Path)


def make_folder(place: Place) -> None:
    """Make a folder and those above it; at a URL there is none to make, and a bucket that is missing is an error."""
    if not is_remote(place):
        place.mkdir(parents=True, exist_ok=True)


def remove(place: Place) -> None:
    """Remove a file or a folder, if it is there."""
    if is_remote(place):
        with network_errors():
            if place.fs.exists(place.path):
                place.fs.rm(place.path, recursive=True)
    elif place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


@contextmanager
def whole_file(place: Place) -> Iterator[IO[bytes]]:
    """A file to write, which is there as a whole once it is left without an error, and not at all before.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    if is_remote(place):
        buffer = io.BytesIO()  # a file behind a URL counts as written however it is closed
        yield buffer
        with network_errors():
            place.write_bytes(buffer.getvalue())
        return
    draft = place.with_name(f".{place.name}.part")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def size_of(file: Place) -> int:
    """The number of bytes of a file; -1 where it is not there."""
    try:
        with network_errors():
            return file.stat().st_size
    except FileNotFoundError:
        return -1
