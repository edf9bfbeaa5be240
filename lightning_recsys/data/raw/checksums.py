"""Whether files are those that somebody has published."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from lightning_recsys.data.files import stored_file


def check_md5(paths: Iterable[Path], checksums: Mapping[str, str]) -> None:
    """Compare files with the MD5 sums that are given for their names; nothing happens where none is.

    Args:
        paths: The files; of those in an archive, the archive counts, and is read once.
        checksums: MD5 sum by file name, in hexadecimal.

    Raises:
        ValueError: a file has another one.
    """
    for path in dict.fromkeys(map(stored_file, paths)):
        if (expected := checksums.get(path.name)) is None:
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != expected.lower():
            raise ValueError(
                f"{path} is not the published file: its MD5 sum is {found}, not {expected}. Fetch it again; for a file "
                "that you changed on purpose, set checksums to null (data.checksums in train, checksums in prepare)."
            )
