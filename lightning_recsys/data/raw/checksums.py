"""Whether files are those that somebody has published."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from lightning_recsys.data.files import stored_file


def check_md5(path: Path, checksums: Mapping[str, str]) -> None:
    """Compare a file with the MD5 sum that is given for its name; nothing happens where none is.

    Args:
        path: The file; of one in an archive, the archive counts.
        checksums: MD5 sum by file name, in hexadecimal.

    Raises:
        ValueError: the file has another one.
    """
    path = stored_file(path)
    expected = checksums.get(path.name)
    if expected is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected.lower():
        raise ValueError(
            f"{path} is not the published file: its MD5 sum is {found}, not {expected}. Fetch it again; for a file that"
            " you changed on purpose, set the checksums to null (data.checksums in train, checksums in prepare)."
        )
